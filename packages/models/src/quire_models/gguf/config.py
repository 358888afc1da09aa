"""A GGUF file's metadata -> the config.json of the checkpoint that it was made from. Free of torch."""

from __future__ import annotations

import math
import struct
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.deepseek import deepseek_values
from quire_models.gguf.header import GgufHeader, needed
from quire_models.gguf.names import COMPRESSED, checkpoint_name, is_linear

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

_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 2048, 32768)
"""Contexts of pre-training that frequencies of llama3's kind are compared with."""
_SPECIAL_SCALAR_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the one size whose scores are divided by hidden size over heads, not by the head's size."""


def config_values(header: GgufHeader) -> dict[str, Any]:
    """What config.json would say, with a `quantization_config` of method "gguf".

    Raises:
        CheckpointError: An architecture that is not read from GGUF files, or metadata that is missing or wrong.
    """
    meta, path = header.metadata, header.path
    name = meta.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture {name!r} is not read from GGUF files; {', '.join(GGUF_ARCHITECTURES)} are. "
            "Use the model's safetensors checkpoint"
        )
    architecture, model_type = GGUF_ARCHITECTURES[name]
    has_experts = bool(meta.get(f"{name}.expert_count"))
    if has_experts and name == "llama":
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    elif has_experts and name not in ("qwen2moe", "qwen3moe", "gpt-oss", "deepseek2"):
        raise CheckpointError(
            f"{path}: experts are read from GGUF files of llama (Mixtral), qwen2moe, qwen3moe, gpt-oss and deepseek2, "
            f"not of {name}; use the model's safetensors checkpoint"
        )
    values: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for key, field in _FIELDS.items():
        values[field] = needed(header, f"{name}.{key}")
    heads = values["num_attention_heads"]
    values |= {
        "num_key_value_heads": meta.get(f"{name}.attention.head_count_kv", heads),
        "head_dim": meta.get(f"{name}.attention.key_length", values["hidden_size"] // heads),
        "vocab_size": _shape(header, "token_embd.weight")[0],
        "rope_theta": meta.get(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, name, values["max_position_embeddings"]),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "torch_dtype": _dtype(header),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(meta),
    }
    if name.startswith("gemma"):
        values |= _gemma(meta, name, values)
    if name == "deepseek2":
        values |= deepseek_values(header, values)
    elif has_experts:
        values |= _experts(header, name)
    return {**values, "quantization_config": _quantization(header, name)}


def _shape(header: GgufHeader, name: str) -> tuple[int, ...]:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor {name}; convert the model again")
    return header.tensors[name].shape


def _eos_token_ids(meta: dict[str, Any]) -> list[int]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [meta.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _dtype(header: GgufHeader) -> str:
    """Of a file of plain numbers their own, otherwise bfloat16."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(header: GgufHeader, name: str, context: int) -> dict[str, Any] | None:
    meta = header.metadata
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, name)
    kind = meta.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = needed(header, f"{name}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        original = meta.get(f"{name}.rope.scaling.original_context_length", context)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(f"{header.path}: rope scaling {kind!r} is not read from GGUF files; linear and yarn are")


def _llama3_scaling(header: GgufHeader, name: str) -> dict[str, Any]:
    """Files keep what each frequency is divided by; which of llama3's settings that was is found by comparing."""
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.kind != "F32":
        raise CheckpointError(
            f"{header.path}: rope_freqs.weight must be F32, is {tensor.kind}; convert the model again"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        found = struct.unpack(f"<{len(tensor_bytes := file.read(tensor.num_bytes)) // 4}f", tensor_bytes)
    theta, factor = header.metadata.get(f"{name}.rope.freq_base", 10000.0), max(found)
    for context in _LLAMA3_CONTEXTS:
        wanted = [_llama3_divisor(theta ** (-i / len(found)), factor, context) for i in range(len(found))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise CheckpointError(
        f"{header.path}: rope_freqs.weight is not what llama3's rope scaling gives for a context of "
        f"{', '.join(map(str, _LLAMA3_CONTEXTS))}; use the model's safetensors checkpoint"
    )


def _llama3_divisor(frequency: float, factor: float, context: int) -> float:
    """Of Llama 3.1: long waves by the factor, short ones by 1, smoothly between."""
    wavelength = 2 * math.pi / frequency
    if wavelength < context / 4.0:
        return 1.0
    if wavelength > context / 1.0:
        return factor
    smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _experts(header: GgufHeader, name: str) -> dict[str, Any]:
    meta = header.metadata
    number = needed(header, f"{name}.expert_count")
    values: dict[str, Any] = {
        "num_local_experts": number,
        "num_experts": number,
        "num_experts_per_tok": needed(header, f"{name}.expert_used_count"),
    }
    if name == "llama":
        return values
    inner = needed(header, f"{name}.expert_feed_forward_length")
    if name == "gpt-oss":
        # Frequencies between those that are kept and those that are divided are not cut to whole dimensions.
        scaling = _rope_scaling(header, name, needed(header, f"{name}.context_length"))
        values["rope_scaling"] = scaling and {**scaling, "truncate": False}
        return values | {
            "intermediate_size": inner,
            "sliding_window": meta.get(f"{name}.attention.sliding_window"),
            "attention_bias": True,
        }
    values |= {
        "moe_intermediate_size": inner,
        "norm_topk_prob": meta.get(f"{name}.expert_weights_norm", name == "qwen3moe"),
    }
    if name == "qwen2moe":
        values["shared_expert_intermediate_size"] = _shape(header, "blk.0.ffn_up_shexp.weight")[0]
    return values


def _gemma(meta: dict[str, Any], name: str, values: dict[str, Any]) -> dict[str, Any]:
    special = values["num_hidden_layers"] == _SPECIAL_SCALAR_LAYERS.get(name)
    size = values["hidden_size"] / values["num_attention_heads"] if special else values["head_dim"]
    more: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size,
        "attn_logit_softcapping": meta.get(f"{name}.attn_logit_softcapping"),
        "final_logit_softcapping": meta.get(f"{name}.final_logit_softcapping"),
        "sliding_window": meta.get(f"{name}.attention.sliding_window"),
    }
    pattern = meta.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        more["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern:
        more["sliding_window_pattern"] = pattern
    if name == "gemma3":
        more["rope_local_base_freq"] = meta.get("gemma3.rope.freq_base_swa", 10000.0)
        more["rope_theta"] = meta.get("gemma3.rope.freq_base", 1e6)
    return more


def _quantization(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Type of each linear layer; experts that lie in one tensor have one entry."""
    types: dict[str, str] = {}
    tied = "output.weight" not in header.tensors
    for tensor in header.tensors.values():
        name = checkpoint_name(tensor.name, architecture)
        if tied and name == "model.embed_tokens.weight" and tensor.kind in COMPRESSED:
            name = "lm_head.weight"  # as a copy of its own; the embedding is widened
        if is_linear(name):
            types[name.removesuffix(".weight")] = tensor.kind
    return {"quant_method": "gguf", "types": types}
