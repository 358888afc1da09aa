"""`AdapterDevice`: slots that are filled from a store, as a runner asks for them. Knows neither files nor requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire_lora.slots import AdapterSlots
from quire_lora.store import AdapterStore

__all__ = ["AdapterDevice"]


class AdapterDevice:
    """Implements `quire_runner.AdapterDevice`.

    Args:
        slots: The network's.
        store: Where versions come from; whoever asks for one holds it there.
    """

    def __init__(self, slots: AdapterSlots, store: AdapterStore) -> None:
        self._slots, self._store = slots, store
        self.begin = slots.begin
        self.begin_captured = slots.begin_captured
        self.begin_logits = slots.begin_logits

    def place(self, slot: int, version: str) -> None:
        """Fill a slot, unless this version is in it."""
        if self._slots.versions[slot] != version:
            self._slots.place(slot, version, self._store.adapter(version))

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
        return self._slots.changes_vocabulary(slots)
