"""Families of random checkpoints with mixtures of experts or recurrent layers: their config.json and weights, from the
size of a decoder.

Experts are stacked, as Transformers has them in memory. Knows Mixtral, Qwen3-MoE, gpt-oss, Mamba-2 and Qwen3-Next
(without experts); `checkpoints.py` writes the files and what these families have in common with Llama's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["MOE_FAMILIES", "RECURRENT_FAMILIES", "moe_fields", "moe_shapes", "recurrent_fields", "recurrent_shapes"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]

MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "rope_theta": 1000000.0,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
}
"""As `checkpoints.FAMILIES`; the widths of experts follow from the size."""


def moe_fields(like: str, size: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json beyond those that every family has: a token's experts are as wide as the size says,
    in Mixtral each of them."""
    inner = size["intermediate_size"]
    if like == "qwen3-moe":
        return {"moe_intermediate_size": max(1, inner // 4)}
    return {"intermediate_size": max(1, inner // 4)} if like == "gpt-oss" else {}


def moe_shapes(config: dict[str, Any], at: str) -> Shapes:
    """Name and shape of every weight behind the attention of the layer whose names begin with `at`."""
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    num = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    experts = f"{at}mlp.experts."
    if config["model_type"] != "gpt_oss":
        yield f"{at}mlp.gate.weight", (num, hidden)
        yield f"{experts}gate_up_proj", (num, 2 * inner, hidden)
        yield f"{experts}down_proj", (num, hidden, inner)
        return
    yield f"{at}self_attn.sinks", (config["num_attention_heads"],)
    yield f"{at}mlp.router.weight", (num, hidden)
    yield f"{at}mlp.router.bias", (num,)
    yield f"{experts}gate_up_proj", (num, hidden, 2 * inner)
    yield f"{experts}gate_up_proj_bias", (num, 2 * inner)
    yield f"{experts}down_proj", (num, inner, hidden)
    yield f"{experts}down_proj_bias", (num, hidden)


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
