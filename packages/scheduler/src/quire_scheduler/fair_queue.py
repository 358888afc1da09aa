"""Waiting requests, and whose turn it is: the tenant that holds the fewest rows, of equal ones who was served least.

Rows are what everybody waits for, so that a tenant which floods the queue waits behind its own requests and nobody
else's. Tokens that were computed decide between tenants with equally many rows; a tenant that comes (back) begins with
the count of the least served one that is there, so that nobody saves up a right to flood later (Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024). Inside a tenant the policy orders. Knows no rule, no block
and no clock; no tenant (None) is a tenant too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire_interfaces import Request
from quire_scheduler.state import Order, OrderedStates, RequestState

__all__ = ["FairQueue"]

_MAX_TENANTS_REMEMBERED = 1024


class FairQueue:
    """The waiting requests of all tenants, and how many rows and tokens each tenant has."""

    def __init__(self) -> None:
        self._queues: dict[str | None, OrderedStates] = {}
        self._num_waiting = 0
        self._num_running: dict[str | None, int] = {}
        self._num_served: dict[str | None, int] = {}
        """Tokens that were computed for each tenant, in rows that it has left."""
        self._last_num_served = 0
        """That number of the tenant that was the last to leave."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[RequestState]:
        """All, in no particular order."""
        for queue in self._queues.values():
            yield from queue

    def add(self, state: RequestState) -> None:
        """Insert at the place of its order, among its tenant's."""
        tenant = state.request.options.tenant
        if tenant not in self._queues:
            if tenant not in self._num_running:
                self._lift(tenant)
            self._queues[tenant] = OrderedStates()
        self._queues[tenant].add(state)
        self._num_waiting += 1

    def remove(self, state: RequestState) -> None:
        """Take out a state that is in."""
        tenant = state.request.options.tenant
        queue = self._queues[tenant]
        queue.remove(state)
        self._num_waiting -= 1
        if not len(queue):
            del self._queues[tenant]

    def num_waiting(self, tenant: str | None) -> int:
        """Number of this tenant's requests that wait."""
        return len(self._queues.get(tenant, ()))

    def num_running(self, tenant: str | None) -> int:
        """Number of rows that this tenant holds."""
        return self._num_running.get(tenant, 0)

    def num_requests(self) -> dict[str | None, int]:
        """Tenant -> number of its requests that wait or run, of the tenants that have any."""
        tenants = self._queues.keys() | self._num_running.keys()
        return {tenant: self.num_waiting(tenant) + self.num_running(tenant) for tenant in tenants}

    def turns(self) -> Iterator[RequestState]:
        """The waiting requests in the order in which they may run. What was yielded may be taken out (and admitted)
        before the next is asked for; what is left in was passed over and does not come again."""
        heap = [self._turn(tenant, 0) for tenant in self._queues]
        heapq.heapify(heap)
        while heap:
            *_, index, state = heapq.heappop(heap)
            yield state
            tenant = state.request.options.tenant
            states = self._queues[tenant].states if tenant in self._queues else []
            if index < len(states) and states[index] is state:
                index += 1
            if index < len(states):
                heapq.heappush(heap, self._turn(tenant, index))

    def _turn(self, tenant: str | None, index: int) -> tuple[int, int, Order, int, RequestState]:
        state = self._queues[tenant].states[index]
        # No two orders are equal, so that nothing behind them is compared.
        return self._num_running.get(tenant, 0), self._num_served.get(tenant, 0), state.order, index, state

    def admitted(self, request: Request) -> None:
        """Its tenant holds one row more."""
        self._num_running[request.options.tenant] = self._num_running.get(request.options.tenant, 0) + 1

    def left_row(self, request: Request) -> None:
        """Its tenant holds one row less, in which `request.num_computed_tokens` tokens were there in the end."""
        tenant = request.options.tenant
        num_computed = max(0, request.num_computed_tokens - request.num_cached_tokens)
        self._num_served[tenant] = self._num_served.get(tenant, 0) + num_computed
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
            self._last_num_served = self._num_served[tenant]

    def _lift(self, tenant: str | None) -> None:
        """The tenant comes: it was served at least as much as who was served least, of an empty queue as who left it
        last, who is not to pay later for having had it alone."""
        present = self._queues.keys() | self._num_running.keys()
        if len(self._num_served) > _MAX_TENANTS_REMEMBERED:
            self._num_served = {each: num for each, num in self._num_served.items() if each in present}
        least = min((self._num_served.get(each, 0) for each in present), default=self._last_num_served)
        self._num_served[tenant] = max(self._num_served.get(tenant, 0), least)
