"""`HotAdapter`: an adapter that has the whole batch to itself for long is put into the network's own weights.

Matrix by matrix, one in each step, so that no step waits for all of them; the matrices that hold it no longer have it
on top. The first step that has anything else in it finds the weights as they were read, to the bit. Knows slots and
adapters; does not know requests, names or when steps run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_lora.adapter import Adapter, LinearAdapter
from quire_lora.slots import AdapterSlots

__all__ = ["HotAdapter"]


class HotAdapter:
    """Decides which adapter is in the weights, and puts it there. For the thread that runs steps.

    Args:
        slots: The network's.
        after: So many steps in a row have had this one adapter in all rows before the first matrix takes it in.
    """

    def __init__(self, slots: AdapterSlots, after: int) -> None:
        self._slots, self._after = slots, after
        self._slot = self.merged_slot = -1
        """`merged_slot`: the one whose adapter is in the weights with all that it has; -1 for none."""
        self._num_steps = 0
        """In a row that had no other slot."""
        self._left: list[str] = []
        """Layers that are to take it in yet."""
        self._adapter: Adapter | None = None
        """The one that some weights hold."""
        self.num_merges_total = 0
        """Times that all of an adapter came to be in the weights."""

    def merge_for_step(self, slots: NDArray[np.int32], adapter_in: Adapter | None) -> None:
        """Count the step that comes next, and merge one more matrix or undo what was merged, as its rows ask.

        Args:
            slots: [S] of its rows, at least one; -1 for none.
            adapter_in: What is in the first row's slot; None where that row has none.
        """
        slot = int(slots[0])
        if adapter_in is None or (slots != slot).any():
            self.undo()
            return
        if slot != self._slot:
            self.undo()
            self._slot = slot
        self._num_steps += 1
        if self._num_steps == self._after:
            self._left = [] if merge_refusal(self._slots, adapter_in) else sorted(adapter_in.linears, reverse=True)
            self._adapter = adapter_in
        if self._left and self._merge(self._left[-1]):
            self._left.pop()
            if not self._left:
                self.merged_slot = slot
                self.num_merges_total += 1

    def leave(self, slot: int) -> None:
        """What is in a slot changes next."""
        if slot == self._slot:
            self.undo()

    def undo(self) -> None:
        """The weights as they were read, and the adapter on top of them again. Counting begins anew."""
        if self._slots.weights_before:  # nobody else writes there; readers are waited for only where there is need
            with self._slots.weights_lock:
                self._restore()
        self._slot, self.merged_slot, self._num_steps, self._left, self._adapter = -1, -1, 0, [], None

    def _restore(self) -> None:
        assert self._adapter is not None
        for name, before in self._slots.weights_before.items():
            weight = self._slots.linears[name].plain()
            assert weight is not None
            weight.copy_(before)
            self._slots.place_linear(name, self._slot, self._adapter.linears[name])
        self._slots.weights_before.clear()

    def _merge(self, name: str) -> bool:
        """Put the adapter into a layer's weight; False where somebody is reading weights, who is not waited for."""
        assert self._adapter is not None
        if not self._slots.weights_lock.acquire(blocking=False):
            return False
        try:
            weight = self._slots.linears[name].plain()
            assert weight is not None
            self._slots.weights_before[name] = weight.clone()
            weight.copy_(merged_weight(weight, self._adapter.linears[name]))
            self._slots.place_linear(name, self._slot, None)
        finally:
            self._slots.weights_lock.release()
        return True


def merged_weight(weight: Tensor, adapter: LinearAdapter) -> Tensor:
    """[outputs, inputs] float32: what multiplies as `weight` [outputs, inputs] and the adapter on top of it do."""
    a, b = adapter.product(weight.device)
    return torch.addmm(weight.float(), b.T, a)


def merge_refusal(slots: AdapterSlots, adapter: Adapter) -> str:
    """Why an adapter cannot be put into the weights; empty where it can."""
    if adapter.embedding is not None or adapter.lm_head is not None or adapter.experts:
        return "it changes the embedding, the LM head or routed experts"
    if any(each.scale is not None or each.shift is not None for each in adapter.linears.values()):
        return "it has scales or biases"
    weights = [slots.linears[name].plain() for name in adapter.linears]
    places = {weight.data_ptr() for weight in weights if weight is not None}
    if len(places) < len(weights):
        return "layers that it changes share their weights, or keep them in another form than they multiply with"
    return ""
