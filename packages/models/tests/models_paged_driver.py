"""A little driver: builds `ForwardBatch` by hand and runs networks over a paged cache, the way a runner would."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_attention import CrossMedia, ForwardBatch, MediaEmbeds
from quire_interfaces import FullAttentionSpec, KVCacheSpec, LatentAttentionSpec, MambaSpec
from quire_models import DecoderLM
from quire_ops import CACHE_TORCH_DTYPES, LoraTokens, PagedLayout, kv_cache_shape


@dataclass
class Sequence:
    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    """[vocab] per computed token; empty tensors of a network without an LM head."""
    hidden: list[Tensor] = field(default_factory=list)
    """[hidden_size] per computed token."""
    embeds: dict[int, Tensor] = field(default_factory=dict)
    """Token -> its row [width], of those that stand for media."""
    positions: Tensor | None = None
    """[3, tokens] of M-RoPE; None where they are counted."""
    cross: list[tuple[int, Tensor]] = field(default_factory=list)
    """First token that attends to an item by cross attention, and the item's embeddings; the next item's ends it."""
    prefix_len: int = 0
    """Tokens that all see one another."""


def _cache_shape(spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
    """Shape of a layer's cache; a single number where it keeps states."""
    if isinstance(spec, LatentAttentionSpec):
        return num_blocks, spec.block_size // spec.dcp_size, spec.row_bytes // CACHE_TORCH_DTYPES[spec.dtype].itemsize
    if isinstance(spec, FullAttentionSpec):
        return kv_cache_shape(num_blocks, spec.block_size // spec.dcp_size, spec.num_kv_heads, spec.head_dim)
    return (1,)


class PagedDriver:
    """Sequences on one cache; blocks consecutive or shuffled, the cache poisoned with NaN first."""

    def __init__(
        self,
        model: DecoderLM,
        *,
        block_size: int,
        shuffle: bool,
        num_tokens: int = 1024,
        cache_dtype: torch.dtype | None = None,
        window: int | None = None,
        device: str = "cpu",
    ) -> None:
        """window: forget blocks that have left it, as a sliding-window block manager does. device: The model's."""
        config = model.config
        num_blocks = num_tokens // block_size + 64
        self.window = window
        self.device = device
        self.model = model
        self.block_size = block_size
        name = model.cache_dtype if cache_dtype is None else str(cache_dtype).removeprefix("torch.")
        dtype = cache_dtype or CACHE_TORCH_DTYPES[name]
        specs = config.kv_cache_specs(block_size, name).values()
        shapes = [_cache_shape(spec, num_blocks) for spec in specs]
        nothing = float("nan") if dtype.is_floating_point else 127  # of which scales become 3e38
        self.caches = tuple(torch.full(shape, nothing, dtype=dtype, device=device) for shape in shapes)
        kept = [spec.states if isinstance(spec, MambaSpec) else () for spec in specs]
        self.states = tuple(
            tuple(torch.full((num_blocks, *state.shape), float("nan"), device=device) for state in states)
            for states in kept
        )
        self.free = list(range(1, num_blocks))
        if shuffle:
            random.Random(num_blocks).shuffle(self.free)

    def add(self, token_ids: list[int]) -> Sequence:
        return Sequence(list(token_ids), [])

    def step(self, *parts: tuple[Sequence, int], lora: LoraTokens | None = None) -> None:
        """Compute the next tokens of each sequence, (sequence, how many), with the adapters of `lora`."""
        input_ids, positions, slots = [], [], []
        places: list[int] = []
        rows: list[Tensor] = []
        prefix: list[int] = []
        cross: list[CrossMedia] = []
        for seq, count in parts:
            end = seq.num_computed + count
            cross += self._cross(seq, end, len(input_ids))
            while len(seq.blocks) * self.block_size < end:
                seq.blocks.append(self.free.pop(0))
            for position in range(seq.num_computed, end):
                if position < seq.prefix_len:
                    prefix.append(len(input_ids))
                if position in seq.embeds:
                    places.append(len(input_ids))
                    rows.append(seq.embeds[position])
                input_ids.append(seq.token_ids[position])
                axes = [position] * 3 if seq.positions is None else seq.positions[:, position].tolist()
                positions.append(axes)
                block = seq.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
        metadata = self._metadata(parts, slots)
        batch = ForwardBatch(
            input_ids=torch.tensor(input_ids, device=self.device),
            positions=torch.tensor([axes[0] for axes in positions], device=self.device)
            if all(seq.positions is None for seq, _ in parts)
            else torch.tensor(positions, device=self.device).T.contiguous(),
            attention=(metadata,),
            group_of_layer=(0,) * len(self.caches),
            kv_caches=self.caches,
            states=self.states if any(self.states) else (),
            lora=lora,
            media=MediaEmbeds(token_index=torch.tensor(places), embeds=torch.stack(rows)) if rows else None,
            cross_media=tuple(cross),
            prefix_index=torch.tensor(prefix) if prefix else None,
        )
        hidden = self.model.forward(batch)
        logits = self.model.compute_logits(hidden) if self.model.config.generates else hidden[:, :0]
        row = 0
        for seq, count in parts:
            seq.logits.extend(logits[row : row + count])
            seq.hidden.extend(hidden[row : row + count])
            seq.num_computed += count
            row += count

    @staticmethod
    def _cross(seq: Sequence, end: int, first: int) -> list[CrossMedia]:
        """What the next tokens of a sequence attend to, up to `end`; the first of them is `first` of the step."""
        begin, parts = seq.num_computed, []
        starts = [start for start, _ in seq.cross] + [end]
        for number, (_, embeds) in enumerate(seq.cross):
            start, stop = max(starts[number], begin), min(starts[number + 1], end)
            if start < stop:
                parts.append(CrossMedia(begin=first + start - begin, end=first + stop - begin, embeds=(embeds,)))
        return parts

    def _metadata(self, parts: tuple[tuple[Sequence, int], ...], slots: list[int]) -> PagedLayout:
        query_lens = [count for _, count in parts]
        kv_lens = [seq.num_computed + count for seq, count in parts]
        widest = max(len(seq.blocks) for seq, _ in parts)
        table = [self._kept(seq) + [0] * (widest - len(seq.blocks)) for seq, _ in parts]
        starts = [0]
        for count in query_lens:
            starts.append(starts[-1] + count)
        return PagedLayout(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=self.device),
            block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            block_size=self.block_size,
            query_lens=query_lens,
            kv_lens=kv_lens,
        )

    def _kept(self, seq: Sequence) -> list[int]:
        """The blocks, those that no token of this step can see replaced by the null block (which holds NaN)."""
        if self.window is None:
            return seq.blocks
        gone = max(0, seq.num_computed + 1 - self.window) // self.block_size
        return [0] * gone + seq.blocks[gone:]

    def run(self, seq: Sequence, chunk: int) -> None:
        """Compute all known tokens of a sequence, `chunk` at a time."""
        while seq.num_computed < len(seq.token_ids):
            self.step((seq, min(chunk, len(seq.token_ids) - seq.num_computed)))

    def greedy(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Decode alone: `num_tokens` tokens after the computed prompt."""
        out: list[int] = []
        for _ in range(num_tokens):
            token = int(seq.logits[-1].argmax())
            out.append(token)
            seq.token_ids.append(token)
            self.step((seq, 1))
        return out
