"""Every mix of parameters, in batches of strangers with drafts, gives the token the slow reference gives."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import SamplingParams
from quire_ops import ops
from quire_sampling import Sampler, SamplingState

STOP_IDS = (1, 3)
NEAR = 2e-6  # float32 exponentials against float64 ones


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Edits use binary fractions, so that float32 and float64 agree on every edited logit and on every tie."""

    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    return SamplingParams(
        temperature=rng.choice([0, 0.3, 1, 1, 1.7]),
        top_k=maybe(rng.choice([1, 2, 7, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 5]), 0),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.99]), 1),
        min_p=maybe(rng.choice([0.01, 0.2, 1]), 0),
        repetition_penalty=maybe(rng.choice([0.5, 2, 4]), 1),
        presence_penalty=maybe(rng.choice([-1.5, 0.25, 2]), 0),
        frequency_penalty=maybe(rng.choice([-0.5, 0.75]), 0),
        logit_bias=maybe({token: rng.choice([-100, -2.5, 3]) for token in tokens(3)}, None),
        allowed_token_ids=maybe(tokens(5), None),
        bad_words_token_ids=maybe(tuple(tokens(rng.randint(1, 3)) for _ in range(6)), ()),
        min_tokens=maybe(rng.randint(1, 6), 0),
    )


def agrees(oracle: SimpleNamespace, token_id: int, logits: list[float], params: SamplingParams, u: float) -> bool:
    if params.greedy:
        return token_id == logits.index(max(logits))
    for nudge in (1, 1 - NEAR, 1 + NEAR):  # where top_p or min_p cuts exactly at a token, rounding may decide
        nudged = replace(params, top_p=min(1, params.top_p * nudge), min_p=min(1, params.min_p * nudge))
        low, high = oracle.interval(oracle.distribution(logits, nudged), token_id)
        if low < high and low - NEAR <= u <= high + NEAR:
            return True
    return False


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([2, 5, 63, 64, 65, 130, 400, 700]),
    num_requests=st.integers(1, 6),
    spread=st.sampled_from([0.0, 0.5, 2.0, 8.0]),
    grid=st.booleans(),
    by_op=st.booleans(),
)
def test_same_token_as_the_reference(
    oracle: SimpleNamespace, seed: int, vocab_size: int, num_requests: int, spread: float, grid: bool, by_op: bool
) -> None:
    rng = random.Random(seed)
    state = SamplingState(num_requests + 3, vocab_size)
    token_ids = torch.randint(0, min(vocab_size, 12), (num_requests + 3, 24), generator=torch.manual_seed(seed))
    rows: list[int] = []
    positions: list[int] = []
    requests = {}
    for row in rng.sample(range(num_requests + 3), num_requests):
        params, num_prompt_tokens, request_seed = random_params(rng, vocab_size), rng.randint(1, 9), rng.getrandbits(64)
        state.set_row(
            row, params, seed=request_seed, num_prompt_tokens=num_prompt_tokens, stop_token_ids=(*STOP_IDS, vocab_size)
        )
        requests[row] = (params, num_prompt_tokens, request_seed)
        first = rng.randint(num_prompt_tokens - 1, 18)
        for position in range(first, first + rng.randint(1, 4)):  # one logit row, and one more per draft
            rows.append(row)
            positions.append(position)
    logits = torch.randn(len(rows), vocab_size, generator=torch.manual_seed(seed)) * spread
    if grid:
        logits = (logits * 2).round() / 2  # many ties

    sampler = Sampler(state, penalize=ops.penalize if by_op else None)
    output = sampler.sample(logits.clone(), rows, torch.tensor(positions), token_ids)

    failed = output.failures()
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        params, num_prompt_tokens, request_seed = requests[row]
        history = token_ids[row, : position + 1].tolist()
        edited = oracle.edited_logits(logits[i].tolist(), params, history, num_prompt_tokens, STOP_IDS)
        if max(edited) == -float("inf"):
            assert i in failed
            continue
        assert i not in failed
        u = oracle.uniform_number(request_seed, position + 1 - num_prompt_tokens)
        assert agrees(oracle, int(output.token_ids[i]), edited, params, u), (params, u)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=3, min_p=0.03, top_p=0.3),  # hundreds pass min_p, and much weight does not
        SamplingParams(temperature=3, top_k=300, top_p=0.3),
        SamplingParams(temperature=3, top_k=300, min_p=0.03, top_p=0.9),
        # 64 candidates reach top_p of everything, but top_p is a share of what the other filter leaves
        SamplingParams(temperature=1.5, top_k=300, top_p=0.4),
        SamplingParams(temperature=1.5, min_p=0.015, top_p=0.4),
        SamplingParams(temperature=3, top_p=0.6),
        SamplingParams(temperature=1, min_p=0.5),
    ],
)
def test_filters_that_leave_more_than_the_first_candidates(oracle: SimpleNamespace, params: SamplingParams) -> None:
    num_rows, vocab_size = 80, 3000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(11)) * 3
    state = SamplingState(num_rows, vocab_size)
    for row in range(num_rows):
        state.set_row(row, params, seed=row, num_prompt_tokens=1)
    token_ids = torch.zeros(num_rows, 4, dtype=torch.int64)

    output = Sampler(state).sample(logits.repeat(num_rows, 1), range(num_rows), torch.zeros(num_rows).long(), token_ids)

    exact = oracle.distribution(logits.tolist(), params)
    for row, token_id in enumerate(output.token_ids.tolist()):
        low, high = oracle.interval(exact, token_id)
        assert low - NEAR <= oracle.uniform_number(row, 0) <= high + NEAR
