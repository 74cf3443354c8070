"""Models that place their tokens by a bias of their scores: its table, and texts longer than one pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from tiny import tiny_checkpoint

from paceline.bundle import Bundle
from paceline.ort import PREFILL_ROWS, OrtModel
from paceline_export.causal_lm import trace
from paceline_export.export import export_bundle
from paceline_export.flavors import FLAVORS
from paceline_export.own_attention import position_bias, reference_attention
from paceline_export.source import resolve


def test_the_bias_grows_with_the_distance_as_the_paper_has_it() -> None:
    """Press et al. 2021: of 8 heads, the slopes are 1/2, 1/4, …, 1/256."""
    slopes = 2.0 ** -torch.arange(1, 9)
    for config in (transformers.BloomConfig(n_head=8), transformers.MptConfig(n_heads=8)):
        table = position_bias(config, 30)
        assert table is not None
        assert table.dtype == torch.float32
        torch.testing.assert_close(table - table[29], (torch.arange(30) - 29)[:, None] * slopes)
    assert position_bias(transformers.LlamaConfig(), 30) is None
    assert position_bias(transformers.FalconConfig(), 30) is None


def test_falcons_bias_is_in_steps_of_bfloat16() -> None:
    config = transformers.FalconConfig(hidden_size=128, num_attention_heads=8, alibi=True)
    table = position_bias(config, 300)
    assert table is not None
    assert table[256, 0] == table[257, 0] == 256 * 0.5 / 4  # a head has 16 values
    assert table[258, 0] > table[256, 0]


def test_the_bias_is_made_once_and_lasts_as_float32() -> None:
    config = transformers.BloomConfig(vocab_size=272, hidden_size=64, n_layer=2, n_head=4)
    for name, input_of in (("ort", 10), ("trt", 3)):
        traced = trace(config, max_length=64, dtype="float16", flavor=FLAVORS[name])
        layers = [node for node in traced.model.graph if node.op_type in ("GroupQueryAttention", "Attention")]
        assert len({node.inputs[input_of] for node in layers}) == 1
        assert traced.constants["rotary.position_bias"].shape == (64, 4)
        assert traced.model.graph.initializers["rotary.position_bias"].dtype == traced.model.graph.outputs[0].dtype


@pytest.mark.parametrize("name", ["falcon-rw, alibi", "mpt, alibi", "bloom, alibi"])
def test_a_text_of_several_passes_is_torch(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    count = PREFILL_ROWS + 40
    for setting in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if hasattr(config, setting):
            config = type(config)(**config.to_dict() | {setting: 512})
    folder = tiny_checkpoint(tmp_path / "model", config)
    export_bundle(resolve(str(folder)), None, tmp_path / "bundle", precision="fp32", quality=False)
    model = OrtModel.open(Bundle.open(tmp_path / "bundle"), "target")
    assert model.max_length == 512
    ids = torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(512)
    found = model.forward(ids[0].tolist(), cache, 20)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=reference_attention(config)
    )
    with torch.no_grad():
        expected = reference.eval()(ids).logits[0, -20:].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)
