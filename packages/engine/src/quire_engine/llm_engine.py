"""The synchronous front: add requests, step by hand, collect outputs. For offline batches and for debugging.

Scheduler, executor and processors are those of a server, with no thread, no process and no event loop between.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from quire_engine.config import EngineConfig
from quire_engine.core import EngineCore, EngineParts
from quire_engine.frontend import Frontend
from quire_engine.listener import EngineListener, NullListener
from quire_engine.messages import AddRequest
from quire_engine.output_processor import DetokenizerFactory, RequestProcessor
from quire_engine.outputs import RequestOutput
from quire_engine.pooling import PooledRequestOutput, PoolingProcessor
from quire_engine.request_book import RequestBook
from quire_interfaces import (
    EngineDeadError,
    FinishReason,
    OutputKind,
    PoolingParams,
    RenderedPrompt,
    RequestOptions,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)

__all__ = ["LLMEngine"]


class LLMEngine:
    """Runs requests in this thread.

    Args:
        parts: Scheduler and executor; owned by the engine from now on.
        config: Depth and deadlines.
        tokenizer: For the text of logprobs and the end tokens; None for token-only use.
        make_detokenizer: None gives no text (and no stop strings).
        eos_token_ids: Tokens that end an output; None takes the tokenizer's.
        listener: Hears of steps and requests.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        make_detokenizer: DetokenizerFactory | None = None,
        eos_token_ids: Iterable[int] | None = None,
        listener: EngineListener | None = None,
    ) -> None:
        self.core = EngineCore(parts, config)
        self.info = parts.info
        self._frontend = Frontend(
            parts.info,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer,
            eos_token_ids=eos_token_ids,
            seed=self.core.config.seed,
        )
        self._listener: EngineListener = listener or NullListener()
        self._book: RequestBook[RequestProcessor | PoolingProcessor] = RequestBook(self._listener)
        """By the core's request id; completions that ended are gone."""
        self._core_ids: dict[str, list[str]] = {}
        """Caller's request id -> the core's, of its completions."""
        self._is_closed = False

    def add_request(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: SamplingParams | PoolingParams,
        options: RequestOptions = RequestOptions(),
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: How to choose tokens, how many, when to stop; or how to pool the prompt.
            options: How to schedule and to isolate it, its adapter, and what each output holds (everything at the end,
                unless said).
            request_id: The caller's name for it, unique among those in flight; None makes one.

        Returns:
            Its name.

        Raises:
            RequestError, ContextLengthError: the request cannot run.
            OverloadedError: the scheduler's queue is full; step, and try again.
            EngineDeadError: the engine is closed.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is closed; make another one")
        if isinstance(params, PoolingParams):
            pooling = self._frontend.prepare_pooling(
                prompt, params, options, request_id=request_id, ids_in_use=self._core_ids
            )
            self._queue(pooling.request_id, [pooling.message], pooling.processor)
            return pooling.request_id
        prepared = self._frontend.prepare(
            prompt,
            params,
            options,
            request_id=request_id,
            ids_in_use=self._core_ids,
            default_kind=OutputKind.FINAL_ONLY,
        )
        self._queue(*prepared)
        return prepared.request_id

    def _queue(
        self, request_id: str, messages: list[AddRequest], processor: RequestProcessor | PoolingProcessor
    ) -> None:
        queued_ids: list[str] = []
        try:
            for message in messages:
                request = message.to_request()
                self.core.add_request(request)
                queued_ids.append(message.request_id)
                # Offline there is nobody to keep waiting meanwhile, and this call says of a wrong request that it is.
                self.core.wait_until_prepared(request)
        except Exception:
            self.core.abort_requests(queued_ids)
            raise
        self._core_ids[request_id] = queued_ids
        for message in messages:
            num_prompt_tokens = processor.num_prompt_tokens
            entry = self._book.add(message, processor, n=len(messages), num_prompt_tokens=num_prompt_tokens)
            processor.metrics.append(entry.metrics)

    def has_unfinished_requests(self) -> bool:
        """Whether any output is still to come."""
        return bool(self._core_ids)

    def step(self) -> list[RequestOutput | PooledRequestOutput]:
        """Run one step.

        Returns:
            The outputs that it brought, of the kind that each request asked for.

        Raises:
            EngineDeadError: the device hangs, or fails whatever it is given.
        """
        result = self.core.step()
        now = time.monotonic()
        self._book.start(result.started, result.started_time_s)
        outputs: list[RequestOutput | PooledRequestOutput] = []
        for core_output in result.outputs:
            entry = self._book.record(core_output, now)
            if entry is None:  # aborted while the step ran
                continue
            processor = entry.reader
            output = processor.process(core_output)
            aborts = processor.take_aborts()
            if aborts:
                self.core.abort_requests(aborts)
                for core_id in aborts:
                    self._book.finish(core_id, FinishReason.STOP, now)
            if output is not None:
                outputs.append(output)
                if output.finished:
                    del self._core_ids[output.request_id]
        for num_tokens in result.step_tokens:
            self._listener.on_step(num_tokens, None)
        return outputs

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests; nothing more comes of them. Unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            core_ids = self._core_ids.pop(request_id, [])
            self.core.abort_requests(core_ids)
            for core_id in core_ids:
                self._book.finish(core_id, FinishReason.ABORT)

    def stats(self) -> SchedulerStats:
        """Counters and gauges of this moment."""
        return self.core.stats()

    def sleep(self, level: int = 1) -> int:
        """Hold all requests until `wake_up`; level, result and errors as of `EngineCore.sleep`."""
        self.core.collect_all()
        return self.core.sleep(level)

    def wake_up(self, tags: Collection[str] = ()) -> int | None:
        """Undo `sleep`; arguments, result and errors as of `EngineCore.wake_up`."""
        return self.core.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold some."""
        return self.core.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Forget the embeddings of media that no running request needs; False where some are left."""
        was_emptied = self.core.reset_encoder_cache()
        self.core.flush()  # the step that tells the runner, where no request brings one
        return was_emptied

    def collective_rpc(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """What all ranks return to a call; result and errors as of `EngineCore.collective_rpc`."""
        self.core.collect_all()
        return self.core.collective_rpc(method, arguments, named)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._is_closed = True
        self.core.flush()
        self.core.close()
