"""Metadata of DeepSeek-V2's and V3's GGUF files ("deepseek2") -> fields of config.json. Free of torch.

Files without `expert_group_count` do not say which groups experts are chosen from: all of them are one group there.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader, needed

__all__ = ["deepseek_values"]

_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


def deepseek_values(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    """What differs from `values`, the fields of any decoder.

    Raises:
        CheckpointError: Metadata that is missing, or of a way to choose experts that is not known.
    """
    meta = header.metadata

    def of(key: str, default: Any = None) -> Any:
        return meta.get(f"deepseek2.{key}", default)

    rotated = needed(header, "deepseek2.rope.dimension_count")
    # Later files give the sizes of what the cache keeps as key_length, and those of a head apart.
    key = of("attention.key_length_mla") or needed(header, "deepseek2.attention.key_length")
    value = of("attention.value_length_mla") or needed(header, "deepseek2.attention.value_length")
    return {
        **_experts(header),
        "num_key_value_heads": values["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": of("attention.q_lora_rank"),
        "kv_lora_rank": needed(header, "deepseek2.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_interleave": True,
        "rope_scaling": _scaling(values["rope_scaling"], of("rope.scaling.yarn_log_multiplier", 0.0)),
    }


def _scaling(scaling: dict[str, Any] | None, log_multiplier: float) -> dict[str, Any] | None:
    """Files have a tenth of `mscale_all_dim`, which `mscale` equals."""
    if scaling is None or not log_multiplier:
        return scaling
    mscale = round(10.0 * log_multiplier, 6)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _experts(header: GgufHeader) -> dict[str, Any]:
    meta = header.metadata
    gating = meta.get("deepseek2.expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise CheckpointError(
            f"{header.path}: deepseek2.expert_gating_func {gating!r} is not known; {_SOFTMAX} (softmax) and {_SIGMOID} "
            "(sigmoid) are. Use the model's safetensors checkpoint"
        )
    groups = meta.get("deepseek2.expert_group_count", 1)
    values = {
        "n_routed_experts": needed(header, "deepseek2.expert_count"),
        "num_experts_per_tok": needed(header, "deepseek2.expert_used_count"),
        "moe_intermediate_size": needed(header, "deepseek2.expert_feed_forward_length"),
        "n_shared_experts": meta.get("deepseek2.expert_shared_count", 0),
        "first_k_dense_replace": meta.get("deepseek2.leading_dense_block_count", 0),
        "routed_scaling_factor": meta.get("deepseek2.expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("deepseek2.expert_weights_norm", False),
        "n_group": groups,
        "topk_group": meta.get("deepseek2.expert_group_used_count", 1),
    }
    if gating == _SIGMOID:
        return values | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return values | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
