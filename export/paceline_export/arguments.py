"""What an export can be asked for: arguments are checked before anything is fetched."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.bundle import MANIFEST_NAME, Bundle
from paceline.errors import InvalidInputError

from .flavors import find_flavor
from .other_tokenizer import METHODS
from .quantize import CALIBRATIONS
from .quantize.blockwise import BLOCK_SIZES
from .source import Source

__all__ = ["check_arguments", "check_ready"]

_LEAST_FILE = 1_000_000  # bytes; with less, a large model would be thousands of files


def check_ready(
    target: Bundle,
    draft: Source | None,
    flavor: str,
    calibration: str | None,
    adapter: Path | None,
    *,
    long_context: bool = False,
) -> None:
    """Refuse what cannot be honoured where the target has been exported already."""
    if draft is None:
        raise InvalidInputError(
            f"{target.root} is a bundle, so its target is exported already: name a draft for it. One that is cut from "
            "the target needs the target's checkpoint."
        )
    if target.manifest.target.flavor != flavor:
        raise InvalidInputError(
            f"{target.root}: its target has the flavour {target.manifest.target.flavor!r}, and {flavor!r} is asked for."
        )
    if calibration is not None:
        raise InvalidInputError(
            f"calibration={calibration!r} is for a target that is exported, and {target.root} is a bundle already; "
            "leave it out."
        )
    if long_context:
        raise InvalidInputError(
            f"long_context is for a target that is exported, and {target.root} is a bundle already, whose graph is "
            "taken as it is: name the target's checkpoint."
        )
    if adapter is not None:
        raise InvalidInputError(
            f"adapter={os.fspath(adapter)!r} is for a target that is exported, and {target.root} is a bundle already, "
            "whose weights are stored: name the target's checkpoint."
        )


def check_arguments(
    out: str | os.PathLike[str],
    *,
    has_draft: bool,
    flavor: str = "ort",
    precision: str,
    draft_precision: str | None,
    draft_vocab: int | None,
    draft_method: str | None = None,
    draft_layers: int | None = None,
    max_length: int | None,
    block_size: int,
    calibration: str | None = None,
    draft_calibration: str | None = None,
    quality: bool = True,
    draft_adapter: str | os.PathLike[str] | None = None,
    max_file_size: int | None = None,
    long_context: bool = False,
    overwrite: bool,
) -> None:
    """Check what can be checked without a checkpoint, so that a mistake is said before anything is fetched.

    Raises:
        InvalidInputError: an argument of a wrong type or out of its range, one that cannot be honoured, or `out` exists
            or cannot be made.
    """
    for name, value, kinds in (
        ("out", out, (str, os.PathLike)),
        ("has_draft", has_draft, (bool,)),
        ("flavor", flavor, (str,)),
        ("precision", precision, (str,)),
        ("draft_precision", draft_precision, (str, type(None))),
        ("draft_vocab", draft_vocab, (int, type(None))),
        ("draft_method", draft_method, (str, type(None))),
        ("draft_layers", draft_layers, (int, type(None))),
        ("max_length", max_length, (int, type(None))),
        ("block_size", block_size, (int,)),
        ("calibration", calibration, (str, type(None))),
        ("draft_calibration", draft_calibration, (str, type(None))),
        ("quality", quality, (bool,)),
        ("draft_adapter", draft_adapter, (str, os.PathLike, type(None))),
        ("max_file_size", max_file_size, (int, type(None))),
        ("long_context", long_context, (bool,)),
        ("overwrite", overwrite, (bool,)),
    ):
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InvalidInputError(f"{name} must be of type {expected}, got {value!r:.80}.")
    if draft_adapter is not None and not has_draft:
        raise InvalidInputError(
            f"draft_adapter={os.fspath(draft_adapter)!r} is for a draft model, and there is none"
            + ("; one that is cut from the target has the target's adapter." if draft_layers is not None else ".")
        )
    if draft_layers is not None:
        if draft_layers < 1:
            raise InvalidInputError(f"draft_layers must be at least 1, got {draft_layers}.")
        has_draft = True
    if draft_method is not None:
        if draft_method not in METHODS:
            raise InvalidInputError(f"Unknown draft_method {draft_method!r}: expected one of {', '.join(METHODS)}.")
        if not has_draft:
            raise InvalidInputError(f"draft_method={draft_method!r} is for a draft model, and there is none.")
    made_for = find_flavor(flavor)
    made_for.weight_format(precision)
    if draft_precision is not None:
        made_for.weight_format(draft_precision, "draft_precision")
        if not has_draft:
            raise InvalidInputError(f"draft_precision={draft_precision!r} is for a draft model, and there is none.")
    if draft_vocab is not None:
        if draft_vocab < 0:
            raise InvalidInputError(f"draft_vocab must be a number of ids, or 0 for all, got {draft_vocab}.")
        if not has_draft:
            raise InvalidInputError(f"draft_vocab={draft_vocab} is for a draft model, and there is none.")
    if draft_calibration is not None and not has_draft:
        raise InvalidInputError(f"draft_calibration={draft_calibration!r} is for a draft model, and there is none.")
    if long_context and flavor != "ort":
        raise InvalidInputError(
            f"long_context is for graphs of the flavour 'ort', and {flavor!r} is asked for; leave it out."
        )
    if max_file_size is not None and max_file_size < _LEAST_FILE:
        raise InvalidInputError(
            f"max_file_size must be at least {_LEAST_FILE:,} bytes, which is {_LEAST_FILE // 1000**2} MB; got "
            f"{max_file_size:,}."
        )
    for which, chosen, stored in (
        ("calibration", calibration, precision),
        ("draft_calibration", draft_calibration, draft_precision or precision),
    ):
        if chosen is not None and chosen not in CALIBRATIONS:
            raise InvalidInputError(f"Unknown {which} {chosen!r}: expected one of {', '.join(CALIBRATIONS)}.")
        if chosen is not None and made_for.weight_format(stored).float8:
            raise InvalidInputError(
                f"{which}={chosen!r} is for int4 weights; {stored} is always calibrated, in a way of its own: leave "
                "it out."
            )
        if chosen == "gptq" and stored != "int4":
            raise InvalidInputError(
                f"{which}='gptq' is for int4 weights, and these are {stored}, which is nearly lossless without it; "
                "leave it out."
            )
    if block_size not in BLOCK_SIZES:
        raise InvalidInputError(f"Unknown block size {block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}.")
    if max_length is not None and max_length < 2:
        raise InvalidInputError(f"max_length must be at least 2 positions, got {max_length}.")
    _check_out(out, overwrite)


def _check_out(out: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that `out` is free, or may be replaced, and that a folder can be made beside it: by making one."""
    text = os.fspath(out)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"out must be the path of a folder, got {text!r:.80}.")
    out = Path(text)
    if out.is_symlink() and not out.exists():
        raise InvalidInputError(
            f"{out} is a link to {os.readlink(out)}, which does not exist; remove the link, or name the folder itself."
        )
    if os.path.lexists(out):
        if not overwrite:
            raise InvalidInputError(f"{out} exists already; choose another folder, or pass --overwrite to replace it.")
        if not (out / MANIFEST_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidInputError(f"{out} is not a bundle, so it is not replaced; choose another folder.")
    real = Path(os.path.realpath(out))
    above = next(folder for folder in (*real.parents, real) if os.path.lexists(folder))
    if not above.is_dir():
        raise InvalidInputError(f"{out} cannot be made: {above} is no folder; choose another place.")
    try:
        trial = above / f".{real.name}.partial-{os.getpid()}"
        trial.mkdir()
        trial.rmdir()
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidInputError(
            f"{out} cannot be made: no folder can be made in {above} ({error.strerror}); choose another place."
        ) from error
