"""Where the bytes of a medium come from: URLs (data, http, https, file), bytes, or what Python code has decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from quire_interfaces import Modality
from quire_multimodal.config import MediaConfig
from quire_multimodal.decode import check_samples, to_rgb
from quire_multimodal.errors import MediaError
from quire_multimodal.fetch import fetch_media

__all__ = ["LoadedMedia", "MediaSource", "decode_base64", "load"]

RAW_FPS = 24.0
"""Frames in a second of a video that is given as an array alone."""
_DATA_URL = re.compile(r"data:[^,]{0,200}?(;base64)?,", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """A medium as a request names it. One of `url` and `value`, or `uuid` alone for one that was prepared before."""

    modality: Modality
    url: str | None = None
    """data:, http:, https: or file: URL."""
    value: Any = None
    """Encoded bytes; an image of Pillow or uint8 [height, width, 3]; a video as uint8 [frames, height, width, 3] or a
    list of images, or a pair of those and a mapping with `fps`, `frames_indices` and `total_num_frames`; a sound as
    float [samples], [samples, channels] or [channels, samples], of which there are fewer channels, at the rate of the
    processor, or a pair of that and its samples in a second."""
    is_embeds: bool = False
    """Whether the value is the embeddings themselves: float [N, W], or what `torch.save` or `numpy.save` writes, as
    bytes or in base64."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of embeddings: what positions are counted from, as in {"image_grid_thw": [[1, 8, 8]]}."""
    uuid: str | None = None
    """The caller's own name of the content, which stands for its hash."""
    key: str | None = None
    """`MediaItem.key` of an item that was prepared before, in place of everything else."""
    param: str | None = None
    """Part of the request, for errors: "messages[1].content[0]"."""


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """The bytes of a medium, and how they are to be read."""

    data: bytes
    form: str = "encoded"
    """"encoded", "embeds", or the raw "image", "video" or "samples"."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Shape of raw pixels, times of raw frames, rate of raw samples."""

    def digest(self) -> str:
        """Hex sha256 of the bytes and of how they are read."""
        digest = hashlib.sha256(f"{self.form}{sorted(self.fields.items())}\0".encode())
        digest.update(self.data)
        return digest.hexdigest()


def load(source: MediaSource, config: MediaConfig) -> LoadedMedia:
    """The bytes of a source; blocks while they are fetched or read.

    Raises:
        MediaError: not there, not allowed, too large, or no such kind of source.
    """
    if source.is_embeds and isinstance(source.value, np.ndarray):
        file = io.BytesIO()
        np.save(file, source.value, allow_pickle=False)
        media = LoadedMedia(file.getvalue(), "embeds")
    elif source.is_embeds:
        value = source.value
        media = LoadedMedia(decode_base64(value) if isinstance(value, str) else bytes(value), "embeds")
    elif source.url is not None:
        media = LoadedMedia(_load_url(source.url, config))
    elif isinstance(source.value, (bytes, bytearray, memoryview)):
        media = LoadedMedia(bytes(source.value))
    else:
        media = _load_value(source.modality, source.value)
    if not media.data:
        raise MediaError(f"the {source.modality} is empty")
    if media.form in ("encoded", "embeds") and len(media.data) > config.media_max_bytes:
        raise too_many_bytes(config.media_max_bytes)
    return media


def too_many_bytes(max_bytes: int) -> MediaError:
    """The error for a medium that is too large as it is sent."""
    return MediaError(f"it has more than the {max_bytes:,} bytes allowed", code="media_too_large")


def _load_url(url: str, config: MediaConfig) -> bytes:
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return _decode_data_url(url, config.media_max_bytes)
    if scheme in ("http", "https"):
        return fetch_media(url, config)
    if scheme == "file":
        return _read_file(url, config)
    raise MediaError("the URL must begin with data:, http:, https: or file:", code="unsupported_media")


def _decode_data_url(url: str, max_bytes: int) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        raise MediaError("the data URL is not complete: it must be data:TYPE;base64,DATA")
    if len(url) - match.end() > max_bytes * 4 // 3 + 4:
        raise too_many_bytes(max_bytes)
    if match.group(1) is None:
        return urllib.parse.unquote_to_bytes(url[match.end() :])
    text = url[match.end() :]
    return decode_base64(urllib.parse.unquote(text) if "%" in text else text, "the data URL")


