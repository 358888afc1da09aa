"""Transcribing with models that hear in conversations (Qwen2-Audio, Qwen3-ASR, Voxtral, ...), and with those that
hear alone (Moonshine, Canary, ...): each chunk of speech is a question with a sound, whose answer is its text.

Such models tell no times: a segment is a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.media import HeldMedia, MediaFront, media_sources
from quire.prompts import parse_prompt_async
from quire.speech.chunks import segments_of_chunks
from quire.speech.questions import SpeechQuestions
from quire.speech.transcribers import Hearing
from quire_engine import AsyncEngine
from quire_interfaces import QuireError, RequestOptions
from quire_renderers import ChatRenderer
from quire_speech import Segment, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.speech.transcribers import AudioBlocks

__all__ = ["ChatTranscriber"]


class ChatTranscriber:
    """Transcribes by questions.

    Args:
        engine: Its model takes sounds in conversations, or alone.
        renderer: Of its conversations.
        media: Prepares their sounds.
        folder: Of the checkpoint, whose config.json says which model it is.
        longest_s: Seconds of the longest sound that the engine reads at once.
    """

    has_word_timestamps = False

    def __init__(
        self, engine: AsyncEngine, renderer: ChatRenderer, media: MediaFront, folder: Path, longest_s: float
    ) -> None:
        self._engine, self._renderer, self._media = engine, renderer, media
        self._questions = SpeechQuestions(folder, renderer.tokenizer, longest_s)
        self.can_translate = self._questions.can_translate

    async def transcribe(
        self, blocks: AudioBlocks, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment, None]:
        """As `Transcriber` says."""
        self._questions.check(options, self._engine.info.model)

        async def hear(start_s: float, samples: NDArray[np.float32]) -> list[Segment]:
            return [await self._heard(start_s, samples, options, request_options, hearing)]

        heard = segments_of_chunks(blocks, self._questions.window_s, hear)
        async with contextlib.aclosing(heard) as segments:
            async for segment in segments:
                yield segment

    async def _heard(
        self,
        start_s: float,
        samples: NDArray[np.float32],
        options: TranscriptionOptions,
        request_options: RequestOptions,
        hearing: Hearing,
    ) -> Segment:
        question = self._questions.ask(samples, options)
        held: HeldMedia | None = None
        try:
            if question.prompt is not None:
                parsed = await parse_prompt_async(question.prompt, self._renderer, self._media)
                held, prompt = parsed.media, parsed.rendered
            else:
                held = await self._media.prepare(media_sources(question.messages))
                prompt = self._renderer.render_chat(question.messages, media=held, **question.render_options)
            params = self._questions.params(options)
            text, token_ids, logprob = "", [], 0.0
            async for output in self._engine.generate(prompt, params, request_options):
                (completion,) = output.outputs
                if completion.error is not None:
                    raise QuireError(f"a part of the recording failed in the engine: {completion.error}")
                text += completion.text
                token_ids += completion.token_ids
                logprob = logprob if completion.cumulative_logprob is None else completion.cumulative_logprob
        finally:
            if held is not None:
                held.release()
        hearing.num_prompt_tokens += len(prompt.token_ids)
        hearing.num_generation_tokens += len(token_ids)
        text, language = self._questions.read(text)
        if options.language is not None:
            hearing.language, hearing.language_probability = options.language, 1.0
        hearing.language = hearing.language or language
        made = (0, start_s, len(samples), text, tuple(token_ids), logprob, options, hearing.language)
        return self._questions.segment(*made)
