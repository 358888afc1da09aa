"""The asynchronous front: a prompt and parameters in, a stream of `RequestOutput` out.

Puts together a `Frontend`, a client and the output processors. Knows no HTTP and no chat templates. Control calls
(statistics, pauses, adapters, the end) are the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence

from quire_engine.beam_requests import beam_prompt, beams_output, continuations, start_search
from quire_engine.beam_search import BeamSearchParams
from quire_engine.client import EngineClient
from quire_engine.frontend import Frontend, PreparedRequest, as_rendered, check_unused
from quire_engine.messages import EngineInfo
from quire_engine.output_processor import DetokenizerFactory
from quire_engine.outputs import RequestOutput
from quire_engine.pooling import PooledRequestOutput
from quire_engine.streams import OutputStream
from quire_interfaces import (
    FinishReason,
    OutputKind,
    PoolingParams,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
    Tokenizer,
)

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Generates and pools. All calls from one event loop.

    Args:
        client: The engine, or engines; must be ready (`await client.ready()`).
        tokenizer: For the text of logprobs and the end tokens; None for token-only use.
        make_detokenizer: None gives no text (and no stop strings).
        eos_token_ids: Tokens that end an output; None takes the tokenizer's.
        seed: Seed of the seeds that requests without one get; None for other ones each time.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        tokenizer: Tokenizer | None = None,
        make_detokenizer: DetokenizerFactory | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if client.info is None:
            raise RuntimeError("the client is not ready: await client.ready() before making an AsyncEngine")
        self.client = client
        self.info: EngineInfo = client.info
        self._frontend = Frontend(
            self.info,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self._streams: dict[str, OutputStream] = {}
        self._beam_search_ids = itertools.count()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output unless `ignore_eos`."""
        return self._frontend.eos_token_ids

    def generate(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: SamplingParams,
        options: RequestOptions = RequestOptions(),
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the request now, run it when iterated. Closing the generator early aborts it within one engine step.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: How to choose tokens, how many, when to stop.
            options: How to schedule and to isolate it, its adapter, and what each output holds (deltas, unless said).
            request_id: The caller's name for it, unique among those in flight; None makes one.

        Raises:
            RequestError, ContextLengthError: here, about the request itself.
            RequestError, OverloadedError, EngineDeadError: from the generator, by the engine.
        """
        prepared = self._frontend.prepare(
            prompt,
            params,
            options,
            request_id=request_id,
            ids_in_use=self._streams,
            default_kind=OutputKind.DELTA,
        )
        return self._run(prepared)

    async def encode(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: PoolingParams,
        options: RequestOptions = RequestOptions(),
        *,
        request_id: str | None = None,
    ) -> PooledRequestOutput:
        """Pool one prompt. Cancelling the call drops the request before the engine's next step.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: What to pool, and how.
            options: How to schedule and to isolate it, and its adapter.
            request_id: The caller's name for it, unique among those in flight; None makes one.

        Returns:
            The output; one that failed in the engine says why.

        Raises:
            RequestError, ContextLengthError: about the request itself.
            OverloadedError, EngineDeadError: by the engine.
        """
        prepared = self._frontend.prepare_pooling(
            prompt, params, options, request_id=request_id, ids_in_use=self._streams
        )
        stream = self.client.open([prepared.message])
        self._streams[prepared.request_id] = stream
        prepared.processor.metrics = stream.metrics
        try:
            async for core_output in stream:
                output = prepared.processor.process(core_output)
                if output is not None:
                    return output
        finally:
            stream.close()
            if self._streams.get(prepared.request_id) is stream:
                del self._streams[prepared.request_id]
        raise AssertionError("the stream ended without an output")

    def check(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams | PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> None:
        """Whether `generate`, or with pooling parameters `encode`, would take the request, which does not run.

        Raises:
            RequestError, ContextLengthError: as they do.
        """
        self._frontend.check(prompt, params, options)

    async def beam_search(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: BeamSearchParams,
        options: RequestOptions = RequestOptions(),
        *,
        max_logprobs: int,
    ) -> RequestOutput:
        """The most likely continuations, the best one first. Cancelling it aborts the beams.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: How wide and how far to search.
            options: Of the requests that compute the beams, one per beam and step.
            max_logprobs: Log probabilities per token that the engine gives, which bounds the beams.

        Raises:
            ContextLengthError: prompt and output do not fit the context.
            RequestError: the beams are more than there are log probabilities for.
            QuireError: the engine could not compute a beam.
        """
        tokenizer = self._frontend.tokenizer
        if tokenizer is None:
            raise RequestError("beam search needs text, but this engine has no tokenizer", code="unsupported")
        rendered = as_rendered(prompt)
        search = start_search(rendered, params, self.eos_token_ids, self.info, max_logprobs)
        step_params = params.step_params(search.num_candidates)
        step_options = dataclasses.replace(options, output_kind=OutputKind.FINAL_ONLY)

        async def step(token_ids: list[int]) -> RequestOutput:
            outputs = self.generate(beam_prompt(rendered, token_ids, self.info), step_params, step_options)
            async with contextlib.aclosing(outputs):
                return await anext(outputs)

        num_cached_tokens = 0
        while not search.is_done:
            steps = [asyncio.ensure_future(step(token_ids)) for token_ids in search.prompts()]
            try:
                outputs = await asyncio.gather(*steps)
            finally:  # when one fails, the others have nobody to run for
                for each in steps:
                    each.cancel()
                await asyncio.gather(*steps, return_exceptions=True)
            num_cached_tokens = num_cached_tokens or outputs[0].num_cached_tokens
            search.advance(continuations(outputs))
        name = f"beam-search-{next(self._beam_search_ids)}"
        return beams_output(name, rendered, params, search, tokenizer, num_cached_tokens)

    async def _run(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        request_id, messages, processor = prepared
        check_unused(request_id, self._streams)
        stream = self.client.open(messages, n=len(messages))
        self._streams[request_id] = stream
        processor.metrics = stream.metrics
        try:
            async for core_output in stream:
                output = processor.process(core_output)
                aborts = processor.take_aborts()
                if aborts:
                    self.client.abort(aborts, FinishReason.STOP)
                if output is not None:
                    yield output
                if processor.finished:
                    break
        finally:
            stream.close()
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by the caller's names; their outputs end with FinishReason.ABORT. Unknown ones are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            stream = self._streams.get(request_id)
            if stream is not None:
                self.client.abort(stream.alive)

    def abort_all(self) -> int:
        """End every request with FinishReason.ABORT. Returns their number."""
        request_ids = list(self._streams)
        self.abort(request_ids)
        return len(request_ids)

    def num_requests(self) -> int:
        """Number of requests being iterated."""
        return len(self._streams)
