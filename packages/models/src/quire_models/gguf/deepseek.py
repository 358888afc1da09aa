"""Metadata of DeepSeek-V2's and V3's GGUF files ("deepseek2") -> fields of config.json. Free of torch.

Files without `expert_group_count` do not say which groups experts are chosen from: all of them are one group there.
"""

from __future__ import annotations

import math
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader

__all__ = ["deepseek_values"]

_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


def deepseek_values(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    """What differs from `values`, the fields of any decoder.

    Raises:
        CheckpointError: Metadata that is missing, or of a way to choose experts that is not known.
    """
    fields = header.fields

    def whole(key: str, default: Any) -> Any:
        return fields.integer(f"deepseek2.{key}", default=default, minimum=1)

    rotated = fields.integer("deepseek2.rope.dimension_count", minimum=1)
    # Later files give the sizes of what the cache keeps as key_length, and those of a head apart.
    key = whole("attention.key_length_mla", None) or fields.integer("deepseek2.attention.key_length", minimum=1)
    value = whole("attention.value_length_mla", None) or fields.integer("deepseek2.attention.value_length", minimum=1)
    fields.skip("deepseek2.attention.value_length")
    multiplier = fields.number("deepseek2.rope.scaling.yarn_log_multiplier", default=0.0)
    return {
        **_experts(header),
        "num_key_value_heads": values["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": whole("attention.q_lora_rank", None),
        "kv_lora_rank": fields.integer("deepseek2.attention.kv_lora_rank", minimum=1),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_interleave": True,
        "rope_scaling": _scaling(values["rope_scaling"], multiplier),
    }


def _scaling(scaling: dict[str, Any] | None, log_multiplier: float) -> dict[str, Any] | None:
    """Files have a tenth of `mscale_all_dim`, which `mscale` equals: the two cancel in cosines and sines."""
    if scaling is None or not log_multiplier:
        return scaling
    mscale = round(10.0 * log_multiplier, 6)
    result = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    if "attention_factor" in result and result["factor"] > 1.0:
        result["attention_factor"] /= 0.1 * math.log(result["factor"]) + 1.0
    return result


def _experts(header: GgufHeader) -> dict[str, Any]:
    fields = header.fields

    def whole(key: str, default: int) -> int:
        return fields.integer(f"deepseek2.{key}", default=default, minimum=0)

    gating = whole("expert_gating_func", 0) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise CheckpointError(
            f"{header.path}: deepseek2.expert_gating_func {gating!r} is not known; {_SOFTMAX} (softmax) and {_SIGMOID} "
            "(sigmoid) are. Use the model's safetensors checkpoint"
        )
    groups = whole("expert_group_count", 1)
    values = {
        "n_routed_experts": fields.integer("deepseek2.expert_count", minimum=1),
        "num_experts_per_tok": fields.integer("deepseek2.expert_used_count", minimum=1),
        "moe_intermediate_size": fields.integer("deepseek2.expert_feed_forward_length", minimum=1),
        "n_shared_experts": whole("expert_shared_count", 0),
        "first_k_dense_replace": whole("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.number("deepseek2.expert_weights_scale", default=1.0),
        "norm_topk_prob": fields.flag("deepseek2.expert_weights_norm", default=False),
        "n_group": groups,
        "topk_group": whole("expert_group_used_count", 1),
    }
    if gating == _SIGMOID:
        return values | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return values | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
