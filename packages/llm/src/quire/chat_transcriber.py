"""Transcribing with models that hear in conversations (Qwen2-Audio, Qwen3-ASR, Voxtral, ...): each stretch of speech is
a question with a sound, whose answer is its text.

Stretches are found by the voice detector, so that silence asks nothing, and several are asked at a time. Such models
tell no times: a segment is a stretch.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire_multimodal  # its names are loaded when they are used
from quire.media import MediaFront, MediaPart, media_sources
from quire.transcribers import Hearing
from quire_engine import AsyncEngine
from quire_interfaces import Modality, QuireError, RequestError, RequestOptions, SamplingParams
from quire_renderers import ChatRenderer
from quire_speech import Segment, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.transcribers import Pieces

__all__ = ["ChatTranscriber"]

_RATE, _WINDOW_S, _MAX_AT_A_TIME = 16_000, 30.0, 4
_MAX_TOKENS = 448
"""Of a window, where the request names no bound: more than anybody says in half a minute."""
_QUESTIONS = {"granite_speech": "can you transcribe the speech into a written format?"}
"""model_type -> the question that its model card gives."""
_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ru": "Russian",
    "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
"""Code -> name, for models that are asked in words."""
_QWEN_TEXT = "<asr_text>"
"""Qwen3-ASR writes `language English<asr_text>` before the text."""


class ChatTranscriber:
    """Transcribes by questions.

    Args:
        engine: Its model takes sounds in conversations.
        renderer: Of its conversations.
        media: Prepares their sounds.
        folder: Of the checkpoint, whose config.json says which model it is.
    """

    model_kind = "a model for conversations that hears"
    can_translate = True
    has_word_timestamps = False

    def __init__(self, engine: AsyncEngine, renderer: ChatRenderer, media: MediaFront, folder: Path) -> None:
        self._engine, self._renderer, self._media = engine, renderer, media
        self._model_type = str(_read_json(folder / "config.json").get("model_type"))
        processor = _read_json(folder / "processor_config.json").get("feature_extractor")
        extractor = processor or _read_json(folder / "preprocessor_config.json")
        self._window_s = min(_WINDOW_S, float(extractor.get("chunk_length") or _WINDOW_S))

    async def transcribe(
        self, pieces: Pieces, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment, None]:
        """As `Transcriber` says."""
        from quire_speech.voice_activity import SpeechWindows

        if options.word_timestamps:
            raise RequestError(
                f"{self._engine.info.model} tells no times of words; leave timestamp_granularities at segment",
                param="timestamp_granularities",
                code="unsupported",
            )
        if options.logprobs:
            raise RequestError(
                f"{self._engine.info.model} tells no log probabilities; leave include out",
                param="include",
                code="unsupported",
            )
        if options.beam_size > 1:
            raise RequestError("beams are for models of Whisper's kind; leave them out", param="n", code="unsupported")
        cutter, index = SpeechWindows(self._window_s), 0
        running: deque[asyncio.Task[Segment]] = deque()

        def ask(windows: list[tuple[float, NDArray[np.float32]]]) -> None:
            nonlocal index
            for start_s, samples in windows:
                work = self._heard(index, start_s, samples, options, request_options, hearing)
                running.append(asyncio.ensure_future(work))
                index += 1

        try:
            async for piece in pieces:
                ask(await asyncio.to_thread(cutter.feed, piece))
                while running and (running[0].done() or len(running) >= _MAX_AT_A_TIME):
                    yield await running.popleft()
            ask(await asyncio.to_thread(cutter.finish))
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _heard(
        self,
        index: int,
        start_s: float,
        samples: NDArray[np.float32],
        options: TranscriptionOptions,
        request_options: RequestOptions,
        hearing: Hearing,
    ) -> Segment:
        messages, begun = self._messages(samples, options)
        held = await self._media.prepare(media_sources(messages))
        try:
            prompt = self._renderer.render_chat(
                messages, media=held, add_generation_prompt=not begun, continue_final_message=begun
            )
            params = SamplingParams(
                temperature=options.temperatures[0],
                max_tokens=options.max_tokens or _MAX_TOKENS,
                seed=options.seed,
                top_p=options.top_p,
                top_k=options.top_k,
                min_p=options.min_p,
                repetition_penalty=options.repetition_penalty,
                presence_penalty=options.presence_penalty,
                frequency_penalty=options.frequency_penalty,
                logprobs=0,
            )
            text, token_ids, logprob = "", [], 0.0
            async for output in self._engine.generate(prompt, params, request_options):
                (completion,) = output.outputs
                if completion.error is not None:
                    raise QuireError(f"a part of the recording failed in the engine: {completion.error}")
                text += completion.text
                token_ids += completion.token_ids
                logprob = logprob if completion.cumulative_logprob is None else completion.cumulative_logprob
        finally:
            held.release()
        hearing.num_prompt_tokens += len(prompt.token_ids)
        hearing.num_generation_tokens += len(token_ids)
        text = self._read(text, options, hearing)
        return Segment(
            index=index,
            seek_s=start_s,
            start_s=start_s,
            end_s=start_s + len(samples) / _RATE,
            text=f" {text}" if text else "",
            token_ids=tuple(token_ids),
            temperature=options.temperatures[0],
            avg_logprob=logprob / max(len(token_ids), 1),
            compression_ratio=_compression_ratio(text),
            no_speech_prob=0.0,
        )

    def _messages(
        self, samples: NDArray[np.float32], options: TranscriptionOptions
    ) -> tuple[list[dict[str, Any]], bool]:
        """The conversation, and whether it ends with the beginning of the answer."""
        source = quire_multimodal.MediaSource(modality=Modality.AUDIO, value=(samples, _RATE), param="file")
        sound = {"type": "audio", "source": MediaPart(source)}
        language = _LANGUAGES.get((options.language or "").lower(), (options.language or "").capitalize())
        context = " ".join(each for each in (options.prompt, options.hotwords) if each)
        if self._model_type == "qwen3_asr" and options.task == "transcribe":
            messages: list[dict[str, Any]] = [{"role": "system", "content": context}] if context else []
            messages.append({"role": "user", "content": [sound]})
            if language:
                messages.append({"role": "assistant", "content": f"language {language}{_QWEN_TEXT}"})
            return messages, bool(language)
        question = _QUESTIONS.get(self._model_type, "Transcribe the speech word for word. Answer with the text alone.")
        if options.task == "translate":
            question = "Translate the speech into English. Answer with the translation alone."
        if language:
            question += f" The speech is in {language}."
        if context:
            question += f" These words may occur in it: {context}"
        return [{"role": "user", "content": [sound, {"type": "text", "text": question}]}], False

    def _read(self, text: str, options: TranscriptionOptions, hearing: Hearing) -> str:
        """The text of an answer; a language that it names is remembered."""
        if options.language is not None:
            hearing.language, hearing.language_probability = options.language, 1.0
        if self._model_type == "qwen3_asr" and _QWEN_TEXT in text:
            named, _, text = text.partition(_QWEN_TEXT)
            hearing.language = hearing.language or named.removeprefix("language").strip()
        return text.strip()


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
