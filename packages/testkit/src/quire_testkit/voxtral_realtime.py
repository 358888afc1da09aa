"""A tiny random Voxtral Realtime, whose makers' tools Quire does without. Imports torch."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint

__all__ = ["VoxtralRealtime"]

ARCHITECTURE = "VoxtralRealtimeForConditionalGeneration"
CONTROL_TOKENS = ("<unk>", "<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]")
RATE, TOKEN_LEN = 16_000, 1280
"""Samples in a second, and of the sound under a token."""
NUM_LEFT_PAD, NUM_DELAY, NUM_LONGEST_WORD = 4, 3, 10
TEKKEN: dict[str, Any] = {
    "config": {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": 256 + len(CONTROL_TOKENS),
        "default_num_special_tokens": len(CONTROL_TOKENS),
        "version": "v13",
    },
    "vocab": [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ],
    "special_tokens": [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(CONTROL_TOKENS)
    ],
    "audio": {
        "sampling_rate": RATE,
        "frame_rate": RATE / TOKEN_LEN,
        "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
        "transcription_format": "streaming",
        "transcription_delay_ms": 1000 * NUM_DELAY * TOKEN_LEN / RATE,
        "streaming_look_ahead_ms": 2.5,
        "streaming_look_back_ms": 52.5,
        "streaming_n_left_pad_tokens": NUM_LEFT_PAD,
    },
}


class VoxtralRealtime:
    """A random checkpoint with its tokenizer and feature extractor; its texts end with the sound alone.

    Args:
        folder: Where the checkpoint goes.
    """

    def __init__(self, folder: Path) -> None:
        import transformers

        self.folder = folder
        (folder / "tekken.json").write_text(json.dumps(TEKKEN))
        make: Any = transformers.VoxtralRealtimeFeatureExtractor
        self._extractor = make(feature_size=16)
        self._extractor.save_pretrained(folder)
        case = MEDIA_CASES[ARCHITECTURE]
        text = {
            **case.fields["text_config"],
            "vocab_size": TEKKEN["config"]["default_vocab_size"],
            "eos_token_id": None,
            "max_position_embeddings": 1024,
        }
        fields = {**case.fields, "text_config": text, "default_num_delay_tokens": NUM_DELAY}
        self._network = write_checkpoint(folder, ARCHITECTURE, dataclasses.replace(case, fields=fields))
        self._network.generation_config.eos_token_id = None

    def expected(self, samples: NDArray[np.float32]) -> list[int]:
        """All tokens that Transformers writes of a sound, float32 [samples] at 16 kHz, which is prepared as
        mistral-common 1.13.1 prepares a `TranscriptionRequest` of a whole recording."""
        behind = -len(samples) % TOKEN_LEN + (NUM_DELAY + 1 + NUM_LONGEST_WORD) * TOKEN_LEN
        padded = np.pad(samples, (NUM_LEFT_PAD * TOKEN_LEN, behind))
        pad = CONTROL_TOKENS.index("[STREAMING_PAD]")
        ids = torch.tensor([[CONTROL_TOKENS.index("<s>"), *[pad] * (NUM_LEFT_PAD + NUM_DELAY)]])
        features = self._extractor(padded, sampling_rate=RATE, return_tensors="pt")["input_features"]
        with torch.inference_mode():
            found = self._network.generate(
                input_ids=ids,
                input_features=features,
                num_delay_tokens=NUM_DELAY,
                max_new_tokens=1024,  # it ends with the sound
                do_sample=False,
            )
        assert found.shape[1] == len(padded) // TOKEN_LEN
        tokens: list[int] = found[0, ids.shape[1] :].tolist()
        return tokens
