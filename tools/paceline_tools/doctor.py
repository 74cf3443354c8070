"""`paceline doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import paceline
from paceline import Bundle
from paceline.bundle import ModelEntry
from paceline.cost_profile import cpu_name
from paceline.engines import engine_fault
from paceline.errors import PacelineError
from paceline.ort_session import onnxruntime_packages
from paceline.providers import PROVIDERS

from .arguments import FOLDER
from .probes import Finding, probe
from .tables import size

__all__ = ["command"]

PYTHON = (3, 11)
# What each extra of the package brings; the first row is what paceline itself needs.
PACKAGES = {
    "": ("numpy", "tokenizers", "jinja2"),
    "tools": ("click", "scipy"),
    "export": ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "gguf", "accelerate"),
    "grammar": ("llguidance",),
}
# Tokens of the text whose caches a bundle must have room for.
TEXT = 2048
SIGNS = {"ok": "ok", "missing": "--", "broken": "!!"}


@click.command("doctor")
@click.argument("folders", metavar="[DIR]...", nargs=-1, type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
@click.pass_context
def command(context: click.Context, /, folders: tuple[Path, ...], as_json: bool) -> None:
    """Say what this machine can run, and what is missing; with bundles DIR..., which of them fit.

    Every provider is started with a tiny graph. A line begins with `ok`, with `--` for what is not there, or with `!!`
    for what is there but unusable, and says behind an arrow how to mend it. The exit code is 0 when something can run:
    a provider, and a bundle if some are named. Otherwise it is 1.
    """
    probes = {f"provider {name}": ("provider", name) for name in PROVIDERS} | {
        "GPUs": ("gpus",),
        "CUDA": ("cuda",),
        "cuDNN": ("cudnn",),
        "TensorRT": ("tensorrt", "tensorrt"),
        "TensorRT-RTX": ("tensorrt", "tensorrt_rtx"),
    }
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)), 2)) as pool:
        probed = dict(zip(probes, pool.map(lambda title: probe(title, *probes[title]), probes), strict=True))
    started = [name for name in PROVIDERS if probed[f"provider {name}"].status == "ok"]
    findings = [_python(), *_packages(), _onnxruntime(), *probed.values(), *_machine()]
    gpus = probed["GPUs"].facts.get("gpus", [])
    bundles = [_bundle(folder, started, gpus[0] if gpus else {}) for folder in folders]
    findings += bundles
    can_run = bool(started) and (not bundles or any(finding.status == "ok" for finding in bundles))
    if as_json:
        document = {"can_run": can_run, "providers": started, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(document, ensure_ascii=False, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            words = " ".join(f"{finding.found} → {finding.mend}".removesuffix(" → ").split())  # on one line
            click.echo(f"{SIGNS[finding.status]}  {finding.name:{width}}  {words}")
        what = f"Providers that start: {', '.join(started)}." if started else "No provider starts: nothing can run."
        if bundles and started and not can_run:
            what += " None of the bundles can run."
        click.echo(f"\n{what}")
    if not can_run:
        context.exit(1)


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        return Finding("Python", "broken", found, f"Python {'.'.join(map(str, PYTHON))} or newer is expected.")
    return Finding("Python", "ok", found)


def _packages() -> Iterator[Finding]:
    for extra, names in PACKAGES.items():
        versions = {name: _version(name) for name in names}
        there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        missing = [name for name, version in versions.items() if version is None]
        title = f"extra {extra}" if extra else "packages"
        if not missing:
            yield Finding(title, "ok", f"paceline {paceline.__version__}, {there}" if not extra else there)
        elif extra:
            mend = f"Only for what needs it: pip install 'paceline[{extra}]'"
            yield Finding(title, "missing", f"lacks {', '.join(missing)}", mend)
        else:
            yield Finding(title, "broken", f"lacks {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _onnxruntime() -> Finding:
    """Which package brings ONNX Runtime; whether it can be imported is for the providers to say."""
    owners = onnxruntime_packages()
    found = ", ".join(f"{name} {_version(name)}" for name in owners)
    if len(owners) == 1:
        return Finding("ONNX Runtime", "ok", found)
    install = "pip install 'paceline[cpu]' or 'paceline[gpu]'"
    if not owners:
        return Finding("ONNX Runtime", "missing", "not installed", install)
    mend = f"They overwrite each other: pip uninstall {' '.join(owners)}, then {install}"
    return Finding("ONNX Runtime", "broken", found, mend)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("processor", "ok", f"{cpu_name()}, {cores} core{'s' * (cores > 1)} for this process")
    mode = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = re.search(r"\[(\w+)\]", mode)
    if chosen is None:
        yield Finding("huge pages", "missing", "this system has none to ask for")
    elif chosen[1] == "never":
        mend = "Steps are faster with them: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", "missing", "switched off", mend)
    else:
        yield Finding("huge pages", "ok", {"madvise": "to be asked for (madvise)"}.get(chosen[1], chosen[1]))
    free = _free_bytes()
    facts = {} if free is None else {"free_bytes": free}
    yield Finding("memory", "ok", "unknown" if free is None else f"{size(free)} free", facts=facts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    found = re.search(r"^MemAvailable: +(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _bundle(folder: Path, started: Sequence[str], gpu: Mapping[str, Any]) -> Finding:
    """Whether a bundle opens, and which of the providers that start have room for it."""
    title = f"bundle {folder}"
    try:
        bundle = Bundle.open(folder)
    except (PacelineError, OSError) as error:
        return Finding(title, "broken", str(error))
    manifest = bundle.manifest
    models = [model for model in (manifest.target, manifest.draft) if model is not None]
    engines = {engine.path for engine in manifest.engines}
    weights = sum(entry.size for name, entry in manifest.files.items() if name not in engines)
    text = min(TEXT, manifest.target.max_length)
    caches = sum(model.kv_bytes_per_position * min(text, model.max_length) for model in models)
    free = _free_bytes()
    refusals = {name: _refusal(name, bundle, weights + caches, free, gpu) for name in started}
    fits = [name for name, refusal in refusals.items() if not refusal]
    facts = {"weight_bytes": weights, "cache_bytes": caches, "providers": fits}
    precisions = " + ".join(model.precision for model in models)
    needs = f"{precisions}, needs {size(weights)}, and {size(caches)} for a text of {text} tokens"
    if fits:
        return Finding(title, "ok", f"{needs}; runs with {', '.join(fits)}", facts=facts)
    reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items()) or "no provider starts"
    return Finding(title, "broken", f"{needs}; {reasons}", facts=facts)


def _refusal(provider: str, bundle: Bundle, needed: int, free: int | None, gpu: Mapping[str, Any]) -> str:
    """Why a provider cannot run the models; empty if it can."""
    row, manifest = PROVIDERS[provider], bundle.manifest
    models: dict[str, ModelEntry | None] = {"target": manifest.target, "draft": manifest.draft}
    if row.device != "cuda":
        return f"{size(free)} of memory are free" if free is not None and free < needed else ""
    gpu_bytes, sm = gpu.get("free_bytes", 0), gpu.get("compute_capability", "")
    if row.engine is not None:
        built = {
            engine.model
            for engine in manifest.engines
            if (engine.backend, engine.sm) == (row.name, sm)
            and not engine_fault(bundle.root, engine.path, manifest.files[engine.path])
        }
        if missing := [name for name, model in models.items() if model is not None and name not in built]:
            return (
                f"no engine of the {' and the '.join(missing)} for compute capability {sm}; `paceline build` makes it"
            )
    elif any(model is not None and model.kv_dtype != "float16" for model in models.values()):
        return "its KV caches are not float16; export with --flavor cuda"
    return f"{size(gpu_bytes)} of the GPU's memory are free" if gpu_bytes < needed else ""
