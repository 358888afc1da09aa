"""What is checked when a request arrives: that it can run at all, and that there is room in the queue."""

from __future__ import annotations

from collections import deque

from quire_interfaces import ContextLengthError, OverloadedError, Request, RequestError

__all__ = ["QueueBound", "token_limit"]


def token_limit(request: Request, *, max_model_len: int | None, max_request_tokens: int) -> int:
    """Number of known tokens at which a request ends for length.

    The last token of a request is never computed, so it needs no slot. A request whose client asked for no particular
    length may be cut by the size of the KV cache; one that asked for more than fits is refused.

    Args:
        request: A new request.
        max_model_len: Context length in tokens, or None.
        max_request_tokens: What the whole KV cache holds, in tokens of one request.

    Raises:
        RequestError: The prompt is empty, or max_tokens is below 1.
        ContextLengthError: The prompt fills the context, or the KV cache can never hold the request.
    """
    num_prompt = request.num_prompt_tokens
    if request.pooling_params is not None and max_model_len is not None:
        max_model_len += 1  # its one output token stands for what is pooled, behind the context
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    if max_model_len is not None and num_prompt >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but the context holds {max_model_len} and one of them must be left "
            f"for the output; shorten the prompt",
            num_prompt_tokens=num_prompt,
            max_model_len=max_model_len,
        )
    limit = num_prompt + request.max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    has_own_bound = request.sampling_params.max_tokens is not None
    num_slots = limit - 1 if has_own_bound else num_prompt
    if num_slots > max_request_tokens:
        raise ContextLengthError(
            f"{num_prompt} prompt tokens and {limit - num_prompt} output tokens need {num_slots} slots in the KV "
            f"cache, which holds {max_request_tokens} tokens in all; shorten the prompt, lower max_tokens, or give the "
            f"server a larger KV cache",
            param="max_tokens" if num_prompt <= max_request_tokens else "prompt",
            code="kv_cache_too_small",
            num_prompt_tokens=num_prompt,
            max_model_len=max_request_tokens,
            max_tokens=request.sampling_params.max_tokens,
        )
    return min(limit, max_request_tokens + 1)


class QueueBound:
    """Refuses requests when too many wait, and estimates when it is worth trying again.

    The scheduler reads no clock: the arrival times of the requests are the clock. A place in the queue becomes free
    whenever a running request ends, so the recent rate of endings says how fast the queue falls.

    Args:
        max_queued_requests: Most requests that may wait.
    """

    def __init__(self, max_queued_requests: int) -> None:
        self.max_queued_requests = max_queued_requests
        self._now_s = 0.0
        self._ended_s: deque[float] = deque(maxlen=64)

    def ended(self) -> None:
        """A request ended."""
        self._ended_s.append(self._now_s)

    def check(self, request: Request, num_waiting: int, num_of_tenant: int) -> None:
        """Let the request pass, or not. The requests of a tenant with a name may take as many places as they leave
        free, so that however many tenants flood the queue, the next one finds room (Choudhury and Hahne, "Dynamic queue
        length thresholds", 1998).

        Args:
            num_waiting: Requests that wait.
            num_of_tenant: Those of the request's tenant.

        Raises:
            OverloadedError: The queue is full, or the tenant's share of it.
        """
        self._now_s = max(self._now_s, request.arrival_time_s)
        num_free = self.max_queued_requests - num_waiting
        if num_free > (num_of_tenant if request.options.tenant else 0):
            return
        retry_after_s = self._retry_after_s()
        if num_free > 0:
            reason = f"{num_of_tenant} of your requests wait already, as many as your share of max_queued_requests"
        else:
            reason = f"{num_waiting} requests wait already, as many as max_queued_requests"
        raise OverloadedError(
            f"{reason} ({self.max_queued_requests}) allows; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def _retry_after_s(self) -> float:
        """Time in which an eighth of the queue (at least one place) will be free; 1 to 60 s, 1 s when unknown."""
        if not self._ended_s:
            return 1.0
        span_s = self._now_s - self._ended_s[0]
        places = max(1, self.max_queued_requests // 8)
        return min(60.0, max(1.0, places * span_s / len(self._ended_s)))
