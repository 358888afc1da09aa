"""Frames of Fast Conformers beside those of Transformers' extractors."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from quire_speech import SAMPLES_PER_S, standardized_log_mel
from quire_testkit.media_files import tone

FIELDS = {"feature_size": 80}


@pytest.mark.parametrize("seconds", [0.05, 1.0, 9.3])
def test_frames_are_those_of_parakeet(seconds: float) -> None:
    chooser = np.random.default_rng(1)
    sound = tone(2, seconds)
    sound += chooser.normal(0, 0.01, len(sound)).astype(np.float32)
    extractor = transformers.ParakeetFeatureExtractor(**FIELDS)
    expected = extractor(sound, sampling_rate=SAMPLES_PER_S, return_tensors="np")
    frames = standardized_log_mel(sound, num_mel_bins=80, max_frames=4000)
    assert len(frames) == expected["attention_mask"].sum() == len(sound) // 160
    assert np.abs(frames - expected["input_features"][0, : len(frames)]).max() < 1e-3


def test_noise_that_cohere_adds_is_far_below_speech() -> None:
    """Its extractor adds noise of 1e-5 to each sample, which is left out here."""
    chooser = np.random.default_rng(1)
    sound = tone(2, 2.0) + chooser.normal(0, 0.001, 2 * SAMPLES_PER_S).astype(np.float32)
    extractor = transformers.CohereAsrFeatureExtractor(feature_size=128)
    expected = extractor(sound.copy(), sampling_rate=SAMPLES_PER_S, return_tensors="np")["input_features"][0]
    frames = standardized_log_mel(sound, num_mel_bins=128, max_frames=4000)
    assert 0 < np.abs(frames - expected[: len(frames)]).max() < 0.5
    assert np.abs(frames - expected[: len(frames)]).mean() < 0.02


def test_short_and_long_sounds() -> None:
    assert standardized_log_mel(np.ones(3, np.float32), num_mel_bins=16, max_frames=10).shape == (2, 16)
    long = tone(1, 1.0)
    cut = standardized_log_mel(long, num_mel_bins=16, max_frames=10)
    assert np.array_equal(cut, standardized_log_mel(long[:1600], num_mel_bins=16, max_frames=99))
