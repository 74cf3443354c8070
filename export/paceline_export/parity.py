"""ONNX against torch on the same weights: is the exported graph the model it was exported from?

The weights are read back from the bundle (quantised ones as the values they stand for) into transformers' own model,
with its own attention, so that what is compared is the graph: tracing, fused operators, rotation, caches, rollback.
Of a draft with logits for some ids, these are compared; that they stand for the right ids cannot be seen from a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from paceline.bundle import Bundle, ModelEntry
from paceline.errors import BundleError
from paceline.logit_ids import read_logit_ids
from paceline.model import CausalLM
from paceline.tokenizer import Tokenizer

from .cpu import load_graph, open_on_cpu
from .own_attention import reference_attention
from .quantize.blockwise import Blockwise
from .quantize.packed import PackedWeight, unpacked
from .ragged import RaggedBatch

__all__ = [
    "SHORTEST",
    "TOLERANCES",
    "ModelParity",
    "ParityReport",
    "PhaseParity",
    "Tolerance",
    "check_bundle",
    "compare",
    "log_softmax",
]

# Prose, code and numbers, so that tokens of many kinds are compared.
TEXT = '''A hash map stores each entry in a bucket that is chosen by the hash of its key.

def mean(values: list[float]) -> float:
    """Arithmetic mean; raises ValueError for an empty list."""
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

In 1969 three people flew 384,400 km to the Moon. «Déjà vu», said the 東京 visitor, "2 + 2 = 4". The draft model
proposes a few tokens, the target model scores them in one pass, and whatever it does not agree with is drawn again.
'''
PREFILL, SINGLE, VERIFY = 64, 4, 5
SHORTEST = PREFILL + SINGLE + VERIFY + 1  # positions that a model must have for it
_POSITIONS = 256  # of the caches that are compared
_PARTS = (
    ".q",
    ".scales",
    ".zero_points",
    ".order",
    ".table",
    "_shape",
    ".row_start",
    ".row_end",
    ".row_axis",
    ".input_scale",
)  # of quantised weights, as passes.weights names them


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a graph may be from torch on the same weights.

    Attributes:
        logit: largest difference of a logit.
        kl: mean Kullback-Leibler divergence of the next token's distribution, in nats.
        near_tie: gap between torch's two best logits below which the best token is open.
    """

    logit: float
    kl: float
    near_tie: float


# By the arithmetic of the products, not by the weights: torch computes with the very weights that are stored.
# "int8" is what few-bit kernels do to be fast: activations are rounded to 8 bits, block by block. "fp8" is a graph that
# rounds them by operators of its own.
TOLERANCES = {
    "fp32": Tolerance(2e-3, 1e-6, 2e-3),
    "fp16": Tolerance(0.2, 1e-3, 0.1),
    "int8": Tolerance(12.0, 0.1, 2.0),
    "fp8": Tolerance(12.0, 0.1, 2.0),
}
_ARITHMETIC: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ort": {"fp32": ("fp32",), "fp16": ("fp16",), "int8": ("fp32", "int8"), "int4": ("fp32", "int8")},
    "cuda": dict.fromkeys(("fp16", "int8", "int4"), ("fp16",)),
    "trt": {**dict.fromkeys(("fp16", "bf16", "int8", "int4"), ("fp16",)), "fp8": ("fp16", "fp8")},
}
_NOTES = {"bfloat16": "ONNX Runtime does not run bfloat16 on a CPU: the graph was compared in float16"}


@dataclass(frozen=True, slots=True)
class PhaseParity:
    """Comparison of some rows of logits.

    Attributes:
        name: `prefill`, `single steps`, `verification` or `after rollback`, of one text; `batch: …` of several.
        rows: number of rows compared.
        max_logit_diff: largest absolute difference of a logit.
        kl: mean divergence of ONNX's distribution from torch's, in nats.
        argmax_agreement: share of rows with the same best token.
        near_ties: rows with another best token where torch's two best are closer than the tolerance.
        disagreements: rows with another best token where they are not.
    """

    name: str
    rows: int
    max_logit_diff: float
    kl: float
    argmax_agreement: float
    near_ties: int
    disagreements: int


