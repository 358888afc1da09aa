"""Late interaction: a program scores a document for its query, and keeps no more of their products than a tile.

Sums have one order, whatever other pairs a launch has: a score does not depend on them.

Shape legend: M queries, Q tokens of all of them, N documents, T tokens of all of them, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.triton.attention_steps import MIN_TILE
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = ["calls", "maxsim", "maxsim_kernel"]

_QUERY_TOKENS = 32
_DOCUMENT_TOKENS = 64
_MOST_NUMBERS = 64
"""Of a vector, that are multiplied at once."""


@triton.jit(do_not_specialize=["query_step"])
def maxsim_kernel(
    queries, documents, query_begins, document_begins, scores, query_step, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """scores [N] float32 of documents [T, D] for queries [Q, D]; begins [N + 1], [M + 1]. Grid: (N,).

    query_step: 1 where each document has a query of its own, 0 where there is one for all.
    """
    pair = tl.program_id(0)
    query = pair * query_step
    query_begin, query_end = tl.load(query_begins + query), tl.load(query_begins + query + 1)
    begin, end = tl.load(document_begins + pair), tl.load(document_begins + pair + 1)
    lane = tl.arange(0, BLOCK_D)
    score = 0.0
    for first in range(query_begin, query_end, BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        for token in range(begin, end, BLOCK_N):
            col = token + tl.arange(0, BLOCK_N)
            product = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
            for k in range(0, D, BLOCK_D):
                inside = k + lane < D
                q = tl.load(queries + row[:, None] * D + k + lane[None, :],
                            mask=(row < query_end)[:, None] & inside[None, :], other=0.0)  # fmt: skip
                d = tl.load(documents + col[None, :] * D + k + lane[:, None],
                            mask=(col < end)[None, :] & inside[:, None], other=0.0)  # fmt: skip
                product = tl.dot(q, d, product, input_precision="ieee")
            product = tl.where((col < end)[None, :], product, float("-inf"))
            most = tl.maximum(most, tl.max(product, axis=1))
        score += tl.sum(tl.where(row < query_end, most, 0.0), axis=0)
    tl.store(scores + pair, score)


@implements(ops.maxsim)
def maxsim(queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int]) -> Tensor:
    num_documents, size = len(document_lens), documents.shape[1]
    scores = torch.empty(num_documents, dtype=torch.float32, device=documents.device)
    if num_documents:
        maxsim_kernel[(num_documents,)](
            queries.contiguous(), documents.contiguous(), _begins(query_lens, queries), _begins(document_lens, queries),
            scores, int(len(query_lens) > 1), D=size, BLOCK_Q=_QUERY_TOKENS, BLOCK_N=_DOCUMENT_TOKENS,
            BLOCK_D=min(_MOST_NUMBERS, max(MIN_TILE, triton.next_power_of_2(size))), num_warps=4, num_stages=2,
        )  # fmt: skip
    return scores


def _begins(lens: Sequence[int], like: Tensor) -> Tensor:
    """Where each begins and the last ends, [lens + 1] int64, on the device of `like`."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int64, device="cpu").to(like.device)


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A query of 32 tokens with documents, in vectors of 128 numbers (ColBERTv2)."""
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    queries, documents = (torch.empty(tokens, 128, dtype=dtype, device="meta") for tokens in (32, 8 * 180))
    yield shape.dtype, lambda: maxsim(queries, documents, [32], [180] * 8)
