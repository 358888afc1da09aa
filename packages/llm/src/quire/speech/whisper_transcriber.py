"""Transcribing with Whisper over asyncio: sound comes block by block, segments go out as they are heard."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import quire_speech
from quire.logprob_bound import resolved_max_logprobs
from quire.speech.transcribers import TextDelta
from quire.speech.transcribing import SpeechFront, WindowRequests
from quire_engine import AsyncEngine, BeamSearchParams, RequestOutput
from quire_interfaces import OutputKind, RenderedPrompt, RequestOptions, SamplingParams
from quire_speech import Segment, TokenLogprob, Transcription, TranscriptionOptions

if TYPE_CHECKING:
    from quire.speech.transcribers import AudioBlocks, Hearing
    from quire_speech import Decode, Decoded, Recording, Step

__all__ = ["WhisperTranscriber"]


class WhisperTranscriber:
    """`quire.speech.transcribers.Transcriber` by an engine that runs Whisper.

    Args:
        front: Of the model.
        engine: Runs its windows.
        max_logprobs: The server's bound, which bounds beams.
    """

    def __init__(self, front: SpeechFront, engine: AsyncEngine, max_logprobs: int) -> None:
        self._front, self._engine = front, engine
        self._max_logprobs = resolved_max_logprobs(max_logprobs, engine.info.vocab_size)
        self.can_translate = "translate" in front.vocabulary.tasks
        self.has_word_timestamps = bool(front.vocabulary.alignment_heads) and engine.info.aligns_words

    async def transcribe(
        self, blocks: AudioBlocks, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment | TextDelta, None]:
        """As `Transcriber` says."""
        request_options = dataclasses.replace(request_options, output_kind=OutputKind.FINAL_ONLY)
        recording, requests = self._front.recording(), self._front.requests()
        transcriber = self._front.transcriber(recording, options, aligns_words=self._engine.info.aligns_words)
        steps, answer = transcriber.run(), None
        source = aiter(blocks)
        try:
            while True:
                step = await asyncio.to_thread(_advance, steps, answer)
                answer = None
                hearing.language = transcriber.language or ""
                hearing.language_probability = transcriber.language_probability
                if isinstance(step, Transcription):
                    return
                if isinstance(step, Segment):
                    yield step
                elif isinstance(step, quire_speech.MoreSound):
                    await _hear(recording, source)
                elif hearing.wants_deltas and isinstance(step, quire_speech.Decode) and step.telling != "nothing":
                    async with contextlib.aclosing(self._telling(step, requests, request_options, hearing)) as parts:
                        async for part in parts:
                            if isinstance(part, TextDelta):
                                yield part
                            else:
                                answer = part
                else:
                    answer = await self._answer(step, requests, request_options, hearing)
        finally:
            requests.release()

    async def _answer(self, step: Any, requests: WindowRequests, options: RequestOptions, hearing: Hearing) -> Any:
        if isinstance(step, quire_speech.AlignTokens):
            prompt, pooling = requests.align(step)
            hearing.num_prompt_tokens += len(prompt.decoder_token_ids or ())
            return requests.aligned(await self._engine.encode(prompt, pooling, options))
        prompt = requests.prompt(step.features, step.prompt)
        if isinstance(step, quire_speech.Probe):
            return requests.probed(await self._run(prompt, requests.probe(step), options, hearing))
        output = await self._run(prompt, requests.decode(step), options, hearing)
        hearing.num_prompt_tokens += len(prompt.token_ids) + len(step.prompt)
        hearing.num_generation_tokens += output.num_generation_tokens
        return requests.decoded(step, output)

    async def _telling(
        self, step: Decode, requests: WindowRequests, options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[TextDelta | Decoded, None]:
        """The text of a window as it is written, then the answer."""
        prompt, params = requests.prompt(step.features, step.prompt), requests.decode(step)
        partial = requests.partial(step)
        assert isinstance(params, SamplingParams)
        options = dataclasses.replace(options, output_kind=OutputKind.DELTA)
        whole: RequestOutput | None = None
        logprobs: list[TokenLogprob] = []
        async with contextlib.aclosing(self._engine.generate(prompt, params, options)) as outputs:
            async for output in outputs:
                (new,) = output.outputs
                num_told = partial.num_told
                logprobs += requests.text_logprobs(new) if step.options.logprobs else ()
                if text := partial.add(new.token_ids, new.cumulative_logprob or 0.0):
                    told = tuple(logprobs[num_told : partial.num_told]) if step.options.logprobs else None
                    yield TextDelta(text, told)
                whole = output if whole is None else _joined(whole, output)
        assert whole is not None
        hearing.num_prompt_tokens += len(prompt.token_ids) + len(step.prompt)
        hearing.num_generation_tokens += len(whole.outputs[0].token_ids)
        yield requests.decoded(step, whole)

    async def _run(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions,
        hearing: Hearing,
    ) -> RequestOutput:
        if isinstance(params, BeamSearchParams):
            return await self._engine.beam_search(prompt, params, options, max_logprobs=self._max_logprobs)
        async with contextlib.aclosing(self._engine.generate(prompt, params, options)) as outputs:
            return await anext(outputs)


def _joined(whole: RequestOutput, new: RequestOutput) -> RequestOutput:
    """The first completion with what is new of it."""
    (before,), (after,) = whole.outputs, new.outputs
    after.token_ids = before.token_ids + after.token_ids
    after.logprobs = [*(before.logprobs or ()), *(after.logprobs or ())]
    return new


def _advance(steps: Any, answer: Any) -> Step | Transcription:
    """The next step, or the value of the last one."""
    try:
        step: Step = steps.send(answer)
    except StopIteration as end:
        transcription: Transcription = end.value
        return transcription
    return step


async def _hear(recording: Recording, source: Any) -> None:
    """Add the next block."""
    try:
        block = await anext(source)
    except StopAsyncIteration:
        await asyncio.to_thread(recording.finish)
    else:
        await asyncio.to_thread(recording.add, block)