@dataclass(frozen=True, slots=True)
class ModelParity:
    """All phases of one model in one arithmetic, and whether they are within its tolerance.

    A quantised model is compared twice: with the products in float32, which shows that the graph is right, and as it
    is shipped, with activations rounded to 8 bits, which shows what the fast kernels cost. `note` says what else the
    comparison stands for.
    """

    which: str
    precision: str
    arithmetic: str
    phases: tuple[PhaseParity, ...]
    tolerance_logit: float
    tolerance_kl: float
    note: str | None = None

    @property
    def reason(self) -> str | None:
        """What is beyond tolerance, or None."""
        for phase in self.phases:
            where = f"{self.which} in {self.arithmetic} arithmetic, {phase.name}"
            if not phase.max_logit_diff <= self.tolerance_logit:  # so that NaN fails
                return f"{where}: a logit differs by {phase.max_logit_diff:.3g}, more than {self.tolerance_logit:g}"
            if not phase.kl <= self.tolerance_kl:
                return f"{where}: the distributions differ by {phase.kl:.3g} nats, more than {self.tolerance_kl:g}"
            if phase.disagreements:
                return f"{where}: {phase.disagreements} rows have another best token, near-ties left out"
        return None

    @property
    def passed(self) -> bool:
        """Whether every phase is within tolerance."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Parity of every model of a bundle."""

    models: tuple[ModelParity, ...]

    @property
    def passed(self) -> bool:
        """Whether every model is within tolerance."""
        return all(model.passed for model in self.models)


def check_bundle(bundle: Bundle, *, on_progress: Callable[[str], None] | None = None) -> ParityReport:
    """Compare every model of a bundle with torch on the same weights.

    Takes the memory of the float32 model: about 7 GB for 1.8 billion parameters.

    Args:
        bundle: an opened bundle.
        on_progress: called with what is being done.

    Raises:
        BundleError: the bundle does not hold what is needed to rebuild the torch model.
    """
    report = on_progress or (lambda stage: None)
    models = []
    for which in ("target", "draft"):
        entry: ModelEntry | None = getattr(bundle.manifest, which)
        if entry is None:
            continue
        if entry.max_length < SHORTEST:
            raise BundleError(f"{which}: a context of {entry.max_length} positions is too short for the check.")
        ids = Tokenizer.from_bundle(bundle, which).encode(TEXT, add_special_tokens=False)
        found = {}
        batch = RaggedBatch(ids) if entry.flavor == "trt" else None
        for arithmetic in _ARITHMETIC[entry.flavor][entry.precision]:
            report(f"{which}: ONNX Runtime, {arithmetic} arithmetic")
            exact = arithmetic != entry.precision and arithmetic != "int8"
            model = open_on_cpu(bundle.path(entry.path), entry, _POSITIONS, exact=exact)
            found[arithmetic] = _onnx_logits(model, ids) | (batch.onnx_logits(model) if batch else {})
        report(f"{which}: torch")
        reference = reference_model(bundle, entry)
        expected = _torch_logits(reference, ids) | (batch.torch_logits(reference) if batch else {})
        if (logit_ids := read_logit_ids(bundle, entry)) is not None:
            expected = {name: np.ascontiguousarray(rows[:, logit_ids]) for name, rows in expected.items()}
        for arithmetic, logits in found.items():
            tolerance = TOLERANCES[arithmetic]
            phases = tuple(compare(name, expected[name], logits[name], tolerance.near_tie) for name in expected)
            limits = (tolerance.logit, tolerance.kl)
            models.append(
                ModelParity(which, entry.precision, arithmetic, phases, *limits, note=_NOTES.get(entry.kv_dtype))
            )
    return ParityReport(tuple(models))


