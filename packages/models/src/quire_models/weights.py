"""Filling networks: each tensor of a checkpoint into its parameter, or random ones.

A tensor of the wanted dtype on the CPU is a view of its file, nothing is copied; to a GPU it goes through pinned
memory, while the next one is read. What has been read and converted leaves memory (`mapped_pages.py`). Knows names and
shapes; does not know files (`checkpoint_files.py`), nor networks beyond their list of parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_interfaces.platforms import platform_of_type
from quire_models.checkpoint_files import CheckpointFiles, open_checkpoint
from quire_models.kv_scales import KVScales
from quire_models.layers.network import Network
from quire_models.layers.scope import Packed, Parameter
from quire_models.mapped_pages import MappedPages
from quire_models.read_ahead import SMALL_BYTES, read_ahead, streamed
from quire_models.staged_uploads import StagedUploads
from quire_quantization.numbers import KV_SCALES, OPTIONAL_TENSORS, ask

__all__ = ["Progress", "fill_parameters", "fill_with_dummies", "load_dummy_weights", "load_weights"]

Progress = Callable[[int, int], None]
"""(bytes of checkpoint tensors placed so far, bytes of all) -> None."""

IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",  # older checkpoints stored the frequencies, which follow from config.json
    ".attn.masked_bias",
    ".weight_shape",  # of packed weights: it follows from config.json
    ".input_scale",  # of activations, which stay as they are
    ".activation_scale",
    ".input_zero_point",
    ".input_global_scale",
)


def load_weights(
    model: Network, folder: str | Path, progress: Progress | None = None, *, load_format: str = "auto"
) -> None:
    """Fill every parameter of `model` from the files in `folder`, and scales for its KV cache.

    Args:
        progress: Called after each tensor.
        load_format: One of `quire_models.load_formats.LOAD_FORMATS`, except "dummy".

    Raises:
        CheckpointError: No files of this format, unreadable ones, or weights that are missing, superfluous or of the
            wrong shape: all of them are listed in one message.
    """
    folder = Path(folder)
    scales = KVScales(model.attention_names, model.num_checkpoint_kv_heads)
    filling = fill_parameters(
        model, folder, model.checkpoint_tensors, progress, load_format=load_format, absent=model.absent
    )
    extra = [name for name, piece in filling.extra if not (_is_ignored(name, model) or scales.take(name, piece))]
    if filling.missing or extra or filling.wrong:
        raise CheckpointError(_complaint(folder, filling.missing, extra, filling.wrong))
    model.set_kv_scales(scales.found)
    model.finish_loading(filling.trim)


class Loadable(Protocol):
    """What has parameters to fill: a network, or towers."""

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def parameters(self) -> list[Parameter]:
        """What the checkpoint has to bring."""

    @property
    def packs(self) -> dict[str, Packed]:
        """What the checkpoint may bring in the place of several parameters, by its name there."""


class Filling(NamedTuple):
    """What came of filling parameters from a checkpoint."""

    missing: list[str]
    """Parameters without a tensor."""
    extra: list[tuple[str, Tensor]]
    """Tensors that are no parameters, by the names that they would have as such."""
    wrong: list[str]
    """Tensors of other shapes, and which."""
    trim: Callable[[], None]
    """Lets go of pages of the files that have been read."""


def fill_parameters(
    model: Loadable,
    folder: Path,
    checkpoint_tensors: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]],
    progress: Progress | None = None,
    *,
    load_format: str = "auto",
    absent: Collection[str] = (),
) -> Filling:
    """Give each parameter its tensor from the files in `folder`.

    Args:
        checkpoint_tensors: A tensor of the checkpoint -> names and tensors of parameters.
        progress: Called after each tensor of the checkpoint.
        load_format: As `load_weights` takes it.
        absent: Names of parts whose tensors other ranks read.

    Raises:
        CheckpointError: No files of this format, or unreadable ones.
    """
    parameters = {parameter.name: parameter for parameter in model.parameters}
    checkpoint = open_checkpoint(folder, pickled=load_format == "pt")
    tensors, is_streamed = checkpoint.tensors(), load_format == "runai_streamer"
    if is_streamed and not isinstance(checkpoint, CheckpointFiles):
        raise CheckpointError(f"{folder} is not in Transformers' format, whose files load_format runai_streamer reads")
    if is_streamed or checkpoint.total_bytes >= SMALL_BYTES:
        tensors = streamed(checkpoint.files) if is_streamed else read_ahead(checkpoint)
    pages = MappedPages(checkpoint.files)
    done = 0
    wrong: dict[str, str] = {}
    extra: list[tuple[str, Tensor]] = []
    uploads = StagedUploads(model.device) if platform_of_type(model.device.type).module else None
    with closing(tensors):  # an error holds on to it, and threads would wait for whoever uses it
        for stored_name, stored in tensors:
            done += stored.nbytes
            for name, tensor in checkpoint_tensors(stored_name, stored):
                for part, piece in _parts(name, tensor, model, wrong):
                    parameter = parameters.get(part)
                    if parameter is None and is_of_other_rank(part, absent):
                        continue
                    if parameter is None:
                        extra.append((part, piece))
                    elif not _fits(tuple(piece.shape), parameter.checkpoint_shape):
                        wrong[part] = f"{part} is {list(piece.shape)}, should be {list(parameter.checkpoint_shape)}"
                    else:
                        parameter.tensor = _placed(piece, model, parameter, uploads)
            pages.trim()
            if progress is not None:
                progress(done, checkpoint.total_bytes)
    if uploads is not None:
        uploads.finish()
    missing = [name for name, p in parameters.items() if p.tensor is None and not p.optional and name not in wrong]
    return Filling(missing, extra, [line for line in wrong.values() if line], pages.trim)


def load_dummy_weights(model: Network, seed: int = 0) -> None:
    """Fill every parameter at random, reproducibly: for measuring without a checkpoint. Norms begin as ones, biases as
    zeros, so that activations stay in range."""
    fill_with_dummies(model, seed)
    if model.cache_dtype.startswith("fp8") and ask(KV_SCALES, False):
        scale = torch.ones(2, model.num_checkpoint_kv_heads)
        model.set_kv_scales(dict.fromkeys(model.attention_names, scale))
    model.finish_loading()


def fill_with_dummies(model: Loadable, seed: int = 0) -> None:
    """Give each parameter random numbers, as `load_dummy_weights` says."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters:
        if parameter.optional and not _is_filled(parameter):
            continue
        dtype = parameter.dtype or model.dtype
        shape = tuple(max(size, 1) for size in parameter.checkpoint_shape)  # of any size, where it is -1
        if len(parameter.shape) < 2 or not dtype.is_floating_point:
            value = 0.0 if parameter.name.endswith("bias") or not dtype.is_floating_point else 1.0
            tensor = torch.full(shape, value, dtype=dtype)
        else:
            tensor = torch.empty(shape, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
        parameter.tensor = _put(parameter.part_of(tensor), model, parameter)


def _is_filled(parameter: Parameter) -> bool:
    """Whether an optional parameter gets numbers. A quantized layer has them or not, as the checkpoint's writer likes;
    who asks which kernels there may be wants both. The order of inputs is no kernel's."""
    if not parameter.on_host or parameter.name.endswith("g_idx"):
        return False
    return parameter.name.endswith(".input_scale") or ask(OPTIONAL_TENSORS, False)


def is_of_other_rank(name: str, absent: Collection[str]) -> bool:
    """Whether a tensor belongs to a part that only other ranks have."""
    parts = name.split(".")
    return bool(absent) and any(".".join(parts[:end]) in absent for end in range(1, len(parts)))


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """The same, with -1 for any size; one number is one number in every shape."""
    if len(shape) == len(wanted) and all(a in (b, -1) for b, a in zip(shape, wanted, strict=True)):
        return True
    return math.prod(shape) == math.prod(wanted) == 1


def _is_ignored(name: str, model: Network) -> bool:
    return name in model.ignored_tensors or name.endswith(IGNORED_SUFFIXES)


def _parts(name: str, tensor: Tensor, model: Loadable, wrong: dict[str, str]) -> Iterable[tuple[str, Tensor]]:
    """The tensor under its own name, or what it stands for; the names of what a wrong one stands for go to `wrong`."""
    packed = model.packs.get(name)
    if packed is None:
        return [(name, tensor)]
    if tuple(tensor.shape) == packed.shape:
        return packed.split(tensor)
    if tensor.ndim == 3 and tuple(tensor.mT.shape) == packed.shape:  # experts with their inputs first (Qwen3-VL)
        return packed.split(tensor.mT)
    wrong.update((part, "") for part, _ in packed.split(torch.empty(packed.shape, device="meta")))
    wrong[name] = f"{name} is {list(tensor.shape)}, should be {list(packed.shape)}"
    return []


def _placed(tensor: Tensor, model: Loadable, parameter: Parameter, uploads: StagedUploads | None) -> Tensor:
    """The tensor itself where dtype and device are right, else a converted copy."""
    if parameter.dtype == torch.uint8 and tensor.dtype in (torch.float8_e8m0fnu, torch.int8):
        tensor = tensor.view(torch.uint8)  # the exponents themselves, or elements that are packed
    elif parameter.dtype == torch.float32 and tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.float()
    elif parameter.dtype == torch.int64 and tensor.dtype == torch.int32:
        tensor = tensor.long()
    exact = parameter.dtype is not None and (not parameter.dtype.is_floating_point or parameter.dtype.itemsize == 1)
    if exact and tensor.dtype != parameter.dtype:
        raise CheckpointError(
            f"{parameter.name} is {tensor.dtype} where quantization_config of config.json says {parameter.dtype}; "
            "use files of one checkpoint"
        )
    if not exact and (not tensor.is_floating_point() or tensor.dtype.itemsize == 1):
        raise CheckpointError(
            f"{parameter.name} is of dtype {tensor.dtype}, a quantized format, but no quantization_config says so of "
            "it; use files of one checkpoint, or the unquantized one"
        )
    shaped = parameter.part_of(tensor.reshape(-1 if -1 in parameter.shape else parameter.checkpoint_shape))
    dtype = parameter.dtype or model.dtype
    if uploads is not None and shaped.device.type == "cpu" and not parameter.on_host:
        return uploads.upload(shaped, dtype, parameter.memory(dtype, model.device))
    return _put(shaped, model, parameter)


def _put(tensor: Tensor, model: Loadable, parameter: Parameter) -> Tensor:
    """The tensor on its device in its dtype: in the memory that the parameter asks for, else itself or a copy."""
    dtype = parameter.dtype or model.dtype
    memory = parameter.memory(dtype, model.device)
    if memory is not None:
        return memory.copy_(tensor)
    return tensor.to(device="cpu" if parameter.on_host else model.device, dtype=dtype).contiguous()


def _lacking_prefix(missing: list[str], extra: list[str]) -> str:
    """What most of the missing names begin with, if the rest of them is what is not known; empty otherwise."""
    unknown = set(extra)
    counts = Counter(name[: -len(rest)] for name in missing for rest in [name.partition(".")[2]] if rest in unknown)
    prefix, count = counts.most_common(1)[0] if counts else ("", 0)
    return prefix if 2 * count > len(missing) else ""


def _complaint(folder: Path, missing: list[str], extra: list[str], wrong: list[str]) -> str:
    if (prefix := _lacking_prefix(missing, extra)) and not wrong:
        example = next(name for name in missing if name.startswith(prefix))
        return (
            f"the tensors in {folder} are named without {prefix!r} ({example.removeprefix(prefix)!r} where {example!r} "
            f"is wanted, and {len(missing) - 1} more): a network without its LM head was saved; load it with "
            "Transformers' AutoModelForCausalLM and call save_pretrained(folder)"
        )
    parts = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("not known", extra), ("of the wrong shape", wrong))
        if names
    ]
    return f"the weights in {folder} do not fit its config.json ({'; '.join(parts)}); use files of one checkpoint"
