"""Writes small GGUF files with any metadata, whose weights are zeros."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NETWORK: dict[str, Any] = {
    "embedding_length": 8, "block_count": 2, "feed_forward_length": 12, "attention.head_count": 2,
    "attention.head_count_kv": 1, "context_length": 4096, "attention.key_length": 4, "attention.value_length": 4,
    "rope.dimension_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
}  # fmt: skip
SHAPES = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_up": (12, 8)}


def write(
    file: Path,
    metadata: dict[str, Any] | None = None,
    *,
    tokens: Sequence[tuple[str, int]] = (),
    frequencies: Sequence[float] = (),
    architecture: str = "llama",
) -> Path:
    """A file with `metadata` over that of `NETWORK` (None takes a key away; a key without a prefix gets the
    architecture's), a vocabulary of (text, kind), and tensors of its shapes without more."""
    writer = gguf.GGUFWriter(file, architecture)
    values = {f"{architecture}.{key}": value for key, value in NETWORK.items()}
    for key, value in (metadata or {}).items():
        outer = key.startswith(("tokenizer.", "general.", "other."))
        values[key if outer else f"{architecture}.{key}"] = value
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
             list: writer.add_array}  # fmt: skip
    for key, value in values.items():
        if value is not None:
            kinds[type(value)](key, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([text for text, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
        writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", np.zeros((max(4, len(tokens)), 8), np.float32))
    for layer in range(2):
        for name, shape in SHAPES.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(shape, np.float32))
    if frequencies:
        writer.add_tensor("rope_freqs.weight", np.array(frequencies, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
