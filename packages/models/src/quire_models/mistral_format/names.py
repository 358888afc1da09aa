"""Names of tensors in Mistral AI's own format -> those of Transformers' classes of the same networks. Free of torch."""

from __future__ import annotations

import re

from quire_interfaces import Fields

__all__ = ["checkpoint_name", "rotated_heads"]

_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
    "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_KINDS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
"""Scales of FP8, which are multiplied with in both formats."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_EXPERT = re.compile(r"(feed_forward\.)?experts\.(\d+)\.(w[123])")
_UNSERVED = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""What names of towers begin with."""


def checkpoint_name(name: str) -> str | None:
    """ "layers.0.attention.wq.weight" -> "model.layers.0.self_attn.q_proj.weight"; None for tensors that are not
    loaded: those of towers, and scales of keys and values; a name that is not known comes back."""
    if name.startswith(_UNSERVED) or "_fake_quantizer." in name:
        return None
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{_KINDS.get(kind, kind)}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    if expert := _EXPERT.fullmatch(found[2]):
        outer, matrix = ("block_sparse_moe", expert[3]) if expert[1] else ("mlp", _MATRICES[expert[3]])
        part: str | None = f"{outer}.experts.{expert[2]}.{matrix}"
    else:
        part = _OF_LAYER.get(found[2])
    return name if part is None else f"model.layers.{found[1]}.{part}.{_KINDS.get(found[3], found[3])}"


def rotated_heads(name: str, config: Fields) -> int:
    """Heads of a tensor whose rows are in this format pairs of dimensions that rotate together, where Transformers'
    class has the first of all pairs and then the second; 0 for other tensors.

    Args:
        name: In this format.
        config: What config.json says.
    """
    part = name.rpartition(".")[0].rpartition(".attention.")[2]
    fields = {"wq": "num_attention_heads", "wk": "num_key_value_heads"}
    is_latent = config.get("kv_lora_rank") is not None  # whose class rotates pairs as they are here
    return config.integer(fields[part]) if part in fields and not is_latent else 0
