"""The tensors of a GGUF file under the names and in the order of rows of the checkpoint that it was made from.

Plain numbers and types that stay compressed are mapped; the others are widened as they are asked for, one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire_models.gguf.grids import grid_of, library
from quire_models.gguf.header import GgufTensor, read_header
from quire_models.gguf.names import checkpoint_name, of_each_expert, stays_compressed
from quire_quantization.ggml import GGML_TYPES, read_ggml

__all__ = ["GgufCheckpoint"]

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNUSED = ("rope_freqs.weight",)
_ROWS_BYTES = 1 << 24
"""Compressed bytes that are widened at a time."""


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """The weights of one file, or of its parts, beside its config.json."""

    path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, or its parts, in order."""
        return tuple(dict.fromkeys(tensor.path for tensor in read_header(self.path).tensors.values()))

    @property
    def total_bytes(self) -> int:
        """Of all tensors as they are in the file."""
        return sum(tensor.num_bytes for tensor in read_header(self.path).tensors.values())

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and tensor: float, or uint8 [outputs, bytes of a row] of what stays compressed.

        Raises:
            CheckpointError: The file cannot be read.
        """
        header = read_header(self.path)
        architecture = header.metadata["general.architecture"]
        config = json.loads((self.path.parent / "config.json").read_text())
        apart: dict[str, dict[str, Tensor]] = {}
        data = {file: np.memmap(file, dtype=np.uint8, mode="c") for file in self.files}
        for tensor in header.tensors.values():
            if tensor.name in _UNUSED:
                continue
            name = checkpoint_name(tensor.name, architecture)
            raw = torch.from_numpy(data[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes])
            compressed = stays_compressed(name, tensor.kind)
            value = raw.view(*tensor.shape[:-1], -1) if compressed else _floats(raw, tensor)
            if name.endswith("shared_expert_gate.weight"):
                value = value.view(1, -1)
            if name.endswith((".keys.weight", ".values.weight")):
                if tensor.name.replace("_k_b.", "_kv_b.").replace("_v_b.", "_kv_b.") not in header.tensors:
                    yield from _joined(name, value, apart)  # files of some time have both forms
                continue
            if names := of_each_expert(name, len(value)):
                yield from zip(names, value, strict=True)
                continue
            if architecture == "llama" and ".attn_q." in tensor.name:
                value = _rows_of_halves(value, config["num_attention_heads"])
            elif architecture == "llama" and ".attn_k." in tensor.name:
                value = _rows_of_halves(value, config["num_key_value_heads"])
            elif architecture.startswith("gemma") and name.endswith("norm.weight"):
                value = value - 1.0  # files have one added to the weights of norms
            yield name, value


def _floats(raw: Tensor, tensor: GgufTensor) -> Tensor:
    """Of the tensor's shape; widened ones in float32."""
    if tensor.kind in _PLAIN:
        return raw.view(_PLAIN[tensor.kind]).view(tensor.shape)
    rows = raw.view(math.prod(tensor.shape[:-1]), -1)
    out = torch.empty(len(rows), tensor.shape[-1])
    step = max(1, _ROWS_BYTES // rows.shape[1])
    for begin in range(0, len(rows), step):
        out[begin : begin + step] = _decoded(rows[begin : begin + step], tensor.kind)
    return out.view(tensor.shape)


def _decoded(rows: Tensor, kind: str) -> Tensor:
    """rows [N, bytes] uint8 -> [N, inputs] float32."""
    if kind in GGML_TYPES:
        return read_ggml(rows, kind, grid_of(kind)).dequantized()
    quants = library()
    decoded: Tensor = torch.from_numpy(quants.dequantize(rows.numpy(), quants.GGMLQuantizationType[kind]))
    return decoded


def _rows_of_halves(value: Tensor, heads: int) -> Tensor:
    """Rows of a head from pairs that are rotated together side by side to all firsts, then all seconds."""
    size = value.shape[0] // heads
    return value.view(heads, size // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _joined(name: str, value: Tensor, apart: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Of latent attention: keys [H, R, N] and values [H, V, R], when both have come, as one matrix [H * (N + V), R].

    Args:
        name: "...kv_b_proj.keys.weight", or values.
        apart: Name of the matrix -> what has come of it.
    """
    matrix, _, part = name.removesuffix(".weight").rpartition(".")
    found = apart.setdefault(matrix, {})
    found[part] = value
    if len(found) == 2:
        yield f"{matrix}.weight", torch.cat((found["keys"].transpose(1, 2), found["values"]), dim=1).flatten(0, 1)
        del apart[matrix]
