"""A tiny random multilingual Whisper, with its tokenizer and the rules of its generation_config.json. Imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire_testkit.tokenizers import write_tokenizer

__all__ = ["NUM_TOKENS", "MultilingualWhisper"]

RATE = 16_000
NUM_LANGUAGES = 99
NUM_MEL_BINS, NUM_POSITIONS = 16, 100
WINDOW_S = NUM_POSITIONS / 50
NUM_TOKENS = 12
"""Most tokens of a window."""


class MultilingualWhisper:
    """The network of Transformers, and its folder."""

    def __init__(self, folder: Path) -> None:
        transformers: Any = import_module("transformers")
        languages: Any = import_module("transformers.models.whisper.tokenization_whisper")

        self.folder, self._codes = folder, list(languages.LANGUAGES)[:NUM_LANGUAGES]
        write_tokenizer(folder, vocab_size=600)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        codes = self._codes
        names = ["endoftext", "startoftranscript", *codes, "translate", "transcribe", "startoflm", "startofprev",
                 "nospeech", "notimestamps", *(f"{step * 0.02:.2f}" for step in range(NUM_POSITIONS + 1))]  # fmt: skip
        tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
        tokenizer.save_pretrained(folder)
        self.tokenizer: Any = tokenizer
        self.ids: dict[str, int] = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
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
        of_languages = {code: logits[self.ids[code]].item() for code in self._codes}
        total = sum(math.exp(each) for each in of_languages.values())
        (code,) = [code for code, token in self.ids.items() if token == named.item()]
        return code, math.exp(of_languages[code]) / total

    def heard(self, samples: NDArray[np.float32]) -> dict[str, Any]:
        """The spectrogram, at least as long as a window."""
        found = self.extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True,
                               truncation=False, padding="longest")  # fmt: skip
        missing = (0, max(0, 2 * NUM_POSITIONS - found["input_features"].shape[-1]))
        return {name: torch.nn.functional.pad(found[name], missing) for name in found}

    def segments(
        self, samples: NDArray[np.float32], network: Any = None, **arguments: Any
    ) -> list[tuple[float, float, list[int]]]:
        """Start, end and text of the segments that long-form generation writes, those that take no time left out.

        Args:
            network: In the place of this one; None for this one.
            arguments: Of generation.
        """
        with torch.inference_mode():
            output = (network or self.network).generate(
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
