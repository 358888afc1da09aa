"""The oracle of these tests: sampling written down once more, one row at a time, in Python floats, without any of the
package's shortcuts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from quire_interfaces import LogitsProcessor, SamplingParams
from quire_sampling import Sampler, SamplingState

MASK = 2**64 - 1


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> list[float]:
    """Logits after masks, bias and penalties."""
    result = list(logits)
    output = list(history[num_prompt_tokens:])
    for token_id in range(len(result)):
        banned = params.allowed_token_ids is not None and token_id not in params.allowed_token_ids
        for *prefix, last in params.bad_words_token_ids:
            banned |= token_id == last and list(history[len(history) - len(prefix) :]) == prefix
        banned |= len(output) < params.min_tokens and token_id in stop_token_ids
        if banned:
            result[token_id] = -math.inf
        result[token_id] += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in history:
            divide = result[token_id] > 0
            result[token_id] *= 1 / params.repetition_penalty if divide else params.repetition_penalty
        result[token_id] -= params.presence_penalty * (token_id in output)
        result[token_id] -= params.frequency_penalty * output.count(token_id)
    return result


def distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min_p, top_k and top_p."""
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    enough = params.top_p * math.fsum(weights[i] for i in order)
    kept: list[int] = []
    for i in order:
        if math.fsum(weights[j] for j in kept) >= enough:
            break
        kept.append(i)
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in set(kept) else 0.0 for i in range(len(logits))]


def interval(probabilities: Sequence[float], token_id: int) -> tuple[float, float]:
    """Where u must fall for this token."""
    cumulative = [0.0, *accumulate(probabilities)]
    return cumulative[token_id], cumulative[token_id + 1]


def token_at(probabilities: Sequence[float], u: float) -> int:
    return bisect_right(list(accumulate(probabilities)), u)


def uniform_number(seed: int, position: int) -> float:
    """SplitMix64 with unsigned Python integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mix((seed + gamma) & MASK)
    return (mix((start + (position + 1) * gamma) & MASK) >> 11) / 2**53


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """The reference functions, by name."""
    return SimpleNamespace(
        edited_logits=edited_logits,
        distribution=distribution,
        interval=interval,
        token_at=token_at,
        uniform_number=uniform_number,
    )


@pytest.fixture(scope="session")
def sample_one() -> Callable[..., SimpleNamespace]:
    """Sample for one request alone: a namespace with token_id, logprobs, error."""

    def run(
        logits: Sequence[float] | torch.Tensor,
        params: SamplingParams,
        *,
        history: Sequence[int] = (0,),
        num_prompt_tokens: int = 1,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        processors: dict[str, LogitsProcessor] | None = None,
    ) -> SimpleNamespace:
        row = torch.as_tensor(logits, dtype=torch.float32).clone()
        state = SamplingState(1, len(row), logits_processors=processors)
        state.set_row(0, params, seed=seed, num_prompt_tokens=num_prompt_tokens, stop_token_ids=stop_token_ids)
        output = Sampler(state).sample(
            row.unsqueeze(0), [0], torch.tensor([len(history) - 1]), torch.tensor([list(history)])
        )
        return SimpleNamespace(
            token_id=int(output.token_ids[0]),
            logprobs=output.logprobs().get(0),
            error=output.failed_rows().get(0),
        )

    return run
