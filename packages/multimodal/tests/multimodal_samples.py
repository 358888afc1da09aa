"""Encoded media, made here from a seed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray


def random_image(width: int = 80, height: int = 60, seed: int = 0) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def tone(seconds: float = 1.0, rate: int = 16_000, hertz: float = 440.0) -> NDArray[np.float32]:
    return np.sin(np.arange(int(seconds * rate)) * (2 * np.pi * hertz / rate)).astype(np.float32) * 0.5


def sound(seconds: float = 1.0, rate: int = 16_000, kind: str = "WAV") -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate), rate, format=kind)
    return file.getvalue()


def video(num_frames: int = 12, width: int = 64, height: int = 48, fps: int = 6, kind: str = "mp4") -> bytes:
    """Frames that grow brighter."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((height, width, 3), index * 200 // num_frames + 20, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
