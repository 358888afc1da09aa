"""The tensors of a folder in Mistral AI's own format, under the names and in the order of rows of Transformers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_interfaces import Fields, read_json
from quire_models.mistral_format.names import checkpoint_name, rotated_heads

__all__ = ["MistralCheckpoint"]


class StoredFiles(Protocol):
    """Files of safetensors; `CheckpointFiles` is one."""

    @property
    def files(self) -> tuple[Path, ...]:
        """In order of name."""

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and mapped tensor of everything in them."""


@dataclass(frozen=True, slots=True)
class MistralCheckpoint:
    """The weights of a folder that was made of a params.json (`quire_models.mistral_format.folder`)."""

    folder: Path
    stored: StoredFiles

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of weights."""
        return self.stored.files

    @property
    def total_bytes(self) -> int:
        """Of all tensors, those of towers included."""
        return self.stored.total_bytes

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and tensor of every parameter: mapped, but for projections of rotated heads, which are copied."""
        config = Fields(read_json(self.folder / "config.json"), str(self.folder / "config.json"))
        for name, tensor in self.stored.tensors():
            if (known := checkpoint_name(name)) is not None:
                yield known, _in_halves(tensor, rotated_heads(name, config))


def _in_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head, stored as pairs (0, 1), (2, 3), ..., as 0, 2, ..., 1, 3, ...; what is not of all outputs, and
    tensors without such heads, come back."""
    if not num_heads or not tensor.ndim or tensor.shape[0] % (2 * num_heads):
        return tensor
    rows = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    paired: Tensor = rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2)
    return paired.reshape(tensor.shape).view(tensor.dtype)
