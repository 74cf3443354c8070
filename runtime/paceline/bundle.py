"""The bundle: the folder that an export writes, and its manifest `paceline.json`.

The manifest is the only contract between export and runtime. Nothing in a bundle is executed.

```
bundle/paceline.json                 this module's Manifest
bundle/target/model.onnx  model.onnx.data  config.json    large models may have more data: model.onnx.data.1, …
bundle/target/lanes-4.onnx           a graph of the same weights that takes 4 texts in one pass: `paceline batch`
bundle/draft/…                       the same for the draft model, when there is one
bundle/draft/logit_ids.npy           the ids that the draft model has logits for, when these are not all
bundle/draft/tokenizer.json          the draft model's own tokenizer, when it is not the target's
bundle/draft/shared_ids.npy          … and the ids that both give the same bytes
bundle/sampler/*.onnx                sampling and verification as graphs
bundle/engines/*.engine              engines that `paceline build` made of the graphs
bundle/tokenizer.json  chat_template.jinja  generation_config.json
bundle/additional_chat_templates/NAME.jinja   templates that the checkpoint has beside its usual one
```
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from .errors import BundleError
from .files import write_whole

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MOST_LANES",
    "SAMPLER_BLOCK",
    "AdapterEntry",
    "Bundle",
    "DraftTokenizerEntry",
    "EngineEntry",
    "EngineProfile",
    "FileEntry",
    "LanesEntry",
    "LogitIdsEntry",
    "Manifest",
    "ModelEntry",
    "QualityEntry",
    "SamplerEntry",
    "SourceEntry",
    "TensorSpec",
    "TextQuality",
    "TokenizerEntry",
    "build_dataclass",
    "check_safe_path",
    "file_sha256",
    "write_whole",
]

FORMAT_VERSION = 1
MANIFEST_NAME = "paceline.json"
# Rows of the sampler's graphs hold a whole number of blocks of so many ids.
SAMPLER_BLOCK = 512
# Texts in one pass, at most: each lane adds operators to every layer.
MOST_LANES = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a graph input or output; a string in `shape` is a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """A LoRA adapter that was merged into a model's weights: the name of its folder, and the hash of its weights."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Where a model's weights came from. `sha256` covers the checkpoint's weight files, in order of their names."""

    name: str
    kind: Literal["recipe", "hub", "folder", "gguf"]
    sha256: str
    adapter: AdapterEntry | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TokenizerEntry:
    """What the runtime must know of the tokenizer beyond `tokenizer.json`.

    `vocab_size` is the number of ids that have a text: ids `0 … vocab_size - 1`. Logits behind it are padding.
    `special_tokens` are the texts that chat templates know by name (`eos_token`, …); None in bundles from before they
    were kept.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    special_tokens: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise BundleError(f"tokenizer.vocab_size must be at least 1, got {self.vocab_size}.")
        for token_id in (self.bos_token_id, *self.eos_token_ids, self.pad_token_id):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise BundleError(f"Special token id {token_id} is outside the tokenizer's {self.vocab_size} ids.")


@dataclass(frozen=True, slots=True)
class DraftTokenizerEntry:
    """The tokenizer of a draft model that has another one than the target.

    Attributes:
        path: its `tokenizer.json`.
        tokenizer: what must be known beyond that, as for the target's.
        shared_ids: file of a numpy array of int32 `[2, shared]`: ids of the draft, rising, and below them the target's
            ids that add the same bytes to a text. No id stands there twice.
        method: how such a draft proposes: `intersection` draws shared ids, `text` goes on greedily in its own tokens,
            whose text the target's tokenizer then splits.
    """

    path: str
    tokenizer: TokenizerEntry
    shared_ids: str
    method: Literal["intersection", "text"]


@dataclass(frozen=True, slots=True)
class LogitIdsEntry:
    """A model that takes `num_input_ids` ids in and has logits for some of them: those in the file at `path`.

    The file is a numpy array of int32 `[logits]`, the id that each logit stands for, in rising order.
    """

    path: str
    num_input_ids: int


@dataclass(frozen=True, slots=True)
class LanesEntry:
    """A second graph of a model's weights, which takes up to `count` texts in one pass, each in a lane of its own.

    Attributes:
        path: of the graph, beside the model's own, whose file of weights it reads.
        count: number of lanes.
    """

    path: str
    count: int

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_LANES:
            raise BundleError(f"{self.path}: a graph has 2 to {MOST_LANES} lanes, got {self.count}.")


@dataclass(frozen=True, slots=True)
class TextQuality:
    """What the stored weights cost on one held-out text, against the model in full precision.

    Attributes:
        positions: number of positions compared.
        kl: mean Kullback-Leibler divergence of the shipped distribution from the full one, in nats.
        argmax_agreement: share of positions with the same best token.
        perplexity: of the text under the model as shipped.
        full_perplexity: of the text under the model in full precision.
    """

    positions: int
    kl: float
    argmax_agreement: float
    perplexity: float
    full_perplexity: float


@dataclass(frozen=True, slots=True)
class QualityEntry:
    """What the stored weights cost on texts that no calibration saw: prompts in prose, and program code."""

    prompts: TextQuality
    code: TextQuality


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One exported model: its graph, its shapes, and how its weights are stored.

    `calibration` says how quantised weights were chosen (`gptq`; None is rounding to the nearest), or that inputs are
    rounded by ranges that a text told (`ranges`), `mixed_bits` gives the bits of those projections that have others
    than `precision` says, by their names in the checkpoint (`NAME[:ROWS]`: its first rows), and `quality` what all this
    costs; None where it was not measured, as in bundles from before it was.
    """

    path: str
    flavor: Literal["ort", "cuda", "trt"]
    architecture: str
    precision: Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"]
    block_size: int | None  # of most quantised weights
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_length: int
    vocab_size: int  # width of the logits
    kv_dtype: Literal["float32", "float16", "bfloat16"]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: SourceEntry
    prequantized: str | None = None  # "gptq" or "awq": the checkpoint held these numbers; None: the export made them
    logit_ids: LogitIdsEntry | None = None  # None where the i-th logit stands for id i
    calibration: Literal["gptq", "ranges"] | None = None
    mixed_bits: Mapping[str, int] | None = None
    quality: QualityEntry | None = None
    lanes: LanesEntry | None = None  # None where its graph takes one text in a pass
    long_context: bool = False  # whether steps behind long texts read what heads share once for all of them

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_size", "max_length", "vocab_size"):
            if not 1 <= getattr(self, field) < 2**31:
                raise BundleError(f"{self.path}: {field} must be from 1 to 2**31 - 1, got {getattr(self, field)}.")
        # Buffers are made from these figures, so they must be those of the graph.
        cache = (self.kv_dtype, (self.num_kv_heads, self.head_size))
        past = [spec for spec in self.inputs if spec.name.startswith("past_key_values.")]
        if len(past) != 2 * self.num_layers or any((spec.dtype, spec.shape[1::2]) != cache for spec in past):
            raise BundleError(
                f"{self.path}: the caches among its inputs are not {2 * self.num_layers} of {self.num_kv_heads} heads "
                f"of size {self.head_size} in {self.kv_dtype}; the manifest contradicts itself. Export it again."
            )
        logits = [spec.shape[-1:] for spec in self.outputs if spec.name == "logits"]
        if logits != [(self.vocab_size,)]:
            raise BundleError(
                f"{self.path}: its output 'logits' is not {self.vocab_size} wide; the manifest contradicts itself. "
                "Export the bundle again."
            )
        if not self.vocab_size <= self.num_input_ids < 2**31:
            raise BundleError(
                f"{self.path}: it has {self.vocab_size} logits for {self.num_input_ids} input ids; the manifest "
                "contradicts itself. Export the bundle again."
            )

    @property
    def num_input_ids(self) -> int:
        """Ids `0 … num_input_ids - 1` can be fed."""
        return self.vocab_size if self.logit_ids is None else self.logit_ids.num_input_ids

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that one position takes."""
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}[self.kv_dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * itemsize


@dataclass(frozen=True, slots=True)
class SamplerEntry:
    """The sampler's graphs: where they are by their names, and the width of their rows of probabilities and counts."""

    graphs: Mapping[str, str]
    width: int


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """A range of input shapes that an engine is built for: by each input's name its least, usual and largest shape."""

    name: str
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]

    def __post_init__(self) -> None:
        for name, shapes in self.shapes.items():
            ranks = {len(shape) for shape in shapes}
            ordered = len(shapes) == 3 and len(ranks) == 1 and all(map(_is_rising, zip(*shapes, strict=True)))
            if not ordered:
                raise BundleError(
                    f"The profile {self.name!r} gives {name!r} the shapes {shapes!r:.120}; expected a least, a usual "
                    "and a largest shape of one rank, in this order."
                )


