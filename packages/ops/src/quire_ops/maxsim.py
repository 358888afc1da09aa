"""Op `maxsim`: late interaction.

Shape legend: M queries, Q tokens of all of them, N documents, T tokens of all of them, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["maxsim"]


@op
def maxsim(queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int]) -> Tensor:
    """Late interaction of queries with documents: the sum over the query's vectors of the largest product with one of
    the document's (Khattab & Zaharia 2020, arXiv:2004.12832, eq. 3); queries [Q, D], documents [T, D], of one dtype,
    one behind the other, query_lens [M] and document_lens [N] their tokens, at least 1 each; M is 1, the query of all
    documents, or N, one each -> [N] float32."""
    parts = queries.double().split(list(query_lens)) * (len(document_lens) if len(query_lens) == 1 else 1)
    pairs = zip(parts, documents.double().split(list(document_lens)), strict=True)
    scores = [(query @ document.T).amax(dim=1).sum() for query, document in pairs]
    return torch.stack(scores).float() if scores else queries.new_zeros(0, dtype=torch.float32)


@torch_backend_for(maxsim)
def _torch_maxsim(
    queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int]
) -> Tensor:
    """One product with all documents of a query, then the largest of each document's rows."""
    if len(query_lens) == 1:
        return _scores_of_query(queries, documents, document_lens)
    pairs = zip(queries.split(list(query_lens)), documents.split(list(document_lens)), document_lens, strict=True)
    scores = [_scores_of_query(query, document, [length]) for query, document, length in pairs]
    return torch.cat(scores) if scores else queries.new_zeros(0, dtype=torch.float32)


def _scores_of_query(query: Tensor, documents: Tensor, lens: Sequence[int]) -> Tensor:
    """[N] float32 scores of documents [T, D] of `lens` tokens for one query [Q, D]."""
    products = F.linear(documents.float(), query.float())
    offsets = torch.tensor([0, *accumulate(lens[:-1])], device=products.device)
    indices = torch.arange(len(products), device=products.device)
    return F.embedding_bag(indices, products, offsets, mode="max").sum(dim=1)