def compare(name: str, expected: NDArray[np.float32], found: NDArray[np.float32], near_tie: float) -> PhaseParity:
    """Compare two arrays of logits `[rows, vocab]`; `near_tie` is the gap below which the best token is open."""
    expected64, found64 = expected.astype(np.float64), found.astype(np.float64)
    log_p, log_q = log_softmax(expected64), log_softmax(found64)
    same = expected.argmax(-1) == found.argmax(-1)
    top = np.partition(expected64, -2, axis=-1)[:, -2:]
    close = top[:, 1] - top[:, 0] < near_tie
    return PhaseParity(
        name=name,
        rows=len(expected),
        max_logit_diff=float(np.abs(expected64 - found64).max()),
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        argmax_agreement=float(same.mean()),
        near_ties=int((~same & close).sum()),
        disagreements=int((~same & ~close).sum()),
    )


def reference_model(bundle: Bundle, entry: ModelEntry) -> torch.nn.Module:
    """transformers' model in float32 with the weights of an exported graph.

    Raises:
        BundleError: no configuration, or weights that do not fit it.
    """
    folder = Path(entry.path).parent.as_posix()
    config = AutoConfig.from_pretrained(bundle.path(f"{folder}/config.json"))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    tied = dict(model_class._tied_weights_keys or {}) if config.tie_word_embeddings else {}
    config.tie_word_embeddings = False  # embedding and LM head may be stored with different bits
    with torch.device("meta"):
        empty = model_class(config)
    own, table = empty.state_dict(), empty.get_input_embeddings()
    # The graph holds factors, too, that the model computes by itself. Experts lie one behind the other.
    stored = stored_weights(bundle.path(entry.path))
    weights = {name: value for name, value in stored.items() if name in own}
    weights |= {name: value.reshape(own[name].shape) for name, value in weights.items() if own[name].dim() == 3}
    for pair in tied.items():  # one stands for both where they share it
        if len(found := [weights[name] for name in pair if name in weights]) == 1:
            weights |= dict.fromkeys(pair, found[0])
    embedding = next(f"{name}.weight" for name, module in empty.named_modules() if module is table)
    if embedding in weights:  # blocks of a table that was the LM head, too, may be padded
        weights[embedding] = weights[embedding][:, : own[embedding].shape[1]]
    if (logit_ids := read_logit_ids(bundle, entry)) is not None:  # zeros stand for rows that the LM head does not keep
        for name, value in weights.items():
            if value.shape[0] == len(logit_ids) < own[name].shape[0]:
                weights[name] = torch.zeros(own[name].shape).index_copy_(0, torch.from_numpy(logit_ids), value)
    bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        model = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.float32,
            attn_implementation=reference_attention(config),
            experts_implementation="eager",
        )
    except RuntimeError as error:
        raise BundleError(f"{bundle.root}: the weights do not fit {folder}/config.json: {error}") from error
    finally:
        if bars:
            enable_progress_bar()
    if missing := sorted(set(dict(model.named_parameters())) - set(weights)):
        raise BundleError(f"{bundle.root}: the graph lacks weights of {folder}/config.json, such as {missing[0]!r}.")
    return cast(torch.nn.Module, model.eval())


