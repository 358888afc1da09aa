"""Embeddings that a caller has computed, read from what `torch.save` or `numpy.save` writes, without torch.

A file of `torch.save` holds a pickle. It is read by a machine that knows how to put one tensor together and nothing
else: no name in it is looked up.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import Modality
from quire_multimodal.errors import MediaError
from quire_multimodal.sources import MediaSource, decode_base64

__all__ = ["EMBEDS_TOKEN_ID", "read_embeds", "read_fact", "split_prompt_embeds"]

EMBEDS_TOKEN_ID = 0
"""Stands among the token ids of a prompt for a row that the caller has computed."""
_MAX_ROWS_PER_ITEM = 512
"""A long prompt of embeddings is several items: those at its beginning are found again under another end, and the
engine holds those alone that it is computing."""

_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": "<u2"}
"""Torch's names of what holds a tensor's numbers. Numpy has no bfloat16: its bits are the upper ones of float32."""
_STORAGES |= {"LongStorage": "<i8", "IntStorage": "<i4"}
_FACTS = {"image_grid_thw": 3, "video_grid_thw": 3, "second_per_grid_ts": None, "video_second_per_grid": None}
"""What may be said of embeddings -> numbers in a row; None for numbers that are no rows."""
_MAX_FACT_ROWS = 4096
_MAX_PICKLE_BYTES = 1 << 16


def read_embeds(data: bytes, width: int | None = None) -> NDArray[np.float32]:
    """Embeddings, float32 [N, W].

    Args:
        data: What `torch.save` or `numpy.save` has written of one tensor of floating-point numbers.
        width: W that the network wants; None for any.

    Raises:
        MediaError: no such file, numbers that are not finite, or another shape.
    """
    return _checked(_read_array(data), width)


def _read_array(data: bytes) -> Any:
    try:
        return _read_torch(data) if data.startswith(b"PK") else np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # files lie in every way
        raise MediaError(f"no embeddings that can be read: {error or type(error).__name__}") from error


def read_fact(name: str, value: str | bytes | NDArray[Any]) -> list[Any]:
    """What a caller says of embeddings, one entry for each item: grids of patches [items, 3], or seconds [items].

    Args:
        name: As the processor names it, "image_grid_thw".
        value: The numbers, or a file as of `read_embeds`.

    Raises:
        MediaError: a name that is not known, no numbers, or other ones.
    """
    if name not in _FACTS:
        raise MediaError(f"embeddings have no {name[:64]!r}; there are {', '.join(_FACTS)}")
    data = decode_base64(value, name) if isinstance(value, str) else value
    array = _read_array(data) if isinstance(data, bytes) else np.asarray(data)
    row = _FACTS[name]
    if row is not None and array.ndim == 1:
        array = array[None]
    kinds, shape = ("iu", (row,)) if row is not None else ("iuf", ())
    if array.dtype.kind not in kinds or array.shape[1:] != shape or not 0 < len(array) <= _MAX_FACT_ROWS:
        raise MediaError(f"{name} must be numbers {['items', *shape]}, got {array.dtype} {list(array.shape)}")
    if not np.isfinite(array).all() or array.min() <= 0:
        raise MediaError(f"the numbers of {name} must be above 0")
    fact: list[Any] = array.tolist()
    return fact


def _checked(array: Any, width: int | None) -> NDArray[np.float32]:
    """An array of embeddings as float32 [N, W]; a first dimension of 1 is left out. Raises MediaError."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise MediaError("embeddings must be one tensor of floating-point numbers")
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or not array.size or array.shape[1] != (width or array.shape[1]):
        raise MediaError(f"embeddings must be [N, {width or 'W'}], not {list(array.shape)}")
    with np.errstate(over="ignore"):  # what float32 does not hold is not finite
        embeds: NDArray[np.float32] = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(embeds).all():
        raise MediaError("embeddings must be finite")
    return embeds


def split_prompt_embeds(
    value: str | bytes | NDArray[Any], width: int, item_width: int | None = None, *, param: str = "prompt_embeds"
) -> list[MediaSource]:
    """The items of a prompt that is embeddings, in order.

    Args:
        value: [N, width] or [1, N, width], or what `read_embeds` reads, as bytes or in base64.
        width: Of the residual stream.
        item_width: Width of the items, where the network reads further features beside it: they are zero.
        param: Field of the request, for errors.

    Raises:
        MediaError: no such tensor.
    """
    try:
        data = decode_base64(value) if isinstance(value, str) else value
        array = read_embeds(data, width) if isinstance(data, (bytes, bytearray)) else _checked(data, width)
    except MediaError as error:
        raise error.at(param) from None
    if item_width is not None and item_width > width:
        array = np.pad(array, ((0, 0), (0, item_width - width)))
    return [
        MediaSource(
            modality=Modality.EMBEDS, value=array[begin : begin + _MAX_ROWS_PER_ITEM], is_embeds=True, param=param
        )
        for begin in range(0, len(array), _MAX_ROWS_PER_ITEM)
    ]


def _read_torch(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        (name,) = (each.filename for each in file.infolist() if each.filename.endswith("/data.pkl"))
        if file.getinfo(name).file_size > _MAX_PICKLE_BYTES:
            raise MediaError("it holds more than one tensor")
        return _TensorUnpickler(file, name.removesuffix("data.pkl")).load()


class _TensorUnpickler(pickle.Unpickler):
    """Reads one tensor of an archive."""

    def __init__(self, file: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(file.read(f"{folder}data.pkl")))
        self._file, self._folder = file, folder

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        known = {("torch._utils", "_rebuild_tensor_v2"): _rebuild, ("collections", "OrderedDict"): OrderedDict}
        if (module, name) not in known:
            raise MediaError(f"it holds {module}.{name}, not a tensor alone")
        return known[module, name]

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, storage, key, _, _ = pid
        info = self._file.getinfo(f"{self._folder}data/{key}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise MediaError("it is compressed, which torch.save does not do")
        values = np.frombuffer(self._file.read(info), _STORAGES[storage])
        return (values.astype("<u4") << 16).view("<f4") if storage == "BFloat16Storage" else values


def _rebuild(
    values: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """A tensor from the numbers that hold it; none of its elements lies outside of them."""
    steps = [count * step for count, step in zip((each - 1 for each in size), stride, strict=True)]
    if min((offset, *size, *stride), default=0) < 0 or offset + sum(steps) >= len(values):
        raise MediaError("its shape is not that of its numbers")
    if np.prod(size, dtype=object) > len(values):
        raise MediaError("it has more elements than numbers")
    bytes_of = [step * values.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(values[offset:], size, bytes_of).copy()
