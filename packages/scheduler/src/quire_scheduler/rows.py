"""The rows of the runner: which are free, and which the runner still has to be told were freed."""

from __future__ import annotations

import heapq

__all__ = ["RowPool"]


class RowPool:
    """Row numbers `0 <= row < num_rows`; the lowest free one is given out first, so that batches stay dense."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._is_free = [True] * num_rows
        self._untold: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Rows that `take` can give out."""
        return len(self._free)

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
