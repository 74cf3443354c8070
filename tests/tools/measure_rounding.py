"""What rounding does to one and the same text that is fed at once, row by row, or in passes of several rows, in torch.

`python -m tests.tools.measure_rounding BUNDLE` prints the figures that the tolerances of `paceline verify` stand on
(`tools/paceline_tools/invariants.py`): the largest total variation of the next token's distribution, and how far below
the best logit the other pass's choice lies where the two choose differently. Whatever the bundle's precision, its
weights run in each dtype; products accumulate in float32, as on a GPU's tensor cores, and are rounded once. `float8`,
for bundles of the precision fp8, is float16 with the projections' inputs rounded to float8 numbers, as in their graphs.
All texts share each pass, so a dtype takes one pass over the weights for each row of one text, and not of all.
"""

from __future__ import annotations

import argparse
import copy
from importlib.resources import files
from pathlib import Path

import torch
from transformers import DynamicCache

from paceline.bundle import Bundle
from paceline.tokenizer import Tokenizer
from paceline_export.calibrate.texts import HELD_OUT
from paceline_export.cpu import load_graph
from paceline_export.parity import reference_model

ROWS = 96  # of each text
PROMPT = 32  # of them at once, before the passes
WIDTHS = (1, 2, 5, 9)
FLOAT8_END = 448.0  # the largest number of e4m3


@torch.inference_mode()
def logits(model: torch.nn.Module, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Logits float32 `[texts, rows, vocab]` of texts `[texts, PROMPT + rows]`, fed in passes of `width` rows of each.

    The prompt goes first, in one pass, and its logits are not among them.
    """
    cache, found, position = DynamicCache(), [], 0
    while position < ids.shape[1]:
        count = width if position else PROMPT
        out = model(ids[:, position : position + count], cache=cache, use_cache=True)
        if position:
            found.append(out.logits.float())
        position += count
    return torch.cat(found, 1)


def round_products(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Turn a model into one that computes in `dtype`, whose products with weights accumulate in float32.

    torch's own products in few bits are slow on a CPU that has no instructions for them.
    """
    model.to(dtype)

    def exact(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0].float()

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.to(dtype)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.float()  # numbers of `dtype`, as they are stored now
            module.register_forward_pre_hook(exact)
            module.register_forward_hook(rounded)


def input_scales(graph: Path) -> dict[str, float]:
    """What a projection's inputs are divided by before they are rounded to float8, by the projection's name."""
    model, found = load_graph(graph), {}
    for node in model.graph:
        if node.op_type != "MatMul":
            continue
        rounded, transposed = (value.producer() for value in node.inputs)
        if rounded is None or rounded.op_type != "DequantizeLinear":
            continue
        weight = transposed.inputs[0].producer().inputs[0].name  # dequantised, and transposed
        found[weight.removesuffix(".weight.q")] = float(rounded.inputs[1].const_value.numpy())
    return found


def round_inputs(model: torch.nn.Module, scales: dict[str, float]) -> None:
    """Have these projections read float8 numbers times their scales."""
    for name, scale in scales.items():

        def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor], *, scale: float = scale) -> torch.Tensor:
            levels = (inputs[0].float() / scale).clamp(-FLOAT8_END, FLOAT8_END).to(torch.float8_e4m3fn)
            return (levels.float() * scale).to(inputs[0].dtype)

        model.get_submodule(name).register_forward_pre_hook(rounded, prepend=True)


def compared(whole: torch.Tensor, pieces: torch.Tensor) -> tuple[list[float], float, list[float]]:
    """Total variation of each row of logits `[rows, vocab]`, their largest difference, and gaps where choices part."""
    variations = (whole.softmax(-1) - pieces.softmax(-1)).abs().sum(-1) / 2
    best, other = whole.argmax(-1), pieces.argmax(-1)
    index, parted = torch.arange(len(best)), best != other
    gaps = (whole[index, best] - whole[index, other])[parted]
    return variations.tolist(), float((whole - pieces).abs().max()), gaps.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--draft", action="store_true", help="measure the bundle's draft model, not its target")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="some of these, and float8")
    parser.add_argument("--texts", type=int, default=6)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    entry = bundle.manifest.draft if options.draft else bundle.manifest.target
    if entry is None:
        parser.error(f"{options.bundle} has no draft")
    texts = _texts(Tokenizer.from_bundle(bundle, "draft" if options.draft else "target"), options.texts)
    exact = reference_model(bundle, entry)
    print(f"{'dtype':9} {'rows':>5} {'max TV':>8} {'mean TV':>8} {'max logit':>9} {'parted':>6} {'max gap':>8}")
    for name in options.dtypes.split(","):
        model = copy.deepcopy(exact)
        round_products(model, torch.float16 if name == "float8" else getattr(torch, name))
        if name == "float8":
            scales = input_scales(bundle.path(entry.path))
            if not scales:
                parser.error(
                    f"{options.bundle} rounds no inputs to float8; export it with --flavor trt --precision fp8"
                )
            round_inputs(model, scales)
        variations: list[float] = []
        gaps: list[float] = []
        largest = 0.0
        whole = logits(model, texts, ROWS - PROMPT)
        for width in WIDTHS:
            for one, other in zip(whole, logits(model, texts, width), strict=True):
                varied, difference, parted = compared(one, other)
                variations += varied
                gaps += parted
                largest = max(largest, difference)
        print(
            f"{name:9} {len(variations):5} {max(variations):8.2g} {sum(variations) / len(variations):8.2g} "
            f"{largest:9.2g} {len(gaps):6} {max(gaps, default=0.0):8.2g}",
            flush=True,
        )


def _texts(tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """Pieces of `ROWS` tokens `[texts, ROWS]` of the texts that no calibration saw, by turns of each of them."""
    found = []
    for name in HELD_OUT:
        text = (files("paceline_export.calibrate") / "heldout" / f"{name}.txt").read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False)
        found.append([torch.tensor(ids[at : at + ROWS]) for at in range(0, len(ids) - ROWS, ROWS)])
    return torch.stack([piece for pieces in zip(*found, strict=False) for piece in pieces][:count])


if __name__ == "__main__":
    main()
