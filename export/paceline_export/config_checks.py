"""What a checkpoint's configuration may say: numbers that a decoder can be built from, and that fit its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from paceline.errors import CheckpointError

from .source import Source
from .weights import num_tensors

__all__ = ["check_against_weights", "check_counts", "check_epsilons", "check_rotation", "check_sizes"]

_COUNTS = (
    *("num_hidden_layers", "max_position_embeddings", "max_seq_len", "seq_length", "vocab_size"),
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
)
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
_ROTATION = ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


def check_counts(name: str, stated: Callable[[str], Any]) -> None:
    """Check the numbers that a decoder is built from, where they are stated; transformers takes many as they are.

    Raises:
        CheckpointError: one of them is not a positive whole number.
    """
    for setting in _COUNTS:
        value = stated(setting)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise _no_decoder(name, f"{setting}={value!r:.80}", "a whole number of at least 1")


def check_against_weights(source: Source, settings: Mapping[str, Any]) -> None:
    """Check that a checkpoint's files can hold what its configuration asks for, before a model of it is built.

    Raises:
        CheckpointError: more layers than tensors, or a size beyond the number of weights.
    """
    tensors = sum(num_tensors(path) for path in source.weight_files)
    weights = 8 * sum(path.stat().st_size for path in source.weight_files)  # of a bit each at least
    for names, most, what in ((_LAYERS, tensors, "tensors"), (_SIZES, weights, "weights")):
        for setting in names:
            value = settings.get(setting)
            if isinstance(value, int) and value > most:
                raise _no_decoder(
                    source.name, f"{setting}={value!r:.40}", f"at most {most:,}, since its files hold no more {what}"
                )


def check_epsilons(name: str, config: PreTrainedConfig) -> None:
    """Check what norms add to a variance before they divide by its root.

    Raises:
        CheckpointError: it is no finite number of at least 0.
    """
    for setting, value in config.to_dict().items():
        if not re.fullmatch(r"(.*_)?(layer_?)?norm_(eps|epsilon)|epsilon", setting) or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise _no_decoder(name, f"{setting}={value!r:.40}", "a small number of at least 0, such as 1e-06")


def check_rotation(name: str, config: PreTrainedConfig) -> None:
    """Check the numbers of a rotation, or of one for each kind of layer; transformers only warns of others.

    Raises:
        CheckpointError: one of them is none.
    """
    stated = getattr(config, "rope_parameters", None)
    kinds = [stated, *stated.values()] if isinstance(stated, dict) else []
    for kind in kinds:
        for setting in _ROTATION if isinstance(kind, dict) else ():
            value = kind.get(setting)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
                raise _no_decoder(name, f"{setting}={value!r:.40} in its rope_parameters", "a number")


def check_sizes(name: str, config: PreTrainedConfig) -> None:
    """Check the numbers that a decoder is built from, and that they go together.

    Raises:
        CheckpointError: they do not, or one of them is not a positive whole number, or there is no vocabulary.
    """
    check_counts(name, lambda setting: getattr(config, setting, None))
    check_epsilons(name, config)
    check_rotation(name, config)
    if getattr(config, "vocab_size", None) is None:
        raise CheckpointError(
            f"{name} is no plain decoder of text: its configuration ({config.model_type!r}) has no vocab_size "
            "of its own. paceline exports plain decoders only."
        )
    hidden, heads, kv_heads, head_size = (
        getattr(config, setting, None)
        for setting in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads is None or hidden is None:
        return  # not a transformer; the trace says why it is not supported
    if kv_heads is not None and heads % kv_heads:
        raise _no_decoder(
            name, f"num_attention_heads={heads} and num_key_value_heads={kv_heads}", "as many or a whole multiple"
        )
    if head_size is None and hidden % heads:
        raise _no_decoder(
            name, f"hidden_size={hidden} and num_attention_heads={heads}", "a whole multiple, or a head_dim"
        )


def _no_decoder(name: str, setting: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: its configuration has {setting}; expected {expected}. Take config.json from where the checkpoint "
        "came from."
    )
