"""DRY, top-n-sigma, dynamic temperature, typical_p, XTC and Mirostat against their definitions in Python floats."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

XTC_STREAM = 0x58544300
NEAR = 2e-6


def dry_logits(logits: Sequence[float], history: Sequence[int], params: SamplingParams) -> list[float]:
    """The definition, token by token: how long is the sequence that this token would make longer?"""
    tokens = list(history[-params.dry_range :]) if params.dry_range else list(history)
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        follower = tokens[place + 1]
        length = 0
        while (
            length < 50
            and length <= place
            and tokens[place - length] == tokens[-1 - length]
            and tokens[place - length] not in params.dry_sequence_breakers
        ):
            length += 1
        if length and follower not in params.dry_sequence_breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    result = list(logits)
    for token, length in longest.items():
        if length >= params.dry_allowed_length:
            result[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return result


def sigma_logits(logits: Sequence[float], num_sigmas: float) -> list[float]:
    finite = [x for x in logits if x > -math.inf]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
    return [x if x >= max(finite) - num_sigmas * sigma else -math.inf for x in logits]


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    total = math.fsum(weights)
    return [x / total for x in weights]


def dynamic_temperature(logits: Sequence[float], params: SamplingParams) -> float:
    p = [x for x in softmax(logits, 1.0) if x > 0]
    share = -math.fsum(x * math.log(x) for x in p) / math.log(len(p))
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    return low + (high - low) * share**params.dynatemp_exponent


def without_top_choices(p: Sequence[float], threshold: float) -> list[float]:
    top = sorted((i for i in range(len(p)) if p[i] >= threshold and p[i] > 0), key=lambda i: (-p[i], i))
    result = [0.0 if i in top[:-1] else x for i, x in enumerate(p)]
    return [x / math.fsum(result) for x in result]


def zipf_k(p: Sequence[float], mu: float) -> int:
    best = sorted((x for x in p if x > 0), reverse=True)[:101]
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
    drops = [math.log(a / b) for a, b in itertools.pairwise(best)]
    s = math.fsum(map(math.prod, zip(steps, drops, strict=True))) / math.fsum(t * t for t in steps)
    return max(1, min(len(p), round(((s - 1) * 2**mu / (1 - len(p) ** (1 - s))) ** (1 / s))))


class MirostatReference:
    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.mu = 2 * params.mirostat_tau

    def kept(self, p: Sequence[float]) -> list[float]:
        order = sorted(range(len(p)), key=lambda i: (-p[i], i))
        if self.params.mirostat_mode == 1:
            kept = set(order[: zipf_k(p, self.mu)])
        else:
            kept = {i for i in order if p[i] > 0 and -math.log2(p[i]) <= self.mu} or {order[0]}
        total = math.fsum(p[i] for i in kept)
        return [x / total if i in kept else 0.0 for i, x in enumerate(p)]

    def learn(self, p: Sequence[float], kept: Sequence[float], token: int) -> None:
        surprise = -math.log2((p if self.params.mirostat_mode == 1 else kept)[token])
        self.mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)


@pytest.mark.parametrize("seed", range(40))
def test_dry_penalizes_what_would_repeat_a_sequence(sample_one: Any, seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([3, 7, 40])
    part = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 70))]
    history = (part * rng.randint(1, 3) + [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))] + part)[:180]
    params = SamplingParams(
        temperature=0,
        dry_multiplier=rng.choice([0.25, 1.0, 8.0]),
        dry_base=rng.choice([1.0, 1.25, 1.75]),
        dry_allowed_length=rng.choice([1, 2, 4]),
        dry_range=rng.choice([0, 1, 2, 30]),
        dry_sequence_breakers=tuple(rng.sample(range(vocab_size), rng.choice([0, 0, 1]))),
    )
    logits = torch.randn(vocab_size, generator=torch.manual_seed(seed)) * 3
    expected = dry_logits(logits.tolist(), history, params)
    # logit_bias lifts one token after the other to where only its penalty decides between it and a fixed rival.
    for token in range(0, vocab_size, max(1, vocab_size // 6)):
        got = sample_one(logits, params, history=history, num_prompt_tokens=2)
        assert got.token_id == expected.index(max(expected))
        logits[token] += expected[got.token_id] - expected[token] + 1e-3
        expected = dry_logits(logits.tolist(), history, params)


def test_dry_sees_a_repetition_in_two_tokens(sample_one: Any) -> None:
    params = SamplingParams(temperature=0, dry_multiplier=8.0, dry_allowed_length=1, dry_sequence_breakers=())
    assert sample_one([1.0, 0.0], params, history=[0, 0]).token_id == 1
    assert sample_one([1.0, 0.0], params, history=[0]).token_id == 0


def samples(logits: torch.Tensor, params: SamplingParams, num_tokens: int) -> list[int]:
    """One token for each of the seeds 0, 1, ..."""
    state = SamplingState(num_tokens, logits.shape[-1])
    for row in range(num_tokens):
        state.set_row(row, params, seed=row, num_prompt_tokens=1)
    rows = logits.repeat(num_tokens, 1) if logits.ndim == 1 else logits
    history = torch.zeros(num_tokens, 2, dtype=torch.int64)
    return (
        Sampler(state)
        .sample(rows.clone(), range(num_tokens), torch.zeros(num_tokens).long(), history)
        .token_ids.tolist()
    )


def assert_sampled(oracle: SimpleNamespace, p: Sequence[float], tokens: Sequence[int]) -> None:
    """Each token is the one in whose interval its seed's number falls."""
    for seed, token in enumerate(tokens):
        low, high = oracle.interval(p, token)
        assert low < high
        assert low - NEAR <= oracle.uniform_number(seed, 0) <= high + NEAR


