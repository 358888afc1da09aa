"""`AdapterRuntime`: slots that are filled from a store, as a runner asks for them. Knows neither files nor requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import SchedulerStats
from quire_lora.merging import HotAdapter
from quire_lora.slots import AdapterSlots
from quire_lora.store import AdapterStore

__all__ = ["AdapterRuntime"]


class AdapterRuntime:
    """Implements `quire_runner.StepAdapters`.

    Args:
        slots: The network's.
        store: Where versions come from; whoever asks for one holds it there.
        merge_after: An adapter that was alone for so many steps in a row is put into the weights; 0 for never. Without
            effect where every layer keeps its weight in another form than the network computes in.
    """

    def __init__(self, slots: AdapterSlots, store: AdapterStore, *, merge_after: int = 0) -> None:
        self._slots, self._store = slots, store
        self._hot = HotAdapter(slots, merge_after) if merge_after and slots.has_plain_weights else None
        self.tokens_of = slots.tokens_of
        self.captured_tokens_of = slots.captured_tokens_of
        self.logit_tokens_of = slots.logit_tokens_of

    def place(self, slot: int, version: str) -> None:
        """Fill a slot, unless this version is in it."""
        if self._slots.versions[slot] != version:
            if self._hot is not None:
                self._hot.leave(slot)
            self._slots.place(slot, version, self._store.adapter(version))

    def merge_for_step(self, slots: NDArray[np.int32]) -> int:
        """Put an adapter that has the batch to itself into weights, or take it out of them, before a step.

        Args:
            slots: [S] the slot of each of the step's rows, at least one; -1 for none.

        Returns:
            The slot whose adapter is in the weights with all that it has; -1 for none.
        """
        if self._hot is None:
            return -1
        version = None if slots[0] < 0 else self._slots.versions[slots[0]]
        self._hot.merge_for_step(slots, None if version is None else self._store.adapter(version))
        return self._hot.merged_slot

    def add_stats(self, stats: SchedulerStats) -> None:
        """Say how often an adapter was put into the weights."""
        stats.num_adapter_merges_total = 0 if self._hot is None else self._hot.num_merges_total

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
        return self._slots.changes_vocabulary(slots)
