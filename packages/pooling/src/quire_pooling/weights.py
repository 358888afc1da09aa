"""Tensors of a pooler that are in files beside the network's: modules of sentence-transformers, heads of BGE-M3, and
rows of an LM head. Nothing in a file is ever run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_pooling.spec import DenseSpec, PoolerSpec

__all__ = ["load_pooler_weights"]


def load_pooler_weights(
    spec: PoolerSpec,
    folder: Path,
    network_folder: Path | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> dict[str, Tensor]:
    """The tensors of `spec` that do not come with the network's.

    Args:
        spec: What the pooler does, as `read_pooler` gives it.
        folder: The checkpoint's.
        network_folder: Where the weights of its network are; None for `folder`.
        rename: Name of a tensor in its files -> that in the network, or None for one of a tower; None for the same.

    Returns:
        Name -> tensor, on the CPU, in the dtype of its file. With those of the network's own head they are the
        `weights` of `Pooler`.

    Raises:
        CheckpointError: A file or a tensor is missing or damaged; the message names it.
    """
    weights: dict[str, Tensor] = {}
    wanted: dict[str, list[str]] = {}
    for name in spec.shapes():
        place, _, tensor = name.rpartition("/")
        if place:
            wanted.setdefault(place, []).append(tensor)
    for place, names in wanted.items():
        tensors = _module_tensors(folder / place)
        for name in names:
            if name not in tensors:
                raise CheckpointError(f"{folder / place} has no tensor {name}; download the checkpoint again")
            weights[f"{place}/{name}"] = tensors[name]
    for step in spec.head.steps:
        if isinstance(step, DenseSpec) and step.rows:
            weights[step.weight] = _rows(network_folder or folder, step, rename)
    return weights


def _module_tensors(place: Path) -> dict[str, Tensor]:
    """The tensors of a module's folder, or of a file of tensors."""
    if place.is_file():
        return _pickled(place)
    if (file := place / "model.safetensors").is_file():
        with _opened(file) as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
    if (file := place / "pytorch_model.bin").is_file():
        return _pickled(file)
    raise CheckpointError(f"{place} has neither model.safetensors nor pytorch_model.bin; download the checkpoint again")


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error


def _pickled(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)  # tensors only: nothing in it is called
    except Exception as error:  # a damaged file fails wherever the unpickler stumbles
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"cannot read {file}: {reason}; download the file again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} does not hold names and tensors; download the file again")
    return {str(name): tensor.detach() for name, tensor in tensors.items()}


def _rows(folder: Path, step: DenseSpec, rename: Callable[[str], str | None] | None) -> Tensor:
    """Rows of a matrix of the network, without reading the rest; float32 [out_features, in_features]."""
    for file in _network_files(folder):
        with _opened(file) as reader:
            names = reader.keys()
            stored = next((name for name in names if (rename(name) if rename else name) == step.weight), None)
            if stored is None:
                continue
            matrix = reader.get_slice(stored)
            size = matrix.get_shape()[0]
            if (largest := max(step.rows + step.minus_rows)) >= size:
                raise CheckpointError(f"{file}: {step.weight} has {size} rows, and token {largest} is asked for")
            chosen = torch.cat([matrix[row : row + 1] for row in step.rows]).float()
            if step.minus_rows:
                chosen = chosen - torch.cat([matrix[row : row + 1] for row in step.minus_rows]).float()
            return chosen
    raise CheckpointError(
        f"{folder} has no tensor {step.weight} in a safetensors file, which scores are made of; convert the checkpoint "
        "(load it with transformers and call save_pretrained(folder))"
    )


def _network_files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob("*.safetensors")))
