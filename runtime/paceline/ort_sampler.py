"""A bundle's sampler graphs, and the inputs that a generation gives to them.

The graphs and their inputs are described in `paceline_export.sampler`; `ort_round` plays rounds with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle
from .device_array import AnyArray, bind_input, bind_output
from .errors import BundleError, InvalidInputError
from .ort_session import open_session
from .providers import PROVIDERS, Provider, find_provider
from .sampling import SamplingParams

__all__ = ["BoundGraph", "GraphInputs", "SamplerGraphs", "parameter_inputs"]

# Beyond this the scaled logits underflow to probability 0 anyway; a larger factor would overflow float32. A smaller
# one than the least would be 0 in float32, and minus infinity times 0 is NaN.
_MIN_SCALE, _MAX_SCALE = 2e-38, 1e38
# What float32 holds; below the least, numbers lose digits or are 0.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# Up to this `top_k` the graphs sort candidates out instead of searching a threshold.
_FEW = 256

# Inputs and outputs of the graphs: ONNX Runtime's name of the type, and the shape. A string is a size that is known
# once the bundle is; None is one that only a run has.
_Signature = dict[str, tuple[str, list[str | int | None]]]
_FLOAT, _INT, _BOOL = "tensor(float)", "tensor(int64)", "tensor(bool)"
_ADJUSTMENTS: _Signature = {
    "penalise": (_BOOL, []),
    "repetition_penalty": (_FLOAT, []),
    "presence_penalty": (_FLOAT, []),
    "frequency_penalty": (_FLOAT, []),
    "prompt_counts": (_FLOAT, ["width"]),
    "new_counts": (_FLOAT, ["width"]),
    "bias": (_FLOAT, [None, "width"]),
}
_CHANCE: _Signature = {
    "inverse_temperature": (_FLOAT, []),
    "cut": (_BOOL, []),
    "top_k_few": (_BOOL, []),
    "top_k_many": (_BOOL, []),
    "top_k": (_INT, []),
    "top_p_few": (_BOOL, []),
    "top_p_many": (_BOOL, []),
    "top_p": (_FLOAT, []),
    "min_p": (_FLOAT, []),
    "cut_typical_p": (_BOOL, []),
    "typical_p": (_FLOAT, []),
}
_VERIFIER: _Signature = _ADJUSTMENTS | {
    "logits": (_FLOAT, [1, None, "logits"]),
    "drafted": (_INT, [1, None]),
    "end_token_ids": (_INT, [None]),
}
_DRAFTER: _Signature = _ADJUSTMENTS | {
    "logits": (_FLOAT, [1, 1, "logits"]),
    "drafted": (_INT, [1, None]),
}
_DRAFT: _Signature = {
    "draft_probs": (_FLOAT, [None, "width"]),
    "deterministic": (_BOOL, [None]),
    "accept_uniforms": (_INT, [None]),
    "draw_uniforms": (_INT, [None]),
}
_VERDICT: _Signature = {"verdict": (_INT, [3])}
_TOKEN: _Signature = {"token": (_INT, [1, 1]), "healthy": (_BOOL, [1])}
_VERIFIERS: dict[str, tuple[_Signature, _Signature]] = {
    "token": (_VERIFIER | _CHANCE | _DRAFT, _VERDICT),
    "block": (_VERIFIER | _CHANCE | _DRAFT | {"any_deterministic": (_BOOL, [])}, _VERDICT),
    "deterministic": (_VERIFIER | _CHANCE | {"draw_uniforms": (_INT, [None])}, _VERDICT),
    "greedy": (_VERIFIER, _VERDICT),
}
_DRAFTERS: dict[str, tuple[_Signature, _Signature]] = {
    "draft": (_DRAFTER | _CHANCE | {"uniform": (_INT, [1])}, _TOKEN | {"probs": (_FLOAT, [1, "width"])}),
    "greedy_draft": (_DRAFTER, _TOKEN),
}


def parameter_inputs(params: SamplingParams, vocab_size: int) -> dict[str, NDArray[Any]]:
    """The inputs of a sampler's graph that stay the same for a whole generation, by their names; all are scalars.

    Raises:
        InvalidInputError: a repetition penalty that float32 cannot hold.
    """
    if not _LEAST <= params.repetition_penalty <= _MOST:
        raise InvalidInputError(
            f"repetition_penalty is {params.repetition_penalty}, but sampler='graph' computes in float32, which holds "
            f"{_LEAST:.3g} to {_MOST:.3g}; use a value in between."
        )
    top_k, top_p = 0 < params.top_k < vocab_size, params.top_p < 1
    few = top_k and params.top_k <= _FEW
    penalise = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    inputs: dict[str, Any] = {
        "penalise": np.bool_(penalise),
        "repetition_penalty": np.float32(params.repetition_penalty),
        "presence_penalty": np.float32(params.presence_penalty),
        "frequency_penalty": np.float32(params.frequency_penalty),
    }
    if not params.greedy:
        inputs |= {
            "inverse_temperature": np.float32(min(max(1 / params.temperature, _MIN_SCALE), _MAX_SCALE)),
            "cut": np.bool_(top_k or top_p or params.min_p > 0),
            "top_k_few": np.bool_(few),
            "top_k_many": np.bool_(top_k and not few),
            "top_k": np.int64(min(params.top_k, vocab_size)),
            "top_p_few": np.bool_(top_p and few),
            "top_p_many": np.bool_(top_p and not few),
            "top_p": np.float32(max(params.top_p, _LEAST)),
            "min_p": np.float32(max(params.min_p, _LEAST) if params.min_p else 0),
            "cut_typical_p": np.bool_(params.typical_p < 1),
            "typical_p": np.float32(max(params.typical_p, _LEAST)),
        }
    return {name: np.asarray(value) for name, value in inputs.items()}


class GraphInputs:
    """What one generation's sampling parameters and history give to a sampler's graphs.

    Attributes:
        params: the parameters, of which constraints and the n-gram rule are none that a graph can apply.
        vocab_size: of the common vocabulary.
        scalars: inputs that stay the same, by their names.
        prompt_counts: float32 `[width]`, the vocabulary in whole blocks.
        new_counts: float32 `[width]`, up to the last `move`.
        end_token_ids: int64, at least one; -1 is none.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        vocab_size: int,
        width: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start behind `prompt`.

        Raises:
            InvalidInputError: a parameter that float32 cannot hold.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.scalars = parameter_inputs(params, vocab_size)
        self.prompt_counts = np.bincount(np.asarray(prompt, np.int64), minlength=width).astype(np.float32)
        self.new_counts = np.zeros(width, np.float32)
        self._num_prompt_tokens = self._num_counted = len(prompt)
        self._end_token_ids = sorted(end_token_ids)
        self.end_token_ids = np.array(self._end_token_ids or [-1], np.int64)
        self._bias = np.zeros((1, width), np.float32)
        for token_id, value in dict(params.logit_bias).items():
            if value > _MOST:
                raise InvalidInputError(
                    f"logit_bias is {value} for id {token_id}, but sampler='graph' computes in float32, which holds up "
                    f"to {_MOST:.3g}; use a smaller one."
                )
            self._bias[0, token_id] = value if value >= -_MOST else -np.inf  # forbids, as it does in numpy
        self._bias[0, list(params.banned_token_ids)] = -np.inf
        self._num_forbidden = int(np.count_nonzero(np.isneginf(self._bias)))

    def leaves_a_token(self, position: int, ids: NDArray[np.int64]) -> bool:
        """Whether biases and masks leave one of `ids`, which rise, at `position`, whatever the logits are."""
        num_new = position - self._num_prompt_tokens
        ends = self._end_token_ids if num_new < self.params.min_new_tokens else []
        if num_new < len(self.params.forced_token_ids):
            forced = self.params.forced_token_ids[num_new]
            at = int(np.searchsorted(ids, forced))
            known = at < len(ids) and ids[at] == forced
            return bool(known and forced not in ends and self._bias[0, forced] > -np.inf)
        if self._num_forbidden + len(ends) < len(ids):
            return True
        return bool(((self._bias[0, ids] > -np.inf) & ~np.isin(ids, ends)).any())

    def move(self, tokens: Sequence[int]) -> None:
        """Count the tokens that the text has grown by."""
        np.add.at(self.new_counts, list(tokens[self._num_counted :]), 1)
        self._num_counted = len(tokens)

    def bias(self, position: int, rows: int) -> NDArray[np.float32]:
        """What is added to the logits of the rows for `position`, `position + 1`, …: `[1 or rows, width]`."""
        first = position - self._num_prompt_tokens
        forced = self.params.forced_token_ids
        if first >= max(self.params.min_new_tokens, len(forced)):
            return self._bias
        bias = np.repeat(self._bias, rows, axis=0)
        for row, num_new in enumerate(range(first, first + rows)):
            if num_new < self.params.min_new_tokens:
                bias[row, self._end_token_ids] = -np.inf
            if num_new < len(forced):
                bias[row, : forced[num_new]] = bias[row, forced[num_new] + 1 :] = -np.inf
        return bias


