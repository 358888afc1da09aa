"""Hugging Face `generate` of Whisper, greedy: windows of a recording in turn, those of several as a batch."""

from __future__ import annotations

import itertools
from typing import Any

from program import Run, serve
from recordings import FIRST_PROMPT, RATE, WINDOW_S, timed


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import torch
    import transformers

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    folder = settings["file"] or settings["model"]
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    of_language = {"language": "en", "task": "transcribe"} if model.generation_config.is_multilingual else {}

    def transcribe(sounds: list[Any], most_tokens: int) -> list[str]:
        step = RATE * WINDOW_S
        windows = [[each[at : at + step] for at in range(0, len(each), step)] for each in sounds]
        texts = [""] * len(sounds)
        for batch in itertools.zip_longest(*windows):
            rows = [row for row, window in enumerate(batch) if window is not None]
            heard = extractor([batch[row] for row in rows], sampling_rate=RATE, return_tensors="pt")
            with torch.inference_mode():
                features = heard.input_features.to(dtype)
                output = model.generate(
                    features, max_new_tokens=most_tokens, num_beams=1, do_sample=False, **of_language
                )
            for row, text in zip(rows, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True):
                texts[row] += text
        return texts

    return timed(transcribe), transformers.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
