"""Videos and sounds made from a number, decoded and as files."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_testkit.seeing_models import drawing

__all__ = ["RATE", "VideoClip", "clip", "media_url", "read_clip", "tone", "video_file", "wav_file"]

RATE = 16_000
"""Samples in a second of the sounds."""


@dataclass(frozen=True, slots=True)
class VideoClip:
    """A video that is decoded."""

    frames: NDArray[np.uint8]
    """[frames, height, width, 3]."""
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of all its frames, as processors of Transformers take them."""
        num_frames, height, width, _ = self.frames.shape
        return {
            "total_num_frames": num_frames,
            "fps": self.fps,
            "duration": num_frames / self.fps,
            "height": height,
            "width": width,
            "frames_indices": list(range(num_frames)),
        }


def clip(number: int, num_frames: int = 6, size: tuple[int, int] = (48, 40), fps: float = 2.0) -> VideoClip:
    """A video; those of different numbers differ."""
    return VideoClip(np.stack([np.asarray(drawing(number + index, size)) for index in range(num_frames)]), fps)


def tone(number: int, seconds: float = 1.0, rate: int = RATE) -> NDArray[np.float32]:
    """A sound, float32 [samples]; those of different numbers differ."""
    times = np.arange(int(seconds * rate)) / rate
    rising = 0.05 * np.sin(2 * np.pi * (1500 + 100 * number) * times * times)
    return np.asarray(0.3 * np.sin(2 * np.pi * (200 + 70 * number) * times) + rising, np.float32)


def video_file(video: VideoClip, sound: NDArray[np.float32] | None = None) -> bytes:
    """The video in an MP4 file, compressed, with a sound at `RATE`."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=int(video.fps))
        stream.height, stream.width = video.frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        track = None if sound is None else container.add_stream("aac", rate=RATE, layout="mono")
        for frame in video.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        if track is not None and sound is not None:
            samples = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
            samples.sample_rate = RATE
            container.mux(track.encode(samples))
            container.mux(track.encode())
    return file.getvalue()


def read_clip(data: bytes) -> VideoClip:
    """All frames of a video file."""
    import av

    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return VideoClip(np.stack(frames), float(stream.average_rate or 0))


def wav_file(samples: NDArray[np.float32], rate: int = RATE) -> bytes:
    """The sound in a WAV file that holds every bit."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def media_url(data: bytes, kind: str) -> str:
    """A data URL of this media type."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