@dataclass(frozen=True, slots=True)
class SamplerGraphs:
    """The sampler's graphs of a bundle, loaded.

    Attributes:
        sessions: by name: `token`, `block`, `deterministic` and `greedy` verify; `draft` and `greedy_draft` draft.
        vocab_size: of the common vocabulary.
        width: of rows of probabilities, counts and biases: the vocabulary in whole blocks.
        provider: what runs them.
    """

    sessions: Mapping[str, Any]
    vocab_size: int
    width: int
    provider: Provider = PROVIDERS["cpu"]

    @classmethod
    def open(cls, bundle: Bundle, *, provider: str = "cpu", threads: int | None = None) -> SamplerGraphs:
        """Load a bundle's graphs, to run where the models' logits lie; the arguments are those of `OrtModel.open`.

        Raises:
            BundleError: the bundle was exported without them, one is missing or cannot be loaded, or is not what its
                name says.
        """
        manifest = bundle.manifest
        entry = manifest.sampler
        if entry is None:
            raise BundleError(f"{bundle.root} has no sampler graphs; export it again, or load it with sampler='numpy'.")
        expected = {name: (signature, manifest.target.vocab_size) for name, signature in _VERIFIERS.items()}
        if manifest.draft is not None:
            expected |= {name: (signature, manifest.draft.vocab_size) for name, signature in _DRAFTERS.items()}
        if missing := sorted(expected.keys() - entry.graphs.keys()):
            raise BundleError(f"{bundle.root} lacks the sampler graphs {', '.join(missing)}; export the bundle again.")
        sessions, provider = {}, find_provider(provider).sampler
        for name, (signature, logits_width) in expected.items():
            path = entry.graphs[name]
            sessions[name] = open_session(bundle.path(path), provider=provider, threads=threads)
            sizes = {"width": entry.width, "logits": logits_width}
            for kind, wanted, found in zip(
                ("inputs", "outputs"),
                signature,
                (sessions[name].get_inputs(), sessions[name].get_outputs()),
                strict=True,
            ):
                if wrong := _differences(wanted, found, sizes):
                    raise BundleError(
                        f"{bundle.root}: {path} is not the sampler's {name!r} graph: the {kind} "
                        f"{', '.join(wrong[:4])} are others than expected. Export the bundle again."
                    )
        return cls(sessions, manifest.tokenizer.vocab_size, entry.width, PROVIDERS[provider])

    def bound(self, name: str, inputs: GraphInputs) -> BoundGraph:
        """A graph of this name with what a generation gives to it."""
        graph = BoundGraph(self.sessions[name], name, self.provider)
        for key, value in inputs.scalars.items():
            graph.bind_input(key, value)
        graph.bind_input("prompt_counts", inputs.prompt_counts)
        graph.bind_input("new_counts", inputs.new_counts, changes=True)
        graph.bind_input("end_token_ids", inputs.end_token_ids)
        return graph


