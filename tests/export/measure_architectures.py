"""Measure every architecture in every flavour and precision: `python tests/export/measure_architectures.py`.

Each is a tiny model with random weights that is exported and compared with torch, as `paceline check` does. It writes
`models/architectures.md`; with names, such as `gpt2 opt`, it only prints the rows of the architectures that begin so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from architectures import ARCHITECTURES, REFUSED
from tiny import tiny_checkpoint
from transformers import PreTrainedConfig

from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline_export.causal_lm import trace
from paceline_export.export import ExportReport, export_bundle
from paceline_export.flavors import FLAVORS
from paceline_export.parity import ModelParity, check_bundle
from paceline_export.source import resolve

PAGE = Path(__file__).parents[2] / "models" / "architectures.md"
COLUMNS = tuple((flavor.name, precision) for flavor in FLAVORS.values() for precision in flavor.precisions)
# What a largest difference is stated as: the least of these that is at least twice as large.
_BOUNDS = (1e-5, 1e-4, 1e-3, 2e-3, 0.01, 0.05, 0.1, 0.2)

_HEAD = """# Architectures

Which decoders export, in which flavour and precision, and how exactly the graph then computes what torch does. Any
architecture of transformers goes the same way, through its attention and experts interfaces; these are the ones that
the tests hold (`tests/export/architectures.py`, which `python tests/export/measure_architectures.py` measures and
writes this page from; `pytest -m "slow or not slow" tests/export/test_architectures.py` compares each number below with a new measurement).

Each row is a tiny model with random weights: two layers, 16 values a head, windows of 16 positions. It is exported and compared with
transformers' own code on the weights as they are stored, logit by logit: a prompt of 64 tokens, one row at a time, five rows, and
five other rows behind a rollback, on texts of 73 tokens, which cross the windows; in the flavour `trt` also three texts
of different lengths in one batch. A number is a bound of the largest difference of a logit, at least twice what was
measured; the best token is the same in every row, but where torch's own two best are closer than the tolerance. Few-bit
weights are compared in float32 (`ort`) or float16 (`trt`) arithmetic, which shows that the graph is right;
what the weights themselves cost is the `quality` of an export. bf16 is compared in float16, fp8 without its rounding of
inputs. Of `trt` the graph is compared, in ONNX Runtime; its engines have not run on a GPU yet.

"""

_COSTS = """
## What it costs where no fused operator fits

| what | in the flavour | instead | costs |
|---|---|---|---|
| partial rotation; a head size that is no multiple of 16; a norm behind the rotation | both | the model's own code rotates, by tables that are looked up | some ten small operators a layer |
| bounded scores (softcap), sinks | `trt` | products and a softmax in float32 | all scores are written to memory: 4 bytes × heads × rows × positions of the cache, in each layer |
| experts | `ort` | an expert is a branch that is skipped where no row of the pass chose it; otherwise it runs for every row | nothing for one row; with more rows, each expert's time for all of them |
| experts | `trt` | every expert runs for every row, and what the router did not choose is dropped | the time of all experts: 4 × that of the chosen ones for 2 of 8 |
| routers, tables of learned positions | both | they stay in full precision; the export says how many weights do | little: they are small |
| frequencies that depend on the length of the text (dynamic, longrope) | both | the frequencies of short texts | texts end where the others would begin; the export says so, and a larger `--max-length` is refused |

"""


def bound(difference: float) -> float:
    """What a measured difference is stated as."""
    return next((limit for limit in _BOUNDS if limit >= 2 * difference), _BOUNDS[-1])


def exported(checkpoint: Path, flavor: str, precision: str, out: Path) -> ExportReport:
    """Export a tiny checkpoint; blocks are as small as its projections need."""
    options = {"max_length": 128} if flavor == "trt" else {}
    return export_bundle(
        resolve(str(checkpoint)), None, out, flavor=flavor, precision=precision, block_size=32, quality=False, **options
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
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "model", config)
        for flavor, precision in COLUMNS:
            out = Path(folder) / f"{flavor}-{precision}"
            try:
                exported(checkpoint, flavor, precision, out)
            except CheckpointError as error:
                yield f"refused: {error}"
                continue
            yield f"{bound(measured(out)[1]):g}"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    rows = []
    for name, config in ARCHITECTURES.items():
        if not names or name.startswith(tuple(names)):
            rows.append(line([name, *row(name, config)]))
            print(rows[-1], end="", file=sys.stderr, flush=True)
    if names:
        return
    titles = line(["architecture", *(f"{flavor} {precision}" for flavor, precision in COLUMNS)])
    table = titles + line(["---"] * (len(COLUMNS) + 1)) + "".join(rows)
    refused = line(["architecture", "reason"]) + line(["---"] * 2)
    refused += "".join(line([name, refusal(config)]) for name, (config, _) in REFUSED.items())
    PAGE.write_text(f"{_HEAD}{table}{_COSTS}## Refused\n\nWithin seconds, before any weight is read.\n\n{refused}", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
