"""Sounds of any length, from a file to blocks of samples, with a memory that does not grow with the length.

Where `decode` reads a sound of a prompt whole, this reads recordings of hours. Every container goes through PyAV, to 16
bits, as other programs read speech. Runs in a process of its own (`sound_worker`): files come from strangers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quire_multimodal.bounds import check_audio, container_format
from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError

__all__ = ["SoundFile"]

_HEAD_BYTES = 256
_MAX_FRAME_SAMPLES = 1 << 22
"""Of one packet, whatever it says of itself."""


class SoundFile:
    """The first sound track of a file.

    Args:
        file: Seekable; FFmpeg is given no name, so that it opens nothing else.
        max_seconds: Longest sound.
        rate: Samples in a second that blocks are to have.

    Raises:
        MediaError: no sound, too long a one, a damaged file, or the extra that reads it is not installed.
    """

    def __init__(self, file: BinaryIO, *, max_seconds: float, rate: int = 16_000) -> None:
        try:
            self._av: Any = importlib.import_module("av")
        except ImportError:
            raise MediaError(
                "this server reads no sounds: it needs quire-multimodal[video]", code="unsupported_media"
            ) from None
        self._file, self._max_seconds, self._rate = file, max_seconds, rate
        file.seek(0)
        head = file.read(_HEAD_BYTES)
        if not head:
            raise MediaError("the file is empty")
        self._format = container_format(head)
        if self._format is None:
            raise MediaError(
                "it is no sound that can be read (WAV, FLAC, MP3, M4A, MP4, OGG, Opus, WebM, MKV, AAC, ...)"
            )
        self.duration_s = self._measure()
        """Length of the sound, of its packets: headers may say anything."""

    def _open(self) -> Any:
        self._file.seek(0)
        return self._av.open(self._file, format=self._format, metadata_errors="ignore")

    def _measure(self) -> float:
        try:
            with self._open() as container:
                if not container.streams.audio:
                    raise MediaError("there is no sound in it")
                stream = container.streams.audio[0]
                if stream.codec_context is None:
                    raise MediaError("the sound has a codec that is not read")
                seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else None
                config = MediaConfig(media_max_seconds=self._max_seconds)
                check_audio(stream.codec_context.sample_rate, stream.codec_context.channels, seconds, config)
                return self._length_of_packets(container, stream)
        except MediaError:
            raise
        except Exception as error:  # whatever the library raises on damaged data
            raise MediaError(f"the sound cannot be decoded: {error or type(error).__name__}") from error

    def _length_of_packets(self, container: Any, stream: Any) -> float:
        first, last, num_packets = None, 0.0, 0
        for packet in container.demux(stream):
            if not packet.size:
                continue
            num_packets += 1
            if packet.pts is None or packet.time_base is None:
                continue
            start = float(packet.pts * packet.time_base)
            first = start if first is None else min(first, start)
            last = max(last, start + float((packet.duration or 0) * packet.time_base))
            if last - first > self._max_seconds:
                raise self._too_long()
        if not num_packets:
            raise MediaError("the sound has no samples")
        return last - (first or 0.0)

    def _too_long(self) -> MediaError:
        return MediaError(f"the sound is longer than the {self._max_seconds:g} s allowed", code="media_too_large")

    def blocks(self, block_s: float = 5.0) -> Iterator[NDArray[np.float32]]:
        """The samples, float32 [samples] from -1 to 1, the mean of all channels, in blocks.

        Args:
            block_s: About how long each is; the last one may be shorter.

        Raises:
            MediaError: not a packet can be decoded, or there is more than its length and bounds allow.
        """
        wanted, most = int(block_s * self._rate), int(self._max_seconds * self._rate)
        collected: list[NDArray[np.float32]] = []
        num_collected = num_samples = 0
        try:
            for samples in self._decoded():
                num_samples += len(samples)
                if num_samples > most + self._rate:
                    raise self._too_long()
                collected.append(samples)
                num_collected += len(samples)
                if num_collected >= wanted:
                    yield np.concatenate(collected)
                    collected, num_collected = [], 0
        except MediaError:
            raise
        except Exception as error:
            raise MediaError(f"the sound cannot be decoded: {error or type(error).__name__}") from error
        if collected:
            yield np.concatenate(collected)
        elif not num_samples:
            raise MediaError("the sound has no samples that can be decoded")

    def _decoded(self) -> Iterator[NDArray[np.float32]]:
        """Samples of each packet; a damaged packet among good ones is left out, as players do."""
        resampler: Any = self._av.AudioResampler(format="s16", layout="mono", rate=self._rate)
        with self._open() as container:
            stream = container.streams.audio[0]
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except self._av.error.InvalidDataError:
                    continue
                for frame in frames:
                    if frame.samples > _MAX_FRAME_SAMPLES:
                        raise MediaError("a packet of the sound is too large", code="media_too_large")
                    frame.pts = None  # gaps and jumps of a damaged file are no silence to be filled
                    for each in resampler.resample(frame):
                        yield _floats(each)
            for each in resampler.resample(None):
                yield _floats(each)


def _floats(frame: Any) -> NDArray[np.float32]:
    return np.asarray(frame.to_ndarray()[0], np.float32) / np.float32(32768)
