"""Requests that are pooled: checked on their way to the core, and read when they come back.

Knows the limits that `EngineInfo` states; knows no poolers, no tensors and no text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire_engine.messages import AddRequest, EngineInfo, unpack_token_ids
from quire_engine.metrics import RequestMetrics
from quire_interfaces import (
    EngineCoreOutput,
    FinishReason,
    PooledOutput,
    PoolingParams,
    QuireError,
    RenderedPrompt,
    RequestAbortedError,
    RequestError,
    RequestOptions,
    SamplingParams,
)

__all__ = ["PooledRequestOutput", "PoolingProcessor", "pooling_request", "resolve_pooling_params"]

_STOP_TOKEN_IDS = frozenset((0,))
_SAMPLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=(0,), detokenize=False)
"""Sampling parameters of every pooled request: its one token stands for its output."""


@dataclass(slots=True, kw_only=True)
class PooledRequestOutput:
    """What came of a pooled request: its output, or why there is none."""

    request_id: str
    packed_token_ids: bytes
    """The prompt (`pack_token_ids`)."""
    pooled: PooledOutput | None
    """None where it failed."""
    error: QuireError | None = None
    """Why it failed."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache had."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """Times and counts of the request."""

    finished = True
    """A pooled request has one output."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.packed_token_ids) // 4

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, unpacked at each call."""
        return unpack_token_ids(self.packed_token_ids)


class PoolingProcessor:
    """Reads the core's output of one pooled request.

    Args:
        request_id: The caller's name for it.
        message: The request as the core got it.
    """

    __slots__ = ("_message", "_request_id", "finished", "metrics")

    def __init__(self, request_id: str, message: AddRequest) -> None:
        self._request_id = request_id
        self._message = message
        self.metrics: list[RequestMetrics] = []
        self.finished = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._message.prompt) // 4

    def take_aborts(self) -> list[str]:
        """Nothing: the core ends pooled requests itself."""
        return []

    def process(self, output: EngineCoreOutput) -> PooledRequestOutput | None:
        """The caller's output; None while the request goes on."""
        if output.finish_reason is None:
            return None
        self.finished = True
        return PooledRequestOutput(
            request_id=self._request_id,
            packed_token_ids=self._message.prompt,
            pooled=output.pooled,
            error=None if output.pooled is not None else _error_of(output),
            num_cached_tokens=output.num_cached_tokens,
            metrics=self.metrics,
        )


def pooling_request(
    core_id: str,
    prompt: RenderedPrompt,
    packed: bytes,
    params: PoolingParams,
    options: RequestOptions,
    info: EngineInfo,
) -> AddRequest:
    """The message of a pooled request, whose prompt and adapter were checked.

    Args:
        core_id: Its id in the core.
        prompt: The prompt.
        packed: Its token ids, packed.
        params: Resolved (`resolve_pooling_params`).
        options: How to schedule and to isolate it.
        info: The engine's limits.
    """
    return AddRequest(
        request_id=core_id,
        prompt=packed,
        media=prompt.media if prompt.media is not None and (prompt.media.spans or prompt.media.prefix_len) else None,
        sampling_params=_SAMPLING_PARAMS,
        pooling_params=params,
        second_segment_start=prompt.second_segment_start,
        reads_prefix_cache=params.task in info.cached_pooling_tasks,
        seed=0,
        max_tokens=1,
        stop_token_ids=_STOP_TOKEN_IDS,
        options=options,
        arrival_time_s=time.monotonic(),
    )


def resolve_pooling_params(params: PoolingParams, info: EngineInfo) -> PoolingParams:
    """The parameters with a task, which this engine has.

    Args:
        params: Of the request.
        info: What the engine does.

    Raises:
        RequestError: the engine pools nothing, or has no such task.
    """
    tasks = info.pooling_tasks
    if not tasks:
        raise RequestError(
            f"{info.model or 'this model'} generates text and pools nothing; serve an embedding or classification "
            "model, or convert this one (--convert embed)",
            param="task",
            code="unsupported",
        )
    if params.task not in (None, "plugin", *tasks):
        raise RequestError(
            f"this model does not support the task {params.task!r}; it has {', '.join(tasks)}",
            param="task",
            code="unsupported",
        )
    return params if params.task is not None else params.with_task(tasks[0])


def _error_of(output: EngineCoreOutput) -> QuireError:
    """Why a request ended without pooled output."""
    failure = output.failure
    if failure is None or output.finish_reason is FinishReason.ABORT:
        return RequestAbortedError("the request was aborted before its output was there")
    if failure.code is not None:
        return RequestError(failure.message, param=failure.param, code=failure.code)
    return QuireError(failure.message)
