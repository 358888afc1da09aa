"""The synchronous front: add requests, step by hand, collect outputs. For offline batches and for debugging.

The same scheduler, executor and processors as behind a server, with no thread, no process and no event loop between.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from quire_engine.config import EngineConfig
from quire_engine.core import EngineCore, EngineParts
from quire_engine.input_processor import InputProcessor
from quire_engine.listener import EngineListener, NullListener
from quire_engine.output_processor import DetokenizerFactory, RequestProcessor
from quire_engine.outputs import OutputKind, RequestOutput
from quire_engine.streams import RequestMetrics
from quire_interfaces import (
    EngineDeadError,
    FinishReason,
    RenderedPrompt,
    RequestError,
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
        self._tokenizer = tokenizer
        self._make_detokenizer = make_detokenizer
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self._input_processor = InputProcessor(parts.info, eos_token_ids, tokenizer, self.core.config.seed)
        self._listener: EngineListener = listener or NullListener()
        self._processors: dict[str, RequestProcessor] = {}
        """By the core's request id; completions that ended are gone."""
        self._metrics: dict[str, RequestMetrics] = {}
        self._core_ids: dict[str, list[str]] = {}
        self._auto_ids = itertools.count()
        self._is_closed = False

    def add_request(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        kind: OutputKind = OutputKind.FINAL_ONLY,
    ) -> str:
        """Queue a request; arguments as for `AsyncEngine.generate`. Returns its id.

        Raises:
            RequestError, ContextLengthError: the request cannot run.
            OverloadedError: the scheduler's queue is full; step, and try again.
            EngineDeadError: the engine is closed.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is closed; make another one")
        if params.stop and self._make_detokenizer is None:
            raise RequestError("stop strings need text, but this engine has no detokenizer", param="stop")
        rendered = prompt if isinstance(prompt, RenderedPrompt) else RenderedPrompt(token_ids=list(prompt))
        request_id = request_id if request_id is not None else f"request-{next(self._auto_ids)}"
        if request_id in self._core_ids:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id", code="duplicate_request_id")
        messages = self._input_processor.process(
            request_id,
            rendered.token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            decoder_token_ids=rendered.decoder_token_ids,
        )
        core_ids = [each.request_id for each in messages]
        processor = RequestProcessor(
            request_id,
            rendered.text,
            rendered.token_ids,
            core_ids,
            params,
            tokenizer=self._tokenizer,
            make_detokenizer=self._make_detokenizer,
            kind=kind,
            follows=self._input_processor.follows(rendered),
        )
        added: list[str] = []
        try:
            for message in messages:
                request = message.to_request()
                self.core.add_request(request)
                added.append(message.request_id)
                # Offline there is nobody to keep waiting meanwhile, and a wrong request is told so by this call.
                self.core.wait_until_prepared(request)
        except Exception:
            self.core.abort_requests(added)
            raise
        self._core_ids[request_id] = core_ids
        for message in messages:
            metrics = RequestMetrics(
                arrival_time_s=message.arrival_time_s,
                num_prompt_tokens=len(rendered.token_ids),
                max_tokens=message.max_tokens,
                n=len(messages),
            )
            processor.metrics.append(metrics)
            self._processors[message.request_id] = processor
            self._metrics[message.request_id] = metrics
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._core_ids)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns news, by the kind each request asked for.

        Raises:
            EngineDeadError: the device hangs, or fails whatever it is given.
        """
        result = self.core.step()
        now = time.monotonic()
        for core_id in result.started:
            metrics = self._metrics.get(core_id)
            if metrics is not None:
                if metrics.scheduled_time_s == 0.0:
                    metrics.scheduled_time_s = result.started_time_s
                else:
                    metrics.num_preemptions += 1
        outputs: list[RequestOutput] = []
        for news in result.outputs:
            processor = self._processors.get(news.request_id)
            if processor is None:  # aborted while the step ran
                continue
            self._count(news.request_id, len(news.new_token_ids), news.num_cached_tokens, now)
            output = processor.process(news)
            aborts = processor.take_aborts() if processor.aborts else None
            if aborts:
                self.core.abort_requests(aborts)
            if news.finish_reason is not None or aborts:
                self._end(news.request_id, now, news.finish_reason or FinishReason.STOP)
            if output is not None:
                outputs.append(output)
                if output.finished:
                    del self._core_ids[output.request_id]
        for num_tokens in result.step_tokens:
            self._listener.on_step(num_tokens, None)
        return outputs

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests; nothing more comes of them. Unknown ids are ignored."""
        now = time.monotonic()
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            core_ids = self._core_ids.pop(request_id, [])
            self.core.abort_requests(core_ids)
            for core_id in core_ids:
                if core_id in self._processors:
                    self._end(core_id, now, FinishReason.ABORT)

    def stats(self) -> SchedulerStats:
        return self.core.stats()

    def sleep(self, level: int = 1) -> int:
        """See `EngineCore.sleep`; requests are refused until `wake_up`."""
        self.core.settle()
        return self.core.sleep(level)

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self.core.wake_up()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold some."""
        return self.core.reset_prefix_cache()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._is_closed = True
        self.core.flush()
        self.core.close()

    def _count(self, core_id: str, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        metrics = self._metrics[core_id]
        if num_cached_tokens > metrics.num_cached_tokens:
            metrics.num_cached_tokens = num_cached_tokens
        if num_tokens == 0:
            return
        if metrics.num_generation_tokens == 0:
            metrics.first_token_time_s = now
            self._listener.on_first_token(now - metrics.arrival_time_s)
        else:
            self._listener.on_tokens(now - metrics.last_token_time_s, num_tokens)
        metrics.last_token_time_s = now
        metrics.num_generation_tokens += num_tokens

    def _end(self, core_id: str, now: float, reason: FinishReason) -> None:
        del self._processors[core_id]
        metrics = self._metrics.pop(core_id)
        metrics.finished_time_s = now
        self._listener.on_finished(metrics, reason)
