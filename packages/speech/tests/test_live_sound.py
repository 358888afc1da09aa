"""Sound of a line: G.711 as FFmpeg decodes it, resampling as soxr does it, whatever the blocks."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from quire_interfaces import RequestError
from quire_speech.live_sound import RATE, LiveSound, Resampler, a_law, mu_law


@pytest.mark.parametrize(("subtype", "table"), [("ULAW", mu_law()), ("ALAW", a_law())])
def test_g711_is_that_of_libsndfile(subtype: str, table: np.ndarray) -> None:
    """All 256 bytes, decoded by another library from a file that holds them."""
    data, _ = soundfile.read(
        io.BytesIO(bytes(range(256))), samplerate=8000, channels=1, format="RAW", subtype=subtype, dtype="float32"
    )
    assert np.array_equal(table, data)


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100, 48_000])
def test_rates_keep_tones_and_times(rate: int) -> None:
    times = np.arange(2 * rate) / rate
    sound = (0.4 * np.sin(2 * np.pi * 440 * times) + 0.2 * np.sin(2 * np.pi * 1900 * times + 1)).astype(np.float32)
    resampler = Resampler(rate)
    whole = np.concatenate([resampler.feed(sound), resampler.finish()])
    expected = np.arange(2 * RATE) / RATE
    expected = 0.4 * np.sin(2 * np.pi * 440 * expected) + 0.2 * np.sin(2 * np.pi * 1900 * expected + 1)
    assert abs(len(whole) - 2 * RATE) <= 1
    middle = slice(RATE // 10, 2 * RATE - RATE // 10)
    assert np.abs(whole[middle] - expected[middle]).max() < 2e-3
    resampler, blocks, at = Resampler(rate), [], 0
    for size in [1, 7, 160, 1000] * 100:
        blocks.append(resampler.feed(sound[at : at + size]))
        at += size
    blocks.append(resampler.feed(sound[at:]))
    blocks.append(resampler.finish())
    assert np.allclose(np.concatenate(blocks), whole, atol=1e-6)


def test_what_is_above_the_new_rate_is_gone() -> None:
    high = np.sin(2 * np.pi * 10_000 * np.arange(24_000) / 24_000).astype(np.float32)
    assert np.abs(Resampler(24_000).feed(high)[1000:]).max() < 0.01


def test_pcm_may_come_byte_by_byte() -> None:
    samples = np.arange(-1000, 1000, 7, dtype="<i2")
    line = LiveSound("pcm16", RATE)
    parts = [line.feed(bytes([byte])) for byte in samples.tobytes()]
    assert np.array_equal(np.concatenate(parts), samples.astype(np.float32) / 32768)


@pytest.mark.parametrize(("form", "rate"), [("mp3", 24_000), ("pcm16", 11_025)])
def test_other_forms_are_refused(form: str, rate: int) -> None:
    with pytest.raises(RequestError):
        LiveSound(form, rate)  # type: ignore[arg-type]  # on purpose
