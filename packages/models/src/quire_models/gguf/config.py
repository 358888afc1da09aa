"""A GGUF file's metadata -> the config.json of the checkpoint that it was made from. Free of torch."""

from __future__ import annotations

import math
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.gguf.deepseek import deepseek_values
from quire_models.gguf.end_tokens import end_token_ids, named_token_id, tokens_of
from quire_models.gguf.header import GgufHeader
from quire_models.gguf.layers import check_shapes, number_of_layers, of_all_layers, shape_of
from quire_models.gguf.names import checkpoint_name, is_linear
from quire_models.gguf.rope import rope_scaling

__all__ = ["GGUF_ARCHITECTURES", "config_values"]

GGUF_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
}
"""general.architecture -> class and model type. DeepSeek-V3's are written as deepseek2, Mistral's and
Mixtral's as llama."""

_HARMLESS = (
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "rope.scaling.original_context_length",
)
"""Metadata of any architecture that makes no difference to its network, or only where it is read."""
_SAID = ("attention.sliding_window", "attention.sliding_window_pattern")
"""Metadata that other readers of the format do not read either for architectures where Quire does not."""
_NEUTRAL = {
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.output_scale": 1.0,
    "expert_weights_scale": 1.0,
    "attention.causal": True,
}
"""Metadata that is written with the value that it has without being written."""
_SPECIAL_SCALAR_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the one size whose scores are divided by hidden size over heads, not by the head's size."""


def config_values(header: GgufHeader) -> dict[str, Any]:
    """What config.json would say, with a `quantization_config` of method "gguf".

    Raises:
        CheckpointError: An architecture that is not read from GGUF files, or metadata that is missing or wrong.
    """
    fields, path = header.fields, header.path
    name = fields.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture {name!r} is not read from GGUF files; {', '.join(GGUF_ARCHITECTURES)} are. "
            "Use the model's safetensors checkpoint"
        )
    architecture, model_type = GGUF_ARCHITECTURES[name]
    has_experts = fields.integer(f"{name}.expert_count", default=0, minimum=0) > 0
    if has_experts and name == "llama":
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    elif has_experts and name not in ("qwen2moe", "qwen3moe", "gpt-oss", "deepseek2"):
        raise CheckpointError(
            f"{path}: experts are read from GGUF files of llama (Mixtral), qwen2moe, qwen3moe, gpt-oss and deepseek2, "
            f"not of {name}; use the model's safetensors checkpoint"
        )
    heads = of_all_layers(header, f"{name}.attention.head_count")
    hidden = fields.integer(f"{name}.embedding_length", minimum=1)
    context = fields.integer(f"{name}.context_length", minimum=1)
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": number_of_layers(header, name),
        "intermediate_size": of_all_layers(header, f"{name}.feed_forward_length"),
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon", minimum=0.0),
        "num_key_value_heads": of_all_layers(header, f"{name}.attention.head_count_kv", heads),
        "head_dim": fields.integer(f"{name}.attention.key_length", default=hidden // heads, minimum=1),
        "vocab_size": shape_of(header, "token_embd.weight")[0],
        "rope_theta": fields.number(f"{name}.rope.freq_base", default=10000.0, above=0.0),
        "rope_scaling": rope_scaling(header, name, context),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "torch_dtype": _dtype(header),
        "bos_token_id": named_token_id(header, "bos"),
        "eos_token_id": end_token_ids(header),
    }
    if name != "deepseek2":
        _check_head_sizes(header, name, values["head_dim"])
    if name.startswith("gemma"):
        values |= _gemma(header, name, values)
    if name == "deepseek2":
        values |= deepseek_values(header, values)
    elif has_experts:
        values |= _experts(header, name, values)
    check_shapes(header, values)
    if len(tokens_of(header)) > values["vocab_size"]:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens_of(header))} tokens, but token_embd.weight has "
            f"{values['vocab_size']} rows; convert the model again"
        )
    _check_all_read(header, name)
    return {**values, "quantization_config": _quantization(header, name)}


def _check_head_sizes(header: GgufHeader, name: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        header.fields.fixed(f"{name}.{key}", head_dim)
    scale = header.fields.number(f"{name}.attention.scale", default=0.0)
    if scale and not name.startswith("gemma") and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4):
        raise CheckpointError(
            f"{header.path}: {name}.attention.scale {scale} is not read from GGUF files, where it is not that of the "
            f"head's size ({head_dim**-0.5:.6g}); use the model's safetensors checkpoint"
        )


