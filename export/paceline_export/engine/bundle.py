"""Engines for a bundle's models: everything checked before the first build, everything kept or nothing."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from paceline.bundle import Bundle, EngineEntry, ModelEntry
from paceline.errors import InvalidInputError

from .backends import Backend, find_backend
from .build import ProfileReport, build_plan
from .device import compute_capability
from .profiles import ProfileRows, make_profiles
from .store import EngineStore

__all__ = ["DEFAULT_MAX_DRAFT_TOKENS", "BuildReport", "EngineReport", "build_engines"]

DEFAULT_MAX_DRAFT_TOKENS = 8

_Which = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine: what it was built for, its size on disk in bytes, and what the build said.

    `entry` is that of the first of the GPUs that it serves, and `sms` their compute capabilities. `attention` is the
    number of layers that attend; `findings` is what only a build that is not strict lets pass.
    """

    entry: EngineEntry
    sms: tuple[str, ...]
    bytes: int
    seconds: float
    attention: int
    profiles: tuple[ProfileReport, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BuildReport:
    """All engines of a build. `peak_memory` is the largest resident size of the process so far, in bytes."""

    path: Path
    seconds: float
    peak_memory: int
    engines: tuple[EngineReport, ...]


def build_engines(
    bundle: Bundle,
    sms: Sequence[str] | None,
    *,
    backend: str = "tensorrt-rtx",
    max_length: int | None = None,
    max_draft_tokens: int = DEFAULT_MAX_DRAFT_TOKENS,
    max_batch: int = 1,
    profile_rows: Sequence[ProfileRows] = (),
    workspace: int | None = None,
    timing_cache: Path | None = None,
    strict: bool = True,
    engine_per_gpu: bool = False,
    out: Path | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> BuildReport:
    """Build engines of a bundle's models for some GPUs, and put them into the bundle.

    GPUs that the backend can serve well with one engine get one, listed once for each of them.

    Args:
        bundle: of the flavour `trt`.
        sms: compute capabilities, such as `8.9`; None is that of the GPU at hand, for backends that need it.
        backend: what builds, a key of `BACKENDS`.
        max_length: positions of the caches, at most the graphs'; None takes the graphs'. A draft may have fewer.
        max_draft_tokens: most drafted tokens of a round.
        max_batch: most sequences of a batch.
        profile_rows: profiles beside, or instead of, those of a speculative round; see `make_profiles`.
        workspace: bytes of scratch memory that a kernel may take; None leaves it to the backend.
        timing_cache: file of kernels' timings to read and extend, for backends that time kernels.
        strict: refuse an engine in which something is dropped, unused, inconsistent or not fused.
        engine_per_gpu: build for each GPU alone, too, where one engine could serve several.
        out: folder for the engines instead of the bundle.
        on_progress: called with what is being done and the share of the whole that is behind, 0 to 1.

    Raises:
        InvalidInputError: an argument that cannot be honoured, such as a GPU that cannot hold the precision.
        InstallationError: the backend is not installed, or needs a GPU that is not there.
        BuildError: a graph that cannot be built, or that a strict build refuses. Nothing is kept.
    """
    started = time.perf_counter()
    report = on_progress or (lambda stage, done: None)
    builder = find_backend(backend)
    models = _models(bundle)
    sms = _gpus(builder, sms)
    for sm in sms:
        for model in models.values():
            builder.check_target(sm, model.precision)
    if timing_cache is not None and not builder.times_kernels:
        raise InvalidInputError(
            f"timing_cache={str(timing_cache)!r:.80} is of no use: {builder.name} times no kernels when it builds; "
            "leave it out."
        )
    if workspace is not None and workspace < 1:
        raise InvalidInputError(f"workspace must be a positive number of bytes, got {workspace}.")
    lengths = {which: _length(model, which, max_length) for which, model in models.items()}
    profiles = {
        which: make_profiles(
            model,
            which,
            max_length=lengths[which],
            max_draft_tokens=max_draft_tokens,
            max_batch=max_batch,
            given=profile_rows,
        )
        for which, model in models.items()
    }
    if unknown := {given.model for given in profile_rows} - set(models):
        raise InvalidInputError(f"profile_rows names the model {sorted(unknown)[0]!r}; expected {' or '.join(models)}.")
    builder.load()
    found = []
    jobs = [
        (group, which, model)
        for which, model in models.items()
        for group in ([(sm,) for sm in sms] if engine_per_gpu else builder.groups(sms))
    ]
    with EngineStore(bundle, out) as store:
        for i, (group, which, model) in enumerate(jobs):
            stage = f"{which}, compute capability {', '.join(group)}"

            def within(share: float, stage: str = stage, behind: int = i) -> None:
                report(stage, (behind + share) / len(jobs))

            within(0.0)
            plan = build_plan(
                bundle.path(model.path),
                profiles[which],
                backend=builder,
                sms=group,
                max_length=lengths[which],
                workspace=workspace,
                timing_cache=timing_cache,
                strict=strict,
                on_progress=within,
            )
            activations = [profile.activation_bytes for profile in plan.profiles]
            entry = EngineEntry(
                path="",
                model=which,
                backend=cast(Literal["tensorrt-rtx", "tensorrt"], builder.name),
                backend_version=plan.backend_version,
                sm=group[0],
                precision=model.precision,
                graph_sha256=bundle.manifest.graph_sha256(model),
                max_length=lengths[which],
                max_draft_tokens=max_draft_tokens,
                max_batch=max_batch,
                profiles=profiles[which],
                weight_bytes=plan.weight_bytes,
                activation_bytes=None if None in activations else max(size or 0 for size in activations),
            )
            size = store.write([dataclasses.replace(entry, sm=sm) for sm in group], plan.content)
            found.append((group, size, plan.seconds, plan.attention, plan.profiles, plan.findings))
            del plan  # as large as the engine
        report("list the engines", 1.0)
        listed = {(entry.model, entry.sm): entry for entry in store.commit()}
    return BuildReport(
        path=bundle.root if out is None else out,
        seconds=time.perf_counter() - started,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        engines=tuple(
            EngineReport(listed[which, group[0]], *rest) for (group, which, _), rest in zip(jobs, found, strict=True)
        ),
    )


def _gpus(backend: Backend, sms: Sequence[str] | None) -> Sequence[str]:
    """The compute capabilities to build for, as far as the backend can without their GPUs."""
    if sms is not None and (not sms or len(set(sms)) < len(sms)):
        raise InvalidInputError(f"sms must be different compute capabilities, got {', '.join(sms) or 'none'}.")
    if not backend.times_kernels:
        if sms is None:
            raise InvalidInputError(
                f"{backend.name} builds for GPUs that need not be there, so it must be told which: --sm with some of "
                f"{', '.join(backend.targets)}."
            )
        return sms
    here = compute_capability()
    if sms is not None and list(sms) != [here]:
        raise InvalidInputError(
            f"{backend.name} builds for the GPU at hand alone, whose compute capability is {here}, got "
            f"{', '.join(sms)}. Leave --sm out, or build ahead of time with --backend tensorrt-rtx."
        )
    return [here]


def _models(bundle: Bundle) -> dict[_Which, ModelEntry]:
    models: dict[_Which, ModelEntry] = {"target": bundle.manifest.target}
    if bundle.manifest.draft is not None:
        models["draft"] = bundle.manifest.draft
    for which, model in models.items():
        if model.flavor != "trt":
            raise InvalidInputError(
                f"{bundle.root}: the {which}'s graph is of the flavour {model.flavor}, which TensorRT cannot read; "
                "export the models with --flavor trt."
            )
    return models


def _length(model: ModelEntry, which: str, wanted: int | None) -> int:
    """Positions of one model's caches. A draft may have fewer than were asked for: then drafting stops there."""
    if wanted is not None and wanted > model.max_length and which == "target":
        raise InvalidInputError(
            f"max_length={wanted} exceeds the {model.max_length} positions that the {which}'s graph was exported for; "
            "export it with a larger --max-length."
        )
    return model.max_length if wanted is None else min(wanted, model.max_length)
