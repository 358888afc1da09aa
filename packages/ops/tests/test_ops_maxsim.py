"""Op `maxsim`: every backend against the reference."""

from __future__ import annotations

import pytest
import torch
from ops_conformance import cases, check, random

from quire_ops import OpBackend, ops


@cases(ops.maxsim)
@pytest.mark.parametrize("lens", [[1], [3, 1, 40], [180] * 5], ids=str)
@pytest.mark.parametrize("query_len", [1, 32])
def test_maxsim_of_one_query(backend: OpBackend, dtype: torch.dtype, lens: list[int], query_len: int) -> None:
    query, documents = random(query_len, 96, dtype=dtype), random(sum(lens), 96, dtype=dtype, seed=1)
    scores = backend.function(query.clone(), documents.clone(), [query_len], lens)
    check(scores, ops.maxsim(query, documents, [query_len], lens))


@cases(ops.maxsim)
@pytest.mark.parametrize("size", [32, 50, 128])
def test_maxsim_of_pairs(backend: OpBackend, dtype: torch.dtype, size: int) -> None:
    query_lens, document_lens = [5, 70, 16, 17], [121, 1, 33, 260]
    queries, documents = random(108, size, dtype=dtype), random(415, size, dtype=dtype, seed=1)
    scores = backend.function(queries.clone(), documents.clone(), query_lens, document_lens)
    check(scores, ops.maxsim(queries, documents, query_lens, document_lens))


@cases(ops.maxsim)
def test_products_may_all_be_negative(backend: OpBackend, dtype: torch.dtype) -> None:
    query, documents = random(7, 64, dtype=dtype).abs(), -random(45, 64, dtype=dtype, seed=1).abs()
    scores = backend.function(query.clone(), documents.clone(), [7], [13, 32])
    check(scores, ops.maxsim(query, documents, [7], [13, 32]))
    assert (scores < 0).all()


@cases(ops.maxsim)
def test_there_may_be_no_pair(backend: OpBackend, dtype: torch.dtype) -> None:
    empty = torch.empty(0, 64, dtype=dtype)
    scores = backend.function(empty, empty, [], [])
    assert (scores.shape, scores.dtype) == ((0,), torch.float32)


def test_the_reference_is_the_sum_of_largest_products() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    documents = torch.tensor([[2.0, -1.0], [1.0, 3.0], [-4.0, -5.0]])
    scores = ops.maxsim(query, documents, [2], [2, 1])
    assert scores.dtype == torch.float32
    assert scores.tolist() == [2.0 + 3.0, -4.0 - 5.0]


def test_the_reference_pairs_a_query_with_each_document() -> None:
    queries, documents = torch.eye(3), torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0], [0.0, 0.0, 7.0]])
    assert ops.maxsim(queries, documents, [1, 2], [1, 2]).tolist() == [1.0, 5.0 + 7.0]
