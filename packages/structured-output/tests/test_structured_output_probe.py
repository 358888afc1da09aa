"""The trial walk: a grammar is refused for what its masks take, not for what else the processor did meanwhile."""

from __future__ import annotations

import time

import pytest

from quire_interfaces import GrammarMatcher, GrammarSpec, RequestError
from quire_structured_output.probe import MAX_STEP_S, probe
from quire_testkit.conformance.grammar_backend import EOS, TOKENS

SPEC = GrammarSpec("regex", "[a-z]{30,40}")


class Burning:
    """A matcher some of whose masks take too much processor time.

    Args:
        matcher: Gives the masks.
        period: Of so many masks, all but one are slow; 0 for all of them.
    """

    def __init__(self, matcher: GrammarMatcher, period: int) -> None:
        self._matcher, self._period = matcher, period
        self.num_masks = 0
        self.accept, self.rollback = matcher.accept, matcher.rollback

    def fill_bitmask(self, words: memoryview) -> None:
        self._matcher.fill_bitmask(words)
        self.num_masks += 1
        if not self._period or self.num_masks % self._period:
            end_s = time.thread_time() + 1.5 * MAX_STEP_S
            while time.thread_time() < end_s:
                pass


def burning(backend, period: int) -> Burning:
    return Burning(backend.compile(SPEC).new_matcher(), period)


def test_a_mask_that_is_slow_now_and_then_is_not_the_grammars_fault(backend):
    matcher = burning(backend, 3)
    walk = probe(matcher, len(TOKENS), EOS, SPEC)
    assert len(walk) > 10
    assert walk == probe(burning(backend, 1), len(TOKENS), EOS, SPEC), "the same way, however long it took"


def test_a_mask_that_is_slow_each_time_is(backend):
    matcher = burning(backend, 0)
    with pytest.raises(RequestError, match=r"regex is too complex: one step takes \d+ ms") as caught:
        probe(matcher, len(TOKENS), EOS, SPEC)
    assert caught.value.code == "grammar_too_large"
    assert matcher.num_masks < 60, "one slow step is enough"
