"""Lists of sampling parameters have a bound each, and its last allowed size is taken."""

from __future__ import annotations

import pytest

from quire_interfaces import RequestError, SamplingParams
from quire_interfaces.sampling_bounds import _NO_LISTS, _lists, are_biases, are_token_ids

TAKEN = {
    "stop": [("s",) * 256, ("a" * 16_384,), ("a" * 8192, "b" * 8192)],
    "stop_token_ids": [tuple(range(1024))],
    "bad_words": [("w",) * 1024, ("w" * 65_536,)],
    "bad_words_token_ids": [((1,),) * 16_384, (tuple(range(64)),)],
    "dry_sequence_breakers": [("b",) * 1024, (7,) * 1024, ("b" * 16_384,)],
    "logit_bias": [dict.fromkeys(range(32_768), -100)],
    "allowed_token_ids": [tuple(range(262_144))],
}
REFUSED = {
    "stop": [("s",) * 257, ("a" * 16_385,), ("a" * 8192, "b" * 8193)],
    "stop_token_ids": [tuple(range(1025))],
    "bad_words": [("w",) * 1025, ("w" * 65_537,)],
    "bad_words_token_ids": [((1,),) * 16_385, (tuple(range(65)),)],
    "dry_sequence_breakers": [("b",) * 1025, ("b" * 16_385,)],
    "logit_bias": [dict.fromkeys(range(32_769), -100)],
    "allowed_token_ids": [tuple(range(262_145))],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in TAKEN.items() for value in values])
def test_what_is_within_the_bounds_is_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_what_is_beyond_is_refused_by_name_and_bound(field, value):
    with pytest.raises(RequestError, match=rf"{field} holds .*, at most [0-9]+ are allowed") as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert len(str(error.value)) < 200


def test_requests_without_lists_are_not_looked_through():
    assert _lists(SamplingParams()) == _NO_LISTS


@pytest.mark.parametrize("ids", [(-1,), (2**31 + 1,), (True,), (1.0,), ("1",), (0, 5, -3), {-1: 0.0}])
def test_no_token_ids(ids):
    assert not are_token_ids(ids)


@pytest.mark.parametrize(
    "biases", [(101,), (-100.5,), (float("nan"),), (1, float("nan")), (float("inf"),), ("1",), (True,)]
)
def test_no_biases(biases):
    assert not are_biases(biases)


def test_errors_do_not_repeat_long_values():
    with pytest.raises(RequestError) as error:
        SamplingParams(bad_words_token_ids=("x" * 60,) * 4000, stop=("y" * 9000, ""))
    assert len(str(error.value)) < 200