def decode_base64(text: str, source: str = "it") -> bytes:
    """Bytes that were sent in base64. Raises MediaError, which names `source`, where they were not."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(f"{source} holds no base64") from None


def _read_file(url: str, config: MediaConfig) -> bytes:
    """A file below the folder that is allowed, symbolic links resolved."""
    if not config.allowed_local_media_path:
        raise MediaError("this server reads no local files (--allowed-local-media-path)", code="media_not_allowed")
    parts = urllib.parse.urlsplit(url)
    root = Path(config.allowed_local_media_path).resolve()
    try:
        path = Path(urllib.parse.unquote(parts.path)).resolve()
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(root):
            raise MediaError("the file is not below the folder that is allowed", code="media_not_allowed")
        if not path.is_file():
            raise MediaError("there is no such file")
        with path.open("rb") as file:
            return file.read(config.media_max_bytes + 1)
    except (OSError, ValueError):
        raise MediaError("the file cannot be read") from None


def _load_value(modality: Modality, value: Any) -> LoadedMedia:
    """What Python has decoded. Raises MediaError."""
    if modality == Modality.AUDIO:
        return _load_samples(value)
    metadata: Mapping[str, Any] = {}
    if modality == Modality.VIDEO and isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    if modality == Modality.VIDEO and isinstance(value, (list, tuple)) and len(value):
        value = np.stack([_pixels(each) for each in value])
    pixels = _pixels(value)
    if not isinstance(pixels, np.ndarray):
        raise MediaError(f"{type(value).__name__} is no {modality} that is read", code="unsupported_media")
    num_axes = {Modality.IMAGE: 3, Modality.VIDEO: 4}.get(modality)
    if pixels.ndim != num_axes or pixels.shape[-1] != 3 or pixels.dtype != np.uint8:
        raise _wrong_array(modality, pixels)
    fields: dict[str, Any] = {"shape": list(pixels.shape)}
    if modality == Modality.VIDEO:
        fields |= _frame_times(metadata, len(pixels))
    return LoadedMedia(pixels.tobytes(), str(modality), fields)


def _pixels(value: Any) -> Any:
    """The array of an image, of frames or of a tensor; what is none stays as it is."""
    if isinstance(value, PIL.Image.Image):
        return np.asarray(to_rgb(value))
    return np.asarray(value) if hasattr(value, "__array__") else value


def _wrong_array(modality: Modality, array: NDArray[Any]) -> MediaError:
    return MediaError(f"an array of {array.dtype} with shape {array.shape} is no {modality} that is read")


def _frame_times(metadata: Mapping[str, Any], num_frames: int) -> dict[str, Any]:
    """Which frames of a video an array holds, and how many there are in a second; all of it, if it is not said."""
    known = {name: value for name, value in metadata.items() if value is not None}
    try:
        indices = [int(index) for index in known.get("frames_indices", range(num_frames))]
        fps, total = float(known.get("fps", RAW_FPS)), int(known.get("total_num_frames", max(indices) + 1))
    except (TypeError, ValueError) as error:
        raise MediaError(f"the metadata of the video cannot be read: {error}") from None
    if len(indices) != num_frames or min(indices) < 0 or max(indices) >= total or not 0 < fps < float("inf"):
        raise MediaError(f"the metadata of the video are not those of {num_frames} frames: {dict(metadata)!r:.200}")
    return {"frame_indices": indices, "num_frames": total, "fps": fps}


def _load_samples(value: Any) -> LoadedMedia:
    """A sound as an array, or with its rate."""
    rate = None
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
            raise MediaError(f"samples in a second must be a number above 0, got {rate!r:.100}")
    array = np.asarray(value) if hasattr(value, "__array__") else value
    if not isinstance(array, np.ndarray):
        raise MediaError(f"{type(value).__name__} is no audio that is read", code="unsupported_media")
    if array.ndim == 2 and array.dtype.kind == "f":  # channels behind samples, as soundfile reads it, or before them
        array = array.mean(axis=0 if array.shape[0] < array.shape[1] else 1)
    if array.ndim != 1 or array.dtype.kind != "f" or not array.size:
        raise _wrong_array(Modality.AUDIO, array)
    check_samples(array)
    fields = {} if rate is None else {"rate": rate}
    return LoadedMedia(np.ascontiguousarray(array, np.float32).tobytes(), "samples", fields)
