"""`AdapterGate`: a request runs when its adapter is read and has a slot on the device.

An `AdmissionRule` for the scheduler: requests whose adapter has a slot pass those that wait for one. A `RequestGate`
for the engine's loop: adapters are read beside it, and what cannot be read fails its requests. Knows versions, slots
and counts; all calls come from the loop's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from quire_interfaces import (
    AdapterStore,
    AdmissionRule,
    ModelNotFoundError,
    QuireError,
    Request,
    RequestError,
    SchedulerStats,
)

__all__ = ["AdapterGate"]


@dataclass(slots=True)
class _Wish:
    """A request that has an adapter, from its arrival to its end."""

    name: str
    version: str
    future: Future[None]
    is_running: bool = False
    num_passed: int = 0
    """Requests that were admitted while this one waited for a slot."""


class AdapterGate(AdmissionRule):
    """Implements `quire_interfaces.AdmissionRule` and `quire_interfaces.RequestGate`.

    A version stays in its slot after its last request, until another needs the slot; the least recently used goes
    first. Requests of one adapter could keep a slot for ever: once `max_passes` of them were admitted while a request
    waits for a slot, no further ones are, until it has one.

    Args:
        store: Owned from now on: `close` closes it. None takes no requests with adapters.
        num_slots: Slots on the device.
        max_passes: Requests admitted past one that waits for a slot, before its adapter has priority.
    """

    name = "adapter_slots"
    holds_queue = False

    def __init__(self, store: AdapterStore | None, num_slots: int = 0, *, max_passes: int = 256) -> None:
        self.store = store
        self._num_slots = num_slots
        self._max_passes = max_passes
        self._wishes: dict[str, _Wish] = {}
        self._starved: set[str] = set()
        """Requests that were passed too often."""
        self._slots: OrderedDict[str, int] = OrderedDict()
        """Version -> its slot; the least recently used first."""
        self._running: Counter[str] = Counter()
        """Version -> rows that use it."""
        self._free = list(range(num_slots))[::-1]
        self._num_placements = 0

    # As the engine's loop sees it.

    def prepare(self, request: Request) -> None:
        """Resolve the name of the request's adapter and start to read the version it stands for."""
        if request.options.adapter is None:
            return
        if self.store is None:
            raise ModelNotFoundError(
                f"the adapter {request.options.adapter!r} was asked for, but this engine serves none (--enable-lora)"
            )
        version = self.store.resolve(request.options.adapter)
        future = self.store.fetch(version)
        if future.done() and (error := future.exception()) is not None:
            raise _as_ours(error, request.options.adapter)
        self.store.hold(version)
        request.adapter_version = version
        # Enters the hash of the first block, and so of every block.
        request.cache_extra_keys = (*request.cache_extra_keys, (0, 1, f"adapter:{version}"))
        self._wishes[request.request_id] = _Wish(request.options.adapter, version, future)

    def wait(self, request: Request) -> None:
        """Raise why the request's adapter could not be read, once reading has ended."""
        wish = self._wishes.get(request.request_id)
        if wish is not None and (error := wish.future.exception()) is not None:
            raise _as_ours(error, wish.name)

    @property
    def is_preparing(self) -> bool:
        """Whether the adapter of any request is still being read."""
        return any(not wish.future.done() for wish in self._wishes.values())

    def take_failed(self) -> list[tuple[str, QuireError]]:
        """Requests whose adapter could not be read, with the reason; they are forgotten."""
        failed: list[tuple[str, QuireError]] = []
        for request_id, wish in self._wishes.items():
            if not wish.is_running and wish.future.done() and (error := wish.future.exception()) is not None:
                failed.append((request_id, _as_ours(error, wish.name)))
        self.forget([request_id for request_id, _ in failed])
        return failed

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let go of the adapters of requests that have ended."""
        for request_id in request_ids:
            wish = self._wishes.pop(request_id, None)
            self._starved.discard(request_id)
            if wish is not None and self.store is not None:
                self.store.drop(wish.version)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Count adapters in use, slots, placements, and requests by adapter."""
        stats.num_adapters_running = sum(count > 0 for count in self._running.values())
        stats.num_adapter_slots = self._num_slots
        stats.num_adapter_placements_total = self._num_placements
        for wish in self._wishes.values():
            counts = stats.adapter_requests_running if wish.is_running else stats.adapter_requests_waiting
            counts[wish.name] = counts.get(wish.name, 0) + 1

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()

    # As the scheduler sees it.

    def admits(self, request: Request) -> bool:
        """Whether the request's adapter is read and has a slot, or could have one."""
        wish = self._wishes.get(request.request_id)
        if wish is None:
            return request.options.adapter is None
        if not _is_read(wish):
            return False
        if wish.version in self._slots:
            return not any(self._wishes[starved].version not in self._slots for starved in self._starved)
        return bool(self._free) or any(not self._running[version] for version in self._slots)

    def admitted(self, request: Request) -> None:
        """Give its adapter a slot."""
        wish = self._wishes.get(request.request_id)
        if wish is None:
            return
        version = wish.version
        if version not in self._slots:
            if not self._free:
                idle = next(version for version in self._slots if not self._running[version])
                self._free.append(self._slots.pop(idle))
            self._slots[version] = self._free.pop()
            self._num_placements += 1
        self._slots.move_to_end(version)
        self._running[version] += 1
        wish.is_running, wish.num_passed = True, 0
        self._starved.discard(request.request_id)
        request.adapter_slot = self._slots[version]
        for request_id, other in self._wishes.items():
            if not other.is_running and other.version not in self._slots and _is_read(other):
                other.num_passed += 1
                if other.num_passed >= self._max_passes:
                    self._starved.add(request_id)

    def released(self, request: Request) -> None:
        """Its row uses the slot no more."""
        if request.adapter_slot < 0:
            return
        request.adapter_slot = -1
        self._running[request.adapter_version] -= 1
        if not self._running[request.adapter_version]:
            del self._running[request.adapter_version]
        wish = self._wishes.get(request.request_id)
        if wish is not None:
            wish.is_running = False

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself."""
        used = sorted([*self._slots.values(), *self._free])
        assert used == list(range(self._num_slots)), f"slots {used} of {self._num_slots}"
        running = Counter(wish.version for wish in self._wishes.values() if wish.is_running)
        assert running == self._running, (running, self._running)
        assert all(version in self._slots for version in running)


def _is_read(wish: _Wish) -> bool:
    return wish.future.done() and wish.future.exception() is None


def _as_ours(error: BaseException, name: str) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return RequestError(f"the adapter {name!r} could not be read: {type(error).__name__}: {error}", param="model")
