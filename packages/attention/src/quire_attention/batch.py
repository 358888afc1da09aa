"""The inputs of one forward pass, as the runner builds them and every model reads them.

Shape legend: T tokens of this step, S sequences (requests) of this step, B blocks in the widest block table.
Tokens of a sequence stand next to each other, sequences in the order of the scheduler's entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire_ops import LoraTokens, PagedLayout

__all__ = ["CrossMedia", "EncoderBatch", "ForwardBatch", "MediaEmbeds"]


@dataclass(slots=True, kw_only=True)
class EncoderBatch:
    """Whole inputs that an encoder reads in a step, one behind the other. Shape legend: E tokens of all of them."""

    input_ids: Tensor
    """[E] int64."""
    positions: Tensor
    """[E] int64: position of each token in its input."""
    lens: list[int]
    """Tokens of each input."""
    token_type_ids: Tensor | None = None
    """[E] int64: 0 for tokens of the first text of a pair, 1 for those of the second one (Devlin et al. 2019, sec. 3);
    None where all are 0. Networks with one token type alone (RoBERTa) do not read it."""
    lora: LoraTokens | None = None
    """Which tokens of the inputs use which adapter slot; None where none does."""
    key_lens: list[int] | None = None
    """Tokens of each input, from its first, that its tokens attend to; None for all."""
    features: tuple[Tensor, ...] = ()
    """Spectrogram of each input [mel bins, frames], where the network reads these in place of tokens."""


@dataclass(slots=True, kw_only=True)
class MediaEmbeds:
    """What towers have made of the media among a step's tokens. Shape legend: M tokens that stand for media."""

    token_index: Tensor
    """[M] int64: places of these tokens among the step's."""
    embeds: Tensor
    """[M, width]: their rows, of the width of the residual stream; wider where a network adds features behind its
    first layers too (Bai et al., "Qwen3-VL", 2025, DeepStack)."""


@dataclass(slots=True, kw_only=True)
class CrossMedia:
    """Media that neighbouring tokens of a step attend to by cross attention. Shape legend: N embeddings of an item."""

    begin: int
    """First of the tokens among the step's."""
    end: int
    """The token behind the last of them."""
    embeds: tuple[Tensor, ...]
    """[N, width] of each item: what its layers with cross attention read."""


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """The step's tokens, where their keys, values and states are, and which adapters they use: all that a network's
    `forward` gets."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: position of each token in its sequence; [A, T] where a network tells A axes apart, as
    time, height and width."""
    attention: tuple[PagedLayout, ...]
    """Per KV cache group: where the keys and values, or the states, of its layers are. In cross attention each token of
    the step stands for a sequence of its own, whose one query sees all that the encoder of its request has read;
    `slot_mapping` speaks of the tokens of `encoder`."""
    group_of_layer: tuple[int, ...]
    """Per layer: index into `attention`."""
    kv_caches: tuple[Tensor, ...]
    """Per layer: the layer's cache, in the shape that the attention backend asked for; the bytes of each block where a
    layer keeps states."""
    num_positions: int = 0
    """All positions are below it, where a head drafts that does not see the beginnings of its sequences, which
    `PagedLayout.kv_lens` then leave out."""
    states: tuple[tuple[Tensor, ...], ...] = ()
    """Per layer: its state tensors [num_blocks, *shape of one state], in the order of its spec, views of its cache;
    none for attention. Empty when no layer of the network has any."""

    lora: LoraTokens | None = None
    """Which tokens use which adapter slot; None where none does."""
    media: MediaEmbeds | None = None
    """Rows that take the place of token embeddings; None where the step has text alone."""
    cross_media: tuple[CrossMedia, ...] = ()
    """What tokens attend to by cross attention, in their order; tokens that are not named attend to nothing."""
    prefix_index: Tensor | None = None
    """[P] int64: places, among the step's tokens, of those that see all tokens of their prompt (prefix LM); None where
    there are none. All of a prompt that no step before has computed are in the step."""
    encoder: EncoderBatch | None = None
    """What the encoder has to read in this step, for networks that have one; None when it has nothing to do."""

    def of_layer(self, layer: int) -> tuple[Tensor, PagedLayout]:
        """The cache and the metadata of one layer."""
        return self.kv_caches[layer], self.attention[self.group_of_layer[layer]]

    def states_of_layer(self, layer: int) -> tuple[tuple[Tensor, ...], PagedLayout]:
        """The state tensors and the metadata of one layer."""
        return self.states[layer], self.attention[self.group_of_layer[layer]]
