"""What `LLM` gives back: vLLM's `RequestOutput` and `CompletionOutput`, made of the engine's own.

`AsyncLLM` streams the engine's outputs as they are (`quire_engine.RequestOutput`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import quire_engine
from quire.lora_request import LoRARequest
from quire_engine import Logprob, RequestMetrics
from quire_interfaces import FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CompletionOutput", "RequestOutput", "RequestStateStats", "to_request_output"]


@dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request. Times that end in `_ts` are `time.monotonic()` seconds; 0.0 is "never"."""

    num_generation_tokens: int = 0
    """Output tokens of all completions."""
    arrival_time: float = 0.0
    """`time.time()` seconds."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """First entered a row."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    """Of the completion that took longest."""
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    num_preemptions: int = 0
    completions: list[RequestMetrics] = field(default_factory=list)
    """Times and counts of each completion."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion (of n)."""

    index: int
    text: str
    token_ids: list[int]
    """The token that ended the output is included, its text is not (unless include_stop_str_in_output)."""
    cumulative_logprob: float | None = None
    """Sum over the tokens; None where no log probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per token, by token id: the sampled one first, then the most likely ones, best first. None when not asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of the stop token the caller named; None for the model's own end token."""
    lora_request: LoRARequest | None = None
    text_offsets: list[int] = field(default_factory=list)
    """Per token: where its text begins in the whole output; only when log probabilities were asked for."""
    error: str | None = None
    """With FinishReason.ERROR: why."""
    error_code: str | None = None
    """Where the request itself is wrong: a machine-readable reason (`RequestError.code`)."""
    error_param: str | None = None
    """The field at fault, if it is one."""
    routed_experts: NDArray[Any] | None = None
    """With `enable_return_routed_experts`: the experts that routers chose, [tokens of prompt and output - 1, layers
    with routed experts, experts of a token] uint8, or uint16 where there are more than 256. The last token of the
    output was not computed, so that it has none."""
    error_signal: str | None = None
    """Name of the signal that ended the process that computed it, e.g. "SIGKILL"; None where none did."""

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All of a request."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Per prompt token (None for the first), by token id: the prompt's own first. None when not asked for."""
    outputs: list[CompletionOutput]
    """Completions by index; of a beam search the best one first."""
    finished: bool = True
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    num_generation_tokens: int = 0
    """Output tokens of all completions."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where the request's keys and values are held for another engine, when it asked for that: to be handed on."""


def to_request_output(output: quire_engine.RequestOutput, lora_request: LoRARequest | None = None) -> RequestOutput:
    """The engine's output in vLLM's form."""
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=None
        if output.prompt_logprobs is None
        else [None if position is None else _by_token_id(position) for position in output.prompt_logprobs],
        outputs=[_completion(each, lora_request) for each in output.outputs],
        finished=output.finished,
        metrics=_stats(output.metrics),
        lora_request=lora_request,
        num_cached_tokens=output.num_cached_tokens,
        num_generation_tokens=output.num_generation_tokens,
        kv_transfer_params=output.kv_transfer_params,
    )


def _completion(output: quire_engine.CompletionOutput, lora_request: LoRARequest | None) -> CompletionOutput:
    completion = CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else [_by_token_id(position) for position in output.logprobs],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        lora_request=lora_request,
        text_offsets=output.text_offsets,
        routed_experts=output.routed_experts,
    )
    return completion if output.error is None else _failed(completion, output)


def _failed(completion: CompletionOutput, output: quire_engine.CompletionOutput) -> CompletionOutput:
    completion.error, completion.error_code = output.error, output.error_code
    completion.error_param, completion.error_signal = output.error_param, output.error_signal
    return completion


def _by_token_id(position: Sequence[Logprob]) -> dict[int, Logprob]:
    """The sampled token may be among the most likely ones again; its own entry has its true rank."""
    entries: dict[int, Logprob] = {}
    for entry in position:
        entries.setdefault(entry.token_id, entry)
    return entries


def _stats(metrics: Sequence[RequestMetrics]) -> RequestStateStats | None:
    if not metrics:
        return None
    arrival = min(each.arrival_time_s for each in metrics)
    first = min((each.first_token_time_s for each in metrics if each.first_token_time_s), default=0.0)
    return RequestStateStats(
        num_generation_tokens=sum(each.num_generation_tokens for each in metrics),
        arrival_time=time.time() - (time.monotonic() - arrival),
        queued_ts=arrival,
        scheduled_ts=min((each.scheduled_time_s for each in metrics if each.scheduled_time_s), default=0.0),
        first_token_ts=first,
        last_token_ts=max(each.last_token_time_s for each in metrics),
        first_token_latency=first - arrival if first else 0.0,
        num_preemptions=sum(each.num_preemptions for each in metrics),
        completions=list(metrics),
    )
