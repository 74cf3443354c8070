"""The architectures that are checked, as tiny models: one row each. A new architecture is a new row."""

from __future__ import annotations

import transformers as hf
from tiny import sizes

__all__ = ["ARCHITECTURES", "REFUSED", "WINDOW"]

WINDOW = 16  # positions; the check's texts are 73 long, so that they cross it
_ALTERNATING = ["sliding_attention", "full_attention"]
_WINDOWED = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 8.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4}
_TOKENS = {"bos_token_id": 259, "eos_token_id": 260, "pad_token_id": 261}
_FALCON = {"vocab_size": 272, "num_hidden_layers": 2, "max_position_embeddings": 256} | _TOKENS
_GPT2 = {"vocab_size": 272, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256} | _TOKENS

ARCHITECTURES = {
    "llama 2": hf.LlamaConfig(**sizes(num_key_value_heads=4)),
    "llama 3, scaled rotation, tied": hf.LlamaConfig(**sizes(rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama, yarn": hf.LlamaConfig(**sizes(rope_parameters=_YARN)),
    "llama, dynamic rotation": hf.LlamaConfig(**sizes(rope_parameters=_DYNAMIC)),
    "llama, heads of 24": hf.LlamaConfig(**sizes(head_dim=24)),
    "mistral, window": hf.MistralConfig(**sizes(sliding_window=WINDOW, head_dim=16)),
    "mixtral, experts": hf.MixtralConfig(**sizes(num_local_experts=4)),
    "qwen2": hf.Qwen2Config(**sizes()),
    "qwen2-moe, experts, window": hf.Qwen2MoeConfig(
        **sizes(use_sliding_window=True, max_window_layers=1, shared_expert_intermediate_size=64, **_EXPERTS)
        | {"sliding_window": WINDOW}
    ),
    "qwen3, normed heads": hf.Qwen3Config(**sizes(**_HEAD)),
    "qwen3-moe, experts": hf.Qwen3MoeConfig(**sizes(**_HEAD, **_EXPERTS)),
    "gemma": hf.GemmaConfig(**sizes(**_HEAD)),
    "gemma 2, bounded scores, alternating windows": hf.Gemma2Config(
        **sizes(**_HEAD, sliding_window=WINDOW, attn_logit_softcapping=5.0)
    ),
    "gemma 3, two rotations": hf.Gemma3TextConfig(**sizes(**_HEAD, **_WINDOWED)),
    "phi, partial rotation": hf.PhiConfig(**sizes(**_PARTIAL)),
    "phi 3, fused projections, long rotation": hf.Phi3Config(
        **sizes(rope_parameters=_LONG, original_max_position_embeddings=128, sliding_window=WINDOW)
    ),
    "granite": hf.GraniteConfig(**sizes(logits_scaling=2.0, residual_multiplier=0.5)),
    "granite-moe, experts": hf.GraniteMoeConfig(**sizes(num_local_experts=4, num_experts_per_tok=2)),
    "olmo 2": hf.Olmo2Config(**sizes()),
    "olmo 3, window": hf.Olmo3Config(**sizes(**_WINDOWED)),
    "smollm 3, layers without rotation": hf.SmolLM3Config(**sizes(no_rope_layer_interval=2)),
    "exaone 4, window": hf.Exaone4Config(**sizes(**_WINDOWED)),
    "stablelm, parallel blocks, partial rotation": hf.StableLmConfig(**sizes(use_parallel_residual=True, **_PARTIAL)),
    "gpt-neox, parallel blocks, partial rotation": hf.GPTNeoXConfig(**sizes(num_key_value_heads=4, **_PARTIAL)),
    "gpt2, learned positions": hf.GPT2Config(**_GPT2),
    "gpt-bigcode, learned positions, one kv head": hf.GPTBigCodeConfig(**_GPT2),
    "gpt-j, rotation by a table of its own": hf.GPTJConfig(rotary_dim=8, **_GPT2),
    "opt, learned positions from 2": hf.OPTConfig(
        vocab_size=272,
        hidden_size=64,
        ffn_dim=96,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **_TOKENS,
    ),
    "starcoder2": hf.Starcoder2Config(**sizes(sliding_window=WINDOW)),
    "cohere, interleaved rotation, parallel blocks": hf.CohereConfig(**sizes()),
    "cohere 2, window": hf.Cohere2Config(**sizes(**_WINDOWED)),
    "glm 4, interleaved partial rotation": hf.Glm4Config(**sizes(**_HEAD)),
    "nemotron, partial rotation": hf.NemotronConfig(
        **sizes(head_dim=32, rope_parameters=_PARTIAL["rope_parameters"] | {"partial_rotary_factor": 0.5})
    ),
    "hunyuan, norm behind rotation": hf.HunYuanDenseV1Config(**sizes(**_HEAD)),
    "gpt-oss, sinks, experts, window": hf.GptOssConfig(
        **sizes(**_HEAD, **_WINDOWED, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN)
    ),
    "falcon, one kv head, parallel blocks": hf.FalconConfig(hidden_size=64, num_attention_heads=4, **_FALCON),
    "falcon 40b, kv heads in groups": hf.FalconConfig(
        hidden_size=64, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, **_FALCON
    ),
    "falcon-rw, alibi": hf.FalconConfig(
        hidden_size=96, num_attention_heads=6, alibi=True, multi_query=False, parallel_attn=False, bias=True, **_FALCON
    ),
    "mpt, alibi": hf.MptConfig(vocab_size=272, d_model=96, n_heads=6, n_layers=2, max_seq_len=256, **_TOKENS),
    "bloom, alibi": hf.BloomConfig(vocab_size=272, hidden_size=64, n_layer=2, n_head=4, seq_length=256, **_TOKENS),
}

# What is refused, with a piece of the reason.
REFUSED = {
    "gpt-neo": (
        hf.GPTNeoConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            vocab_size=272,
            **_TOKENS,
        ),
        "exchange",
    ),
    "mpt, steeper alibi": (
        hf.MptConfig(vocab_size=272, d_model=64, n_layers=2, n_heads=4, attn_config={"alibi_bias_max": 16}),
        "does not follow the setting attn_config.alibi_bias_max=16",
    ),
    "llama 4": (
        hf.Llama4TextConfig(**sizes(**_HEAD, num_local_experts=2, attention_chunk_size=16, intermediate_size_mlp=96)),
        "rotation of Llama4ForCausalLM cannot be tried",
    ),
    "bert, not causal": (
        hf.BertConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96),
        "masks its attention by 'bidirectional_mask_function'",
    ),
    "mamba": (hf.MambaConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2), "takes no position_ids"),
    "t5": (hf.T5Config(vocab_size=272, d_model=64, num_layers=2), "cannot build a causal language model"),
    "llama, rotation without a base": (
        hf.LlamaConfig(**sizes(rope_parameters={"rope_type": "default", "rope_theta": 0.0})),
        "is no number at some positions",
    ),
}
