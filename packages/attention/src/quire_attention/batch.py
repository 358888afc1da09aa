"""The inputs of one forward pass, as the runner builds them and every model reads them.

Shape legend: T tokens of this step, S sequences (requests) of this step, B blocks in the widest block table.
Tokens of a sequence stand next to each other, sequences in the order of the scheduler's entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire_ops import LoraTokens, StateReplay

__all__ = ["AttentionMetadata", "EncoderBatch", "ForwardBatch", "MediaEmbeds"]


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the keys and values, or the states, of one KV cache group are. Layers of the group share it within a step.

    Host lists repeat what the scheduler already knew, so that no backend has to read a device tensor back.

    In cross attention each token of the step stands for a sequence of its own, whose one query sees all that the
    encoder of its request has read (so S is T there); `slot_mapping` speaks of the tokens of `ForwardBatch.encoder`.
    """

    query_start_loc: Tensor
    """[S + 1] int32: first token of each sequence in this step, then T."""
    seq_lens: Tensor
    """[S] int32: tokens of each sequence once this step's are written, the computed ones included."""
    block_table: Tensor
    """[S, B] int32: block ids in token order; entries past the sequence are 0, the null block."""
    slot_mapping: Tensor
    """[T] int64: slot of each token, block id * block_size + offset."""
    block_size: int
    query_lens: list[int]
    """Host copy: tokens of each sequence in this step."""
    kv_lens: list[int]
    """Host copy of `seq_lens`."""
    paths: Tensor | None = None
    """[T, P] int32 where tokens are in trees (see `quire_ops.PagedLayout`); then `positions` are no places in the
    cache."""
    paths_have_windows: bool = False
    """`paths` name exactly the tokens that each one sees, so that layers with a sliding window pass none to their
    backend."""
    replay: StateReplay | None = None
    """Of a group of states, where tokens of the step may turn out wrong: takes down what is needed to store the states
    that go on once it is known (see `quire_ops.StateReplay`)."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """What the attention backend worked out from the fields above, for the other layers of this step. A backend fills
    it on first use; whoever changes the metadata in place empties it."""


@dataclass(slots=True, kw_only=True)
class EncoderBatch:
    """Whole inputs that an encoder reads in a step, one behind the other. Shape legend: E tokens of all of them."""

    input_ids: Tensor
    """[E] int64."""
    positions: Tensor
    """[E] int64: position of each token in its input."""
    lens: list[int]
    """Tokens of each input."""
    lora: LoraTokens | None = None
    """Which tokens of the inputs use which adapter slot; None where none does."""


@dataclass(slots=True, kw_only=True)
class MediaEmbeds:
    """What towers have made of the media among a step's tokens. Shape legend: M tokens that stand for media."""

    token_index: Tensor
    """[M] int64: places of these tokens among the step's."""
    embeds: Tensor
    """[M, width]: their rows, of the width of the residual stream; wider where a network adds features behind its
    first layers too (Bai et al., "Qwen3-VL", 2025, DeepStack)."""


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """The step's tokens, where their keys, values and states are, and which adapters they use: all that a network's
    `forward` gets."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: position of each token in its sequence; [3, T] where a network tells time, height and width apart."""
    attention: tuple[AttentionMetadata, ...]
    """Per KV cache group."""
    group_of_layer: tuple[int, ...]
    """Per layer: index into `attention`."""
    kv_caches: tuple[Tensor, ...]
    """Per layer: the layer's cache, in the shape that the attention backend asked for; the bytes of each block where a
    layer keeps states."""
    num_positions: int = 0
    """All positions are below it, where a head drafts that does not see the beginnings of its sequences, which
    `AttentionMetadata.kv_lens` then leave out."""
    states: tuple[tuple[Tensor, ...], ...] = ()
    """Per layer: its state tensors [num_blocks, *shape of one state], in the order of its spec, views of its cache;
    none for attention. Empty when no layer of the network has any."""

    lora: LoraTokens | None = None
    """Which tokens use which adapter slot; None where none does."""
    media: MediaEmbeds | None = None
    """Rows that take the place of token embeddings; None where the step has text alone."""
    encoder: EncoderBatch | None = None
    """What the encoder has to read in this step, for networks that have one; None when it has nothing to do."""

    def of_layer(self, layer: int) -> tuple[Tensor, AttentionMetadata]:
        """The cache and the metadata of one layer."""
        return self.kv_caches[layer], self.attention[self.group_of_layer[layer]]

    def states_of_layer(self, layer: int) -> tuple[tuple[Tensor, ...], AttentionMetadata]:
        """The state tensors and the metadata of one layer."""
        return self.states[layer], self.attention[self.group_of_layer[layer]]
