"""Op `decode_step`: a whole decode step, from the rows' last tokens to their next ones, in one call.

What a captured graph is on an accelerator, this is on a CPU: the step of every day without anything around its kernels.
Knows rows and a `DecoderStack`; does not know requests. Its reference is made of the other ops' references.

Shape legend: R rows, L token slots of a row, P positions, R rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_ops.decoder_stack import DecoderStack, decoder_stack
from quire_ops.layout import PagedLayout
from quire_ops.linear_weights import LinearWeights, reference_linear
from quire_ops.lora import LoraTokens
from quire_ops.op import op
from quire_ops.quantized_embedding import quantized_embedding
from quire_ops.sampling import SampleTable, sample, sample_masked
from quire_ops.step_inputs import HostInts, RowTable, step_inputs

__all__ = ["DecodeNetwork", "DecodeRows", "RunDecode", "decode_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNetwork:
    """A network: token ids -> embedding, times a factor -> stack -> logits, times a factor and capped."""

    embedding: LinearWeights
    """[vocab, hidden_size], contiguous, as op `quantized_embedding` takes it; where ranks share its rows out, those of
    this one."""
    embedding_rows: tuple[int, ...] = ()
    """Rows of each rank, one behind the other, where they share them out; empty where each has all."""
    stack: DecoderStack
    head: LinearWeights
    """hidden_size -> vocab, without a bias or adapters; in a form of its own, whatever the stack's matrices have."""
    rotations: tuple[Callable[[int], tuple[Tensor, Tensor]], ...]
    """Each: length -> cosines and signed sines [P, 1, R] of the first P positions, at least so many, as op
    `rotary_embedding` takes them."""
    embedding_factor: float = 1.0
    """Of what the embedding gives, rounded to the stack's dtype behind it."""
    logits_factor: float = 1.0
    logits_soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap), after the factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """What is kept of all rows. Never moves: backends may hold addresses."""

    token_ids: Tensor
    """[R, L] int32."""
    num_tokens: HostInts
    """[R] tokens of each row that are known."""
    tables: tuple[RowTable, ...]
    """Per KV cache group."""
    num_blocks: tuple[HostInts, ...]
    """Per KV cache group [R]: blocks of each row."""
    group_of_layer: tuple[int, ...]
    kv_caches: tuple[Tensor, ...]
    """Per layer, of the stack's dtype or quantized (`kv_format`)."""
    states: tuple[tuple[Tensor, ...], ...] = ()
    """Per layer, as `RunDecoder` takes them."""
    lora_slots: NDArray[np.int32]
    """[R] slot of each row's adapter, -1 for none."""
    position_deltas: HostInts
    """[R] number that is added to a token's place in its row, for its rotation; never above 0."""
    sample_table: SampleTable
    """How each row's tokens are chosen."""


class RunDecode(Protocol):
    """A network joined with its rows. Not thread-safe."""

    def __call__(
        self, rows: list[int], starts: list[int], masks: tuple[Tensor, Tensor] | None = None
    ) -> list[int] | None:
        """Compute the token at position `starts[s]` of row `rows[s]`, different rows, choose its successor as op
        `sample` does and write it behind; the row then has `starts[s] + 2` known tokens.

        Args:
            rows: S row numbers.
            starts: S positions.
            masks: `mask_of` [S] int64 and `bitmask` [M, ceil(vocab / 32)] int32 as op `sample_masked` takes them, on
                the host and contiguous.

        Returns:
            The successors. None when something is out of the ordinary: a row lacks its token or a block, or a largest
            logit is not finite. Then no row has changed, and computing the step by other means says what it is.
        """

    def logits(self, rows: list[int], starts: list[int]) -> Tensor | None:
        """Compute the same tokens, choose nothing and write nothing behind them.

        Returns:
            Logits [S, vocab] float32; None when a row lacks its token or a block.
        """


@op
def decode_step(network: DecodeNetwork, rows: DecodeRows) -> RunDecode:
    """A whole decode step in one call, from embedding to tokens. Optional, as `decoder_stack` is."""
    return _ReferenceDecodeStep(network, rows)


class _ReferenceDecodeStep:
    def __init__(self, network: DecodeNetwork, rows: DecodeRows) -> None:
        self._network, self._kept = network, rows
        self._run_stack = decoder_stack(network.stack)

    def __call__(
        self, rows: list[int], starts: list[int], masks: tuple[Tensor, Tensor] | None = None
    ) -> list[int] | None:
        logits = self.logits(rows, starts)
        if logits is None:
            return None
        kept, which, begins = self._kept, np.array(rows), np.array(starts)
        chosen = logits, torch.from_numpy(which), torch.from_numpy(begins), kept.sample_table
        ids, max_logits = sample(*chosen) if masks is None else sample_masked(*chosen, *masks)
        if not max_logits.isfinite().all():
            return None
        kept.token_ids[which, begins + 1] = ids.int()
        kept.num_tokens[which] = begins + 2
        found: list[int] = ids.tolist()
        return found

    def logits(self, rows: list[int], starts: list[int]) -> Tensor | None:
        network, kept, which, begins = self._network, self._kept, np.array(rows), np.array(starts)
        ends = begins + 1
        if (ends > kept.num_tokens[which]).any():
            return None
        for table, num_blocks in zip(kept.tables, kept.num_blocks, strict=True):
            if (ends > num_blocks[which] * table.block_size).any():
                return None
        inputs = step_inputs(kept.token_ids, kept.tables, which, begins, ends)
        layouts = [
            PagedLayout(
                block_table=group.block_table,
                slot_mapping=group.slot_mapping,
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                block_size=table.block_size,
                query_lens=[1] * len(which),
                kv_lens=ends.tolist(),
            )
            for group, table in zip(inputs.groups, kept.tables, strict=True)
        ]
        rotations = [rotation(int(ends.max())) for rotation in network.rotations]
        stack = network.stack
        x = quantized_embedding(inputs.input_ids, network.embedding, stack.hidden_size, stack.dtype)
        x = x * network.embedding_factor
        positions = inputs.positions + torch.from_numpy(kept.position_deltas[which])
        lora = LoraTokens.of(kept.lora_slots[which])
        turns = [(cos[positions], sin[positions]) for cos, sin in rotations]
        hidden = self._run_stack(x, turns, layouts, kept.group_of_layer, kept.kv_caches, kept.states, lora=lora)
        logits = reference_linear(hidden, network.head, wide=True).float() * network.logits_factor
        cap = network.logits_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
