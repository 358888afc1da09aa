"""Shortcuts around sorting give exactly what a stable sort gives, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_ops.sampling import integer_weights, log2_weights
from quire_sampling import top_tokens
from quire_sampling.nucleus import Filters, keep_nucleus_


def make_logits(seed: int, num_rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "grid":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, vocab_size // 2] = 0
    elif kind == "signed zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    return logits


KIND = st.sampled_from(["normal", "grid", "flat", "masked", "signed zeros"])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 4),
    vocab_size=st.sampled_from([1, 2, 63, 64, 65, 129, 1000, 4097]),
    kind=KIND,
    data=st.data(),
)
def test_top_tokens_is_a_stable_sort(seed: int, num_rows: int, vocab_size: int, kind: str, data: st.DataObject) -> None:
    logits = make_logits(seed, num_rows, vocab_size, kind)
    k = data.draw(st.integers(1, vocab_size))
    values, ids = top_tokens(logits, k)
    sorted_values, sorted_ids = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, sorted_ids[:, :k])
    assert torch.equal(values, sorted_values[:, :k])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.sampled_from([1, 2, 65, 300, 2000]),
    kind=KIND,
    top_p=st.sampled_from([0.001, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_log2=st.sampled_from([-torch.inf, -10.0, -2.3, 0.0]),
    top_k=st.sampled_from([1, 2, 50, 299, 10_000]),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_nucleus_is_a_prefix_of_a_stable_sort(
    seed: int, vocab_size: int, kind: str, top_p: float, min_log2: float, top_k: int, temperature: float
) -> None:
    logits = make_logits(seed, 3, vocab_size, kind)
    log2 = log2_weights(logits, logits.amax(-1), torch.full((3,), 1.4427 / temperature))
    weights = integer_weights(log2)
    filters = Filters(
        torch.full((3,), min(top_k, vocab_size)),
        torch.full((3,), top_p, dtype=torch.float64),
        torch.full((3,), min_log2),
    )

    kept = keep_nucleus_(weights.clone(), log2, logits, filters)

    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for i in range(3):
        in_order = weights[i, order[i]]
        candidates = in_order * (log2[i, order[i]] >= min_log2)
        candidates[top_k:] = 0
        num_kept = int((kept[i] > 0).sum())
        assert torch.equal(kept[i, order[i]][:num_kept], in_order[:num_kept])  # a prefix, unchanged
        assert not kept[i, order[i]][num_kept:].any()
        enough = top_p * int(candidates.sum())
        assert int(candidates[:num_kept].sum()) >= enough
        assert num_kept == 1 or int(candidates[: num_kept - 1].sum()) < enough  # the shortest such prefix
        assert num_kept >= 1


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_nucleus_among_equal_tokens_keeps_the_lowest_ids(top_p: float) -> None:
    equal = torch.zeros(1, 400)
    filters = Filters(torch.tensor([400]), torch.tensor([top_p]).double(), torch.tensor([-torch.inf]))
    kept = keep_nucleus_(integer_weights(equal), equal, equal, filters)
    assert kept.nonzero()[:, 1].tolist() == list(range(int(400 * top_p)))
