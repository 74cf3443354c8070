"""`paceline doctor`: its lines, its exit codes, and checks that end their process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import cuda
from paceline.errors import InstallationError
from paceline.providers import PROVIDERS
from paceline_tools import doctor, probes
from paceline_tools.probes import Finding, probe

from .conftest import Invoke, write_table_bundle


def gpus() -> int:
    try:
        return cuda.device_count()
    except InstallationError:
        return 0


def test_it_says_what_starts_here_and_how_to_mend_the_rest(invoke: Invoke, tmp_path: Path) -> None:
    bundle = write_table_bundle(tmp_path / "tables")
    result = invoke("doctor", bundle)
    assert result.exit_code == 0
    assert result.stderr == ""
    *lines, empty, summary = result.stdout.splitlines()
    assert empty == ""
    assert {line[:4] for line in lines} <= {"ok  ", "--  ", "!!  "}
    signs = {" ".join(line[4:].split("  ")[0].split()): line[:2] for line in lines}
    assert signs.keys() >= {f"provider {name}" for name in PROVIDERS} | {"Python", "ONNX Runtime", "GPUs", "cuDNN"}
    assert [signs[name] for name in ("Python", "packages", "ONNX Runtime", "provider cpu")] == ["ok"] * 4
    assert signs[f"bundle {bundle}"] == "ok"
    assert "cpu" in summary.removeprefix("Providers that start: ").rstrip(".").split(", ")
    if gpus() == 0:
        assert signs["provider cuda"] == signs["CUDA"] == "--"


def test_json_holds_the_same(invoke: Invoke, tmp_path: Path) -> None:
    found = json.loads(invoke("doctor", write_table_bundle(tmp_path / "tables"), "--json").stdout)
    assert found["can_run"] is True
    assert found["providers"][0] == "cpu"
    findings = {finding["name"]: finding for finding in found["findings"]}
    assert findings["memory"]["facts"]["free_bytes"] > 1e6
    facts = findings[f"bundle {tmp_path / 'tables'}"]["facts"]
    assert facts["cache_bytes"] == 2 * 128 * 64  # two models of 128 bytes a position, whose contexts hold 64
    assert facts["providers"][0] == "cpu"
    assert all(set(finding) == {"name", "status", "found", "mend", "facts"} for finding in found["findings"])


def test_bundles_none_of_which_open_are_nothing_to_run(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("doctor", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert f"There is no bundle at {tmp_path / 'nowhere'}" in result.stdout
    assert result.stdout.endswith(" None of the bundles can run.\n")


def test_without_onnxruntime_nothing_can_run(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('planted')\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "ONNX Runtime cannot be imported (planted)" in result.stdout
    assert result.stdout.endswith("No provider starts: nothing can run.\n")


def plant(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


def test_a_library_that_ends_its_process_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    plant(tmp_path, "crashes", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    plant(tmp_path, "leaves", "import os\nos._exit(3)\n")
    plant(tmp_path, "chatters", "print('{\"name\": 1}')\n__version__ = '1.2'\n")
    plant(tmp_path, "fails", "raise OSError('libnvinfer.so.10: cannot open')\n")
    found = {name: probe("TensorRT", "tensorrt", name) for name in ("crashes", "leaves", "chatters", "fails")}
    assert found["crashes"] == Finding("TensorRT", "broken", "ended its process by SIGSEGV")
    assert found["leaves"] == Finding("TensorRT", "broken", "ended with exit code 3: no word")
    assert (found["chatters"].status, found["chatters"].facts) == ("ok", {"version": "1.2"})
    assert found["fails"].status == "broken"
    assert "libnvinfer.so.10" in found["fails"].found


def test_a_library_that_does_not_come_back_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    plant(tmp_path, "sleeps", "import time\ntime.sleep(60)\n")
    monkeypatch.setattr(probes, "SECONDS", 1)
    assert probe("TensorRT", "tensorrt", "sleeps").found == "gave no answer in 1 s"


def test_the_stub_of_tensorrt_is_told_from_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_rt-9.9.dist-info").mkdir()
    (tmp_path / "planted_rt-9.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: planted-rt\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stub, nothing = probe("TensorRT", "tensorrt", "planted_rt"), probe("TensorRT", "tensorrt", "planted_other")
    assert (stub.status, stub.found) == ("broken", "planted-rt 9.9 is installed without its module")
    assert "https://pypi.nvidia.com" in stub.mend
    assert (nothing.status, nothing.found) == ("missing", "not installed")


@pytest.mark.parametrize(
    ("owners", "status", "mend"),
    [
        (["onnxruntime"], "ok", ""),
        ([], "missing", "paceline[cpu]"),
        (["onnxruntime", "onnxruntime-gpu"], "broken", "pip uninstall onnxruntime onnxruntime-gpu"),
    ],
)
def test_onnxruntime_comes_from_one_package(
    owners: list[str], status: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "packages_distributions", lambda: {"onnxruntime": owners})  # type: ignore[attr-defined]
    found = doctor._onnxruntime()
    assert found.status == status
    assert mend in found.mend


class TestRoom:
    """Which providers have room for a bundle."""

    @pytest.fixture(autouse=True)
    def _bundle(self, tmp_path: Path) -> None:
        self.folder = write_table_bundle(tmp_path / "tables")

    def look(self, started: list[str], *, free: int, gpu: int) -> Finding:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor, "_free_bytes", lambda: free)
            return doctor._bundle(self.folder, started, {"free_bytes": gpu, "compute_capability": "8.9"})

    def facts(self, *arguments: Any, **options: Any) -> Any:
        return self.look(*arguments, **options).facts["providers"]

    def test_memory_that_is_not_free_is_named(self) -> None:
        assert self.facts(["cpu"], free=10**9, gpu=0) == ["cpu"]
        found = self.look(["cpu"], free=1000, gpu=10**9)
        assert (found.status, found.facts["providers"]) == ("broken", [])
        assert found.found.endswith("cpu: 1 kB of memory are free")

    def test_a_text_is_no_longer_than_the_context(self) -> None:
        assert "for a text of 64 tokens" in self.look(["cpu"], free=10**9, gpu=0).found

    def test_on_a_gpu_caches_must_be_float16(self) -> None:
        found = self.look(["cpu", "cuda"], free=10**9, gpu=10**9)
        assert found.facts["providers"] == ["cpu"]
        manifest = self.folder / "paceline.json"
        manifest.write_text(manifest.read_text().replace('"float32"', '"float16"'))
        assert self.facts(["cpu", "cuda"], free=1000, gpu=10**9) == ["cuda"]
        assert self.facts(["cuda"], free=10**9, gpu=1000) == []

    def test_engines_must_be_there_for_the_gpu(self) -> None:
        found = self.look(["tensorrt-rtx-engine"], free=10**9, gpu=10**9)
        assert found.facts["providers"] == []
        assert "no engine of the target and the draft for compute capability 8.9; `paceline build`" in found.found
