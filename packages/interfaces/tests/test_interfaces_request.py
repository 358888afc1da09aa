"""`Request`: token views across the border of prompt and output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire_interfaces import Request, RequestStatus, SamplingParams


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.integers(0, 20), st.integers(0, 20))
def test_token_ids_is_a_slice_of_the_whole(prompt: list[int], output: list[int], start: int, length: int) -> None:
    request = Request(request_id="a", prompt_token_ids=prompt, sampling_params=SamplingParams(), seed=0, max_tokens=1)
    request.output_token_ids.extend(output)
    whole = prompt + output
    end = min(start + length, len(whole))
    assert request.token_ids(min(start, end), end) == whole[min(start, end) : end]
    assert request.num_tokens == len(whole)
    assert request.num_prompt_tokens == len(prompt)


def test_requests_are_compared_by_identity() -> None:
    one, other = (
        Request(request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(), seed=0, max_tokens=1)
        for _ in range(2)
    )
    assert one != other
    assert len({one, other}) == 2
    assert not one.is_finished
    one.status = RequestStatus.FINISHED
    assert one.is_finished