def _check_all_read(header: GgufHeader, name: str) -> None:
    """Metadata of the architecture describes the network: what of it is set and has not been read makes another one."""
    fields = header.fields
    fields.skip(*(f"{name}.{key}" for key in _HARMLESS))
    for key, neutral in _NEUTRAL.items():
        if f"{name}.{key}" not in fields.names_read:
            fields.fixed(f"{name}.{key}", neutral)
    said = tuple(f"{name}.{key}" for key in _SAID)
    unread = {key: value for key, value in fields.unread().items() if key.startswith(f"{name}.") and key not in said}
    Fields(unread, str(header.path)).refuse_unread("use the model's safetensors checkpoint")


def _dtype(header: GgufHeader) -> str:
    """Of a file of plain numbers their own, otherwise bfloat16."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _experts(header: GgufHeader, name: str, outer: dict[str, Any]) -> dict[str, Any]:
    fields = header.fields
    number = fields.integer(f"{name}.expert_count", minimum=1)
    fields.fixed(f"{name}.expert_gating_func", *((1, 3) if name == "gpt-oss" else (1,)))  # softmax
    used = fields.integer(f"{name}.expert_used_count", minimum=1)
    if used > number:
        raise CheckpointError(f"{header.path}: {name}.expert_used_count is {used}, of {number} experts")
    values: dict[str, Any] = {"num_local_experts": number, "num_experts": number, "num_experts_per_tok": used}
    if name == "llama":
        fields.skip("llama.expert_feed_forward_length")
        return values
    inner = fields.integer(f"{name}.expert_feed_forward_length", minimum=1)
    if name == "gpt-oss":
        # Frequencies between those that are kept and those that are divided are not cut to whole dimensions.
        scaling = outer["rope_scaling"]
        return values | {
            "rope_scaling": scaling and {**scaling, "truncate": False},
            "intermediate_size": inner,
            "sliding_window": fields.integer(f"{name}.attention.sliding_window", default=None, minimum=1),
            "attention_bias": True,
        }
    values |= {
        "moe_intermediate_size": inner,
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", default=name == "qwen3moe"),
    }
    if name == "qwen2moe":
        values["shared_expert_intermediate_size"] = shape_of(header, "blk.0.ffn_up_shexp.weight")[0]
        fields.skip("qwen2moe.expert_shared_feed_forward_length")
    return values


def _gemma(header: GgufHeader, name: str, values: dict[str, Any]) -> dict[str, Any]:
    fields = header.fields
    special = values["num_hidden_layers"] == _SPECIAL_SCALAR_LAYERS.get(name)
    size = values["hidden_size"] / values["num_attention_heads"] if special else values["head_dim"]
    more: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size,
        "attn_logit_softcapping": fields.number(f"{name}.attn_logit_softcapping", default=None, above=0.0),
        "final_logit_softcapping": fields.number(f"{name}.final_logit_softcapping", default=None, above=0.0),
        "sliding_window": fields.integer(f"{name}.attention.sliding_window", default=None, minimum=1),
    }
    pattern = fields.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != values["num_hidden_layers"]:
            raise CheckpointError(
                f"{header.path}: {name}.attention.sliding_window_pattern has {len(pattern)} entries for "
                f"{values['num_hidden_layers']} layers; convert the model again"
            )
        more["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern:
        more["sliding_window_pattern"] = fields.integer(f"{name}.attention.sliding_window_pattern", minimum=1)
    if name == "gemma3":
        more["rope_local_base_freq"] = fields.number("gemma3.rope.freq_base_swa", default=10000.0, above=0.0)
        more["rope_theta"] = fields.number("gemma3.rope.freq_base", default=1e6, above=0.0)
    return more


def _quantization(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Type of each linear layer and of the embedding; experts that lie in one tensor have one entry."""
    types: dict[str, str] = {}
    for tensor in header.tensors.values():
        name = checkpoint_name(tensor.name, architecture)
        if is_linear(name):
            types[name.removesuffix(".weight")] = tensor.kind
    return {"quant_method": "gguf", "types": types}
