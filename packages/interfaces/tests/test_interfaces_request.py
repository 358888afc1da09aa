"""`Request`: token views across the border of prompt and output."""

from __future__ import annotations

from itertools import product

from quire_interfaces import Request, RequestStatus, SamplingParams


def test_token_ids_is_a_slice_of_the_whole() -> None:
    """Every slice of every pair of up to four tokens each."""
    for num_prompt, num_output in product(range(5), repeat=2):
        whole = list(range(num_prompt + num_output))
        request = Request(
            request_id="a", prompt_token_ids=whole[:num_prompt], sampling_params=SamplingParams(), seed=0, max_tokens=1
        )
        request.output_token_ids.extend(whole[num_prompt:])
        assert (request.num_prompt_tokens, request.num_tokens) == (num_prompt, len(whole))
        for end in range(len(whole) + 1):
            for start in range(end + 1):
                assert request.token_ids(start, end) == whole[start:end]


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