class BoundGraph:
    """A graph whose inputs and outputs lie in buffers of the caller's, to be run again and again.

    What is bound is read and written where it lies, when the graph runs; nothing is copied but to and from a device.
    """

    def __init__(self, session: Any, name: str, provider: Provider = PROVIDERS["cpu"]) -> None:
        """Bind nothing yet; `name` is for errors, `provider` is what the session was opened for."""
        self._session = session
        self._name = name
        self._provider = provider
        self._binding = session.io_binding()
        self._names = {value.name for value in session.get_inputs()}
        self._bound: dict[str, AnyArray] = {}  # keeps the buffers alive
        self._changing: set[str] = set()

    def bind_input(self, name: str, array: AnyArray, *, changes: bool = False) -> None:
        """Read an input from `array`; a graph that has no input of this name does without.

        Args:
            name: of the input.
            array: what to read.
            changes: whether it may hold something else at each run.
        """
        if name in self._names and self._bound.get(name) is not array:
            self._bound[name] = array
            bind_input(self._binding, name, array)
            if changes and self._provider.reads_when_bound:
                self._changing.add(name)

    def bind_output(self, name: str, array: AnyArray) -> None:
        """Write an output into `array`."""
        self._bound[name] = array
        bind_output(self._binding, name, array)

    def run(self) -> None:
        """Run the graph on what is bound.

        Raises:
            BundleError: ONNX Runtime cannot.
        """
        for name in self._changing:
            bind_input(self._binding, name, self._bound[name])
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise BundleError(f"ONNX Runtime cannot run the sampler's {self._name!r} graph: {error}") from error


def _differences(wanted: _Signature, found: Sequence[Any], sizes: Mapping[str, int]) -> list[str]:
    """Names of the values that are missing, too many, or of another type or shape; a size known at run time varies."""
    expected = {
        name: (dtype, [sizes[size] if isinstance(size, str) else size for size in shape])
        for name, (dtype, shape) in wanted.items()
    }
    actual = {
        value.name: (value.type, [size if isinstance(size, int) else None for size in value.shape]) for value in found
    }
    return sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
