"""Transcribing over asyncio with models whose tokens come with their frames (Parakeet): each chunk of speech is one
request, whose answer has all of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.prompts import Prompt
from quire.speech.chunks import segments_of_chunks
from quire.speech.frames import TRANSCRIBE, FrameSpeech
from quire.speech.transcribers import Hearing
from quire_interfaces import PoolingParams, RequestOptions
from quire_speech import Segment, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.speech.transcribers import AudioBlocks

    Encode = Callable[[Prompt, PoolingParams, RequestOptions], Coroutine[Any, Any, PoolingRequestOutput[PoolingOutput]]]

__all__ = ["FrameTranscriber"]


class FrameTranscriber:
    """`quire.speech.transcribers.Transcriber` by pooled requests.

    Args:
        encode: `AsyncLLM.encode` of a model with the task "transcribe".
        model: Its name, for messages.
        speech: Of the model.
    """

    can_translate = False
    has_word_timestamps = True

    def __init__(self, encode: Encode, model: str, speech: FrameSpeech) -> None:
        self._encode, self._model, self._speech = encode, model, speech

    async def transcribe(
        self, blocks: AudioBlocks, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment, None]:
        """As `Transcriber` says."""
        self._speech.check(options, self._model)

        async def hear(start_s: float, samples: NDArray[np.float32]) -> list[Segment]:
            output = await self._encode(self._speech.prompt(samples), TRANSCRIBE, request_options)
            rows = output.outputs.tolist()
            hearing.num_prompt_tokens += output.num_prompt_tokens
            hearing.num_generation_tokens += len(rows)
            return self._speech.segments(start_s, len(samples), rows, options)

        if options.language is not None:
            hearing.language, hearing.language_probability = options.language, 1.0
        heard = segments_of_chunks(blocks, self._speech.window_s, hear)
        async with contextlib.aclosing(heard) as segments:
            async for segment in segments:
                yield segment
