"""Reading checkpoints: which file has which tensor, and each tensor into its parameter.

Files are mapped: a tensor of the wanted dtype on the CPU is a view of its file, nothing is copied. Knows safetensors
files and names; does not know networks beyond their list of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models.fields import read_json
from quire_models.kv_scales import KVScales
from quire_models.layers.network import Network
from quire_models.layers.scope import Parameter

__all__ = ["Progress", "checkpoint_files", "load_weights"]

Progress = Callable[[int, int], None]
"""(bytes of checkpoint tensors placed so far, bytes of all) -> None."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",  # older checkpoints stored the frequencies, which follow from config.json
    ".attn.masked_bias",
)


def load_weights(model: Network, folder: str | Path, progress: Progress | None = None) -> None:
    """Fill every parameter of `model` from the safetensors files in `folder`, and scales for its KV cache.

    Args:
        progress: Called after each tensor.

    Raises:
        CheckpointError: No safetensors files, unreadable ones, or weights that are missing, superfluous or of the wrong
            shape: all of them are listed in one message.
    """
    folder = Path(folder)
    parameters = {parameter.name: parameter for parameter in model.parameters}
    total = _total_bytes(checkpoint_files(folder))
    scales = KVScales(model.attention_names, model.config.num_kv_heads)
    done = 0
    wrong: dict[str, str] = {}
    extra: list[str] = []
    for stored_name, stored in _tensors(folder):
        done += stored.nbytes
        for name, tensor in model.checkpoint_tensors(stored_name, stored):
            for part, piece in _parts(name, tensor, model, wrong):
                parameter = parameters.get(part)
                if parameter is None:
                    if not (_is_ignored(part, model) or scales.take(part, piece)):
                        extra.append(part)
                elif tuple(piece.shape) != parameter.shape:
                    wrong[part] = f"{part} is {list(piece.shape)}, should be {list(parameter.shape)}"
                else:
                    parameter.tensor = _placed(piece, model, parameter)
        if progress is not None:
            progress(done, total)
    missing = [name for name, p in parameters.items() if p.tensor is None and name not in wrong]
    if missing or extra or wrong:
        raise CheckpointError(_complaint(folder, missing, extra, [line for line in wrong.values() if line]))
    model.set_kv_scales(scales.found)
    model.finish_loading()


def _is_ignored(name: str, model: Network) -> bool:
    return name in model.ignored_tensors or name.endswith(IGNORED_SUFFIXES)


def _parts(name: str, tensor: Tensor, model: Network, wrong: dict[str, str]) -> Iterable[tuple[str, Tensor]]:
    """The tensor under its own name, or what it stands for; the names of what a wrong one stands for go to `wrong`."""
    packed = model.packs.get(name)
    if packed is None:
        return [(name, tensor)]
    if tuple(tensor.shape) == packed.shape:
        return packed.split(tensor)
    wrong.update((part, "") for part, _ in packed.split(torch.empty(packed.shape, device="meta")))
    wrong[name] = f"{name} is {list(tensor.shape)}, should be {list(packed.shape)}"
    return []


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name.

    Raises:
        CheckpointError: There are none, or the index names files that are not there.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of names to files; download the file again")
        outside = [name for name in weight_map.values() if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of this folder; do not use it")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the {len(files)} files that {INDEX_FILE} names: {', '.join(absent)}; "
                "download the checkpoint again"
            )
        return files
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as {', '.join(pickles)}, a format that runs code when it is read; convert it: "
            "load it with transformers and call save_pretrained(folder), which writes safetensors"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _total_bytes(files: list[Path]) -> int:
    """Bytes of all tensors: the files' sizes without their headers (8 bytes of length, then the header)."""
    total = 0
    for file in files:
        with file.open("rb") as stream:
            header_len = int.from_bytes(stream.read(8), "little")
        total += max(0, file.stat().st_size - 8 - header_len)
    return total


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and mapped tensor of everything in the checkpoint."""
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error


def _placed(tensor: Tensor, model: Network, parameter: Parameter) -> Tensor:
    """The tensor itself where dtype and device are right, else a converted copy."""
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"the checkpoint has weights of dtype {tensor.dtype}, which is a quantized format; use the unquantized one"
        )
    return tensor.to(device=model.device, dtype=parameter.dtype or model.dtype).contiguous()


def _complaint(folder: Path, missing: list[str], extra: list[str], wrong: list[str]) -> str:
    parts = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("not known", extra), ("of the wrong shape", wrong))
        if names
    ]
    return f"the weights in {folder} do not fit its config.json ({'; '.join(parts)}); use files of one checkpoint"
