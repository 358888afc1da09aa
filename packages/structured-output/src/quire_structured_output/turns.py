"""`TurnQueue`: work of several tenants that waits for few workers, so that nobody's waits behind a stranger's flood.

The tenant whose work has taken the least time goes first. Of one tenant's work the least costly goes first, as far as
its cost can be told beforehand; every `OLDEST_EVERY`th time the oldest does, so that nothing waits for ever. Knows
nothing of what is done. Not thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

__all__ = ["TurnQueue"]

Item = TypeVar("Item")

OLDEST_EVERY = 4


class _Lane(Generic[Item]):
    """What waits of one tenant."""

    def __init__(self) -> None:
        self._by_cost: list[tuple[float, int]] = []
        self._items: dict[int, Item] = {}
        """By number of arrival, the oldest first."""
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, number: int, item: Item, cost: float) -> None:
        heapq.heappush(self._by_cost, (cost, number))
        self._items[number] = item

    def take(self) -> Item:
        self._num_taken += 1
        if self._num_taken % OLDEST_EVERY == 0:
            return self._items.pop(next(iter(self._items)))
        while (number := heapq.heappop(self._by_cost)[1]) not in self._items:  # it was the oldest once
            pass
        return self._items.pop(number)


class TurnQueue(Generic[Item]):
    """Work that waits, and how much time each tenant's has taken."""

    def __init__(self) -> None:
        self._lanes: dict[str | None, _Lane[Item]] = {}
        self._used_s: dict[str | None, float] = {}
        """Of tenants whose work waits or was taken since nobody's did."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def put(self, item: Item, *, tenant: str | None = None, cost: float = 0.0) -> None:
        """Let work wait. A tenant that comes begins with the time of who had the least of those that are there."""
        lane = self._lanes.get(tenant)
        if lane is None:
            least_s = min((self._used_s.get(each, 0.0) for each in self._lanes), default=0.0)
            self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), least_s)
            lane = self._lanes[tenant] = _Lane()
        lane.put(next(self._numbers), item, cost)

    def take(self) -> tuple[str | None, Item]:
        """The next work, with its tenant.

        Raises:
            LookupError: nothing waits.
        """
        if not self._lanes:
            raise LookupError("nothing waits")
        tenant = min(self._lanes, key=lambda each: self._used_s.get(each, 0.0))
        lane = self._lanes[tenant]
        item = lane.take()
        if not len(lane):
            del self._lanes[tenant]
        return tenant, item

    def used(self, tenant: str | None, seconds: float) -> None:
        """Work of the tenant took so long. When nothing waits, all are even again."""
        if self._lanes:
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + seconds
        else:
            self._used_s.clear()
