"""A random multilingual Whisper beside Transformers: which language is heard and how probable it is, and the tokens of
windows with a language, a task and a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from quire import LLM
from quire_interfaces import RequestError
from quire_speech import TranscriptionOptions
from quire_testkit.tokenizers import write_tokenizer

SOUND = Path(__file__).parent / "sounds" / "river.ogg"
RATE = 16_000
NUM_LANGUAGES = 99
NUM_MEL_BINS, NUM_POSITIONS = 16, 100
WINDOW_S = NUM_POSITIONS / 50
NUM_TOKENS = 12
GREEDY: dict[str, Any] = {
    "temperatures": (0.0,), "max_tokens": NUM_TOKENS, "no_speech_threshold": None, "logprob_threshold": None,
    "compression_ratio_threshold": None, "condition_on_previous_text": False,
}  # fmt: skip


class Multilingual:
    """The network of Transformers, and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_tokenizer(folder, vocab_size=600)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        codes = list(LANGUAGES)[:NUM_LANGUAGES]
        names = ["endoftext", "startoftranscript", *codes, "translate", "transcribe", "startoflm", "startofprev",
                 "nospeech", "notimestamps", *(f"{step * 0.02:.2f}" for step in range(NUM_POSITIONS + 1))]  # fmt: skip
        tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
        tokenizer.save_pretrained(folder)
        self.tokenizer, self.ids = tokenizer, {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
        ids = self.ids
        others = [*range(ids["endoftext"] + 1, ids["startoftranscript"])]  # of other models, behind all text
        torch.manual_seed(0)
        config = transformers.WhisperConfig(
            vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=NUM_MEL_BINS,
            max_source_positions=NUM_POSITIONS, max_target_positions=64, init_std=0.25,
            decoder_start_token_id=ids["startoftranscript"], bos_token_id=ids["endoftext"],
            eos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"], suppress_tokens=None,
            begin_suppress_tokens=None,
        )  # fmt: skip
        self.network: Any = transformers.WhisperForConditionalGeneration(config).eval()
        rules = {
            "decoder_start_token_id": ids["startoftranscript"], "eos_token_id": ids["endoftext"],
            "pad_token_id": ids["endoftext"], "bos_token_id": ids["endoftext"], "is_multilingual": True,
            "lang_to_id": {f"<|{code}|>": ids[code] for code in codes},
            "task_to_id": {task: ids[task] for task in ("transcribe", "translate")},
            "no_timestamps_token_id": ids["notimestamps"], "prev_sot_token_id": ids["startofprev"],
            "max_initial_timestamp_index": 50, "suppress_tokens": [17, 18, *others], "begin_suppress_tokens": [19, 20],
        }  # fmt: skip
        self.network.generation_config = transformers.GenerationConfig(**rules)
        self.network.save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps(rules))
        self.extractor = transformers.WhisperFeatureExtractor(
            feature_size=NUM_MEL_BINS, chunk_length=round(WINDOW_S), n_fft=400
        )

    def language_of(self, samples: NDArray[np.float32]) -> tuple[str, float]:
        """What Transformers hears in the first window, and its share of the probability of all languages."""
        heard = self.heard(samples[: round(WINDOW_S * RATE)])["input_features"]
        named = self.network.detect_language(heard)
        with torch.inference_mode():
            logits = self.network(heard, decoder_input_ids=torch.tensor([[self.ids["startoftranscript"]]])).logits[0, 0]
        of_languages = {code: logits[self.ids[code]].item() for code in list(LANGUAGES)[:NUM_LANGUAGES]}
        total = sum(math.exp(each) for each in of_languages.values())
        (code,) = [code for code, token in self.ids.items() if token == named.item()]
        return code, math.exp(of_languages[code]) / total

    def heard(self, samples: NDArray[np.float32]) -> dict[str, Any]:
        """The spectrogram, at least as long as a window."""
        found = self.extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True,
                               truncation=False, padding="longest")  # fmt: skip
        missing = (0, max(0, 2 * NUM_POSITIONS - found["input_features"].shape[-1]))
        return {name: torch.nn.functional.pad(found[name], missing) for name in found}

    def segments(self, samples: NDArray[np.float32], **arguments: Any) -> list[tuple[float, float, list[int]]]:
        """Start, end and text of the segments that long-form generation writes, those that take no time left out."""
        with torch.inference_mode():
            output = self.network.generate(
                **self.heard(samples), return_timestamps=True, return_segments=True, temperature=0.0, num_beams=1,
                do_sample=False, max_new_tokens=NUM_TOKENS, **{"condition_on_prev_tokens": False, **arguments},
            )  # fmt: skip
        found = [
            (round(float(each["start"]), 2), round(float(each["end"]), 2), self.text_ids(each["tokens"].tolist()))
            for each in output["segments"][0]
        ]
        return [each for each in found if each[0] != each[1] and each[2]]

    def text_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Without times."""
        return [token for token in token_ids if token < self.ids["endoftext"]]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Multilingual:
    return Multilingual(tmp_path_factory.mktemp("multilingual"))


@pytest.fixture(scope="module")
def llm(whisper: Multilingual) -> Iterator[LLM]:
    with LLM(str(whisper.folder), dtype="float32", kv_cache_memory_bytes=1 << 22, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def sounds() -> list[NDArray[np.float32]]:
    """Nine seconds of speech; five windows, of which the last one is not full."""
    speech = np.asarray(soundfile.read(SOUND, dtype="float32")[0], np.float32)
    noise = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32)
    return [speech, speech[::-1].copy(), 0.05 * noise, speech[40_000:] * np.float32(0.1)]


def test_the_language_is_what_transformers_hears(
    llm: LLM, whisper: Multilingual, sounds: list[NDArray[np.float32]]
) -> None:
    found = llm.transcribe(sounds, TranscriptionOptions(**GREEDY))
    told = [(each.language, each.language_probability) for each in found]
    expected = [whisper.language_of(sound) for sound in sounds]
    assert [code for code, _ in told] == [code for code, _ in expected]
    assert [share for _, share in told] == pytest.approx([share for _, share in expected], rel=1e-3)
    assert len({code for code, _ in told}) > 1, "sounds of one language would say nothing"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"task": "transcribe"}),
        ({"language": "de"}, {"language": "de"}),
        ({"language": "Swahili"}, {"language": "sw"}),
        ({"language": "ja", "task": "translate"}, {"language": "ja", "task": "translate"}),
        ({"task": "translate"}, {"task": "translate"}),
        ({"language": "en", "hotwords": "Ada, Grace"}, {"language": "en", "prompt_ids": "Ada, Grace"}),
        (
            {"language": "en", "prompt": "Ada, Grace", "condition_on_previous_text": True},
            {"language": "en", "prompt_ids": "Ada, Grace", "condition_on_prev_tokens": True},
        ),
    ],
)
def test_segments_are_those_of_transformers(
    llm: LLM, whisper: Multilingual, sounds: list[NDArray[np.float32]], options: Any, arguments: Any
) -> None:
    if "prompt_ids" in arguments:
        text = f" {arguments['prompt_ids']}"
        ids = [whisper.ids["startofprev"], *whisper.tokenizer(text, add_special_tokens=False).input_ids]
        arguments = {**arguments, "prompt_ids": torch.tensor(ids)}
    (found,) = llm.transcribe(sounds[0], TranscriptionOptions(**GREEDY | options))
    segments = [
        (round(each.start_s, 2), round(each.end_s, 2), whisper.text_ids(each.token_ids)) for each in found.segments
    ]
    assert segments == whisper.segments(sounds[0], **arguments)


def test_unknown_languages_are_refused_by_name(llm: LLM, sounds: list[NDArray[np.float32]]) -> None:
    with pytest.raises(RequestError, match="does not know cantonese") as refused:
        llm.transcribe(sounds[0], TranscriptionOptions(language="yue"))
    assert refused.value.param == "language"
