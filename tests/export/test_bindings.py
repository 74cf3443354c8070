"""Every name of TensorRT that the code touches exists in the real bindings of each version that it may meet."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_trt import write_small_graph

from paceline_export.engine.backends import BACKENDS

ROOT = Path(__file__).parents[2]
# Files that hold objects of TensorRT, and the classes of those, by the names that variables have for them there.
BUILDING = {
    "trt": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "layer": "ILayer",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "shapes": "IOptimizationProfile",
    "cache": "ITimingCache",
}
RUNNING = {
    "trt": "",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "config": "IRuntimeConfig",
}
SOURCES = {
    "export/paceline_export/engine/build.py": BUILDING,
    "export/paceline_export/engine/messages.py": BUILDING,
    "export/paceline_export/engine/traps.py": BUILDING,
    "runtime/paceline/trt_engine.py": RUNNING,
}
# What only TensorRT-RTX has, and is asked of it alone: a GPU that is not there.
AHEAD_OF_TIME = {
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "ComputeCapability",
    *(f"ComputeCapability.SM{sm.replace('.', '')}" for sm in BACKENDS["tensorrt-rtx"].targets),
}
# What is asked of TensorRT-RTX alone, behind a look whether it is there.
RTX_ALONE = {
    "BuilderFlag.REQUIRE_USER_ALLOCATION",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "EngineInvalidityDiagnostics.__members__",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "Runtime.get_engine_validity",
}
VERSIONS = ("10.16.1.11", "11.0.0.114", "11.4.0.106")
# Libraries that the bindings link against, with the functions that they take from them, all of which do nothing.
FUNCTIONS = (
    *("createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL", "createInferRefitter_INTERNAL"),
    *("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"),
    *("getBuilderPluginRegistry", "getPluginRegistry", "initLibNvInferPlugins"),
)
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")

LOOK = """
import functools, json, sys, importlib
module = importlib.import_module(sys.argv[1])
def is_there(name):
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
print(json.dumps([module.__version__, [name for name in json.load(sys.stdin) if not is_there(name)]]))
"""


def chains(tree: ast.AST, variables: dict[str, str]) -> Iterator[str]:
    """Dotted names that hang on a variable, from its class on, the longest of each."""
    inner = set()
    for node in ast.walk(tree):
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            if isinstance(at.value, ast.Attribute):
                inner.add(at.value)
            at = at.value
        if parts and node not in inner and isinstance(at, ast.Name) and at.id in variables:
            kind = variables[at.id]
            yield ".".join([kind, parts[-1]] if kind else reversed(parts))  # of an object, only what is its own


def touched() -> set[str]:
    names = {
        name
        for path, variables in SOURCES.items()
        for name in chains(ast.parse((ROOT / path).read_text(encoding="utf-8")), variables)
    }
    return names | AHEAD_OF_TIME


def missing(names: set[str], module: str, **environment: str) -> tuple[str, set[str]]:
    """The version of a module, and which names it lacks; in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        input=json.dumps(sorted(names)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    version, lacking = json.loads(found.stdout)
    return version, set(lacking)


def test_the_names_are_found_in_the_code() -> None:
    names = touched()
    assert len(names) > 50
    for name in ("Builder.create_network", "NetworkDefinitionCreationFlag.STRONGLY_TYPED", "ILayer.get_input"):
        assert name in names
    for name in ("Runtime.deserialize_cuda_engine", "IExecutionContext.execute_async_v3", "TensorIOMode.INPUT"):
        assert name in names
    assert names >= RTX_ALONE
    assert set(chains(ast.parse("trt.A.B(c)\nconfig.d.e = config.f()"), BUILDING)) == {
        "A.B",
        "IBuilderConfig.d",
        "IBuilderConfig.f",
    }


def test_tensorrt_rtx_has_them_all() -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'paceline[trt]'")
    path = os.pathsep.join(sys.path)
    none = {"Builder.no_such", "NoSuch.name"}
    assert missing(touched() | none, "tensorrt_rtx", PYTHONPATH=path)[1] == none


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """NVIDIA's own bindings without its libraries, in whose place are some that export the same names."""
    version = request.param
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for libraries that do nothing")
    kept = ROOT / ".cache" / "tensorrt-bindings" / version
    if not kept.is_dir():
        folder = tmp_path_factory.mktemp("wheel")
        wanted = f"tensorrt-cu13-bindings=={version}"
        options = ["--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, wanted], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder / "wheel", kept)
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "null.c").write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for name in LIBRARIES:
        library = f"lib{name}.so.{version.partition('.')[0]}"
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library)]
        subprocess.run([*command, str(folder / "null.c")], check=True)
    return version, {"PYTHONPATH": str(kept), "LD_LIBRARY_PATH": str(folder)}


# A build, and a runtime, with bindings whose libraries make neither.
START = """
import dataclasses, pathlib, sys
from paceline.errors import InstallationError
from paceline_export.engine.backends import BACKENDS
from paceline_export.engine.build import build_plan
import tensorrt_bindings as trt
backend = dataclasses.replace(BACKENDS["tensorrt"], module="tensorrt_bindings")
try:
    build_plan(pathlib.Path(sys.argv[1]), (), backend=backend, sms=["8.9"])
except InstallationError as error:
    print(error)
try:
    trt.Runtime(trt.Logger())
except TypeError as error:
    print(error)
"""


@pytest.mark.slow
def test_where_tensorrt_does_not_start_a_build_says_so(bindings: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """As behind a driver that is too old: then the bindings raise what `_builder` and `Engine.open` wait for."""
    version, environment = bindings
    path = os.pathsep.join([environment["PYTHONPATH"], *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", START, str(write_small_graph(tmp_path))],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, raised = done.stdout.splitlines()
    assert said.startswith(
        f"tensorrt {version} does not start: it gives no reason. Install it anew, and see whether the"
    )
    assert "factory function returned nullptr" in raised


@pytest.mark.slow
def test_tensorrt_has_them_but_those_of_rtx_alone(bindings: tuple[str, dict[str, str]]) -> None:
    version, environment = bindings
    assert missing(touched(), "tensorrt_bindings", **environment) == (version, AHEAD_OF_TIME | RTX_ALONE)