def _is_rising(sizes: tuple[int, ...]) -> bool:
    return sizes[0] > 0 and sizes == tuple(sorted(sizes))


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine, and what it was built for: it serves no other GPU, version, graph or shapes than these.

    Attributes:
        path: of the engine's file.
        model: whose graph it was built from.
        backend: whose engine it is.
        backend_version: that built it.
        sm: the GPU's compute capability, such as `8.9`.
        precision: of the graph.
        graph_sha256: of the graph and its weights, as `Manifest.graph_sha256` computes it.
        max_length: positions of its caches.
        max_draft_tokens: largest number of drafted tokens that a pass of the target verifies.
        max_batch: largest number of sequences.
        profiles: in the engine's own order.
        weight_bytes: device memory for weights, and `activation_bytes` for the most demanding profile, as the build
            reported them; None where it did not.
    """

    path: str
    model: Literal["target", "draft"]
    backend: Literal["tensorrt-rtx", "tensorrt"]
    backend_version: str
    sm: str
    precision: str
    graph_sha256: str
    max_length: int
    max_draft_tokens: int
    max_batch: int
    profiles: tuple[EngineProfile, ...]
    weight_bytes: int | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `paceline.json`.

    A bundle from before there were sampler graphs has no `sampler`, one without engines no `engines`. There is a
    `draft_tokenizer` where the draft model has another tokenizer than the target.
    """

    format_version: int
    paceline_version: str
    target: ModelEntry
    draft: ModelEntry | None
    tokenizer: TokenizerEntry
    files: Mapping[str, FileEntry]
    sampler: SamplerEntry | None = None
    engines: tuple[EngineEntry, ...] = ()
    draft_tokenizer: DraftTokenizerEntry | None = None

    def __post_init__(self) -> None:
        if self.tokenizer.vocab_size > self.target.vocab_size:
            raise BundleError(
                f"The tokenizer has {self.tokenizer.vocab_size} ids, the target only {self.target.vocab_size} logits."
            )
        for name in self.files:
            check_safe_path(name)
        for model in (self.target, self.draft):
            if model is not None and model.path not in self.files:
                raise BundleError(f"The manifest names the graph {model.path!r} but does not list it among its files.")
            if model is not None and model.lanes is not None and model.lanes.path not in self.files:
                raise BundleError(
                    f"The manifest names the graph {model.lanes.path!r} but does not list it among its files."
                )
        if self.target.logit_ids is not None:
            raise BundleError("The target must have a logit for every id, but the manifest names 'logit_ids' of it.")
        if self.draft is not None and (kept := self.draft.logit_ids) is not None:
            if kept.path not in self.files:
                raise BundleError(f"The manifest names {kept.path!r} but does not list it among its files.")
            if kept.num_input_ids < (ids := self.tokenizer_of("draft").vocab_size):
                raise BundleError(
                    f"The tokenizer has {ids} ids, of which the draft can read only {kept.num_input_ids}; export the "
                    "bundle again."
                )
        if (own := self.draft_tokenizer) is not None:
            if self.draft is None:
                raise BundleError("The manifest names a 'draft_tokenizer', but no draft model.")
            for path in (own.path, own.shared_ids):
                if path not in self.files:
                    raise BundleError(f"The manifest names {path!r} but does not list it among its files.")
            if own.tokenizer.vocab_size > self.draft.num_input_ids:
                raise BundleError(
                    f"The draft's tokenizer has {own.tokenizer.vocab_size} ids, the draft reads only "
                    f"{self.draft.num_input_ids}; export the bundle again."
                )
        for engine in self.engines:
            if engine.path not in self.files:
                raise BundleError(
                    f"The manifest names the engine {engine.path!r} but does not list it among its files."
                )
        if self.sampler is None:
            return
        width = -(-self.tokenizer.vocab_size // SAMPLER_BLOCK) * SAMPLER_BLOCK
        if self.sampler.width != width:
            raise BundleError(
                f"sampler.width is {self.sampler.width}, but {self.tokenizer.vocab_size} ids in whole blocks of "
                f"{SAMPLER_BLOCK} take {width}; export the bundle again."
            )
        for path in self.sampler.graphs.values():
            if path not in self.files:
                raise BundleError(f"The manifest names the graph {path!r} but does not list it among its files.")

    def tokenizer_of(self, which: str) -> TokenizerEntry:
        """The tokenizer of the `"target"` or the `"draft"`, which mostly is the same."""
        return self.draft_tokenizer.tokenizer if which == "draft" and self.draft_tokenizer else self.tokenizer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files that hold both models' weights."""
        return sum(entry.size for name, entry in self.files.items() if ".onnx.data" in name)

    def graph_sha256(self, model: ModelEntry) -> str:
        """SHA-256 over the names and hashes of a graph's own file and those of its weights, as they are listed."""
        beside = (name for name in self.files if name == model.path or name.startswith(f"{model.path}."))
        lines = "".join(f"{name} {self.files[name].sha256}\n" for name in sorted(beside))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> str:
        """Serialise to the text of `paceline.json`."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of `paceline.json`.

        Raises:
            BundleError: not JSON, a newer format, or a field that is missing, unknown or of the wrong type.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST_NAME} is not valid JSON ({error}); export the bundle again.") from error
        if not isinstance(data, dict) or not isinstance(data.get("format_version"), int):
            raise BundleError(f"{MANIFEST_NAME} has no integer 'format_version'; this is not a paceline bundle.")
        version = data["format_version"]
        if version != FORMAT_VERSION:
            mend = "upgrade paceline" if version > FORMAT_VERSION else "export the bundle again"
            raise BundleError(
                f"The bundle has format {version}, this paceline reads format {FORMAT_VERSION}; {mend} to use it."
            )
        return build_dataclass(cls, data, MANIFEST_NAME)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk: its folder and its manifest."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, root: str | Path, *, verify_hashes: bool = False) -> Bundle:
        """Open a bundle and check every file's size, and with `verify_hashes` every file's SHA-256.

        Engines are left to `find_engine`: what uses none goes on without them, and a build can replace them.

        Raises:
            BundleError: no such folder, no manifest, a newer format, or a file that is missing, truncated or altered.
        """
        root = Path(root)
        manifest_path = root / MANIFEST_NAME
        try:
            exists = root.is_dir()
        except (OSError, ValueError) as error:  # a name that no folder can have
            raise BundleError(f"There is no bundle at {root!s:.80}…: {error}.") from error
        if not exists:
            reason = "it is no folder" if root.exists() else "the folder does not exist"
            raise BundleError(f"There is no bundle at {root}: {reason}. `paceline export` makes one.")
        if not manifest_path.is_file():
            raise BundleError(f"{root} is not a bundle: it has no {MANIFEST_NAME}. `paceline export` makes one.")
        if not manifest_path.resolve().is_relative_to(root.resolve()):
            raise BundleError(f"{root}: {MANIFEST_NAME} is a link that leads out of the bundle; refusing to follow it.")
        try:
            manifest = Manifest.from_json(manifest_path.read_text(encoding="utf-8"))
        except (BundleError, UnicodeDecodeError) as error:
            raise BundleError(f"{root}: {error}") from error
        bundle = cls(root, manifest)
        bundle.check_files(verify_hashes=verify_hashes, engines=False)
        return bundle

    def path(self, name: str) -> Path:
        """Path of a file that the manifest lists.

        Raises:
            BundleError: the manifest does not list it.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.root}: the manifest lists no file {name!r}.")
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether the manifest lists this file."""
        return name in self.manifest.files

    def unlisted(self) -> list[str]:
        """Names of files in the folder that the manifest does not list, in order. Nothing of paceline reads them."""
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return sorted(name for name in found if name != MANIFEST_NAME and not self.has(name))

    def check_files(
        self, *, verify_hashes: bool, engines: bool = True, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Check that every listed file, engines among them or not, is in the bundle and of its size (and hash).

        Raises:
            BundleError: naming the first file that is not, or one that a graph may read and the manifest does not list.
        """
        built = {engine.path: engine for engine in self.manifest.engines}
        inside = self.root.resolve()
        for name, entry in self.manifest.files.items():
            path, mend = self.root / name, "Export the bundle again, or copy it again in full."
            if (engine := built.get(name)) is not None:
                if not engines:
                    continue
                mend = f"Build it again: `paceline build {self.root} --backend {engine.backend} --sm {engine.sm}`."
            if not path.is_file():
                raise BundleError(f"{self.root}: the file {name!r} is missing. {mend}")
            if not path.resolve().is_relative_to(inside):
                raise BundleError(
                    f"{self.root}: {name!r} is a link that leads out of the bundle; refusing to follow it."
                )
            size = path.stat().st_size
            if size != entry.size:
                raise BundleError(f"{self.root}: {name!r} has {size} bytes where {entry.size} are expected. {mend}")
            if verify_hashes and (digest := file_sha256(path, on_bytes)) != entry.sha256:
                raise BundleError(f"{self.root}: {name!r} has SHA-256 {digest}, expected {entry.sha256}. {mend}")
        for model in (self.manifest.target, self.manifest.draft):
            # Graphs name their files of weights themselves.
            beside = (self.root / model.path).parent.glob(f"{PurePosixPath(model.path).name}.*") if model else ()
            for path in beside:
                if not self.has(name := path.relative_to(self.root).as_posix()):
                    raise BundleError(
                        f"{self.root}: {name!r} lies beside a graph, but the manifest does not list it. Remove it, or "
                        "export the bundle again."
                    )


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file as hexadecimal digits; `on_bytes` is called with the size of each piece read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return digest.hexdigest()


