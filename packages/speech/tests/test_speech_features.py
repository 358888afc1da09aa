"""Spectrograms, beside Transformers' extractor."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from quire_speech.features import SAMPLES_PER_S, log_mel, mel_filters, window_samples

Samples = NDArray[np.float32]


def sounds() -> dict[str, Samples]:
    """Recordings of several kinds."""
    generator = np.random.default_rng(0)
    noise = (0.1 * generator.standard_normal(5 * SAMPLES_PER_S)).astype(np.float32)
    with_silence = noise.copy()
    with_silence[20_000:50_000] = 0
    with_silence[:5_000] *= 1e-4
    tone = np.sin(0.1 * np.arange(3 * SAMPLES_PER_S + 77)).astype(np.float32)
    silence = np.zeros(SAMPLES_PER_S, np.float32)
    return {"noise": noise, "with_silence": with_silence, "tone": tone, "silence": silence}


@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize("kind", ["noise", "with_silence", "tone", "silence"])
def test_spectrograms_are_those_of_transformers(kind: str, num_mel_bins: int) -> None:
    samples = sounds()[kind]
    extractor = WhisperFeatureExtractor(feature_size=num_mel_bins)
    (expected,) = extractor._np_extract_fbank_features([samples], "cpu")
    found = log_mel(samples, num_mel_bins)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("num_mel_bins", [80, 128])
def test_filters_are_those_of_transformers(num_mel_bins: int) -> None:
    expected = WhisperFeatureExtractor(feature_size=num_mel_bins).mel_filters
    assert np.abs(mel_filters(num_mel_bins) - expected).max() < 1e-12


@pytest.mark.parametrize("num_samples", [0, 1, 159, 160, 200, 201, 400])
def test_short_recordings_have_a_frame_for_each_hop(num_samples: int) -> None:
    assert log_mel(np.ones(num_samples, np.float32), 80).shape == (80, num_samples // 160)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("length", [640, 689])
def test_samples_in_frames_are_those_of_transformers(normalizes: bool, has_mask: bool, length: int) -> None:
    """Where it gives a mask, its network leaves the frame out that is not full."""
    sound = np.random.default_rng(length).normal(0.2, 0.5, length).astype(np.float32)
    extractor = Wav2Vec2FeatureExtractor(do_normalize=normalizes, return_attention_mask=has_mask)
    options = {"sampling_rate": SAMPLES_PER_S, "padding": True, "pad_to_multiple_of": 80, "return_tensors": "np"}
    wanted = extractor(sound, **options)["input_values"]
    if has_mask:
        wanted[:, length // 80 * 80 :] = 0
    got = window_samples(sound, least=1, most=10_000, normalizes=normalizes, frame_len=80, drops_rest=has_mask)
    assert (got.shape, got.dtype) == (wanted.shape, np.float32)
    assert np.abs(got - wanted).max() < 1e-5
