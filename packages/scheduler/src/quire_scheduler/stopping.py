"""When a request is over: stop tokens and lengths. Knows nothing of stop strings (text belongs to the engine)."""

from __future__ import annotations

from quire_interfaces import FinishReason, Request
from quire_scheduler.state import RequestState

__all__ = ["append_tokens", "is_stop"]


def is_stop(request: Request, token_id: int) -> bool:
    """Whether the last output token, which is `token_id`, ends the request.

    The sampler keeps stop tokens away from the first `min_tokens` outputs; if one comes all the same, it is a token.
    """
    num_output_tokens = len(request.output_token_ids)
    return token_id in request.stop_token_ids and num_output_tokens > request.sampling_params.min_tokens


def append_tokens(state: RequestState, tokens: list[int]) -> tuple[int, FinishReason | None, int | None]:
    """Append sampled tokens to a request, up to and including the one that ends it.

    A stop token at the last possible place counts as STOP, not LENGTH.

    Args:
        state: Changed: its output tokens and `num_tokens`.
        tokens: Accepted drafts and the bonus token.

    Returns:
        (number of tokens appended, why the request is over or None, the stop token that ended it or None).
    """
    request = state.request
    for num_appended, token in enumerate(tokens, 1):
        request.output_token_ids.append(token)
        state.num_tokens += 1
        if is_stop(request, token):
            return num_appended, FinishReason.STOP, token
        if state.num_tokens >= state.limit:
            return num_appended, FinishReason.LENGTH, None
    return len(tokens), None, None
