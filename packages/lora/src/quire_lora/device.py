"""`AdapterDevice`: slots that are filled from a store, as a runner asks for them. Knows neither files nor requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import SchedulerStats
from quire_lora.merging import HotAdapter
from quire_lora.slots import AdapterSlots
from quire_lora.store import AdapterStore

__all__ = ["AdapterDevice"]


class AdapterDevice:
    """Implements `quire_runner.AdapterDevice`.

    Args:
        slots: The network's.
        store: Where versions come from; whoever asks for one holds it there.
        merge_after: An adapter that was alone for so many steps in a row is put into the weights; 0 for never. Without
            effect where every layer keeps its weight in another form than the network computes in.
    """

    def __init__(self, slots: AdapterSlots, store: AdapterStore, *, merge_after: int = 0) -> None:
        self._slots, self._store = slots, store
        self._hot = HotAdapter(slots, merge_after) if merge_after and slots.has_plain_weights else None
        self.begin = slots.begin
        self.begin_captured = slots.begin_captured
        self.begin_logits = slots.begin_logits

    def place(self, slot: int, version: str) -> None:
        """Fill a slot, unless this version is in it."""
        if self._slots.versions[slot] != version:
            if self._hot is not None:
                self._hot.leave(slot)
            self._slots.place(slot, version, self._store.adapter(version))

    def settle(self, slots: NDArray[np.int32]) -> int:
        """A step begins: the slot of each of its rows, at least one, -1 for none. An adapter may move into weights, or
        out of them.

        Returns:
            The slot whose adapter is in the weights with all that it has; -1 for none.
        """
        if self._hot is None:
            return -1
        version = None if slots[0] < 0 else self._slots.versions[slots[0]]
        self._hot.settle(slots, None if version is None else self._store.adapter(version))
        return self._hot.merged_slot

    def add_stats(self, stats: SchedulerStats) -> None:
        """Say how often an adapter was put into the weights."""
        stats.num_adapter_merges_total = 0 if self._hot is None else self._hot.num_merges_total

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
        return self._slots.changes_vocabulary(slots)
