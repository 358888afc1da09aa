"""The asynchronous front: a prompt and parameters in, a stream of `RequestOutput` out.

Puts together the input processor, a client and the output processors. Knows no HTTP and no chat templates.
"""

from __future__ import annotations

import asyncio
import itertools
import reprlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, get_args

from quire_engine.client import StreamingClient
from quire_engine.input_processor import InputProcessor
from quire_engine.messages import AddRequest, EngineInfo
from quire_engine.output_processor import DetokenizerFactory, RequestProcessor
from quire_engine.outputs import OutputKind, RequestOutput
from quire_engine.streams import OutputStream
from quire_interfaces import (
    FinishReason,
    PauseState,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)

__all__ = ["PAUSE_MODES", "AsyncEngine", "PauseMode"]

PauseMode = Literal["keep", "wait", "abort"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
PAUSE_LOOK_S = 0.02
"""How often a pause that waits for requests looks whether they have ended."""


class AsyncEngine:
    """Generates. All calls from one event loop.

    Args:
        client: Where the core is; must be ready (`await client.ready()`).
        tokenizer: For the text of logprobs and the end tokens; None for token-only use.
        make_detokenizer: None gives no text (and no stop strings).
        eos_token_ids: Tokens that end an output; None takes the tokenizer's.
        seed: Of the seeds that requests without one get; None for other ones each time.
    """

    def __init__(
        self,
        client: StreamingClient,
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
        self._tokenizer = tokenizer
        self._make_detokenizer = make_detokenizer
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self._input_processor = InputProcessor(self.info, eos_token_ids, tokenizer, seed)
        self._streams: dict[str, OutputStream] = {}
        self._auto_ids = itertools.count()

    def generate(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
        kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """Check the request now, run it when iterated. Closing the iterator early aborts it within one engine step.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: How to choose tokens, how many, when to stop.
            request_id: The caller's name for it, unique among those in flight; None makes one.
            priority: Lower runs first, under the priority policy.
            cache_salt: Only requests with the same salt share cached prefixes.
            adapter: Name of the adapter to run with; None for the network as it is.
            tenant: Whose request it is, for fair sharing.
            kind: What each output holds.

        Raises:
            RequestError, ContextLengthError: here, about the request itself.
            RequestError, OverloadedError, EngineDeadError: from the iterator, by the engine.
        """
        if params.stop and self._make_detokenizer is None:
            raise RequestError("stop strings need text, but this engine has no detokenizer", param="stop")
        rendered = prompt if isinstance(prompt, RenderedPrompt) else RenderedPrompt(token_ids=list(prompt))
        request_id = request_id if request_id is not None else f"request-{next(self._auto_ids)}"
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id", code="duplicate_request_id")
        messages = self._input_processor.process(
            request_id,
            rendered.token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            tenant=tenant,
            decoder_token_ids=rendered.decoder_token_ids,
        )
        processor = RequestProcessor(
            request_id,
            rendered.text,
            rendered.token_ids,
            [each.request_id for each in messages],
            params,
            tokenizer=self._tokenizer,
            make_detokenizer=self._make_detokenizer,
            kind=kind,
            follows=self._input_processor.follows(rendered),
        )
        return self._run(request_id, messages, processor)

    def check(self, prompt: RenderedPrompt, params: SamplingParams, *, adapter: str | None = None) -> None:
        """Whether `generate` would take the request, which does not run.

        Raises:
            RequestError, ContextLengthError: as `generate` does.
        """
        self._input_processor.check(
            prompt.token_ids, params, adapter=adapter, decoder_token_ids=prompt.decoder_token_ids
        )

    async def _run(
        self, request_id: str, messages: list[AddRequest], processor: RequestProcessor
    ) -> AsyncIterator[RequestOutput]:
        client = self.client
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id", code="duplicate_request_id")
        stream = client.open(messages, n=len(messages))
        self._streams[request_id] = stream
        try:
            for message in messages:
                metrics = client.metrics_of(message.request_id)
                assert metrics is not None
                processor.metrics.append(metrics)
            async for news in stream:
                output = processor.process(news)
                aborts = processor.take_aborts()
                if aborts:
                    client.abort(aborts, FinishReason.STOP)
                if output is not None:
                    yield output
                if processor.finished:
                    break
        finally:
            stream.close()
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by the caller's names; their iterators end with FinishReason.ABORT. Unknown ones are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            stream = self._streams.get(request_id)
            if stream is not None:
                self.client.abort(stream.alive)

    def abort_all(self) -> int:
        """End every request with FinishReason.ABORT; how many there were."""
        request_ids = list(self._streams)
        self.abort(request_ids)
        return len(request_ids)

    def num_requests(self) -> int:
        """Requests being iterated."""
        return len(self._streams)

    async def stats(self) -> SchedulerStats:
        return await self.client.stats()

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """Hold new requests until `resume`, and return when nothing runs any more.

        Args:
            mode: What becomes of those that run: "keep" holds them where they are, "wait" waits for their end, "abort"
                ends them, and those that wait, with `FinishReason.ABORT`.
            clear_cache: Forget all cached blocks then; what is held is computed anew.

        Raises:
            RequestError: there is no such mode, or the engine sleeps.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {reprlib.repr(mode)}", param="mode")
        if mode == "wait":
            await self.client.pause(PauseState.NEW_HELD)
            while await self._runs_on():
                await asyncio.sleep(PAUSE_LOOK_S)
        else:
            await self.client.pause(PauseState.ALL_HELD)
            if mode == "abort":
                self.abort_all()
        if clear_cache:
            await self.client.reset_prefix_cache(preempt_running=True)

    async def _runs_on(self) -> bool:
        """Whether requests go on though new ones are held; not when somebody has resumed meanwhile."""
        stats = await self.client.stats()
        return bool(stats.num_running + stats.num_preempted) and await self.client.is_paused()

    async def resume(self) -> None:
        await self.client.resume()

    async def is_paused(self) -> bool:
        return await self.client.is_paused()

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; whether it worked."""
        return await self.client.reset_prefix_cache(preempt_running=preempt_running)

    async def check_integrity(self) -> str | None:
        """None when the engine's bookkeeping is consistent, else what is wrong."""
        return await self.client.check_integrity()

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the engine is gone.
        """
        self.client.check_health()

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Let requests in flight finish within `drain_s` seconds (None: as configured), then stop the engine."""
        await self.client.shutdown(drain_s)
