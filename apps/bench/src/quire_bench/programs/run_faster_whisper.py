"""faster-whisper on a folder in the format of CTranslate2, in float32 or in its int8, which rounds inputs of matrices,
too. Several recordings are transcribed by as many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from program import Run, serve
from recordings import FIRST_PROMPT, timed


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    import faster_whisper

    model = faster_whisper.WhisperModel(
        settings["file"],
        device="cpu",
        compute_type="int8" if settings.get("quantization") else settings["dtype"],
        cpu_threads=settings["num_threads"] or 0,
    )

    def transcribe(sounds: list[Any], most_tokens: int) -> list[str]:
        def one(samples: Any) -> str:
            segments, _ = model.transcribe(
                samples,
                language="en",
                beam_size=1,
                temperature=0.0,
                without_timestamps=True,
                condition_on_previous_text=False,
                compression_ratio_threshold=None,
                log_prob_threshold=None,
                no_speech_threshold=None,
                max_new_tokens=most_tokens,
            )
            return "".join(segment.text for segment in segments)

        with ThreadPoolExecutor(len(sounds)) as pool:
            return list(pool.map(one, sounds))

    return timed(transcribe), faster_whisper.__version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
