"""A checkpoint with quantized linear layers, written from an unquantized one, in the format of compressed-tensors.

Tensor by tensor: memory holds one layer and one file of the result, whatever the model's size. Each weight is rounded
as `--quantization` would do it while loading, so both compute the same. Knows folders and names; the arithmetic is in
`quire_quantization`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError, LinearMethod
from quire_models import ModelConfig, Network, build_model
from quire_models.checkpoint_files import open_checkpoint
from quire_models.quantization_config import QuantizationConfig
from quire_ops import OpRequest
from quire_ops.grouped import unblock_groups, unpack_int4
from quire_quantization import linear_method
from quire_quantization.stored import pack_int32

__all__ = ["SCHEMES", "QuantizeReport", "quantize_checkpoint"]

Progress = Callable[[int, int], None]
"""(bytes read so far, bytes of all) -> None."""


class Scheme(NamedTuple):
    """A form that is written."""

    method: str
    """Of `quire_quantization.linear_method`."""
    format: str
    """Of compressed-tensors."""
    weights: dict[str, Any]
    """What its `config_groups` say."""
    store: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]
    """(what the method keeps, the weight) -> tensors by their names behind the layer's."""


def _store_int8(made: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    return {"weight": made["weight"], "weight_scale": made["scale"][:, None].contiguous()}


def _store_float8(made: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    scale = unblock_groups(made["scale"], len(weight))[:, :1]
    return {"weight": made["weight"], "weight_scale": scale.contiguous()}


def _store_int4(made: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    numbers = unpack_int4(made["weight"], weight.shape[1]).int() + 8
    return {
        "weight_packed": pack_int32(numbers, 4),
        "weight_scale": unblock_groups(made["scale"], len(weight)).contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _int4(method: str, size: int) -> Scheme:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    return Scheme(method, "pack-quantized", weights, _store_int4)


_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
SCHEMES: dict[str, Scheme] = {
    "int8": Scheme("int8", "int-quantized", {**_CHANNEL, "type": "int"}, _store_int8),
    "fp8": Scheme("fp8", "float-quantized", {**_CHANNEL, "type": "float"}, _store_float8),
    "int4-g128": _int4("int4", 128),
    "int4-g64": _int4("int4-g64", 64),
    "int4-g32": _int4("int4-g32", 32),
}
"""Name -> form; all of them weight-only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What `quantize_checkpoint` wrote."""

    num_quantized: int
    """Layers."""
    left: tuple[str, ...]
    """Names of matrices that stay as they were, embeddings aside."""
    bytes_before: int
    bytes_after: int
    files: tuple[str, ...]


def quantize_checkpoint(
    folder: str | Path,
    out: str | Path,
    scheme: str,
    *,
    file_bytes: int = 2 << 30,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write a quantized copy of a checkpoint: weights, config.json, and tokenizer files as they are.

    Args:
        folder: An unquantized checkpoint in safetensors.
        out: A new or empty folder.
        scheme: A key of `SCHEMES`. Linear layers are rounded to nearest; LM head, embeddings, norms and experts stay.
        file_bytes: At most so much in a file of the result; it is held in memory.

    Raises:
        ConfigError: There is no such scheme, or `out` has files.
        CheckpointError: The checkpoint cannot be read, is quantized already, or none of its matrices can be.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"there is no scheme {scheme!r}; choose one of {', '.join(SCHEMES)}", field="scheme")
    folder, out = Path(folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give another one", field="out")
    config = ModelConfig.from_path(folder)
    if config.quantization is not None:
        raise CheckpointError(f"{folder} is quantized already ({config.quantization.name}); use the unquantized model")
    if not config.is_native:
        raise CheckpointError(f"{config.architecture} runs through Transformers, where weights cannot be quantized")
    network = _network(config)
    layers = frozenset(layer for layer in network.stored_layers)
    method = linear_method(SCHEMES[scheme].method, OpRequest())
    checkpoint = open_checkpoint(folder)
    out.mkdir(parents=True, exist_ok=True)
    files = _Files(out, file_bytes)
    done, quantized, left = 0, 0, []
    for name, tensor in checkpoint.tensors():
        done += tensor.nbytes
        if _is_layer(name, tensor, network, layers) and _fits(tensor, SCHEMES[scheme]):
            files.add(_quantized(name, tensor, SCHEMES[scheme], method))
            quantized += 1
        else:
            files.add({name: tensor.clone()})
            if tensor.ndim > 1 and name.endswith(".weight") and "embed" not in name:
                left.append(name.removesuffix(".weight"))
        if progress is not None:
            progress(done, checkpoint.total_bytes)
    if not quantized:
        raise CheckpointError(f"none of the matrices of {config.architecture} can be quantized as {scheme}")
    written = files.finish()
    _copy_others(folder, out, _config(SCHEMES[scheme], left))
    return QuantizeReport(
        num_quantized=quantized, left=tuple(left), bytes_before=done, bytes_after=files.total_bytes, files=written
    )


def _network(config: ModelConfig) -> Network:
    """Without weights, as if its layers were quantized: it says which of them can be."""
    form = QuantizationConfig(layout="int8", bits=8, group_size=None, granularity="channel")
    return build_model(dataclasses.replace(config, quantization=form), dtype="float32")


def _is_layer(name: str, tensor: Tensor, network: Network, layers: frozenset[str]) -> bool:
    """Whether a tensor is the weight of linear layers: of one, or of several side by side."""
    if tensor.ndim != 2 or not name.endswith(".weight"):
        return False
    parts = list(network.checkpoint_tensors(name, tensor))
    together = sum(len(part) for _, part in parts) == len(tensor)
    return together and all(
        part.shape[1:] == tensor.shape[1:] and part_name.removesuffix(".weight") in layers for part_name, part in parts
    )


def _fits(tensor: Tensor, scheme: Scheme) -> bool:
    return tensor.shape[1] % scheme.weights.get("group_size", 1) == 0


def _quantized(name: str, weight: Tensor, scheme: Scheme, method: LinearMethod) -> dict[str, Tensor]:
    stored = scheme.store(method.make_weights(weight, None), weight)
    return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}


class _Files:
    """Tensors into files of bounded size, and their index."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._limit = folder, file_bytes
        self._held: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in self._held.values())
        if self._held and size + sum(tensor.nbytes for tensor in tensors.values()) > self._limit:
            self._write()
        self._held |= tensors
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _write(self) -> None:
        save_file(self._held, self._folder / f"part-{len(self._names)}", metadata={"format": "pt"})
        self._names.append(list(self._held))
        self._held = {}

    def finish(self) -> tuple[str, ...]:
        """Give the files their names. Returns them."""
        self._write()
        count = len(self._names)
        finals = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        finals = ["model.safetensors"] if count == 1 else finals
        for i, final in enumerate(finals):
            (self._folder / f"part-{i}").rename(self._folder / final)
        if count > 1:
            weight_map = {name: final for final, names in zip(finals, self._names, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        return tuple(finals)


def _config(scheme: Scheme, left: list[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", **scheme.weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": scheme.format}},
        "ignore": sorted({*left, "lm_head"}),
    }


def _copy_others(folder: Path, out: Path, quantization: dict[str, Any]) -> None:
    """Tokenizer and settings as they are, and config.json with what was done."""
    for path in folder.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".gguf", ".pt") or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, out / path.name)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
