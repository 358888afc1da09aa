"""Media that lie, burst, end early or are something else: an error each, quickly, and within bounds."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest
import soundfile
from multimodal_samples import encoded, random_image, sound, tone, video

from quire_multimodal import MediaConfig, MediaError, mono_samples
from quire_multimodal.bounds import container_format
from quire_multimodal.decode import decode_audio, decode_image, decode_video

BOUNDS = MediaConfig(media_max_pixels=1_000_000, media_max_frames=16, media_max_seconds=10)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def every(count: int, fps: float) -> range:
    return range(count)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    image = decode_image(encoded(random_image(40, 30), kind), BOUNDS)
    assert (image.size, image.mode) == ((40, 30), "RGB")


def test_the_first_picture_of_several() -> None:
    pictures = [random_image(seed=seed) for seed in range(3)]
    for kind in ("GIF", "WEBP", "TIFF", "MPO"):
        file = io.BytesIO()
        pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], lossless=True)
        image = decode_image(file.getvalue(), BOUNDS)
        assert image.size == pictures[0].size
        if kind in ("WEBP", "TIFF"):
            np.testing.assert_array_equal(np.asarray(image), np.asarray(pictures[0]))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "PNG" if mode in ("1", "L", "LA", "P", "RGBA", "I;16") else "TIFF"
    image = PIL.Image.new(mode, (5, 4)) if mode in ("I;16", "PA") else random_image(5, 4).convert(mode)
    assert decode_image(encoded(image, kind), BOUNDS).mode == "RGB"


def test_transparency_shows_the_background() -> None:
    clear = encoded(PIL.Image.new("RGBA", (2, 2), (10, 20, 30, 0)))
    assert decode_image(clear, BOUNDS).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(clear, BOUNDS, {"rgba_background_color": [1, 2, 3]}).getpixel((0, 0)) == (1, 2, 3)


def test_images_stand_upright() -> None:
    image = random_image(40, 30)
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode_image(encoded(image, "JPEG", exif=exif), BOUNDS).size == (30, 40)


@pytest.mark.parametrize(
    ("width", "height"), [(50_000, 50_000), (1_000_001, 1), (1, 1_000_001), (2**31 - 1, 2**31 - 1)]
)
def test_bombs_are_refused_by_their_header(width: int, height: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in (png(width, height), png(width, height, bytes(3 * 1000)), _gif(65535, 65535), _bmp(width, height)):
        with pytest.raises(MediaError) as failure:
            decode_image(data, BOUNDS)
        assert failure.value.code in ("media_too_large", "invalid_media")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "something was decoded"


def _gif(width: int, height: int) -> bytes:
    data = bytearray(encoded(random_image(4, 4), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def _bmp(width: int, height: int) -> bytes:
    data = bytearray(encoded(random_image(4, 4), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def test_long_and_thin() -> None:
    assert decode_image(encoded(PIL.Image.new("RGB", (1, 65535))), BOUNDS).size == (1, 65535)


def test_a_text_bomb_in_a_png() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100 << 20)))
    data = encoded(random_image(4, 4))
    with pytest.raises(MediaError, match="image"):
        decode_image(data[:33] + text + data[33:], BOUNDS)


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"<?xml version='1.0'?><!DOCTYPE svg [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><svg>&a;</svg>",
        b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"PK\x03\x04" + bytes(100),
        b"#EXTM3U\nhttp://169.254.169.254/\n",
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF\xff\xff\xff\xffWEBP",
        b"II*\0\xff\xff\xff\xff",
        bytes(range(256)) * 20,
    ],
)
def test_what_is_no_image(data: bytes) -> None:
    with pytest.raises(MediaError):
        decode_image(data, BOUNDS)


def test_polyglots_are_what_their_bytes_say() -> None:
    page = b"<script>alert(1)</script>"
    assert decode_image(encoded(random_image(8, 8)) + page + b"PK\x03\x04", BOUNDS).size == (8, 8)
    with pytest.raises(MediaError):
        decode_image(page + encoded(random_image(8, 8)), BOUNDS)
    with pytest.raises(MediaError):
        decode_video(encoded(random_image(8, 8), "BMP"), BOUNDS, every)
    with pytest.raises(MediaError):
        decode_image(sound(), BOUNDS)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_images(kind: str) -> None:
    """Cut short, or with bytes that were changed: an image or an error, never anything else."""
    chooser, good = random.Random(kind), encoded(random_image(24, 18), kind)
    for _ in range(150):
        data = bytearray(good[: chooser.randrange(len(good))] if chooser.random() < 0.4 else good)
        for _ in range(chooser.randrange(4)):
            if data:
                data[chooser.randrange(len(data))] = chooser.randrange(256)
        try:
            assert decode_image(bytes(data), BOUNDS).mode == "RGB"
        except MediaError:
            continue


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_sounds(kind: str) -> None:
    samples = decode_audio(sound(1.0, 22_050, kind), 16_000, BOUNDS)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 16_000) < 2000
    assert 0.4 < np.abs(samples).max() < 0.6
    with pytest.raises(MediaError, match="more than the 10 s") as failure:
        decode_audio(sound(11.0, 8000, kind), 16_000, BOUNDS)
    assert failure.value.code == "media_too_large"
    same = decode_audio(sound(0.5, 16_000, "FLAC"), 16_000, BOUNDS)
    np.testing.assert_allclose(same, tone(0.5), atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    samples = tone(0.1)
    samples[700] = bad
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(MediaError, match="infinite or no numbers"):
        decode_audio(file.getvalue(), 16_000, BOUNDS)
    with pytest.raises(MediaError, match="infinite or no numbers"):
        mono_samples(samples, 16_000, 16_000)


def track(kind: str, codec: str) -> bytes:
    """One second of sound in a container of videos."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=16_000)
        for start in range(0, 16_000, 1000):
            samples = (tone(1.0)[None, start : start + 1000] * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.rate = 16_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "aac"), ("matroska", "pcm_s16le")])
