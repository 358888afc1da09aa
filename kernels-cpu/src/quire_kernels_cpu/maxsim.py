"""Late interaction by the compiled kernels: op `maxsim`.

Knows the C interface; the arithmetic is in `csrc/maxsim.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import ops

__all__ = ["maxsim"]


@backend_for(ops.maxsim)
def maxsim(queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int]) -> Tensor:
    """A score has the same bits whatever other pairs there are."""
    assert len(query_lens) in (1, len(document_lens))
    assert sum(query_lens) == len(queries)
    assert sum(document_lens) == len(documents)
    assert queries.dtype == documents.dtype
    queries, documents = queries.contiguous(), documents.contiguous()
    scores = torch.empty(len(document_lens), dtype=torch.float32)
    first, second = ((ctypes.c_int64 * len(lens))(*lens) for lens in (query_lens, document_lens))
    library().quire_maxsim(
        DTYPES[queries.dtype],
        queries.data_ptr(),
        ctypes.addressof(first),
        len(query_lens),
        documents.data_ptr(),
        ctypes.addressof(second),
        len(document_lens),
        documents.shape[1],
        scores.data_ptr(),
    )
    return scores
