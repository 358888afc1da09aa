"""Recordings as blocks of samples: what another library wrote, of any length, or a reason why there are none."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from quire_multimodal.errors import MediaError
from quire_multimodal.sound_files import SoundFile
from quire_multimodal.sound_pool import OpenSound, SoundPool
from quire_testkit.media_files import RATE, clip, tone, video_file, wav_file


def encoded(samples: NDArray[np.float32], rate: int, form: str, subtype: str | None = None) -> bytes:
    """A file as libsndfile writes it; what is read is compared with what went in."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def read(data: bytes, max_seconds: float = 60.0) -> NDArray[np.float32]:
    return np.concatenate(list(SoundFile(io.BytesIO(data), max_seconds=max_seconds).blocks(0.5)))


@pytest.fixture(scope="module")
def pool() -> Iterator[SoundPool]:
    pool = SoundPool()
    yield pool
    pool.close()


def opened(pool: SoundPool, data: bytes, max_seconds: float = 60.0, block_s: float = 5.0) -> OpenSound:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()  # and its position is at the end
        return pool.open(file.fileno(), max_seconds=max_seconds, block_s=block_s)


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_lossless_files_give_their_samples(form: str) -> None:
    samples = np.round(tone(1, 2.3) * 32767) / 32768
    assert np.array_equal(read(encoded(samples, RATE, form, "PCM_16")), samples.astype(np.float32))


@pytest.mark.parametrize(("form", "rate"), [("OGG", 44_100), ("MP3", 22_050), ("WAV", 8_000), ("WAV", 48_000)])
def test_other_rates_and_codecs_keep_the_tone(form: str, rate: int) -> None:
    """The strongest frequency, and the length, are those of what was written."""
    times = np.arange(3 * rate) / rate
    samples = read(encoded((0.5 * np.sin(2 * np.pi * 440 * times)).astype(np.float32), rate, form))
    assert abs(len(samples) - 3 * RATE) < 0.06 * RATE
    middle = samples[RATE : 2 * RATE]
    assert np.argmax(np.abs(np.fft.rfft(middle))) == 440
    assert 0.45 < np.abs(middle).max() < 0.55


def test_channels_are_averaged() -> None:
    left, right = tone(1), tone(2)
    mixed = read(encoded(np.stack([left, right], 1), RATE, "WAV", "FLOAT"))
    assert np.allclose(mixed, (left + right) / 2, atol=1e-4)


def test_the_sound_of_a_video_is_read() -> None:
    assert abs(len(read(video_file(clip(1, 12), tone(3, 6.0)))) - 6 * RATE) < 0.1 * RATE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"Dear sirs,\nhere is my recording.\n" * 40, "no sound that can be read"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "no sound that can be read"),
        (video_file(clip(1, 4)), "no sound in it"),
        (video_file(clip(1, 4), tone(1))[:2000], "cannot be decoded"),
        (wav_file(tone(1))[:44], "no samples|cannot be decoded"),
        (wav_file(tone(1, 61.5)), "longer than|is 6[12] s long"),
    ],
    ids=["empty", "text", "playlist", "silent video", "cut video", "header alone", "long"],
)
def test_what_is_no_sound_says_so(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        read(data)


def test_a_stream_that_says_no_length_is_measured() -> None:
    """An MP3 file without the frame that tells its length."""

    def stream(seconds: float) -> bytes:
        data = encoded(tone(1, seconds), RATE, "MP3")
        return data[data.index(data[:2], 100) :]

    with pytest.raises(MediaError, match=r"longer than|s long"):
        read(stream(70.0))
    assert len(read(stream(50.0))) > 49 * RATE


def test_damaged_packets_among_good_ones_are_left_out() -> None:
    data = bytearray(encoded(tone(1, 4.0), RATE, "MP3"))
    whole = len(read(bytes(data)))
    data[len(data) // 2 : len(data) // 2 + 600] = os.urandom(600)
    assert 0.7 * whole < len(read(bytes(data))) <= whole + RATE // 10


def test_a_process_reads_one_file_after_another(pool: SoundPool) -> None:
    samples = np.round(tone(4, 3.0) * 32767) / 32768
    data = encoded(samples, RATE, "FLAC", "PCM_16")
    first = opened(pool, data, block_s=1.0)
    assert first.duration_s == pytest.approx(3.0)
    blocks = list(first)
    first.close()
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate(blocks), samples.astype(np.float32))
    process = next(iter(pool._all)).process
    with pytest.raises(MediaError, match="no sound that can be read"):
        opened(pool, b"words")
    abandoned = opened(pool, data, block_s=0.5)
    next(iter(abandoned))
    for number in (signal.SIGINT, signal.SIGTERM):  # which reach every process of a terminal or a service
        process.send_signal(number)
    next(iter(abandoned))
    abandoned.close()
    assert list(abandoned) == []

    async def whole() -> NDArray[np.float32]:
        sound = opened(pool, data)
        blocks = [block async for block in sound]
        sound.close()
        return np.concatenate(blocks)

    assert np.array_equal(asyncio.run(whole()), samples.astype(np.float32))
    assert {each.process for each in pool._all} == {process}


def test_a_process_that_dies_takes_its_file_with_it(pool: SoundPool) -> None:
    sound = opened(pool, wav_file(tone(1, 30.0)), block_s=0.5)
    next(iter(sound))
    sound._worker.process.kill()
    with pytest.raises(MediaError, match="broke down"):
        list(sound)
    sound.close()
    assert len(np.concatenate(list(opened(pool, wav_file(tone(1)))))) == RATE


def test_memory_does_not_grow_with_the_length(pool: SoundPool) -> None:
    silence = np.zeros(1800 * RATE, np.int16)
    sound = opened(pool, encoded(silence, RATE, "FLAC"), max_seconds=3600.0)
    pid = sound._worker.process.pid

    def resident_bytes() -> int:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    num_samples, after_first = 0, 0
    for block in sound:
        num_samples += len(block)
        after_first = after_first or resident_bytes()
    assert num_samples == len(silence)
    assert resident_bytes() - after_first < 16 << 20  # of 115 MB that it is as floats
    sound.close()
