"""`OutputMatcher`: thinking is free until it ends, fixed tokens are a function of what came before, rollback undoes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import GrammarSpec, ReasoningSpan, StructuredOutputsParams
from quire_structured_output import OutputMatcher
from quire_testkit.conformance.grammar_backend import EOS, TOKENS, allowed_tokens

OPEN, CLOSE, BYE = 280, 281, 282
NUM = len(TOKENS)


def matcher_of(backend, pattern="yes|no", *, jump=0, **span):
    grammar = backend.compile(GrammarSpec("regex", pattern))
    reasoning = ReasoningSpan(**span) if span else None
    return OutputMatcher(grammar.new_matcher(), EOS, reasoning, jump)


def accept_all(matcher, token_ids):
    for token_id in token_ids:
        assert token_id in allowed_tokens(matcher, NUM)
        assert matcher.accept(token_id)


def test_without_thinking_the_grammar_begins_at_once(backend, encode):
    matcher = matcher_of(backend)
    assert not matcher.allows_all
    accept_all(matcher, encode("yes"))
    assert allowed_tokens(matcher, NUM) == sorted(EOS)
    accept_all(matcher, EOS[:1])
    assert matcher.is_terminated
    assert matcher.allows_all, "steps in flight behind the end need no mask"
    assert not matcher.accept(encode("y")[0])


def test_thinking_cannot_end_the_output(backend, encode):
    matcher = matcher_of(backend, end_token_ids=(CLOSE,), is_open=True)
    accept_all(matcher, [*encode("no no"), OPEN, BYE])
    assert not set(EOS) & set(allowed_tokens(matcher, NUM))
    assert not matcher.accept(EOS[0])
    accept_all(matcher, [CLOSE, *encode("no"), EOS[1]])
    assert matcher.is_terminated


def test_an_end_of_several_tokens(backend, encode):
    matcher = matcher_of(backend, end_token_ids=(CLOSE, CLOSE, BYE), is_open=True)
    accept_all(matcher, [CLOSE, BYE, CLOSE, CLOSE, CLOSE])
    assert CLOSE in allowed_tokens(matcher, NUM)
    accept_all(matcher, [BYE])
    assert CLOSE not in allowed_tokens(matcher, NUM)
    accept_all(matcher, encode("yes"))


def test_an_output_may_begin_to_think_or_not(backend, encode):
    span = {"start_token_ids": (OPEN, BYE), "end_token_ids": (CLOSE,)}
    thinking = matcher_of(backend, **span)
    accept_all(thinking, [OPEN])
    assert allowed_tokens(thinking, NUM) == [BYE]
    assert thinking.forced_token_ids() == [BYE]
    accept_all(thinking, [BYE, *encode("hm"), CLOSE, *encode("no"), EOS[0]])
    answering = matcher_of(backend, **span)
    accept_all(answering, encode("no"))
    assert OPEN not in allowed_tokens(answering, NUM)


def test_fixed_tokens_are_the_tokenizer_s_own(backend, encode):
    params = StructuredOutputsParams(json={"enum": [{"name": "value"}]}, disable_any_whitespace=True)
    grammar = backend.compile(params.spec())
    matcher = OutputMatcher(grammar.new_matcher(), EOS, None, 32)
    text = '{"name":"value"}'
    assert matcher.forced_token_ids() == encode(text)[: len(matcher.forced_token_ids())]
    assert len(matcher.forced_token_ids()) >= 2
    for token_id in list(matcher.forced_token_ids()):
        assert allowed_tokens(matcher, NUM) == [token_id]
        assert not matcher.accept(encode("x")[0])
        assert matcher.accept(token_id)


@pytest.mark.parametrize("jump", [1, 2, 64])
def test_at_most_so_many_are_fixed_at_once(backend, jump):
    matcher = matcher_of(backend, "x{30}y*", jump=jump)
    assert 1 <= len(matcher.forced_token_ids()) <= jump


def test_nothing_is_fixed_unless_asked_for(backend):
    assert matcher_of(backend, "x{30}").forced_token_ids() == []


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), jump=st.sampled_from([0, 1, 8]), mode=st.sampled_from(["plain", "open", "maybe"]))
def test_rollback_and_replay_give_the_same_masks(backend, seed, jump, mode):
    span = {} if mode == "plain" else {"end_token_ids": (CLOSE, BYE), "is_open": mode == "open"}
    if mode == "maybe":
        span["start_token_ids"] = (OPEN,)
    pattern = r'\{"name":(true|null)(, 12){2,4}\}'
    matcher = matcher_of(backend, pattern, jump=jump, **span)
    rng = random.Random(seed)
    path: list[int] = []
    masks = [allowed_tokens(matcher, NUM)]
    for _ in range(60):
        if path and rng.random() < 0.3:
            back = rng.randint(1, len(path))
            matcher.rollback(back)
            del path[-back:]
            del masks[-back:]
        else:
            choices = [CLOSE, BYE] if {CLOSE, BYE} <= set(masks[-1]) and rng.random() < 0.5 else masks[-1]
            token_id = rng.choice(choices)
            assert matcher.accept(token_id)
            path.append(token_id)
            masks.append(allowed_tokens(matcher, NUM))
            if matcher.is_terminated:
                break
        assert allowed_tokens(matcher, NUM) == masks[-1]
    again = matcher_of(backend, pattern, jump=jump, **span)
    for token_id, mask in zip(path, masks, strict=False):
        assert allowed_tokens(again, NUM) == mask, "a mask is a function of the tokens before it"
        assert again.accept(token_id)
