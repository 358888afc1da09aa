"""Op `maxsim`: every backend against the reference."""

from __future__ import annotations

import pytest
import torch
from ops_conformance import cases, check, random

from quire_ops import OpBackend, ops


@cases(ops.maxsim)
@pytest.mark.parametrize("lens", [[1], [3, 1, 40], [180] * 5], ids=str)
@pytest.mark.parametrize("query_len", [1, 32])
def test_maxsim(backend: OpBackend, dtype: torch.dtype, lens: list[int], query_len: int) -> None:
    query, documents = random(query_len, 96, dtype=dtype), random(sum(lens), 96, dtype=dtype, seed=1)
    check(backend.function(query.clone(), documents.clone(), lens), ops.maxsim(query, documents, lens))


def test_the_reference_is_the_sum_of_largest_products() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    documents = torch.tensor([[2.0, -1.0], [1.0, 3.0], [-4.0, -5.0]])
    scores = ops.maxsim(query, documents, [2, 1])
    assert scores.dtype == torch.float32
    assert scores.tolist() == [2.0 + 3.0, -4.0 - 5.0]
