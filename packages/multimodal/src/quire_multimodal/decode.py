"""Encoded bytes to pixels and samples, within bounds. Runs in a preparing process.

Images by Pillow, videos and compressed sounds by PyAV, other sounds by soundfile, resampled by soxr. Nothing here knows
a model: which frames of a video are wanted is asked of a function.
"""

from __future__ import annotations

import importlib
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from numpy.typing import NDArray

from quire_multimodal.bounds import check_audio, check_image, check_video, container_format, open_image
from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError

__all__ = [
    "VideoFrames",
    "check_samples",
    "decode_audio",
    "decode_image",
    "decode_sound_track",
    "decode_video",
    "resample",
    "to_rgb",
]

_WHITE = (255, 255, 255)
Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The frames of a video that the model is shown."""

    frames: NDArray[np.uint8]
    """[frames, height, width, 3]."""
    indices: list[int]
    """Of these frames among all of the video."""
    num_frames: int
    """Frames of the whole video."""
    fps: float
    """Frames of the video in a second."""
    sound: Samples | None = None
    """Its sound at the rate of the processor, [samples]; None where it has none, or none is wanted."""


def decode_image(data: bytes, config: MediaConfig, options: Mapping[str, Any] | None = None) -> PIL.Image.Image:
    """The image in RGB, upright as its EXIF data say; the first picture of an animation.

    Args:
        data: The encoded image.
        config: Checked before a pixel is decoded.
        options: `rgba_background_color`: what shows through where the image is transparent; white if not said.

    Raises:
        MediaError: out of bounds, or not decodable.
    """
    with open_image(data) as image:
        check_image(image, config)
        with _decoding("image"):
            image.load()
            return to_rgb(PIL.ImageOps.exif_transpose(image), (options or {}).get("rgba_background_color", _WHITE))


@contextmanager
def _decoding(kind: str) -> Iterator[None]:
    """Turns what libraries raise on damaged data, which may be anything, into errors of the medium."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"the {kind} cannot be decoded: {error or type(error).__name__}") from error


def to_rgb(image: PIL.Image.Image, background: Sequence[int] = _WHITE) -> PIL.Image.Image:
    """The image in RGB, on a background where it is transparent."""
    if image.mode == "RGB":
        return image.copy()
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    canvas = PIL.Image.new("RGB", image.size, tuple(background))
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas


def decode_audio(data: bytes, rate: int, config: MediaConfig) -> Samples:
    """Samples of one channel, the mean of all, float32 from -1 to 1, at `rate` per second.

    Raises:
        MediaError: out of bounds, not decodable, or the extra that reads it is not installed.
    """
    samples, native = _read_sound(data, config)
    if not len(samples):
        raise MediaError("the sound has no samples")
    check_samples(samples)
    return resample(samples, native, rate)


def check_samples(samples: NDArray[Any]) -> None:
    """Raises MediaError where a sound has samples that are no numbers: a float file or an array may hold them."""
    if not np.isfinite(samples).all():
        raise MediaError("the sound has samples that are infinite or no numbers (NaN)")


def resample(samples: Samples, native: float, rate: int) -> Samples:
    """The sound at another rate.

    Args:
        samples: [samples] at `native` in a second.
        native: Samples in a second that there are.
        rate: Samples in a second that there are to be.

    Raises:
        MediaError: the extra that resamples is not installed.
    """
    if native == rate:
        return samples
    return np.ascontiguousarray(_library("soxr", "audio").resample(samples, native, rate), np.float32)


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MediaError(
            f"this server reads no such media: it needs quire-multimodal[{extra}]", code="unsupported_media"
        ) from None


def _read_sound(data: bytes, config: MediaConfig) -> tuple[Samples, int]:
    soundfile = _library("soundfile", "audio")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            check_audio(file.samplerate, file.channels, file.frames / max(file.samplerate, 1), config)
            most = int(config.media_max_seconds * file.samplerate)  # a header may say less than there is
            samples = file.read(most, dtype="float32", always_2d=True)
            return np.ascontiguousarray(samples.mean(axis=1), np.float32), int(file.samplerate)
    except soundfile.LibsndfileError as error:
        if container_format(data) is None:
            raise MediaError("no sound that can be read (WAV, FLAC, MP3, OGG, M4A, WebM)") from error
        return _read_container(data, config)


