"""What an encoded image, sound or video says of itself, read from its header before anything is decoded.

Kinds are told by content, never by a name or a type that somebody claims. The containers of FFmpeg are named to it by
this module: left to guess, it would take a playlist, whose entries are addresses, for a video.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import PIL.Image

from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError

__all__ = ["check_audio", "check_image", "check_video", "container_format", "open_image"]

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read, as Pillow names them."""
_RATES_HZ = (1_000, 384_000)
_MAX_CHANNELS = 32


def open_image(data: bytes) -> PIL.Image.Image:
    """The image with its header read and no pixel decoded.

    Raises:
        MediaError: no image of a known format, or a header that makes no sense.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bound on pixels is wider or narrower than ours
            return PIL.Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    except PIL.Image.DecompressionBombError as error:
        raise MediaError(f"the image is too large: {error}", code="media_too_large") from None
    except Exception as error:  # plugins raise what they like on headers that lie
        raise MediaError(f"no image that can be read ({', '.join(_IMAGE_FORMATS)})") from error


def check_image(image: PIL.Image.Image, config: MediaConfig) -> None:
    """Refuse an image that would be too large once decoded.

    Raises:
        MediaError: more pixels than `config` allows.
    """
    _check_pixels("image", image.width, image.height, config)


def _check_pixels(kind: str, width: int, height: int, config: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"the {kind} has no pixels ({width} x {height})")
    if width * height > config.media_max_pixels:
        raise MediaError(
            f"the {kind} has {width} x {height} pixels, more than the {config.media_max_pixels:,} allowed",
            code="media_too_large",
        )


def check_audio(rate: int, channels: int, seconds: float | None, config: MediaConfig) -> None:
    """Refuse a sound that would be too long, or that no device made.

    Args:
        rate: Samples of each channel in a second.
        channels: Number of channels.
        seconds: Length that the header says; None where it says none.
        config: What is allowed.

    Raises:
        MediaError: out of bounds.
    """
    if not _RATES_HZ[0] <= rate <= _RATES_HZ[1]:
        raise MediaError(f"the sound has {rate} samples per second, not {_RATES_HZ[0]} to {_RATES_HZ[1]}")
    if not 1 <= channels <= _MAX_CHANNELS:
        raise MediaError(f"the sound has {channels} channels, not 1 to {_MAX_CHANNELS}")
    _check_seconds("sound", seconds, config)


def check_video(stream: Any, config: MediaConfig) -> None:
    """Refuse a video whose frames are too large or that is too long.

    Args:
        stream: PyAV's video stream.
        config: What is allowed.

    Raises:
        MediaError: out of bounds.
    """
    if stream.codec_context is None:
        raise MediaError("the video has a codec that is not read")
    _check_pixels("video", stream.codec_context.width, stream.codec_context.height, config)
    seconds = None if stream.duration is None or stream.time_base is None else float(stream.duration * stream.time_base)
    _check_seconds("video", seconds, config)


def _check_seconds(kind: str, seconds: float | None, config: MediaConfig) -> None:
    if seconds is not None and seconds > config.media_max_seconds:
        raise MediaError(
            f"the {kind} is {seconds:.0f} s long, more than the {config.media_max_seconds:g} s allowed",
            code="media_too_large",
        )


_AT_START = (
    (b"\x1a\x45\xdf\xa3", "matroska"), (b"OggS", "ogg"), (b"FLV\x01", "flv"), (b"fLaC", "flac"), (b"ID3", "mp3"),
    (b"\x00\x00\x01\xba", "mpeg"), (b"caff", "caf"), (b"#!AMR", "amr"), (b"\x30\x26\xb2\x75", "asf"), (b"GIF8", "gif"),
)  # fmt: skip


def container_format(data: bytes) -> str | None:
    """FFmpeg's name of the container that begins with these bytes; None for one that is not read."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mp4"
    if data[:4] == b"RIFF":
        return {b"AVI ": "avi", b"WAVE": "wav"}.get(data[8:12])
    for magic, name in _AT_START:
        if data.startswith(magic):
            return name
    if len(data) > 188 and data[0] == data[188] == 0x47:
        return "mpegts"
    if len(data) > 1 and data[0] == 0xFF:
        return "aac" if data[1] & 0xF6 == 0xF0 else "mp3" if data[1] & 0xE0 == 0xE0 else None
    return None