def stored_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of an exported graph by the checkpoint's names, in float32; stacked experts as one wide matrix."""
    model = load_graph(path)
    arrays = {
        name: value.const_value for name, value in model.graph.initializers.items() if value.const_value is not None
    }
    nodes = list(model.graph.all_nodes())  # experts are in branches
    heads = {str(node.inputs[1].name) for node in nodes if node.op_type == "MatMulNBits" and node.inputs[1]}
    parts: dict[str, torch.Tensor] = {}
    for node in nodes:
        if node.op_type == "DequantizeLinear" and node.inputs[0].is_initializer():
            name = str(node.inputs[0].name).removesuffix(".q")
            levels = arrays[f"{name}.q"].numpy().astype(np.float32)
            scales = arrays[f"{name}.scales"].numpy().astype(np.float32).reshape(len(levels), -1)
            values = levels * scales.repeat(-(-levels.shape[1] // scales.shape[1]), axis=1)
            parts[name] = torch.from_numpy(_in_order(values, _column_order(_product_of(node))))
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        name = next((str(v.name) for v in node.inputs if v is not None and str(v.name).endswith(".q")), "")
        if not name or (node.op_type == "GatherBlockQuantized" and name in heads):
            continue  # a table that is the LM head, too, and read as that
        name = name.removesuffix(".q")
        packed = arrays[f"{name}.q"].numpy()
        rows, bits, block = len(packed), node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()
        scales = arrays[f"{name}.scales"].numpy().astype(np.float32).reshape(rows, -1)
        zeros = arrays.get(f"{name}.zero_points")
        blocks = scales.shape[1]
        columns = node.attributes["K"].as_int() if "K" in node.attributes else blocks * block
        weight = Blockwise(
            packed.reshape(rows, blocks, -1),
            scales,
            None if zeros is None else zeros.numpy().reshape(rows, -1),
            columns,
            bits,
            block,
        )
        parts[name] = unpacked(PackedWeight(weight, _column_order(node)))
    for name, tensor in arrays.items():
        if name.startswith("rotary.") or "." not in name or name.endswith(_PARTS):
            continue
        parts[name] = torch.from_numpy(np.array(tensor.numpy(), np.float32))
    weights: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, values in parts.items():  # a name ends with .T where what is stored is transposed, [i] or [i:] in front
        plain = name.removesuffix(".T")
        whole, _, place = plain.partition("[")
        number = int(place.partition(":")[0].rstrip("]") or 0)
        weights.setdefault(whole, []).append((number, values if plain == name else values.T.contiguous()))
    return {
        name: found[0][1] if len(found) == 1 else torch.cat([values for _, values in sorted(found, key=_number)])
        for name, found in weights.items()
    }


def _number(part: tuple[int, torch.Tensor]) -> int:
    return part[0]


def _product_of(dequantized: ir.Node) -> ir.Node | None:
    """The product that reads a dequantised weight, transposed; None where rows of it are looked up."""
    (user,) = dequantized.outputs[0].uses()
    return next(iter(user.node.outputs[0].uses())).node if user.node.op_type == "Transpose" else None


def _in_order(values: NDArray[np.float32], order: NDArray[np.int64] | None) -> NDArray[np.float32]:
    """The columns of a weight as the checkpoint has them."""
    return values if order is None else np.ascontiguousarray(values[:, np.argsort(order)])


def _column_order(node: ir.Node | None) -> NDArray[np.int64] | None:
    """The order in which a projection's input is gathered in front of it, or None."""
    if node is None:
        return None
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if producer is None or producer.op_type != "Gather" or not str(producer.inputs[1].name).endswith(".order"):
        return None
    order: NDArray[np.int64] = producer.inputs[1].const_value.numpy()
    return order


def _onnx_logits(model: CausalLM, ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """Logits of prefill, single steps, a verification, and a block after its rollback."""
    cache = model.new_cache(min(model.max_length, _POSITIONS))
    logits = {"prefill": model.forward(ids[:PREFILL], cache, PREFILL).copy()}
    at = PREFILL
    singles = [model.forward([ids[at + i]], cache, 1).copy() for i in range(SINGLE)]
    logits["single steps"] = np.concatenate(singles)
    at += SINGLE
    logits["verification"] = model.forward(ids[at : at + VERIFY], cache, VERIFY).copy()
    cache.rollback(at + 1)  # only the first token of the block stands, and the text goes on otherwise
    logits["after rollback"] = model.forward(_other(ids, at), cache, VERIFY).copy()
    return logits


def _other(ids: Sequence[int], at: int) -> list[int]:
    """Tokens that differ from those that stood behind position `at`."""
    return list(reversed(ids[at + 1 : at + 1 + VERIFY]))


@torch.no_grad()
def _torch_logits(model: torch.nn.Module, ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """The same rows, each from a forward without any cache."""
    end = PREFILL + SINGLE
    text = list(ids[: end + VERIFY])
    rows = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
    other = [*text[: end + 1], *_other(ids, end)]
    after = model(torch.tensor([other]), use_cache=False).logits[0, -VERIFY:].numpy()
    return {
        "prefill": rows[:PREFILL],
        "single steps": rows[PREFILL:end],
        "verification": rows[end:],
        "after rollback": after,
    }


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of the probabilities that logits `[…, vocab]` stand for, of the same shape."""
    x = x - x.max(-1, keepdims=True)
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result
