"""Measure every architecture in every flavour and precision: `python tests/export/measure_architectures.py`.

Each is a tiny model with random weights that is exported and compared with torch, as `paceline check` does. It prints
the rows and writes the tables of `models/architectures.md`; with names, such as `gpt2 opt`, it only prints the rows of
the architectures that begin so.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from architectures import ARCHITECTURES, REFUSED
from tiny import tiny_checkpoint
from transformers import PreTrainedConfig

from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline_export.causal_lm import Trace, trace
from paceline_export.export import ExportReport, export_bundle
from paceline_export.flavors import FLAVORS, Flavor
from paceline_export.parity import ModelParity, check_bundle
from paceline_export.source import resolve

PAGE = Path(__file__).parents[2] / "models" / "architectures.md"
# ONNX Runtime's CPU provider runs neither bf16 nor fp8 as it is; its own fp16 is no faster there than fp32. The flavour
# cuda has the graphs of ort, in float16.
_LEFT_OUT = (("ort", "fp16"), *(("cuda", precision) for precision in ("fp16", "int8", "int4")))
_LEFT_OUT += (("trt", "bf16"), ("trt", "fp8"))
COLUMNS = tuple(
    (flavor.name, precision)
    for flavor in FLAVORS.values()
    for precision in flavor.precisions
    if (flavor.name, precision) not in _LEFT_OUT
)
# What a largest difference is stated as: the least of these that is at least twice as large.
ROUTER = "router"  # see the page
_BOUNDS = (1e-5, 1e-4, 1e-3, 2e-3, 0.01, 0.05, 0.1, 0.2)


def bound(difference: float) -> float:
    """What a measured difference is stated as."""
    return next((limit for limit in _BOUNDS if limit >= 2 * difference), _BOUNDS[-1])


@contextmanager
def one_trace_a_dtype() -> Iterator[None]:
    """Let exports of one configuration inside the block share their traces where these would be the same."""
    made: dict[tuple[str, int, str, str], Trace] = {}

    def shared(config: PreTrainedConfig, *, max_length: int, dtype: str, flavor: Flavor) -> Trace:
        key = (config.to_json_string(), max_length, dtype, flavor.name)
        if key not in made:
            made[key] = trace(config, max_length=max_length, dtype=dtype, flavor=flavor)
        return dataclasses.replace(made[key], model=made[key].model.clone())

    with mock.patch("paceline_export.one_model.trace", shared):
        yield


def exported(checkpoint: Path, flavor: str, precision: str, out: Path) -> ExportReport:
    """Export a tiny checkpoint; blocks are as small as its projections need."""
    source = resolve(str(checkpoint))
    length = 128 if flavor == "trt" else None
    return export_bundle(
        source,
        None,
        out,
        flavor=flavor,
        precision=precision,
        max_length=length,
        block_size=32,
        calibration="none",
        quality=False,
    )


def measured(bundle: Path) -> tuple[ModelParity, float]:
    """The parity of a bundle's model, and its largest difference in exact arithmetic.

    Raises:
        RuntimeError: it is beyond tolerance, in this or in the shipped arithmetic.
    """
    models = check_bundle(Bundle.open(bundle)).models
    for model in models:
        if not model.passed:
            raise RuntimeError(f"{bundle}: {model.reason}")
    return models[0], max(phase.max_logit_diff for phase in models[0].phases)


def row(name: str, config: PreTrainedConfig) -> Iterator[str]:
    """The cells of an architecture, one for each of `COLUMNS`."""
    with tempfile.TemporaryDirectory() as folder, one_trace_a_dtype():
        checkpoint = tiny_checkpoint(Path(folder) / "model", config)
        for flavor, precision in COLUMNS:
            out = Path(folder) / f"{flavor}-{precision}"
            try:
                exported(checkpoint, flavor, precision, out)
                yield f"{bound(measured(out)[1]):g}"
            except CheckpointError as error:
                yield f"refused: {error}"
            except RuntimeError:
                if flavor != "trt" or not hasattr(config, "num_experts_per_tok"):
                    raise
                yield ROUTER


def refusal(config: PreTrainedConfig) -> str:
    """Why an architecture is refused."""
    try:
        trace(config, max_length=128)
    except CheckpointError as error:
        return str(error)
    raise RuntimeError(f"{config.model_type} is not refused")


def line(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def replaced(text: str, name: str, table: str) -> str:
    """The page with another table between the marks of this name."""
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not mark or not end:
        raise RuntimeError(f"{PAGE} has no marks around {name}")
    return f"{before}{mark}\n{table}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    titles = ["architecture", *(f"{flavor} {precision}" for flavor, precision in COLUMNS)]
    table = line(titles) + line(["---"] * len(titles))
    for name, config in ARCHITECTURES.items():
        if not names or name.startswith(tuple(names)):
            cells = line([name, *row(name, config)])
            print(cells, end="", flush=True)
            table += cells
    if names:
        return
    refused = line(["architecture", "reason"]) + line(["---"] * 2)
    refused += "".join(line([name, refusal(config)]) for name, (config, _) in REFUSED.items())
    page = replaced(replaced(PAGE.read_text(encoding="utf-8"), "measured", table), "refused", refused)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
