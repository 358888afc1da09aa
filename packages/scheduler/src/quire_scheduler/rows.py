"""The rows of the runner: which are free, and which the runner still has to be told were freed."""

from __future__ import annotations

import heapq

from quire_interfaces import CachedPrefix, NewRow, Request

__all__ = ["RowPool", "new_row"]


def new_row(request: Request, block_ids: tuple[list[int], ...], cached: CachedPrefix) -> NewRow:
    """What the runner has to know of a request that was put into a row.

    Args:
        request: With its row, and without the tokens of this step in `num_computed_tokens`.
        block_ids: All its blocks, per KV cache group.
        cached: What the KV cache had of it, and these blocks therefore hold.
    """
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.token_ids(0, request.num_tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=block_ids,
        sampling_params=request.sampling_params,
        seed=request.seed,
        num_encoder_tokens=len(request.encoder_token_ids),
        encoder_token_ids=[] if cached.has_encoder else request.encoder_token_ids,
        media=request.media,
        pooling_params=request.pooling_params,
        second_segment_start=request.second_segment_start,
        stop_token_ids=request.stop_token_ids,
        adapter_slot=request.adapter_slot,
        adapter_version=request.adapter_version,
        cache_salt=request.options.cache_salt,
    )


class RowPool:
    """Row numbers `0 <= row < num_rows`; the lowest free one is given out first, so that batches stay dense."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._is_free = [True] * num_rows
        self._untold: dict[int, None] = {}
        self.num_kept_free = 0
        """Rows that are to stay free; where too few are, none is given out until others come back."""

    @property
    def num_free(self) -> int:
        """Rows that `take` can give out."""
        return max(0, len(self._free) - self.num_kept_free)

    @property
    def has_untold(self) -> bool:
        """Whether rows were freed since the last `take_freed`."""
        return bool(self._untold)

    def take(self) -> int:
        """The lowest free row. IndexError when there is none."""
        row = heapq.heappop(self._free)
        self._is_free[row] = False
        return row

    def give_back(self, row: int) -> None:
        """The row's request left it; the runner hears of it with the next step."""
        assert not self._is_free[row], f"row {row} was given back twice"
        heapq.heappush(self._free, row)
        self._is_free[row] = True
        self._untold[row] = None

    def take_freed(self) -> list[int]:
        """Rows freed since the last call, in the order they were freed."""
        freed = list(self._untold)
        self._untold.clear()
        return freed

    def tell_again(self, rows: list[int]) -> None:
        """The step that told the runner of these freed rows left no trace. Rows in use again are left alone."""
        for row in rows:
            if self._is_free[row]:
                self._untold[row] = None
