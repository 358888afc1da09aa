"""Late interaction by the compiled kernels: precision against float64, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.maxsim import maxsim
from quire_ops import ops

QUERY_LENS, DOCUMENT_LENS = [1, 32, 17, 70, 16, 33], [300, 1, 120, 121, 31, 64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 96, 128, 160])
def test_scores_are_as_precise_as_the_products(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    queries, documents = (torch.randn(sum(lens), size).to(dtype) for lens in (QUERY_LENS, DOCUMENT_LENS))
    expected = ops.maxsim(queries.double(), documents.double(), QUERY_LENS, DOCUMENT_LENS)
    scores = maxsim(queries, documents, QUERY_LENS, DOCUMENT_LENS)
    assert (scores - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_pairs_and_threads_change_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lens = DOCUMENT_LENS * 5
    query, documents = torch.randn(40, 128).to(dtype), torch.randn(sum(lens), 128).to(dtype)
    together = maxsim(query, documents, [40], lens)
    alone = [maxsim(query, document, [40], [len(document)]) for document in documents.split(lens)]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(maxsim(query.repeat(len(lens), 1), documents, [40] * len(lens), lens), together)
    torch.set_num_threads(1)
    try:
        assert torch.equal(maxsim(query, documents, [40], lens), together)
    finally:
        torch.set_num_threads(2)


def test_vectors_that_are_views_are_read_right() -> None:
    torch.manual_seed(0)
    wide = torch.randn(50, 96)
    query, document = wide[:8, ::2], wide[8:, ::2]
    expected = maxsim(query.contiguous(), document.contiguous(), [8], [42])
    assert torch.equal(maxsim(query, document, [8], [42]), expected)
