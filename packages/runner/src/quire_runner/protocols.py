"""What a runner asks of those it is given: the network, the network's adapters, and who looks at logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_ops import DecodeRows, RunDecode

__all__ = ["AdapterDevice", "LogitsTap", "Network"]

LogitsTap = Callable[[list[int], list[int], Tensor], None]
"""(rows, positions, logits [N, vocab_size] float32): called once per step that samples, before the sampler changes the
logits; a tap that keeps them must copy. Logits n say what follows the token at `positions[n]` of `rows[n]`."""


class Network(Protocol):
    """What the runner asks of a network; every network of `quire_models` is one."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden_size] of the step's tokens; writes their keys and values into the KV caches."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] float32."""

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """The network joined with the rows, for steps in which every row has one token to compute; None where
        nothing runs these in one call."""

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden_size] -> per row the largest logit's token [N] int64, the lowest id among equals, and that logit
        [N] float32, NaN where the row has NaN."""


class AdapterDevice(Protocol):
    """The adapters of a network on the device; `quire_lora.AdapterSlots` behind a store is one."""

    def place(self, slot: int, version: str) -> None:
        """Fill a slot, unless this version is in it."""

    def settle(self, slots: NDArray[np.int32]) -> int:
        """A step begins, before anything of it is computed: the slot of each of its rows, -1 for none. Returns the one
        whose adapter is in the network's own weights, so that its rows are like those without one; -1 for none."""

    def begin(self, slots: NDArray[np.int32]) -> None:
        """A step begins: the slot of each of its tokens, -1 for none."""

    def begin_captured(self, slots: NDArray[np.int32], size: int) -> bool:
        """As `begin`, for a step that is captured in a graph of so many tokens, or was; False where it cannot be."""

    def begin_logits(self, slots: NDArray[np.int32]) -> None:
        """Logits are computed next: the slot of each hidden state, -1 for none."""

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
