"""Weights go to disk as they are made, into any number of files; an export that ends early leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformers
from tiny import sizes, tiny_checkpoint

import paceline
from paceline.bundle import Bundle
from paceline.errors import InvalidInputError
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle
from paceline_export.passes import weights as stored
from paceline_export.passes.data_file import DataFile
from paceline_export.source import resolve

TOKENS = {name: sizes()[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(**sizes()))


def graph(arrays: dict[str, np.ndarray]) -> ir.Model:
    """A graph of nothing but initializers."""
    values = []
    for name, array in arrays.items():
        tensor = ir.tensor(array, name=name)
        values.append(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        )
    return ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 21}, name="g"), ir_version=10)


ARRAYS: dict[str, np.ndarray] = {
    "a": np.arange(100, dtype=np.float32),
    "small": np.arange(3),
    "b": np.arange(77, dtype=np.uint8).repeat(7),
    "c": np.arange(600, dtype=np.float16).reshape(20, 30),
}


@pytest.mark.parametrize(("max_bytes", "files"), [(None, 1), (10_000, 1), (1000, 2), (600, 3), (1, 3)])
def test_tensors_are_written_in_turn_and_read_back(max_bytes: int | None, files: int, tmp_path: Path) -> None:
    model = graph(ARRAYS)
    with DataFile(tmp_path / "m.onnx.data", max_bytes) as data:
        data.take(model, ["b"])
        value = model.graph.initializers["b"].const_value
        assert isinstance(value, ir.ExternalTensor)
        np.testing.assert_array_equal(value.numpy(), ARRAYS["b"])  # while the file is written still
        data.take(model)
    ir.save(model, tmp_path / "m.onnx")
    names = {path.name for path in tmp_path.iterdir()} - {"m.onnx"}
    assert names == {"m.onnx.data", *(f"m.onnx.data.{i}" for i in range(1, files))}
    assert all((tmp_path / name).stat().st_size <= max((max_bytes or 1e9), 1200) for name in names)
    read = onnx.load(tmp_path / "m.onnx")
    assert {tensor.name for tensor in read.graph.initializer} == set(ARRAYS)
    for tensor in read.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), ARRAYS[tensor.name])


def test_no_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DataFile(tmp_path / "m.onnx.data")


def test_weights_in_many_files_are_the_model(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidInputError, match="max_file_size must be at least 1,000,000 bytes, which is 1 MB; got 20,000"
    ):
        export_bundle(resolve(str(llama)), None, tmp_path / "bundle", max_file_size=20_000)
    monkeypatch.setattr("paceline_export.arguments._LEAST_FILE", 1)
    source = resolve(str(llama))
    export_bundle(source, source, tmp_path / "bundle", precision="fp32", quality=False, max_file_size=20_000)
    bundle = Bundle.open(tmp_path / "bundle", verify_hashes=True)
    assert {f"{which}/model.onnx.data.{i}" for which in ("target", "draft") for i in (1, 2, 3)} <= set(
        bundle.manifest.files
    )
    assert check_bundle(bundle).passed
    steps = paceline.load(tmp_path / "bundle").generate([5, 6, 7], max_new_tokens=5, num_draft_tokens=2)
    assert sum(len(step.token_ids) for step in steps) > 0


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Bytes in memory of each model that is stored already, looked at whenever a projection was stored."""
    models: list[list[int]] = []
    store = stored.store_weights

    def store_watched(model: ir.Model, *args: object, **options: object) -> object:
        held: list[int] = []
        models.append(held)

        def look(name: str) -> None:
            tensors = (value.const_value for value in model.graph.initializers.values())
            held.append(
                sum(t.nbytes for t in tensors if isinstance(t, ir.Tensor | ir.PackedTensor) and t.nbytes >= 256)
            )

        return store(model, *args, **(options | {"on_weight": look}))  # type: ignore[arg-type]

    monkeypatch.setattr("paceline_export.one_model.store_weights", store_watched)
    return models


@pytest.mark.parametrize(("precision", "flavor"), [("int4", "ort"), ("int8", "ort"), ("int4", "trt"), ("fp32", "ort")])
def test_no_more_than_the_head_is_held_until_the_end(
    precision: str, flavor: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = watched(monkeypatch)
    export_bundle(
        resolve(str(llama)), None, tmp_path / "bundle", precision=precision, flavor=flavor, quality=False,
        calibration="none" if precision == "int4" else None, block_size=32,
    )  # fmt: skip
    (held,) = models
    assert len(held) == 2 * 7 + 2  # projections of two layers, the embedding and the head
    assert held[-1] < 272 * 64 * 2  # the head alone, in 8 bits with scales
    assert all(size == 0 for size in held[:-1])
    assert (held[-1] > 0) == (precision != "fp32")  # floats are read when they are written


@pytest.mark.parametrize(
    ("config", "projections"),
    [
        (transformers.MixtralConfig(**sizes(num_local_experts=2)), 2 * (4 + 1 + 2 * 2)),  # one of them a router
        (transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **TOKENS), 2 * 4),  # by columns
    ],
    ids=lambda given: getattr(given, "model_type", ""),
)
def test_experts_weights_by_columns_and_cut_heads_go_to_disk_too(
    config: transformers.PreTrainedConfig, projections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(str(tiny_checkpoint(tmp_path / "model", config)))
    models = watched(monkeypatch)
    export_bundle(source, source, tmp_path / "bundle", precision="int8", draft_vocab=64, quality=False)
    tied = config.tie_word_embeddings
    for held in models:
        assert len(held) == projections + (1 if tied else 2)  # the head, and the embedding where it is another
        assert all(size == 0 for size in held[:-1])
        assert held[-1] > 0
    bundle = Bundle.open(tmp_path / "bundle", verify_hashes=True)
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.vocab_size == 64
    assert check_bundle(bundle).passed


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda end: end.name)
def test_an_export_that_is_ended_while_it_writes_leaves_no_half_bundle(
    end: signal.Signals, llama: Path, tmp_path: Path
) -> None:
    """At SIGINT and SIGTERM nothing stays; after SIGKILL, which no process sees, the next export clears away."""
    arguments = [
        "export",
        "--target",
        str(llama),
        "-o",
        str(tmp_path / "bundle"),
        "--precision",
        "int8",
        "--no-quality",
    ]
    code = f"""
        import os, sys
        from paceline_export.passes.data_file import DataFile
        from paceline_tools.__main__ import main
        write, written = DataFile._write, []
        def ended(self, name, tensor):
            written.append(name)
            if len(written) == 7:
                os.kill(os.getpid(), {int(end)})
            return write(self, name, tensor)
        DataFile._write = ended
        sys.argv = ["paceline", *{arguments!r}]
        main()
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, check=False, capture_output=True, text=True
    )
    left = [path.name for path in tmp_path.iterdir()]
    assert "Traceback" not in child.stderr
    if end == signal.SIGKILL:
        assert child.returncode == -signal.SIGKILL
        assert [name.rpartition("-")[0] for name in left] == [".bundle.partial"]
    else:
        assert (child.returncode, left) == (128 + end, [])
    export_bundle(resolve(str(llama)), None, tmp_path / "bundle", precision="int8", quality=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle.open(tmp_path / "bundle", verify_hashes=True)
