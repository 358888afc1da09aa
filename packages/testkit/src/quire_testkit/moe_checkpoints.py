"""Random checkpoints of families with mixtures of experts: their config.json and weights, from the size of a decoder.

Experts are stacked, as Transformers has them in memory. Knows Mixtral, Qwen3-MoE and gpt-oss; `checkpoints.py` writes
the files and what these families have in common with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["MOE_FAMILIES", "moe_fields", "moe_shapes"]

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
