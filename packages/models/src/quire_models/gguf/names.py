"""Names of GGUF tensors -> names of the checkpoint that the file was made from, and which of them stay compressed.

Free of torch."""

from __future__ import annotations

import re

__all__ = ["COMPRESSED", "checkpoint_name", "is_linear", "of_each_expert", "stays_compressed"]

COMPRESSED = {
    "Q8_0": 8, "Q4_0": 4, "Q5_0": 8, "IQ4_NL": 8, "IQ4_XS": 8, "MXFP4": 8,
    "Q4_1": 16, "Q5_1": 16, "Q2_K": 16, "Q3_K": 16, "Q4_K": 16, "Q5_K": 16, "Q6_K": 16,
    "IQ2_XXS": 16, "IQ2_XS": 16, "IQ2_S": 16, "IQ3_XXS": 16, "IQ3_S": 16, "IQ1_S": 16, "IQ1_M": 16,
}  # fmt: skip
"""Type that is read as it is in the file -> bits of the form in memory where nothing multiplies it in blocks: whole
numbers in groups of 32, or 16 for the compute dtype. Other types are widened to that when they are loaded."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of families with a norm before and behind each part."""
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Routed experts lie in one tensor, and have no numbers here."""
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_GPT_OSS = {
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_DEEPSEEK = {
    **_EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.keys",
    "attn_v_b": "self_attn.kv_b_proj.values",
}
"""Later files have keys and values of the latent apart; they are put together again."""
_OTHER = {
    "deepseek2": _DEEPSEEK,
    "gemma2": _AROUND,
    "gemma3": _AROUND,
    "llama": _MIXTRAL,
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "gpt-oss": _GPT_OSS,
}
"""Architecture -> what it names differently."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
"""One matrix of one expert, as Mixtral's were written at first."""


def checkpoint_name(name: str, architecture: str) -> str:
    """ "blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj.weight"; a name that is not known comes back."""
    if expert := _EXPERT.fullmatch(name):
        stacked = checkpoint_name(f"{expert[1]}_exps.weight", architecture)
        return stacked.replace(".experts.", f".experts.{expert[2]}.")
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    parts = _OF_LAYER | _OTHER.get(architecture, {})
    part = parts.get(match[2])
    if part is None:
        return name
    kind = {"self_attn.sinks": "", "mlp.gate.e_score_correction": "_bias"}.get(part, f".{match[3]}")
    return f"model.layers.{match[1]}.{part}{kind}"


def of_each_expert(name: str, num_experts: int) -> tuple[str, ...]:
    """ "mlp.experts.gate_proj.weight" -> "mlp.experts.0.gate_proj.weight", ...; nothing where it is not of all."""
    if ".experts." not in name or re.search(r"\.experts\.\d", name):
        return ()
    return tuple(name.replace(".experts.", f".experts.{expert}.") for expert in range(num_experts))


def is_linear(name: str) -> bool:
    """Whether the tensor of this checkpoint name is the weight of a linear layer, the LM head or the embedding."""
    return name.endswith(("_proj.weight", "_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")) or name in (
        "lm_head.weight",
        "model.embed_tokens.weight",
    )


def stays_compressed(name: str, kind: str) -> bool:
    """Whether a tensor of this checkpoint name and type is kept as it is in the file."""
    return is_linear(name) and kind in COMPRESSED
