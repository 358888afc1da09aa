"""When a request is over: stop tokens and lengths. Knows nothing of stop strings (text belongs to the engine)."""

from __future__ import annotations

from quire_interfaces import FinishReason
from quire_scheduler.state import RequestState

__all__ = ["append_tokens"]


def append_tokens(state: RequestState, tokens: list[int]) -> tuple[int, FinishReason | None, int | None]:
    """Append sampled tokens to a request, up to and including the one that ends it.

    The sampler keeps stop tokens away from the first `min_tokens` outputs; if one comes all the same, it does not end
    the request. A stop token at the last possible place counts as STOP, not LENGTH.

    Args:
        state: Changed: its output tokens and `num_tokens`.
        tokens: Accepted drafts and the bonus token.

    Returns:
        (tokens taken, why it is over or None, the stop token that ended it or None).
    """
    request = state.request
    output_token_ids = request.output_token_ids
    stop_token_ids = request.stop_token_ids
    limit = state.limit
    num_taken = 0
    for token in tokens:
        output_token_ids.append(token)
        num_taken += 1
        state.num_tokens = num_tokens = state.num_tokens + 1
        if token in stop_token_ids and len(output_token_ids) > request.sampling_params.min_tokens:
            return num_taken, FinishReason.STOP, token
        if num_tokens >= limit:
            return num_taken, FinishReason.LENGTH, None
    return num_taken, None, None
