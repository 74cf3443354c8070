"""Sessions of ONNX Runtime: how a provider is started, and the threads that all sessions share."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from . import cuda
from .cores import usable_cores
from .errors import BundleError, InstallationError, InvalidInputError, shown
from .providers import CPU, Provider, find_provider

__all__ = ["import_onnxruntime", "onnxruntime_packages", "open_session", "pool_threads", "start"]

# y = x + x over float32 [2], in opset 21: a provider that runs it has started.
_TINY = bytes.fromhex(
    "080a3a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020802620f0a0179120a0a08080112040a02080242040a001015"
)


_lock = threading.RLock()
_shares_pool = True  # whether the sessions of the process run on one pool: the first one decides
_pool_threads: int | None = None  # of every model of the process, once one is there; 0 is one per physical core
_registered: set[str] = set()
_started: set[str] = set()


def open_session(
    graph: Path | bytes,
    *,
    provider: str = "cpu",
    threads: int | None = None,
    session_config: tuple[tuple[str, str], ...] = (),
    same_shapes: bool = True,
) -> Any:
    """Open an `onnxruntime.InferenceSession` of a graph's file, or of its bytes, on the shared thread pool.

    With `same_shapes` memory is laid out once for all runs with inputs of the same shapes.

    Raises:
        InvalidInputError: an unknown provider, or a number of threads that differs from that of models already there.
        InstallationError: ONNX Runtime is missing, installed twice, lacks the provider, or the provider does not start.
        BundleError: ONNX Runtime cannot load the graph.
    """
    row = _find_provider(provider)
    ort = import_onnxruntime()
    _settle_threads(ort, threads, row)
    if row.name != CPU:
        start(provider)
    try:
        session = _new_session(ort, graph, row, session_config, same_shapes=same_shapes)
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        name = "the graph" if isinstance(graph, bytes) else graph
        raise BundleError(f"ONNX Runtime cannot load {name}: {error}") from error
    _check_providers(row, session)
    return session


def start(provider: str) -> None:
    """Start a provider with a tiny graph, once in a process: where it cannot, ONNX Runtime itself would fall back.

    Raises:
        InvalidInputError: an unknown provider.
        InstallationError: ONNX Runtime is missing, installed twice, lacks the provider, or the provider does not start.
    """
    row = _find_provider(provider)
    ort = import_onnxruntime()
    _settle_threads(ort, None, row)  # a session without the pool would keep the pool from being made
    with _lock:
        if row.name in _started:
            return
        printed = io.StringIO()
        if row.device == "cuda":
            cuda.check_device()
            if hasattr(ort, "preload_dlls"):
                with contextlib.redirect_stdout(printed):  # it prints what it does not find
                    ort.preload_dlls()
        if row.plugin is not None:
            _register(ort, row, row.plugin)
        elif row.name not in ort.get_available_providers():
            raise InstallationError(
                f"ONNX Runtime {ort.__version__} has no {row.name}: it offers "
                f"{', '.join(ort.get_available_providers())}. {_sentence(row.install)}"
            )
        try:
            session = _new_session(ort, _TINY, row, ())
            (doubled,) = session.run(None, {"x": np.array([1, 2], np.float32)})
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise _not_started(row, f"{error} {printed.getvalue()}") from error
        _check_providers(row, session)
        if doubled.tolist() != [2, 4]:
            raise _not_started(row, f"1 + 1 and 2 + 2 gave {doubled.tolist()}")
        _started.add(row.name)


def pool_threads() -> int:
    """Threads that the models of this process run on; 0 is one per physical core."""
    return _pool_threads or 0


def onnxruntime_packages() -> list[str]:
    """The installed packages that bring the module `onnxruntime`; several overwrite each other's files."""
    owners = importlib.metadata.packages_distributions().get("onnxruntime", ())
    return sorted({name for name in owners if name.startswith("onnxruntime")})


def import_onnxruntime() -> Any:
    """Import ONNX Runtime, which exactly one installed package must provide.

    It sends usage events to Microsoft where the environment variable `ORT_DISABLE_TELEMETRY` does not say 1 when it is
    first imported, and keeps an id of the machine for them. Nobody who runs a model asked for that, so it says 1 here
    unless it was set.

    Raises:
        InstallationError: none is installed, or several that overwrite each other's files.
    """
    owners = onnxruntime_packages()
    if len(owners) > 1:
        raise InstallationError(
            f"{' and '.join(owners)} are both installed and overwrite each other. Uninstall all of them "
            f"(pip uninstall {' '.join(owners)}), then install one: pip install 'paceline[cpu]' or 'paceline[gpu]'."
        )
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise InstallationError(
            f"ONNX Runtime cannot be imported ({error}). Install one of its two packages: "
            "pip install 'paceline[cpu]' or 'paceline[gpu]'."
        ) from error
    return onnxruntime


def _find_provider(provider: str) -> Provider:
    row = find_provider(provider)
    if row.engine is not None:
        raise InvalidInputError(
            f"{provider} runs a bundle's engines, and no graphs; it is no provider of ONNX Runtime."
        )
    return row


