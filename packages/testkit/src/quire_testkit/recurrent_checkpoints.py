"""Random checkpoints of families with recurrent layers: their config.json and weights, from the size of a decoder.

Knows Mamba-2 and Qwen3-Next (without experts); `checkpoints.py` writes the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["RECURRENT_FAMILIES", "recurrent_fields", "recurrent_shapes"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
    "qwen3-next": {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "rope_theta": 10000000.0},
}
"""As `checkpoints.FAMILIES`; the rest of a configuration follows from the size."""


def recurrent_fields(like: str, size: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json beyond those that every family has."""
    hidden = size["hidden_size"]
    if like == "qwen3-next":
        layers = [
            "full_attention" if layer % 4 == 3 or layer == 1 else "linear_attention"
            for layer in range(size["num_hidden_layers"])
        ]
        keys = max(1, hidden // 128)
        return {
            "partial_rotary_factor": 0.25,
            "layer_types": layers,
            "linear_num_key_heads": keys,
            "linear_num_value_heads": 2 * keys,
            "linear_key_head_dim": min(128, hidden // 2),
            "linear_value_head_dim": min(128, hidden // 2),
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
        }
    head_dim = min(64, hidden // 2)
    return {
        "expand": 2,
        "head_dim": head_dim,
        "num_heads": 2 * hidden // head_dim,
        "state_size": min(128, hidden),
        "n_groups": 1,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
    }


def recurrent_shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every weight, in the order they are stored."""
    yield from _qwen3_next(config) if config["model_type"] == "qwen3_next" else _mamba2(config)


def _qwen3_next(config: dict[str, Any]) -> Shapes:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    values, value_size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    key_size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    conv = 2 * key_size + values * value_size
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        if kind == "full_attention":
            for name, rows in (("q", 2 * query), ("k", kv), ("v", kv)):
                yield f"{at}self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{at}self_attn.o_proj.weight", (hidden, query)
            yield f"{at}self_attn.q_norm.weight", (head_dim,)
            yield f"{at}self_attn.k_norm.weight", (head_dim,)
        else:
            yield f"{at}linear_attn.in_proj_qkvz.weight", (conv + values * value_size, hidden)
            yield f"{at}linear_attn.in_proj_ba.weight", (2 * values, hidden)
            yield f"{at}linear_attn.conv1d.weight", (conv, 1, config["linear_conv_kernel_dim"])
            yield f"{at}linear_attn.A_log", (values,)
            yield f"{at}linear_attn.dt_bias", (values,)
            yield f"{at}linear_attn.norm.weight", (value_size,)
            yield f"{at}linear_attn.out_proj.weight", (hidden, values * value_size)
        yield f"{at}mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}mlp.up_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _mamba2(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_heads"]
    inner = heads * config["head_dim"]
    conv = inner + 2 * config["n_groups"] * config["state_size"]
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{layer}."
        yield f"{at}norm.weight", (hidden,)
        yield f"{at}mixer.in_proj.weight", (inner + conv + heads, hidden)
        yield f"{at}mixer.conv1d.weight", (conv, 1, config["conv_kernel"])
        yield f"{at}mixer.conv1d.bias", (conv,)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{at}mixer.{name}", (heads,)
        yield f"{at}mixer.norm.weight", (inner,)
        yield f"{at}mixer.out_proj.weight", (hidden, inner)
    yield "backbone.norm_f.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
