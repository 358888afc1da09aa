"""Which token ends a request: stop tokens count only behind the first `min_tokens` outputs."""

from __future__ import annotations

import pytest

from quire_interfaces import FinishReason
from quire_scheduler.state import RequestState
from quire_scheduler.stopping import append_tokens
from quire_testkit.conformance.scheduler import make_request

STOP = 9


def state_of(*, min_tokens: int, max_tokens: int = 6) -> RequestState:
    request = make_request("a", range(5), max_tokens=max_tokens, stop_token_ids=[STOP], min_tokens=min_tokens)
    return RequestState(request=request, order=(0, 0), limit=5 + max_tokens, num_tokens=5)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("min_tokens", "num_taken", "reason"), [(0, 3, FinishReason.STOP), (2, 3, FinishReason.STOP), (3, 4, None)]
)
def test_a_stop_token_does_not_end_the_first_min_tokens(
    min_tokens: int, num_taken: int, reason: FinishReason | None, at_once: bool
) -> None:
    """Samplers keep stop tokens away from there; one that comes all the same, from a draft or a runner, is a token."""
    state = state_of(min_tokens=min_tokens)
    sampled = [1, 2, STOP, 3]
    ends: list[tuple[int, FinishReason | None, int | None]] = []
    for tokens in [sampled] if at_once else [[token] for token in sampled]:
        ends.append(append_tokens(state, tokens))
        if ends[-1][1] is not None:
            break
    assert state.request.output_token_ids == sampled[:num_taken]
    assert sum(taken for taken, _, _ in ends) == num_taken
    assert state.num_tokens == 5 + num_taken
    assert ends[-1][1:] == (reason, STOP if reason else None)


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    assert append_tokens(state_of(min_tokens=0, max_tokens=2), [1, STOP, 4]) == (2, FinishReason.STOP, STOP)
    assert append_tokens(state_of(min_tokens=2, max_tokens=2), [1, STOP, 4]) == (2, FinishReason.LENGTH, None)