# Rewrites of convolutions, of which decoders have none; one of them (1.31.1) ends the process on float16 graphs of Phi.
_FOR_IMAGES = ["NchwcTransformer", "NhwcTransformer"]


def _new_session(
    ort: Any, graph: Path | bytes, row: Provider, config: tuple[tuple[str, str], ...], *, same_shapes: bool = True
) -> Any:
    options = ort.SessionOptions()
    options.enable_mem_pattern = same_shapes
    options.log_severity_level = 3
    options.use_per_session_threads = not _shares_pool
    if not _shares_pool:
        options.intra_op_num_threads = pool_threads()
        config = (("session.intra_op.allow_spinning", "0"), *config)
    elif row.own_threads:
        config = (("session.force_spinning_stop", "1"), *config)
    if row.name != CPU:
        config = (("session.record_ep_graph_assignment_info", "1"), *config)
    for key, value in config:
        options.add_session_config_entry(key, value)
    source = graph if isinstance(graph, bytes) else str(graph)
    if row.plugin is None:
        # Without the fallback, which would try again and print a banner to stdout.
        providers = [(name, _options(row)) for name in (row.name, *row.behind)]
        return ort.InferenceSession(
            source, options, providers=providers, enable_fallback=0, disabled_optimizers=_FOR_IMAGES
        )
    options.add_provider_for_devices(_devices(ort, row), _options(row))
    for name in row.behind:
        options.add_provider(name, _options(row))
    return ort.InferenceSession(source, options, enable_fallback=0)


def _options(row: Provider) -> dict[str, str]:
    """Options of the provider. On a GPU both models and the sampler share one stream: nothing waits between them."""
    if row.device == "cuda":
        return {"has_user_compute_stream": "1", "user_compute_stream": str(cuda.shared_stream())}
    if row.own_threads:
        threads = (("INFERENCE_NUM_THREADS", str(pool_threads())),) if pool_threads() else ()
        return {"load_config": json.dumps({row.hardware: dict((*row.settings, *threads))})}
    return {}


def _register(ort: Any, row: Provider, plugin: str) -> None:
    """Give ONNX Runtime the plugin's library, once in a process, and see that it finds a device."""
    if not hasattr(ort, "register_execution_provider_library"):
        raise InstallationError(
            f"ONNX Runtime {ort.__version__} takes no plugins such as {row.name}; install version 1.31 or newer."
        )
    try:
        library = importlib.import_module(plugin).get_library_path()
    except (ImportError, OSError) as error:
        raise InstallationError(
            f"The plugin for {row.name} cannot be imported ({error}). {_sentence(row.install)}"
        ) from error
    if row.name not in _registered and not _devices(ort, row):
        try:
            ort.register_execution_provider_library(row.name, library)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise _not_started(row, str(error)) from error
        _registered.add(row.name)
    if not _devices(ort, row):
        raise _not_started(row, "it finds no device that it supports")


def _devices(ort: Any, row: Provider) -> list[Any]:
    """The plugin's first device of the row's kind, or none."""
    return [one for one in ort.get_ep_devices() if one.ep_name == row.name and one.device.type.name == row.hardware][:1]


def _check_providers(row: Provider, session: Any) -> None:
    """See that the session runs with all that was asked for: ONNX Runtime only logs what it goes on without."""
    found = session.get_providers()
    if not {row.name, *row.behind} <= set(found):
        raise _not_started(row, f"ONNX Runtime fell back to {', '.join(found)}")


def _not_started(row: Provider, reason: str) -> InstallationError:
    return InstallationError(f"{row.name} does not start: {_sentence(reason)} {row.needs}")


def _sentence(text: str) -> str:
    """The text, which a library wrote, as a sentence on one line."""
    line = " ".join(text.split())
    return line if line.endswith(".") else f"{line}."


def _settle_threads(ort: Any, threads: int | None, row: Provider) -> None:
    """Settle the number of threads, once in a process, and make the pool that its sessions share.

    Two sessions with pools of their own fight for the cores, since idle threads spin: the pair runs 1.6 times slower.
    A pool that all share spins, too; where the first model's provider has threads of its own, each session gets some
    that do not. Where the number is left out, and the process may use only some of the machine's cores, it is theirs.
    """
    global _shares_pool, _pool_threads
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024):
        raise InvalidInputError(f"threads must be an integer from 1 to 1024, got {shown(threads)}.")
    with _lock:
        if _pool_threads is None:
            number = threads or usable_cores() or 0  # 0: one thread per physical core
            if not row.own_threads:
                try:
                    ort.set_global_thread_pool_sizes(number, 1)
                except Exception as error:  # onnxruntime's exceptions share no base class of their own
                    if threads is not None:
                        raise InvalidInputError(
                            f"threads={threads} comes too late: something else in this process has already made ONNX "
                            "Runtime's global thread pool; leave threads out to share it."
                        ) from error
                    number = 0
            _shares_pool, _pool_threads = not row.own_threads, number
        elif threads is not None and threads != _pool_threads:
            settled = f"{_pool_threads} threads" if _pool_threads else "one thread per core"
            raise InvalidInputError(
                f"threads={threads} comes too late: the models of this process already share {settled}."
            )
