"""A checkpoint as a GGUF file for llama.cpp, with weights as wide as those that Quire is measured with.

Knows what the file says of plain decoders (Llama, Mistral, Qwen 2 and 3); names and quantizers are those of the package
gguf. The file has no vocabulary: programs that read it speak in token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from quire_interfaces import CheckpointError

__all__ = ["GGUF_FORMATS", "write_gguf"]

FAMILIES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MistralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
}
"""Architecture -> its name in the file, and its table of names."""
GGUF_FORMATS = {"plain": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Quire's form of weights -> type of matrices there."""
WIDE = "Q8_0"
"""Of the embedding and the head where matrices have 4 bits, which llama.cpp leaves wider, too."""


def write_gguf(folder: Path, path: Path, weights: str, dtype: str = "bfloat16") -> None:
    """Write a file.

    Args:
        folder: Checkpoint with safetensors.
        path: Where to.
        weights: A key of `GGUF_FORMATS`.
        dtype: Of plain matrices: bfloat16, float16 or float32.

    Raises:
        CheckpointError: no family of `FAMILIES`, a rotation with factors, or quantized weights.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise CheckpointError(f"{folder}: no GGUF file is written of {architecture}, only of {', '.join(FAMILIES)}")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default" or config.get("quantization_config"):
        raise CheckpointError(f"{folder}: no GGUF file is written of scaled rotations or quantized weights")
    family, arch = FAMILIES[architecture]
    kind = GGUF_FORMATS[weights]
    if weights == "plain":
        kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    writer = gguf.GGUFWriter(path, family)
    _write_sizes(writer, config, {"rope_theta": 10_000.0, **config, **rope})
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, read in _tensors(folder).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise CheckpointError(f"{folder}: {name} has no name in a GGUF file")
        values = read()
        if family == "llama" and ".q_proj." in name:
            values = _interleaved(values, config["num_attention_heads"])
        if family == "llama" and ".k_proj." in name:
            values = _interleaved(values, config.get("num_key_value_heads", config["num_attention_heads"]))
        own = gguf.GGMLQuantizationType[_kind(stored, values, kind)]
        writer.add_tensor(stored, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(stored: str, values: np.ndarray, kind: str) -> str:
    """The type of a tensor where matrices have `kind`."""
    if values.ndim == 1:
        return "F32"
    if kind == "Q4_0" and stored.startswith(("token_embd", "output.")):
        kind = WIDE
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return "F16" if values.shape[-1] % block else kind  # as llama.cpp keeps rows that are no whole blocks


def _write_sizes(writer: Any, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(defaults["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")


def _tensors(folder: Path) -> dict[str, Callable[[], np.ndarray]]:
    """Name -> reads the tensor as float32."""
    found: dict[str, Callable[[], np.ndarray]] = {}

    def reader(path: Path, name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            with safe_open(path, framework="pt") as tensors:
                return np.ascontiguousarray(tensors.get_tensor(name).float().numpy())

        return read

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            found |= {name: reader(path, name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    return found


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: pairs of neighbours instead of halves of a head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
