"""The tensors of a `model.bin` under the names of Transformers' Whisper: mapped, int8 and int16 widened."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models.ctranslate2.header import BinTensor, read_header

__all__ = ["CTranslate2Checkpoint"]

_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(.+)/(weight|bias|gamma|beta)")
_PARTS: dict[str, tuple[str, ...]] = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
}
"""Part of a layer -> the modules that it is, one above the other."""
_KINDS = {"gamma": "weight", "beta": "bias"}
_OUTSIDE = {
    "conv1/weight": "conv1.weight",
    "conv1/bias": "conv1.bias",
    "conv2/weight": "conv2.weight",
    "conv2/bias": "conv2.bias",
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
}


@dataclass(frozen=True, slots=True)
class CTranslate2Checkpoint:
    """The weights of one file."""

    path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self.path.resolve(),)

    @property
    def total_bytes(self) -> int:
        """Of the file."""
        return self.path.stat().st_size

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and tensor of every parameter.

        Raises:
            CheckpointError: the file cannot be read, or has a bias where Whisper has none.
        """
        stored = read_header(self.path).tensors
        data = np.memmap(self.path, dtype=np.uint8, mode="c")
        for name, tensor in stored.items():
            stack, _, rest = name.partition("/")
            if rest in _OUTSIDE:
                yield f"model.{stack}.{_OUTSIDE[rest]}", _floats(name, stored, data)
            elif (found := _LAYER.fullmatch(name)) and found[3] in _PARTS and tensor.shape:
                parts, kind = _PARTS[found[3]], _KINDS.get(found[4], found[4])
                pieces = _floats(name, stored, data).chunk(len(parts))
                for part, piece in zip(parts, pieces, strict=True):
                    if part.endswith("k_proj") and kind == "bias":
                        if piece.any():
                            raise CheckpointError(f"{self.path}: {name} has biases of keys, which Whisper has not")
                        continue
                    yield f"model.{stack}.layers.{found[2]}.{part}.{kind}", piece


def _floats(name: str, stored: dict[str, BinTensor], data: np.memmap) -> Tensor:
    """A tensor as floating-point numbers."""
    tensor = _mapped(stored[name], data)
    scale = stored.get(f"{name}_scale")
    if scale is None:
        return tensor
    factors = _mapped(scale, data).float()
    return tensor.float() / (factors[:, None] if factors.ndim else factors)


def _mapped(tensor: BinTensor, data: np.memmap) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    raw = torch.from_numpy(data[tensor.offset : tensor.offset + tensor.numel * dtype.itemsize])
    if tensor.offset % dtype.itemsize:  # a view must begin at a multiple of its numbers' size
        raw = raw.clone()
    return raw.view(dtype).reshape(tensor.shape)
