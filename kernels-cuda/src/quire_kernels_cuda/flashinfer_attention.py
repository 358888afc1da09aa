"""Op `paged_attention` by FlashInfer (Ye et al., 2025), package `flashinfer-python`.

Our cache is what FlashInfer calls layout HND. A step is planned once, from the lengths that the host knows, and run by
each layer. Written to its documentation; it has not run on a GPU in this project.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire_ops import PagedLayout, implements, ops
from quire_ops.staging import to_device

__all__ = ["paged_attention", "plan_arguments"]

WORKSPACE_BYTES = 256 << 20
NUM_WRAPPERS = 2
"""Of each kind, in turn: a step may be planned while the one before runs with its own plan."""


@implements(ops.paged_attention)
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    int8_products: bool = False,
) -> Tensor:
    kind = ("flashinfer", sliding_window, soft_cap, scale, query.shape[1:], kv_cache.shape[2])
    wrapper = layout.derived.get(kind)
    if wrapper is None:
        wrappers = _wrappers(query.device, kind)
        wrappers.append(wrappers.pop(0))
        wrapper = layout.derived[kind] = wrappers[0]
        facts: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
        wrapper.plan(**plan_arguments(query, kv_cache, layout, **facts))
    out: Tensor = wrapper.run(query, kv_cache)
    return out


@cache
def _workspace(device: torch.device) -> Tensor:
    """Shared by all: kernels of a stream follow each other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _wrappers(device: torch.device, kind: Any) -> list[Any]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return [BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "HND") for _ in range(NUM_WRAPPERS)]


def plan_arguments(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> dict[str, Any]:
    """What a step is planned with: which pages each sequence has, as offsets into one list of their ids, and how full
    the last one is. Lengths are the host's; ids are gathered on the device."""
    blocks = [-(-kv_len // layout.block_size) for kv_len in layout.kv_lens]
    width = layout.block_table.shape[1]
    places = [row * width + column for row, count in enumerate(blocks) for column in range(count)]
    lens = torch.tensor(layout.query_lens, dtype=torch.int32)
    return {
        "qo_indptr": _offsets(lens),
        "paged_kv_indptr": _offsets(torch.tensor(blocks, dtype=torch.int32)),
        "paged_kv_indices": layout.block_table.flatten()[to_device(places, query.device)],
        "paged_kv_last_page_len": torch.tensor(
            [(kv_len - 1) % layout.block_size + 1 for kv_len in layout.kv_lens], dtype=torch.int32
        ),
        "num_qo_heads": query.shape[1],
        "num_kv_heads": kv_cache.shape[2],
        "head_dim_qk": query.shape[2],
        "page_size": layout.block_size,
        "causal": True,
        "sm_scale": scale,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "logits_soft_cap": soft_cap,
        "q_data_type": query.dtype,
        "kv_data_type": kv_cache.dtype,
    }


def _offsets(lens: Tensor) -> Tensor:
    """lens [S] -> [S + 1] int32, where each begins, and the end."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
