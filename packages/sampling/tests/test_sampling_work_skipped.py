"""A step does only the work that some row in it needs: seen from the torch operators it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quire_interfaces import SamplingParams
from quire_sampling import Sampler, SamplingState

VOCAB = 4000


class Operators(TorchFunctionMode):
    """Collects the names of the torch functions and methods that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def operators(*requests: SamplingParams, in_step: int | None = None) -> set[str]:
    """Operators of a step with the first `in_step` of the requests; all of them hold rows."""
    state = SamplingState(len(requests), VOCAB)
    for row, params in enumerate(requests):
        state.set_row(row, params, seed=row, num_prompt_tokens=1, stop_token_ids=[2])
    num = in_step or len(requests)
    logits = torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, 17] = 20
    token_ids = torch.zeros(len(requests), 64, dtype=torch.int64)
    with Operators() as seen:
        Sampler(state).sample(logits, range(num), torch.full((num,), 9), token_ids)
    return seen.names


GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams()
DRAW = {"round", "cumsum", "bitwise_right_shift_"}
FILTER = {"topk", "argsort", "sort"}
PENALTY = {"scatter_", "scatter_add_", "scatter_add"}
EDIT = {"index_add_", "scatter_reduce_", "fill_"}


def test_greedy_only_looks_for_the_maximum() -> None:
    assert not operators(GREEDY, GREEDY) & (DRAW | FILTER | PENALTY | EDIT)


def test_plain_draws_do_not_sort_or_scatter() -> None:
    seen = operators(PLAIN, PLAIN)
    assert seen >= DRAW
    assert not seen & (FILTER | PENALTY | EDIT)


def test_a_peaked_top_p_does_not_go_through_the_histogram() -> None:
    seen = operators(SamplingParams(top_p=0.9))
    assert "topk" in seen
    assert not seen & PENALTY


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(top_k=5), "topk"),
        (SamplingParams(temperature=0, repetition_penalty=1.1), "scatter_add_"),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), "index_add_"),
        (SamplingParams(temperature=0, bad_words_token_ids=((1,),)), "scatter_reduce_"),
        (SamplingParams(temperature=0, logprobs=1), "topk"),
    ],
)
def test_work_happens_for_rows_in_the_step_not_for_rows_elsewhere(params: SamplingParams, needs: str) -> None:
    assert needs in operators(GREEDY, params)
    assert operators(GREEDY, params, in_step=1) == operators(GREEDY)
