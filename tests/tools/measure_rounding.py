"""What rounding does to one and the same text that is fed at once, row by row, or in passes of several rows, in torch.

`python -m tests.tools.measure_rounding BUNDLE` prints the figures that the tolerances of `paceline verify` stand on
(`tools/paceline_tools/invariants.py`): the largest total variation of the next token's distribution, and how far below
the best logit the other pass's choice lies where the two choose differently. Whatever the bundle's precision, its
weights run in each dtype; products accumulate in float32, as on a GPU's tensor cores, and are rounded once. `float8`,
for bundles of the precision fp8, is float16 with the projections' inputs rounded to float8 numbers, as in their graphs.
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

ROWS = 160  # of each text
PROMPT = 32  # of them at once, before the passes
WIDTHS = (1, 2, 5, 9)
FLOAT8_END = 448.0  # the largest number of e4m3


@torch.inference_mode()
def logits(model: torch.nn.Module, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Logits float32 `[rows, vocab]` of a text `[PROMPT + rows]` behind its prompt, fed in passes of `width` rows."""
    cache, found, position = DynamicCache(), [], 0
    while position < len(ids):
        count = width if position else PROMPT
        out = model(ids[position : position + count][None], cache=cache, use_cache=True)
        found.append(out.logits[0].float())
        position += count
    return torch.cat(found)[PROMPT:]


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

        model.get_submodule(name).register_forward_pre_hook(rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="some of these, and float8")
    parser.add_argument("--texts", type=int, default=6)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    tokenizer = Tokenizer.from_bundle(bundle)
    texts = _texts(tokenizer, options.texts)
    exact = reference_model(bundle, bundle.manifest.target)
    print(f"{'dtype':9} {'rows':>5} {'max TV':>8} {'mean TV':>8} {'max logit':>9} {'parted':>6} {'max gap':>8}")
    for name in options.dtypes.split(","):
        model = copy.deepcopy(exact).to(torch.float16 if name == "float8" else getattr(torch, name))
        if name == "float8":
            scales = input_scales(bundle.path(bundle.manifest.target.path))
            if not scales:
                parser.error(
                    f"{options.bundle} rounds no inputs to float8; export it with --flavor trt --precision fp8"
                )
            round_inputs(model, scales)
        variations, logit_differences, gaps, rows = [], [], [], 0
        for ids in texts:
            whole = logits(model, ids, ROWS - PROMPT)
            for width in WIDTHS:
                pieces = logits(model, ids, width)
                p, q = whole.softmax(-1), pieces.softmax(-1)
                variations.append((p - q).abs().sum(-1) / 2)
                logit_differences.append(float((whole - pieces).abs().max()))
                best, other = whole.argmax(-1), pieces.argmax(-1)
                parted = best != other
                index = torch.arange(len(best))
                gaps += (whole[index, best] - whole[index, other])[parted].tolist()
                rows += len(best)
        variation = torch.cat(variations)
        print(
            f"{name:9} {rows:5} {float(variation.max()):8.2g} {float(variation.mean()):8.2g} "
            f"{max(logit_differences):9.2g} {len(gaps):6} {max(gaps, default=0.0):8.2g}",
            flush=True,
        )


def _texts(tokenizer: Tokenizer, count: int) -> list[torch.Tensor]:
    """Pieces of `ROWS` tokens of the texts that no calibration saw, by turns of each of them."""
    found = []
    for name in HELD_OUT:
        text = (files("paceline_export.calibrate") / "heldout" / f"{name}.txt").read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False)
        found.append([torch.tensor(ids[at : at + ROWS]) for at in range(0, len(ids) - ROWS, ROWS)])
    return [piece for pieces in zip(*found, strict=False) for piece in pieces][:count]


if __name__ == "__main__":
    main()