def _read_container(data: bytes, config: MediaConfig) -> tuple[Samples, int]:
    """The first sound track of a container of FFmpeg."""
    av = _library("av", "video")
    with _decoding("sound"), _open_container(av, data) as container:
        if not container.streams.audio:
            raise MediaError("there is no sound in it")
        stream = container.streams.audio[0]
        seconds = float(stream.duration * stream.time_base) if stream.duration else None
        check_audio(stream.rate or 0, stream.channels, seconds, config)
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=stream.rate)
        pieces: list[Samples] = []
        remaining = int(config.media_max_seconds * stream.rate)
        for frame in itertools.chain(container.decode(stream), [None]):  # None takes out what is left
            pieces.extend(piece.to_ndarray()[0] for piece in resampler.resample(frame))
            remaining -= 0 if frame is None else frame.samples
            if remaining < 0:
                raise MediaError(f"the sound is longer than {config.media_max_seconds:g} s", code="media_too_large")
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32), int(stream.rate)


def decode_sound_track(data: bytes, rate: int, config: MediaConfig) -> Samples | None:
    """The sound of a video, as `decode_audio` gives it; None for a silent one.

    Raises:
        MediaError: out of bounds, not decodable, or the extra that reads it is not installed.
    """
    av = _library("av", "video")
    with _decoding("video"), _open_container(av, data) as container:
        if not container.streams.audio:
            return None
    samples, native = _read_container(data, config)
    return resample(samples, native, rate) if len(samples) else None


def _open_container(av: Any, data: bytes) -> Any:
    name = container_format(data)
    if name is None:
        raise MediaError("no container that is read (MP4, WebM, MKV, AVI, MPEG, OGG, FLV, GIF)")
    return av.open(io.BytesIO(data), format=name)


def decode_video(data: bytes, config: MediaConfig, choose: Callable[[int, float], Sequence[int]]) -> VideoFrames:
    """Some frames of a video.

    Args:
        data: The encoded video.
        config: Checked before a frame is decoded, and while they are.
        choose: Given the number of frames and the frames in a second: which to take, ascending.

    Raises:
        MediaError: out of bounds, not decodable, or the extra `video` is not installed.
    """
    av = _library("av", "video")
    with _decoding("video"):
        num_frames, fps = _count_frames(av, data, config)
        indices = [int(index) for index in choose(num_frames, fps)]
        if not indices or min(indices) < 0 or max(indices) >= num_frames:
            raise MediaError(f"no frames can be taken from a video of {num_frames}")
        if len(indices) > config.media_max_frames:
            message = (
                f"{len(indices)} frames of the video would be shown, more than the {config.media_max_frames} allowed"
            )
            raise MediaError(message, code="media_too_large")
        return VideoFrames(_take_frames(av, data, config, indices), indices, num_frames, fps)


def _count_frames(av: Any, data: bytes, config: MediaConfig) -> tuple[int, float]:
    """Number of frames, and of frames in a second: packets are counted, for headers lie."""
    with _open_container(av, data) as container:
        if not container.streams.video:
            raise MediaError("there is no video in it")
        stream = container.streams.video[0]
        check_video(stream, config)
        fps = float(stream.average_rate or stream.guessed_rate or 24)
        num_frames = sum(packet.size > 0 for packet in container.demux(stream))
    if num_frames > config.media_max_seconds * max(fps, 1.0):
        raise MediaError(f"the video is longer than {config.media_max_seconds:g} s", code="media_too_large")
    return num_frames, fps


def _take_frames(av: Any, data: bytes, config: MediaConfig, indices: Sequence[int]) -> NDArray[np.uint8]:
    """The frames of these indices; the last one stands for those that a damaged video no longer has."""
    wanted, images = set(indices), {}
    with _open_container(av, data) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        for index, frame in enumerate(container.decode(stream)):
            if frame.width * frame.height > config.media_max_pixels:  # it may grow after the header
                raise MediaError("a frame of the video is too large", code="media_too_large")
            if index in wanted:
                images[index] = frame.to_ndarray(format="rgb24")
            if index >= max(wanted):
                break
    if not images:
        raise MediaError("the video has no frames")
    shape = next(iter(images.values())).shape
    last = images[max(images)]
    frames = [images.get(index, last) for index in indices]
    if any(frame.shape != shape for frame in frames):
        raise MediaError("the frames of the video differ in size")
    return np.stack(frames)