def test_the_sound_of_a_video(kind: str, codec: str) -> None:
    """Matroska says no length of its streams: what is decoded is counted."""
    data = track(kind, codec)
    assert abs(len(decode_audio(data, 8000, BOUNDS)) - 8000) < 1200
    with pytest.raises(MediaError, match=r"longer than 0\.5 s|more than the 0\.5 s"):
        decode_audio(data, 8000, MediaConfig(media_max_seconds=0.5))


def test_a_video_without_sound() -> None:
    with pytest.raises(MediaError, match="no sound"):
        decode_audio(video(), 8000, BOUNDS)


def test_a_wav_header_that_lies() -> None:
    data = bytearray(sound(0.1))
    data[40:44] = struct.pack("<I", 0x7FFFFFFF)  # bytes of samples
    assert len(decode_audio(bytes(data), 16_000, BOUNDS)) <= 160_000
    for rate in (0, 1, 0x7FFFFFFF):
        data[24:28] = struct.pack("<I", rate)
        with pytest.raises(MediaError):
            decode_audio(bytes(data), 16_000, BOUNDS)


def test_videos() -> None:
    frames = decode_video(video(12, fps=6), BOUNDS, lambda count, fps: range(0, count, 3))
    assert (frames.num_frames, frames.fps, frames.indices) == (12, 6.0, [0, 3, 6, 9])
    assert frames.frames.shape == (4, 48, 64, 3)
    assert (np.diff(frames.frames.astype(int).mean(axis=(1, 2, 3))) > 20).all(), "they grow brighter"


@pytest.mark.parametrize(
    ("data", "bounds", "message"),
    [
        (video(20), {"media_max_frames": 16}, "20 frames of the video would be shown"),
        (video(12), {"media_max_pixels": 1000}, "64 x 48 pixels"),
        (video(12, fps=1), {"media_max_seconds": 5}, "12 s long"),
        (sound(), {}, "no video in it"),
    ],
)
def test_videos_out_of_bounds(data: bytes, bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(MediaError, match=message):
        decode_video(data, MediaConfig(**bounds), every)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:1/secret.ts\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        b"<MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><BaseURL>file:///etc/passwd</BaseURL></MPD>",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
        b"[playlist]\nFile1=file:///etc/passwd\n",
    ],
)
def test_playlists_are_no_videos(data: bytes) -> None:
    assert container_format(data) is None
    for read in (lambda: decode_video(data, BOUNDS, every), lambda: decode_audio(data, 16_000, BOUNDS)):
        with pytest.raises(MediaError):
            read()


def test_damaged_videos_and_sounds() -> None:
    chooser = random.Random(0)
    for good in (video(12), sound(0.3), sound(0.3, kind="OGG"), video(8, kind="avi"), video(8, kind="matroska")):
        for _ in range(40):
            data = bytearray(good[: chooser.randrange(len(good))] if chooser.random() < 0.4 else good)
            for _ in range(chooser.randrange(6)):
                if data:
                    data[chooser.randrange(len(data))] = chooser.randrange(256)
            with contextlib.suppress(MediaError):
                decode_video(bytes(data), BOUNDS, every)
            with contextlib.suppress(MediaError):
                decode_audio(bytes(data), 8000, BOUNDS)
