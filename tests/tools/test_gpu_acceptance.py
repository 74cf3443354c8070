"""The program that a GPU is accepted by, run where there is none: with the CPU provider, and over a simulated GPU."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from simulated_gpu import PROVIDER, simulated_gpu
from tiny import sizes, tiny_checkpoint
from transformers import LlamaConfig

import paceline
from paceline.bundle import Bundle
from paceline.device_array import on_host
from paceline.ort import OrtModel
from paceline.trt import TrtModel
from paceline.trt_engine import Engine
from paceline.trt_memory import SequenceMemory
from paceline_tools.gpu_acceptance import accept, command, copies, cuda_graphs, in_place, parity

from .conftest import ROOT, environment

FEW = {"num_draft_tokens": 3, "max_new_tokens": 8, "repeats": 1, "samples": 20}


@pytest.fixture
def bundle(tiny_engines: Path) -> Path:
    return tiny_engines


def run(bundle: Path, output: Path, provider: str) -> tuple[int, str]:
    few = [part for name, value in FEW.items() for part in (f"--{name.replace('num_', '').replace('_', '-')}", value)]
    arguments = ["--run", f"{bundle}={provider}", "-o", output, *few]
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_it_writes_what_it_found(bundle: Path, tmp_path: Path) -> None:
    code, output = run(bundle, tmp_path / "deep" / "found", "cpu")
    assert code == 0, output
    document = json.loads((tmp_path / "deep" / "found.json").read_text())
    (found,) = document["runs"]
    assert document["device"] == "a CPU"
    assert found["failed"] == []
    assert found["law, greedy texts and caches"]["passed"] is True
    assert found["speed"]["plain_tokens_per_second"] > 0
    assert not found.keys() & {"CUDA graphs", "in place", "roofline"}  # a CPU proves none of these
    text = (tmp_path / "deep" / "found.md").read_text()
    assert text in output
    assert text.startswith("# Acceptance on a CPU, ")
    assert "trt fp16, cpu" in text
    assert str(bundle) not in text


def test_over_a_simulated_gpu_everything_holds(bundle: Path) -> None:
    with simulated_gpu() as gpu:
        found = accept(bundle, PROVIDER, **FEW)
        gc.collect()
        assert found["failed"] == []
        assert found["parity, target"].keys() == {"prefill", "single steps", "verification", "after rollback"}
        assert found["in place"] == {"positions kept": True, "positions written": True, "buffers stayed": True}
        assert found["copied to the host"]["largest"] <= 8 * 4
        assert found["CUDA graphs"]["launched"] > found["CUDA graphs"]["one by one"]
        assert gpu.passes


def test_faults_are_seen(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted into the runtime: another id's logits, caches that are written from the start, a look, no graphs."""
    with simulated_gpu():
        decoder = paceline.load(bundle, provider=PROVIDER)
        model: Any = decoder.target
        prompt, opened = [1, 2, 3], Bundle.open(bundle)
        with monkeypatch.context() as patch:
            forward = TrtModel.forward
            patch.setattr(TrtModel, "forward", lambda self, *arguments: np.roll(forward(self, *arguments), 1, -1))
            differences = parity(model, OrtModel.open(opened, "target"))
            assert min(one.tv for one in differences.values()) > 0.1
        with monkeypatch.context() as patch:
            run_behind = SequenceMemory.run
            patch.setattr(SequenceMemory, "run", lambda self, ids, length, count: run_behind(self, ids, 0, count))
            figures, passed = in_place(model)
            assert (figures["positions kept"], passed) == (False, False)
        with monkeypatch.context() as patch:
            resident = TrtModel.forward_in_place
            patch.setattr(TrtModel, "forward_in_place", lambda *given: (out := resident(*given), on_host(out))[0])
            figures, passed = copies(bundle, PROVIDER, prompt, 3)
            assert (figures["largest"] > 1000, passed) == (True, False)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "records", lambda self, shape: False)
            figures, passed = cuda_graphs(decoder, prompt, 3)
            assert (figures["launched"], passed) == (0, False)
        del decoder, model
        gc.collect()


def test_what_cannot_start_is_in_the_files(bundle: Path, tmp_path: Path) -> None:
    with simulated_gpu() as gpu:
        gpu.devices = 0
        code, _ = run(bundle, tmp_path / "found", PROVIDER)
    assert code == 1
    (found,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert found["failed"] == ["to start"]
    assert "CUDA finds no device" in (tmp_path / "found.md").read_text()


SCRIPT = ROOT / "tools" / "gpu_acceptance.sh"


def test_the_scripts_part_without_a_gpu(tmp_path: Path) -> None:
    """Exports, checks, strict builds by TensorRT-RTX and the program above, of a model of a few thousand weights."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'paceline[trt]'")
    config = LlamaConfig(**sizes(hidden_size=128, head_dim=64, max_position_embeddings=1024))
    source = tiny_checkpoint(tmp_path / "model", config)
    work = tmp_path / "work"
    variables = {"PACELINE": sys.executable, "SOURCE": str(source), "WORK": str(work)}
    done = subprocess.run([SCRIPT, "--cpu"], capture_output=True, text=True, env={**environment(), **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("trt-fp16", "trt-int4"):
        built = Bundle.open(work / name, verify_hashes=True).manifest.engines
        assert [(engine.model, engine.sm, engine.backend) for engine in built] == [
            ("target", "8.9", "tensorrt-rtx"),
            ("draft", "8.9", "tensorrt-rtx"),
        ]
    assert done.stdout.count(": passed (") == 2 * 2  # `paceline check`: both models of both bundles
    (found,) = json.loads((work / "cpu.json").read_text())["runs"]
    assert found["failed"] == []
    assert done.stdout.endswith("No GPU has run anything of this.\n")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_the_script_asks_for_a_gpu_before_it_installs_anything() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("no NVIDIA GPU with a driver that answers; --cpu runs what needs none.\n")
    assert "install" not in done.stdout


def test_a_run_that_names_no_provider_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--run", "bundles/x", "-o", str(tmp_path / "found")])
    assert result.exit_code == 2
    assert "--run expects DIR=PROVIDER" in result.output
