"""Requests have exactly the lengths that were asked for, and the same seed gives the same requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_bench import Workload, random_requests
from quire_bench.workload import parse_token_range
from quire_interfaces import ConfigError


@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 60), st.integers(0, 5), st.integers(1, 300))
def test_lengths_and_ids_are_exact(count: int, input_len: int, output_len: int, low: int, width: int) -> None:
    workload = Workload(num_requests=count, input_len=input_len, output_len=output_len)
    requests = random_requests(workload, low=low, high=low + width)
    assert [len(request.prompt_token_ids) for request in requests] == [input_len] * count
    assert [request.output_len for request in requests] == [output_len] * count
    assert {token for request in requests for token in request.prompt_token_ids} <= set(range(low, low + width))


@given(st.integers(1, 200), st.floats(0, 0.99), st.integers(0, 2**40))
def test_spread_lengths_stay_inside_their_bounds(length: int, spread: float, seed: int) -> None:
    workload = Workload(num_requests=30, input_len=length, output_len=length, length_spread=spread, seed=seed)
    shortest, longest = max(1, round(length * (1 - spread))), round(length * (1 + spread))
    for request in random_requests(workload, low=0, high=9):
        assert shortest <= len(request.prompt_token_ids) <= longest
        assert shortest <= request.output_len <= longest


def test_spread_reaches_both_bounds() -> None:
    requests = random_requests(Workload(num_requests=500, input_len=10, length_spread=0.5), low=0, high=9)
    assert {len(request.prompt_token_ids) for request in requests} == set(range(5, 16))


def test_the_seed_decides() -> None:
    first, again, other = (random_requests(Workload(seed=seed), low=10, high=250) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(request.prompt_token_ids) for request in first}) == len(first)


def test_the_prefix_is_shared_and_part_of_the_length() -> None:
    workload = Workload(num_requests=8, input_len=20, prefix_len=12, length_spread=0.4)
    requests = random_requests(workload, low=10, high=250)
    assert len({tuple(request.prompt_token_ids[:12]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids) for request in requests if len(request.prompt_token_ids) > 12}) > 1
    assert min(len(request.prompt_token_ids) for request in requests) >= 12
    whole = random_requests(Workload(num_requests=3, input_len=5, prefix_len=5), low=10, high=250)
    assert whole[0].prompt_token_ids == whole[1].prompt_token_ids == whole[2].prompt_token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("input_len", 0),
        ("output_len", -5),
        ("length_spread", 1.0),
        ("length_spread", -0.1),
        ("length_spread", float("nan")),
        ("prefix_len", -1),
        ("prefix_len", 129),
    ],
)
def test_bad_values_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .* got {value}") as caught:
        Workload(**{field: value})
    assert caught.value.field == field


def test_a_prefix_longer_than_the_shortest_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"from 0 to the shortest prompt \(50\), got 51"):
        Workload(input_len=100, length_spread=0.5, prefix_len=51)


def test_token_ranges() -> None:
    assert parse_token_range("10:250") == (10, 250)
    for text in ("", "10", "10:", "a:b", "1:2:3", "1.5:2"):
        with pytest.raises(ConfigError, match="token_range must be LOW:HIGH") as caught:
            parse_token_range(text)
        assert repr(text) in str(caught.value)
    for low, high in ((5, 5), (6, 5), (-1, 5)):
        with pytest.raises(ConfigError, match=f"the token range {low}:{high} is empty"):
            random_requests(Workload(), low=low, high=high)
