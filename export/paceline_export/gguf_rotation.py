"""How a GGUF file says that a model's rotation is scaled, which transformers does not read.

```
ARCHITECTURE.rope.scaling.type                      none, linear, yarn, longrope
ARCHITECTURE.rope.scaling.factor                    float
ARCHITECTURE.rope.scaling.original_context_length   int
rope_freqs.weight                                   [rotated / 2], what Llama 3.1's scaling divides each frequency by
rope_factors_short.weight, rope_factors_long.weight   longrope's
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.errors import CheckpointError

from .gguf_reader import open_gguf

__all__ = ["scale_rotation"]

# Llama 3.1 and later differ in `factor` alone, and llama.cpp keeps what comes of these numbers, not the numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def scale_rotation(config: PreTrainedConfig, path: Path) -> None:
    """Give a configuration that was read from a GGUF file the scaling of the rotation that the file tells.

    Raises:
        CheckpointError: a scaling that is not supported, or that lacks a number.
    """
    stated = getattr(config, "rope_parameters", None)
    if not isinstance(stated, dict) or stated.get("rope_type", "default") != "default":
        return
    reader = open_gguf(str(path))
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}.rope.scaling."
    settings = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    kind = settings.get("type", "none")
    if kind in ("linear", "yarn"):
        _scale_by_factor(config, path.name, kind, settings)
    elif kind != "none" or tensors.keys() - {"rope_freqs.weight"}:
        raise CheckpointError(
            f"{path.name}: its rotation is scaled by {kind if kind != 'none' else 'longrope'!r} ({prefix}type, "
            "rope_factors_long), which is not read from GGUF files; export this model from Safetensors."
        )
    if (frequencies := tensors.get("rope_freqs.weight")) is not None:
        factors = np.array(gguf.dequantize(frequencies.data, frequencies.tensor_type), np.float32).reshape(-1)
        _scale_by_wavelength(config, path.name, kind, torch.from_numpy(factors))


def _scale_by_factor(config: PreTrainedConfig, name: str, kind: str, settings: dict[str, Any]) -> None:
    factor, original = settings.get("factor"), settings.get("original_context_length")
    odd = [
        key
        for key, value in settings.items()
        if key not in ("type", "factor", "original_context_length", "finetuned", *_YARN)
        and not (key in ("attn_factor", "yarn_attn_factor") and value == 1)
        and not (key == "yarn_ext_factor" and value in (1, -1))
    ]
    if (
        not isinstance(factor, float)
        or not 1 <= factor < 1e6
        or (kind == "yarn" and not (isinstance(original, int) and original > 0))
        or odd
    ):
        raise CheckpointError(
            f"{name}: its rotation is scaled by {kind}, with {settings!r:.200}; expected a factor of at least 1"
            + (", original_context_length" if kind == "yarn" else "")
            + " and no other settings. Export this model from Safetensors."
        )
    config.rope_parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = original
        config.rope_parameters |= {ours: float(settings[key]) for key, ours in _YARN.items() if key in settings}


def _scale_by_wavelength(config: PreTrainedConfig, name: str, kind: str, factors: torch.Tensor) -> None:
    """Find the numbers of Llama 3.1's scaling that divide the frequencies by these factors."""
    if bool((factors == 1).all()):
        return
    plain = dict(config.rope_parameters)
    if kind == "none" and bool(torch.isfinite(factors).all()) and float(factors.min()) >= 1:
        config.rope_parameters = plain | {"rope_type": "llama3", "factor": float(factors.max())} | _LLAMA3
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        size = 2 * len(scaled)
        unscaled = 1.0 / plain["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        if len(factors) == len(scaled) and torch.allclose(unscaled / factors, scaled, rtol=1e-4, atol=0):
            return
    raise CheckpointError(
        f"{name}: its tensor 'rope_freqs.weight' divides the frequencies of the rotation by {len(factors)} numbers "
        f"from {float(factors.min()):.3g} to {float(factors.max()):.3g}, which are not those of Llama 3.1 and later; "
        "such a scaling is not supported. Export this model from Safetensors."
    )
