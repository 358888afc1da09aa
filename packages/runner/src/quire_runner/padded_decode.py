"""A decode step whose host work does not depend on the step: what graphs capture.

Everything that differs between steps of the same number of rows is read on the device. Knows rows, network and sampler;
does not know how graphs are kept.

Shape legend: P entries, some of which may be padding.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_ops import LoraTokens, OpFunction, to_device
from quire_runner.inputs import Layers, make_batch
from quire_runner.protocols import RunnableNetwork
from quire_runner.rows import Rows
from quire_sampling import DeviceEdits, SampleMode, Sampler, TokenMasks

__all__ = ["PaddedDecode"]


class PaddedDecode:
    """A `ComputeStep` (`graphs.py`).

    Args:
        network: The network.
        rows: Where its sequences are.
        decode_inputs: Op `decode_inputs`.
        sampler: Samples.
        layers: What every batch has.
        longest: Tokens of the longest sequence that there may be.
        most: Logit rows of the largest step.
        feature_layers: Layers of the network whose input a drafter reads (`RowDrafter.feature_layers`); where there are
            none, features are the hidden states.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        rows: Rows,
        decode_inputs: OpFunction,
        sampler: Sampler,
        layers: Layers,
        longest: int,
        most: int,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        self._network = network
        self._rows = rows
        self._decode_inputs = decode_inputs
        self._sampler = sampler
        self._layers = layers
        self._longest = longest
        self._feature_layers = feature_layers
        self.modes = (SampleMode.ARGMAX, *sampler.device_modes)
        """What this can be asked for."""
        self.bitmask = torch.zeros(most, sampler.state.num_mask_words, dtype=torch.int32, device=rows.token_ids.device)
        """[most, W] the masks that logit rows may have (`TokenMasks.bitmask`), to be written before a step; the same
        memory for every step."""

    def __call__(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the tokens at `spans` as `ComputeStep` says. Returns token ids [P], largest logits [P], and in mode
        OBSERVED log probabilities."""
        rows, size = self._rows, spans.shape[1]
        inputs = self._decode_inputs(rows.token_ids, rows.row_tables, spans[:4])
        batch = make_batch(inputs, rows, self._layers, [1] * size, [self._longest] * size)  # lengths: a bound
        batch.lora = lora
        places = batch.positions
        if rows.device_position_deltas is not None:
            batch.positions = places + rows.device_position_deltas.index_select(0, spans[0])
        hidden = self.hidden(batch, features)
        return self.sample(mode, hidden, spans[0], places, spans[2], spans[4])

    def sample(
        self, mode: SampleMode, hidden: Tensor, rows: Tensor, places: Tensor, ends: Tensor, mask_of: Tensor
    ) -> tuple[Tensor, ...]:
        """Choose the tokens behind some others, and write them to their rows.

        Args:
            mode: How.
            hidden: [N, hidden_size] of the tokens that they follow.
            rows: [N] int64, the row of each.
            places: [N] int64, positions of the tokens that they follow.
            ends: [N] int64, the positions behind those.
            mask_of: [N] int64 which mask each gets, -1 for none.

        Returns:
            As `ComputeStep` says.
        """
        sampled: tuple[Tensor, ...]
        if mode is SampleMode.ARGMAX:
            sampled = self._network.argmax(hidden)
        else:
            edits = DeviceEdits(self._rows.token_ids, mask_of, self.bitmask)
            logits = self._network.compute_logits(hidden)
            sampled = self._sampler.sample_in_mode(mode, logits, rows, places, edits)
        behind = torch.add(ends, rows, alpha=self._rows.row_len)
        self._rows.token_ids.view(-1).index_copy_(0, behind, sampled[0].to(torch.int32))
        return sampled

    def set_masks(self, masks: TokenMasks | None, num_rows: int) -> NDArray[np.int64] | None:
        """Put the masks of a step where `sample` finds them. Returns which mask each of its logit rows [num_rows] gets,
        -1 for none; None where there are none."""
        if masks is None:
            return None
        self.bitmask[: len(masks.indices)].copy_(masks.bitmask)
        return masks.mask_of(num_rows).numpy()

    def hidden(self, batch: ForwardBatch, features: Tensor | None) -> Tensor:
        """Hidden states [P, hidden_size]; what a drafter reads is put where it finds it."""
        if features is None:
            return self._network.forward(batch)
        if self._feature_layers:
            hidden, found = self._network.forward_with_features(batch, self._feature_layers)
        else:
            hidden = found = self._network.forward(batch)
        features.copy_(found)
        return hidden

    def run_prompt(self, step_inputs: OpFunction, query_lens: list[int], num_computed: int) -> None:
        """Run a step of sequences, all of them padding, with every kernel that a prompt needs.

        Args:
            step_inputs: The op.
            query_lens: Tokens of each sequence.
            num_computed: Tokens before them.
        """
        ends = np.array(query_lens) + num_computed
        rows = np.full(len(ends), self._rows.num_tokens.shape[0] - 1)
        inputs = step_inputs(self._rows.token_ids, self._rows.row_tables, rows, np.full_like(ends, num_computed), ends)
        batch = make_batch(inputs, self._rows, self._layers, query_lens, ends.tolist())
        hidden = self._network.forward(batch)[: len(query_lens)].clone()
        self._network.argmax(hidden)
        if SampleMode.SAMPLED in self.modes:
            first = inputs.positions[: len(query_lens)].clone()
            logits = self._network.compute_logits(hidden)
            self._sampler.sample_in_mode(SampleMode.SAMPLED, logits, to_device(rows, first.device), first)
