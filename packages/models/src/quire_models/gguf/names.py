"""Names of GGUF tensors -> names of the checkpoint that the file was made from, and which of them stay compressed.

Free of torch."""

from __future__ import annotations

import re

__all__ = ["COMPRESSED", "checkpoint_name", "is_linear", "stays_compressed"]

COMPRESSED = {"Q8_0": 8, "Q4_0": 4, "Q5_0": 8, "IQ4_NL": 8, "IQ4_XS": 8, "MXFP4": 8}
"""Type -> bits of the form in memory that holds its values exactly: whole numbers in groups of 32. The others have
minimums or smaller groups, and are widened to the compute dtype when they are loaded."""

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
_OTHER = {"gemma2": _AROUND, "gemma3": _AROUND}
"""Architecture -> what it names differently."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def checkpoint_name(name: str, architecture: str) -> str:
    """ "blk.0.attn_q.weight" -> "model.layers.0.self_attn.q_proj.weight"; a name that is not known comes back."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    parts = _OF_LAYER | _OTHER.get(architecture, {})
    part = parts.get(match[2])
    return name if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"


def is_linear(name: str) -> bool:
    """Whether the tensor of this checkpoint name is the weight of a linear layer, or the LM head."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def stays_compressed(name: str, kind: str) -> bool:
    """Whether a tensor of this checkpoint name and type is multiplied with as it is in the file."""
    return is_linear(name) and kind in COMPRESSED
