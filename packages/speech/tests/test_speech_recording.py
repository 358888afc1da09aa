"""Recordings that come in blocks, and windows of them."""

from __future__ import annotations

import numpy as np
import pytest

from quire_speech.features import log_mel
from quire_speech.recording import Recording


@pytest.mark.parametrize("num_samples", [0, 10, 160, 161, 200, 400, 401, 1_000, 112_033])
def test_blocks_give_the_bits_of_the_whole(num_samples: int) -> None:
    generator = np.random.default_rng(num_samples)
    samples = (0.1 * generator.standard_normal(num_samples)).astype(np.float32)
    whole, blocks, place = Recording.of(samples, 80, 1000), Recording(80, 1000), 0
    while place < num_samples:
        size = int(generator.integers(1, 5_000 if num_samples > 5_000 else 60))
        blocks.add(samples[place : place + size])
        place += size
    blocks.finish()
    assert whole.num_known == blocks.num_known == num_samples // 160
    assert np.array_equal(whole.window(0), blocks.window(0))
    followed = np.concatenate([samples, np.zeros(560, np.float32)])
    expected = log_mel(followed, 80)[:, : num_samples // 160]
    assert np.array_equal(whole.window(0)[:, : expected.shape[1]], expected[:, :1000])
    assert not whole.window(0)[:, expected.shape[1] :].any()


def test_what_was_read_is_forgotten() -> None:
    recording = Recording(80, 100)
    samples = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    for second in range(20):
        recording.add(samples)
        recording.forget(100 * second)
        assert sum(len(each) for each in recording._powers) < 300
    assert recording.has_window(1_890)
    assert not recording.has_window(1_950)
    with pytest.raises(AssertionError):
        recording.window(0)


def test_silence_is_told_from_the_quietest_sound() -> None:
    samples = np.zeros(16_000, np.float32)
    assert Recording.of(samples, 80, 100).is_silent(0)
    samples[8_000:] = 1e-3 * np.sin(np.arange(8_000))
    assert not Recording.of(samples, 80, 100).is_silent(0)