def check_safe_path(name: str) -> None:
    """Refuse a file name that is absolute or leads out of the bundle.

    Raises:
        BundleError: the name is unsafe.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        raise BundleError(f"Unsafe file name {name!r} in a bundle: only relative paths inside the bundle are allowed.")


def _build(annotation: Any, value: Any, where: str) -> Any:
    """Turn parsed JSON into what `annotation` says, or raise a BundleError that names the field."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return build_dataclass(typing.cast(type[Any], annotation), value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        for option in options[:-1]:
            if isinstance(option, type) and type(value) is option:
                return value
        return _build(options[-1], value, where)
    if origin is Literal:
        if value not in args:
            raise BundleError(f"{where} is {value!r}; this paceline knows {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, value, where)))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in _expect(dict, value, where).items()}
    return _expect(annotation, value, where)


def build_dataclass(cls: type[_T], value: Any, where: str) -> _T:
    """Turn a parsed JSON object into a dataclass, field by field; `where` names it in errors.

    Raises:
        BundleError: a field that is missing, unknown or of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    data = _expect(dict, value, where)
    optional = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}  # type: ignore[arg-type]
    if missing := hints.keys() - data.keys() - optional:
        raise BundleError(f"{where} lacks {', '.join(sorted(missing))}.")
    if unknown := data.keys() - hints.keys():
        raise BundleError(f"{where} has fields that this paceline does not know: {', '.join(sorted(unknown))}.")
    return cls(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in data.items()})


_WHOLE = 2**53  # up to here every integer is a float, too


def _expect(kind: type[_T], value: Any, where: str) -> _T:
    if kind is float and type(value) is int and abs(value) <= _WHOLE:  # as other writers of JSON write whole numbers
        value = float(value)
    if type(value) is not kind:
        raise BundleError(f"{where} should be of type {kind.__name__}, got {value!r:.80}.")
    return value
