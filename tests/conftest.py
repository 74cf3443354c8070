"""Real checkpoints and bundles, made once and kept in `.cache/` (ignored by git) for the next run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.bundle import Bundle
from paceline.errors import PacelineError

CACHE = Path(__file__).parent.parent / ".cache"


def pytest_configure(config: pytest.Config) -> None:
    """Give each of the workers a core of its own, where they are as many as the cores.

    Threads of models spin while they wait for each other: two workers with two threads each on two cores took 129 s for
    what took 83 s with one thread each.
    """
    worker = getattr(config, "workerinput", None)
    cores = sorted(os.sched_getaffinity(0))
    if worker is not None and worker["workercount"] == len(cores):
        os.sched_setaffinity(0, {cores[int(worker["workerid"].removeprefix("gw"))]})


@pytest.fixture(scope="session", autouse=True)
def _no_profiles_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep profiles that `paceline tune` stored for whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))
        yield


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep parallel test runs from making the same thing twice."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_bundle(name: str, target: str, draft: str | None, **options: object) -> Path:
    """Export a bundle into the cache unless a healthy one, written by this very code, is there."""
    from paceline_export.export import export_bundle
    from paceline_export.source import resolve

    path = CACHE / "bundles" / f"{name}-{_code_hash()}"
    with locked(name):
        try:
            Bundle.open(path)
        except PacelineError:
            shutil.rmtree(path, ignore_errors=True)
            sources = [resolve(source, cache_dir=CACHE) if source else None for source in (target, draft)]
            export_bundle(sources[0], sources[1], path, **options)  # type: ignore[arg-type]
    return path


def _code_hash() -> str:
    """A short hash of the code that writes bundles."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    files = [path for suffix in ("py", "txt", "json") for path in (root / "export").rglob(f"*.{suffix}")]
    for path in sorted([*files, root / "runtime" / "paceline" / "bundle.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@pytest.fixture(scope="session")
def smol_bundle() -> Path:
    """SmolLM2-135M in fp32, with itself in int4 as the draft."""
    return make_bundle(
        "smollm2", "smollm2-135m", "smollm2-135m", precision="fp32", draft_precision="int4", quality=False
    )


@pytest.fixture(scope="session")
def smol_trt() -> Callable[[str], Path]:
    """SmolLM2-135M of the flavour `trt` alone, in a precision, rounded to nearest, with caches of 2048 positions."""

    def made(precision: str) -> Path:
        options: dict[str, object] = {"flavor": "trt", "precision": precision, "max_length": 2048, "quality": False}
        options |= {} if precision == "fp8" else {"calibration": "none"}  # which must look at inputs in any case
        return make_bundle(f"smollm2-trt-{precision}", "smollm2-135m", None, **options)

    return made


@pytest.fixture(scope="session")
def qwen_bundle() -> Path:
    """The Qwen2.5-Coder pair in int4: minutes the first time, for tests marked `model`."""
    return make_bundle("qwen2.5-coder-int4", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", precision="int4")


@pytest.fixture(scope="session")
def gemma_bundle() -> Path:
    """Gemma-3-270M in fp32, with itself in int4 as the draft, for tests marked `model`."""
    return make_bundle(
        "gemma-3", "gemma-3-270m", "gemma-3-270m", precision="fp32", draft_precision="int4", quality=False
    )


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of random models of a few thousand weights: for what does not depend on what a model says."""
    from tiny import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pair of the flavour `trt` in fp16, with 128 positions, and engines for the GPU of `simulated_gpu`."""
    from simulated_gpu import add_engines
    from tiny import tiny_pair

    bundle = tiny_pair(tmp_path_factory.mktemp("tiny-engines"), "fp16", flavor="trt", max_length=128)
    add_engines(bundle, max_draft_tokens=4)
    return bundle


@pytest.fixture(scope="session")
def tiny_few_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the flavour `trt`: a tied Qwen2 in int4, and in fp8 as its draft, with logits for 200 ids."""
    from tiny import TRT_CONFIGS, tiny_trt

    options = {"draft_precision": "fp8", "draft_vocab": 200}
    return tiny_trt(tmp_path_factory.mktemp("tiny-few-bits"), TRT_CONFIGS["qwen2"], "int4", **options)


@pytest.fixture(scope="session")
def tiny_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the flavour `trt`: a Mistral with a window in int8, no heads of which share keys and values."""
    from tiny import TRT_CONFIGS, tiny_trt

    return tiny_trt(tmp_path_factory.mktemp("tiny-int8"), TRT_CONFIGS["mistral"], "int8")


@pytest.fixture(scope="session")
def tiny_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the flavour `trt`: a Cohere in bf16, which rotates pairs of numbers that lie side by side."""
    from tiny import TRT_CONFIGS, tiny_trt

    return tiny_trt(tmp_path_factory.mktemp("tiny-bf16"), TRT_CONFIGS["cohere"], "bf16")


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle that the test may damage, or change."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture
def lanes_bundle(damaged: Path) -> Path:
    """A copy of the tiny bundle, with graphs for three texts, that the test may change."""
    from paceline.bundle import Bundle
    from paceline_export.lanes import add_lanes

    add_lanes(Bundle.open(damaged), 3)
    return damaged
