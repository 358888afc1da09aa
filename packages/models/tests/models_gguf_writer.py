"""Writes models of Transformers as GGUF files, with the names and the quantizers of the package gguf; returns with each
weight what it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
}
_SCALE_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,)}
_SCALE_AT |= {"TQ2_0": (64,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Bytes of a block where its float16 scales are; 0 for the others."""
_SIZE = {"Q2_K": 0.02, "Q3_K": 0.002, "Q4_K": 0.0008, "Q5_K": 0.0004, "Q6_K": 0.0001}


def blocks(kind: str, rows: int, inputs: int, generator: np.random.Generator) -> np.ndarray:
    """Random blocks of a type: any bits, with scales of moderate size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = generator.integers(0, 256, (rows * inputs // block, size), dtype=np.uint8)
    scale = generator.uniform(0.5, 1.0, len(data)) * _SIZE.get(kind, 0.01 if kind.startswith("TQ") else 0.004)
    halves = scale.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":
        data[:, 0] = generator.integers(118, 123, len(data))
    elif kind == "IQ1_M":  # four bits of the scale on top of each of four words
        words, bits = data[:, 48:].view(np.uint16), scale.astype(np.float16).view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((bits >> (4 * i) & 0xF) << 12)
    else:
        for at in _SCALE_AT.get(kind, (0,)):
            data[:, at : at + 2] = halves
    return data.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: Any,
    family: str,
    kind_of: Callable[[str], str],
    vocabulary: Callable[[Any], None] | None = None,
    part_tensors: int = 0,
    *,
    stacked: bool = True,
) -> None:
    """Write `model`, each matrix in the type that `kind_of` gives for its name there, and set its weights to what the
    file then says. part_tensors: at most so many in a file; 0 for one file. stacked: a tensor
    holds all experts, or keys and values of latents."""
    config = model.config
    writer = gguf.GGUFWriter(path, family, split_max_tensors=part_tensors)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "deepseek2":
        _write_latents(writer, config, stacked=stacked)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    counts = [getattr(config, name, 0) for name in ("num_local_experts", "n_routed_experts", "num_experts")]
    if experts := next(filter(None, counts), 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if attention := rope.get("attention_factor"):
            writer.add_rope_scaling_attn_factors(attention / (0.1 * math.log(rope["factor"]) + 1.0))
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "linear":  # without a type, which is linear then
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "longrope":
        writer.add_tensor("rope_freqs.weight", np.array(rope["long_factor"], dtype=np.float32))
    if family in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope.get("rope_type") == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        plain = rope["rope_theta"] ** -(np.arange(len(frequencies)) / len(frequencies))
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))
    if vocabulary is not None:
        vocabulary(writer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    generator = np.random.default_rng(5)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            for part, matrices in _experts(name, parameter, config):
                stored_name = names.get_name(part, try_suffixes=(".weight", ".bias"))
                kind = "F32" if matrices.ndim == 2 else kind_of(stored_name)
                stored, restored = _convert(matrices.contiguous().flatten(0, -2), kind, generator)
                stored, raw = stored.reshape(*matrices.shape[:-1], -1), gguf.GGMLQuantizationType[kind]
                if stacked:
                    writer.add_tensor(stored_name, stored, raw_dtype=raw)
                else:
                    for i, one in enumerate(stored):
                        writer.add_tensor(stored_name.replace("_exps", f".{i}"), one, raw_dtype=raw)
                matrices.copy_(restored.view(matrices.shape))
            continue
        if name.endswith("kv_b_proj.weight") and not stacked:
            for stored_name, matrices in _keys_and_values(name, parameter, config):
                kind = kind_of(stored_name)
                stored, restored = _convert(matrices.flatten(0, -2), kind, generator)
                stored = stored.reshape(*matrices.shape[:-1], -1)
                writer.add_tensor(stored_name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
                matrices.copy_(restored.view(matrices.shape))
            continue
        stored_name = names.get_name(name.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        if name.endswith(".sinks"):
            stored_name += ".weight"
        weight = parameter.detach()
        if name.endswith("shared_expert_gate.weight"):
            weight = weight[0]
        order = rows_in_pairs(name, weight, config) if family == "llama" else slice(None)
        stored = (weight + 1.0 if family.startswith("gemma") and "norm" in name else weight)[order]
        kind = "F32" if weight.ndim < 2 or "gate_inp" in stored_name else kind_of(stored_name)
        stored, restored = _convert(stored, kind, generator)
        writer.add_tensor(stored_name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        if family.startswith("gemma") and "norm" in name:
            restored -= 1.0
        parameter[order] = restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_latents(writer: gguf.GGUFWriter, config: Any, *, stacked: bool) -> None:
    """What describes DeepSeek; sizes of keys and values as files with `attn_kv_b` have them, or later ones."""
    key, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_head_count_kv(config.num_attention_heads if stacked else 1)
    writer.add_key_length(key if stacked else rank + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim if stacked else rank)
    if not stacked:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if mscale := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _keys_and_values(name: str, parameter: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Names and views [H, R, N] and [H, V, R] of the matrix of both."""
    of_heads = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = of_heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    layer = f"blk.{name.split('.')[2]}"
    return [(f"{layer}.attn_k_b.weight", keys.transpose(1, 2)), (f"{layer}.attn_v_b.weight", values)]


def _experts(name: str, parameter: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """A stacked tensor of Transformers' experts -> name and view [E, outputs, inputs] or [E, outputs] of each part."""
    outer, _, kind = name.rpartition(".")
    is_bias, by_turns = kind.endswith("_bias"), config.model_type == "gpt_oss"
    matrices = parameter if is_bias or not by_turns else parameter.transpose(1, 2)
    suffix = "bias" if is_bias else "weight"
    if kind.startswith("down"):
        return [(f"{outer}.down_proj.{suffix}", matrices)]
    half = matrices.shape[1] // 2
    gate, up = (matrices[:, 0::2], matrices[:, 1::2]) if by_turns else (matrices[:, :half], matrices[:, half:])
    return [(f"{outer}.gate_proj.{suffix}", gate), (f"{outer}.up_proj.{suffix}", up)]


def _convert(weight: Tensor, kind: str, generator: np.random.Generator) -> tuple[np.ndarray, Tensor]:
    type_ = gguf.GGMLQuantizationType[kind]
    try:
        stored = gguf.quants.quantize(weight.numpy(), type_)
    except NotImplementedError:
        stored = blocks(kind, *weight.shape, generator)
    return stored, torch.from_numpy(gguf.quants.dequantize(stored, type_).astype(np.float32))


def rows_in_pairs(name: str, weight: Tensor, config: Any) -> Any:
    """Order of rows of llama's queries and keys: dimensions that are rotated together side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return slice(None)
    size = len(weight) // heads[part]
    of_head = [half * size // 2 + i for i in range(size // 2) for half in (0, 1)]
    return torch.tensor([head * size + row for head in range(heads[part]) for row in of_head])
