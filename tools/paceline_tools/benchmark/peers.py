"""Peers in a benchmark: what `--against` names, started in their own processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline import SamplingParams
from paceline.errors import InstallationError, InvalidInputError
from paceline_tools.peers.engines import EngineError, EngineProcess, adapter_command

from .methods import Method

__all__ = ["PEERS", "Peer", "PeerChoice", "check_knobs", "peer_methods", "start_peers", "stop_peers"]

# Of a load or a text; behind it the peer counts as hanging.
_TIMEOUT_S = 900.0
_DEFAULT_DRAFT_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """A system to compare with.

    Attributes:
        adapter: runs it: `run_ADAPTER.py`.
        install: the command that installs it.
        model: what it loads.
        drafts: whether it can take a draft model.
        more: what the adapter takes behind the number of threads.
        holds: a file that a model's folder must hold; None where a model is no folder.
        takes_gguf: whether a model may be a GGUF file.
    """

    adapter: str
    install: str
    model: str
    drafts: bool = True
    more: tuple[str, ...] = ()
    holds: str | None = None
    takes_gguf: bool = False

    def fault(self, model: Path) -> str | None:
        """Why `model` is none that it loads, as far as a look at it tells."""
        if not model.exists():
            return f"there is no {model}"
        if model.is_dir():
            if self.holds is None:
                return f"{model} is a folder"
            return None if (model / self.holds).is_file() else f"the folder {model} holds no {self.holds}"
        if not self.takes_gguf:
            return f"{model} is no folder"
        try:
            with model.open("rb") as file:
                return None if file.read(4) == _GGUF else f"{model} does not begin as a GGUF does"
        except OSError as error:
            return f"{model} cannot be read ({error.strerror or error})"


_GGUF = b"GGUF"
PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "llama.cpp": Peer("llama_cpp", "pip install llama-cpp-python", "a GGUF file", drafts=False, takes_gguf=True),
        "onnxruntime-genai": Peer(
            "genai",
            "pip install onnxruntime-genai",
            "folders of onnxruntime_genai.models.builder",
            more=("as-built",),
            holds="genai_config.json",
        ),
        "openvino-genai": Peer(
            "openvino",
            "pip install openvino-genai",
            "folders of optimum-cli export openvino",
            holds="openvino_model.xml",
        ),
        "transformers": Peer(
            "transformers",
            "pip install torch transformers",
            "folders of save_pretrained, or GGUFs",
            holds="config.json",
            takes_gguf=True,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class PeerChoice:
    """A peer, its models, and the Python that has its package."""

    name: str
    models: tuple[str, ...]
    python: str

    @classmethod
    def parse(cls, text: str, pythons: Mapping[str, str]) -> PeerChoice:
        """Read `NAME:TARGET[:DRAFT]`.

        Raises:
            InvalidInputError: another form, an unknown peer, a draft that it cannot take, or models that are not there.
        """
        name, *models = text.split(":")
        if name not in PEERS:
            raise InvalidInputError(f"--against {text!r}: {name!r} is none of {', '.join(PEERS)}.")
        peer = PEERS[name]
        most = 2 if peer.drafts else 1
        if not 1 <= len(models) <= most or not all(models):
            form = f"{name}:TARGET[:DRAFT]" if peer.drafts else f"{name}:TARGET"
            raise InvalidInputError(f"--against {text!r}: {form} is expected, with {peer.model}.")
        for model in models:
            if fault := peer.fault(Path(model)):
                raise InvalidInputError(f"--against {text!r}: {fault}; {peer.model} should be there.")
        return cls(name, tuple(map(os.path.abspath, models)), pythons.get(name, sys.executable))


def peer_methods(
    choices: Sequence[PeerChoice], num_draft_tokens: Sequence[int | str], samplings: Mapping[str, float]
) -> list[Method]:
    """Of each peer, plain decoding, and with a draft every fixed K that paceline is measured with, or K = 3."""
    fixed = [k for k in num_draft_tokens if isinstance(k, int)] or [_DEFAULT_DRAFT_TOKENS]
    return [
        Method(f"{choice.name}: {mode}", sampling, temperature, 0, None, "", choice.name, mode)
        for sampling, temperature in samplings.items()
        for choice in choices
        for mode in ("plain", *(f"k{k}" for k in fixed if len(choice.models) > 1))
    ]


def check_knobs(knobs: SamplingParams) -> None:
    """Refuse sampling parameters that the peers are not asked for.

    Raises:
        InvalidInputError: one that is not at its default, but top-p.
    """
    default = SamplingParams(top_p=knobs.top_p)
    if knobs != default:
        raise InvalidInputError(
            "--against takes --temperature and --top-p alone; leave the other sampling options out."
        )


def start_peers(choices: Sequence[PeerChoice], threads: int, methods: Sequence[Method]) -> dict[str, EngineProcess]:
    """Start every peer's process, stopped until it is asked.

    Raises:
        InstallationError: one does not start; its message has the command that installs it.
        InvalidInputError: a method that a peer has not.
    """
    engines: dict[str, EngineProcess] = {}
    try:
        for choice in choices:
            peer = PEERS[choice.name]
            models = [*choice.models, *([""] if peer.drafts and len(choice.models) == 1 else [])]
            command = adapter_command(choice.python, peer.adapter, [*models, str(threads), *peer.more])
            try:
                engines[choice.name] = EngineProcess(choice.name, command, timeout_s=_TIMEOUT_S)
            except EngineError as error:
                raise InstallationError(
                    f"{str(error).rstrip('.')}. If it is not installed in {choice.python}: {peer.install}; or name "
                    f"another Python: --peer-python {choice.name}:PYTHON."
                ) from error
        for method in methods:
            if method.engine in engines and method.mode not in engines[method.engine].methods:
                known = ", ".join(engines[method.engine].methods)
                raise InvalidInputError(f"{method.engine} runs {known}; {method.mode} is none of these.")
    except BaseException:
        stop_peers(engines)
        raise
    return engines


def stop_peers(engines: Mapping[str, EngineProcess]) -> None:
    """End the processes."""
    for engine in engines.values():
        engine.close()
