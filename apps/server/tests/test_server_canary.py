"""A served Canary, which is told the language and translates: transcripts are those of Transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from server_hearing_models import NUM_TOKENS, RECORDING, heard_window, transcript

from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TEXT_TOKENS = 300
TOKENS = (
    "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|de|>", "<|en|>", "<|pnc|>", "<|noitn|>",
    "<|notimestamp|>", "<|nodiarize|>",
)  # fmt: skip
"""Of a translation from German, in the order in which the decoder gets them."""
VOCAB_SIZE = NUM_TEXT_TOKENS + len(TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("canary")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    case = ENCODER_CASES["CanaryForConditionalGeneration"]
    own = {"vocab_size": VOCAB_SIZE, "eos_token_id": None, "decoder_start_token_id": NUM_TEXT_TOKENS}
    own["decoder_config"] = {**case.fields["decoder_config"], "vocab_size": VOCAB_SIZE}
    case = dataclasses.replace(case, fields={**case.fields, **own})
    network = write_checkpoint(folder, "CanaryForConditionalGeneration", case)
    write_tokenizer(folder, vocab_size=NUM_TEXT_TOKENS)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(folder)
    return network


@pytest.fixture(scope="module")
def server(make_hearing: Any, folder: Path, network: Any) -> Any:
    return make_hearing(folder)


def test_recordings_are_translated_over_http(server: Any, network: Any, folder: Path) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["tasks"] == ["transcription", "translation"]
    extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    inputs = extractor(heard_window()[1], sampling_rate=RATE, return_tensors="pt")
    begun = torch.arange(NUM_TEXT_TOKENS, VOCAB_SIZE)[None]
    with torch.inference_mode():
        found = network.generate(
            inputs["input_features"],
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=begun,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    fields = {"max_completion_tokens": str(NUM_TOKENS), "language": "de"}
    files = {"file": ("a.wav", wav_file(RECORDING))}
    answer = server.client.post("/v1/audio/translations", files=files, data=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == transcript(folder, found[0, begun.shape[1] :])


def test_languages_that_it_does_not_know_are_refused(server: Any) -> None:
    files = {"file": ("a.wav", wav_file(tone(1)))}
    answer = server.client.post("/v1/audio/transcriptions", files=files, data={"language": "ja"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "language")
    answer = server.client.post("/v1/audio/translations", files=files, data={"to_language": "ja"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "to_language")
