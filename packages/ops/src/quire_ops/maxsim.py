"""Op `maxsim`: late interaction.

Shape legend: Q tokens of a query, N documents, T tokens of all of them, D numbers of a vector.
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
def maxsim(query: Tensor, documents: Tensor, lens: Sequence[int]) -> Tensor:
    """Late interaction of a query with documents: the sum over the query's vectors of the largest product with one of
    the document's (Khattab & Zaharia 2020, eq. 3); query [Q, D], documents [T, D], of one dtype, one document behind
    the other, lens [N] their tokens, at least 1 each -> [N] float32."""
    products = query.double() @ documents.double().T
    return torch.stack([each.amax(dim=1).sum() for each in products.split(list(lens), dim=1)]).float()


@torch_backend_for(maxsim)
def _torch_maxsim(query: Tensor, documents: Tensor, lens: Sequence[int]) -> Tensor:
    """One product with all documents, then the largest of each document's rows."""
    products = F.linear(documents.float(), query.float())
    offsets = torch.tensor([0, *accumulate(lens[:-1])], device=products.device)
    indices = torch.arange(len(products), device=products.device)
    return F.embedding_bag(indices, products, offsets, mode="max").sum(dim=1)