@pytest.mark.parametrize("vocab_size", [5, 700])
@pytest.mark.parametrize("num_sigmas", [0.3, 1.0, 2.5])
def test_top_n_sigma_keeps_what_is_near_the_largest_logit(
    oracle: SimpleNamespace, vocab_size: int, num_sigmas: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.manual_seed(vocab_size)) * 2
    allowed = tuple(range(vocab_size - vocab_size // 3))  # tokens that are masked must not widen the deviation
    params = SamplingParams(temperature=1.5, top_n_sigma=num_sigmas, allowed_token_ids=allowed)
    masked = [x if i in allowed else -math.inf for i, x in enumerate(logits.tolist())]
    kept = sigma_logits(masked, num_sigmas)
    assert vocab_size == 5 or sum(x > -math.inf for x in kept) < vocab_size / 2
    assert_sampled(oracle, softmax(kept, 1.5), samples(logits, params, 60))


@pytest.mark.parametrize(("spread", "exponent"), [(0.1, 1.0), (2.0, 1.0), (2.0, 0.4), (9.0, 2.0)])
def test_the_temperature_follows_the_entropy(oracle: SimpleNamespace, spread: float, exponent: float) -> None:
    logits = torch.randn(300, generator=torch.manual_seed(3)) * spread
    params = SamplingParams(temperature=0.9, dynatemp_range=1.1, dynatemp_exponent=exponent)
    temperature = dynamic_temperature(logits.tolist(), params)
    assert 0.0 < temperature < 2.0
    assert_sampled(oracle, softmax(logits.tolist(), temperature), samples(logits, params, 60))
    filtered = SamplingParams(temperature=0.9, dynatemp_range=1.1, dynatemp_exponent=exponent, top_k=20)
    fixed = SamplingParams(temperature=temperature, top_k=20)
    assert samples(logits, filtered, 60) == samples(logits, fixed, 60)


def test_xtc_takes_away_the_top_choices(oracle: SimpleNamespace) -> None:
    logits = torch.randn(200, generator=torch.manual_seed(5)) * 2.5
    logits[[17, 40]] = logits.max()  # equally likely ones
    logits[41] = -math.inf
    params = SamplingParams(temperature=1.2, top_p=0.9, xtc_probability=0.5, xtc_threshold=0.05)
    p = oracle.distribution(logits.tolist(), params)
    excluded = without_top_choices(p, 0.05)
    assert 2 < sum(a > 0 for a in p) - sum(a > 0 for a in excluded) < 20
    tokens = samples(logits, params, 200)
    acts = [oracle.uniform_number(seed ^ XTC_STREAM, 0) < 0.5 for seed in range(200)]
    assert 70 < sum(acts) < 130
    for seed, (token, acted) in enumerate(zip(tokens, acts, strict=True)):
        low, high = oracle.interval(excluded if acted else p, token)
        assert low - NEAR <= oracle.uniform_number(seed, 0) <= high + NEAR
    always = SamplingParams(temperature=1.2, xtc_probability=1.0, xtc_threshold=0.0)
    assert set(samples(logits, always, 20)) == {oracle_last(logits.tolist())}


@pytest.mark.parametrize(
    ("typical_p", "more"), [(0.2, {}), (0.8, {}), (0.999, {}), (0.6, {"top_k": 40}), (0.5, {"top_p": 0.9})]
)
def test_typical_p_keeps_what_is_nearest_to_the_entropy(
    oracle: SimpleNamespace, typical_p: float, more: dict[str, Any]
) -> None:
    logits = torch.randn(150, generator=torch.manual_seed(8)) * 2
    logits[[3, 9]] = float(logits[60])  # equally near ones
    p = oracle.distribution(logits.tolist(), SamplingParams(temperature=1.1, **more))
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    kept: list[int] = []
    for token in sorted((i for i, x in enumerate(p) if x > 0), key=lambda i: (abs(-math.log(p[i]) - entropy), i)):
        if math.fsum(p[i] for i in kept) < typical_p:
            kept.append(token)
    assert p.index(max(p)) not in kept or typical_p > 0.2  # the most likely token is not the most typical one
    rest = math.fsum(p[i] for i in kept)
    typical = [x / rest if i in kept else 0.0 for i, x in enumerate(p)]
    params = SamplingParams(temperature=1.1, typical_p=typical_p, **more)
    assert_sampled(oracle, typical, samples(logits, params, 80))


def oracle_last(logits: Sequence[float]) -> int:
    """The least likely token that can be sampled at all."""
    return min((x, i) for i, x in enumerate(logits) if x > -math.inf)[1]


class Writer:
    """One request that writes, alone or with strangers, preempted or not."""

    def __init__(self, params: SamplingParams, num_rows: int = 1) -> None:
        self.params = params
        self.state = SamplingState(num_rows, 400)
        self.history = torch.zeros(num_rows, 60, dtype=torch.int64)

    def enter(self, row: int, num_tokens: int, seed: int = 9, name: str = "me") -> None:
        self.state.set_row(row, self.params, seed=seed, num_prompt_tokens=1, request_id=name)

    def step(self, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
        logits = torch.stack([logits_at(position) for position in positions])
        return Sampler(self.state).sample(logits, rows, torch.tensor(positions), self.history).token_ids.tolist()


def logits_at(position: int) -> torch.Tensor:
    """A Zipf-like distribution, so that both versions have something to cut."""
    order = torch.randperm(400, generator=torch.manual_seed(position))
    return -1.1 * (order + 1.0).log() + 0.1 * torch.randn(400, generator=torch.manual_seed(position))


@pytest.mark.parametrize("params", [
    SamplingParams(mirostat_mode=1, mirostat_tau=3.0, mirostat_eta=0.3),
    SamplingParams(mirostat_mode=2, mirostat_tau=2.0, mirostat_eta=0.5, temperature=1.3, top_k=1),
], ids=["v1", "v2"])  # fmt: skip
def test_mirostat_steers_the_surprise_whatever_happens_to_the_row(
    oracle: SimpleNamespace, params: SamplingParams
) -> None:
    reference = MirostatReference(params)
    alone = Writer(params)
    alone.enter(0, 1)
    tokens, mus = [], []
    for position in range(40):
        [token] = alone.step([0], [position])
        p = softmax(logits_at(position).tolist(), params.temperature)
        kept = reference.kept(p)
        low, high = oracle.interval(kept, token)
        assert low - NEAR <= oracle.uniform_number(9, position) <= high + NEAR, position
        mus.append(reference.mu)
        reference.learn(p, kept, token)
        tokens.append(token)
    assert max(mus) - min(mus) > 0.5

    # The same with a stranger beside, drafts of which one is rejected, a preemption, and another row.
    other = Writer(params, num_rows=3)
    other.enter(2, 1)
    other.enter(1, 1, seed=4, name="stranger")
    got = [other.step([1, 2], [position, position])[1] for position in range(10)]
    drafted = other.step([2, 2, 2, 1], [10, 11, 12, 10])
    got += drafted[:2]  # the third is thrown away
    other.state.clear_row(2)
    other.enter(0, len(got))
    got += [other.step([0], [position])[0] for position in range(12, 40)]
    assert got == tokens


def test_nothing_left_and_nan_fail_their_row_only(sample_one: Any) -> None:
    everything = {"top_n_sigma": 1.0, "dynatemp_range": 0.5, "dry_multiplier": 1.0, "dry_sequence_breakers": ()}
    for extra in ({"xtc_probability": 1.0}, {"mirostat_mode": 1}, {"mirostat_mode": 2}):
        params = SamplingParams(**everything, **extra)
        for value in (math.nan, -math.inf, math.inf):
            assert sample_one([value] * 70, params, history=[1, 2, 1, 2]).error is not None
        assert sample_one([0.0] * 70, params, history=[1, 2, 1, 2]).error is None
        one = [-math.inf] * 69 + [3.0]
        assert sample_one(one, params, history=[1, 2, 1, 2]).token_id == 69
