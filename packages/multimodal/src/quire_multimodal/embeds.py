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

from quire_multimodal.errors import MediaError

__all__ = ["read_embeds"]

_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": "<u2"}
"""Torch's names of what holds a tensor's numbers. Numpy has no bfloat16: its bits are the upper ones of float32."""
_MAX_PICKLE_BYTES = 1 << 16


def read_embeds(data: bytes, width: int | None = None) -> NDArray[np.float32]:
    """Embeddings, float32 [N, W].

    Args:
        data: What `torch.save` or `numpy.save` has written of one tensor of floating-point numbers.
        width: W that the network wants; None for any.

    Raises:
        MediaError: no such file, numbers that are not finite, or another shape.
    """
    try:
        array = _read_torch(data) if data.startswith(b"PK") else np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # files lie in every way
        raise MediaError(f"no embeddings that can be read: {error or type(error).__name__}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise MediaError("embeddings must be one tensor of floating-point numbers")
    if array.ndim != 2 or not array.size or array.shape[1] != (width or array.shape[1]):
        raise MediaError(f"embeddings must be [N, {width or 'W'}], not {list(array.shape)}")
    array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise MediaError("embeddings must be finite")
    return array


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
