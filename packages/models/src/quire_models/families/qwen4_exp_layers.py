"""Modules that only Qwen4-Exp has.

Shape legend: T tokens of the step, S residual streams, H hidden size, Hq query heads, Hi heads of the index, D their
dimension, B blocks of tokens that the step completes, R tokens of a block, G hashes, N tokens of the longest n-gram, K
tokens that are found.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.config import ModelConfig
from quire_models.families.qwen4_exp import (
    POSITION_DIGITS,
    BlockIndexSpec,
    BlockSparseAttentionSpec,
    GatedResidualSpec,
    HyperLayerSpec,
    HyperNetworkSpec,
    NGramSpec,
)
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.rotary import Rotary, RotaryTable
from quire_models.layers.scope import AdjacentParameters, Scope
from quire_ops import PagedLayout, ops
from quire_ops.staging import to_device

__all__ = [
    "BlockIndex",
    "BlockSparseAttention",
    "GatedResidual",
    "HyperLM",
    "HyperLayer",
    "LastTokens",
    "NGramEmbedding",
]

COMPLETED = "blocks that the step completes"
"""Key of what is derived from a step's layout."""


class StreamNorm:
    """x [T, S * H] -> like x: an RMS norm of each stream, whose weights are stored as their distance from one."""

    def __init__(self, scope: Scope, num_streams: int, size: int, eps: float) -> None:
        self._norm = scope.op(ops.rms_norm)
        self._sizes, self._eps = (num_streams, size), eps
        self._parameter = scope.parameter("weight", num_streams * size)
        self._ones = torch.ones(size, dtype=torch.float32, device=scope.device)
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weight = self._parameter.take().float() + 1.0

    def __call__(self, x: Tensor) -> Tensor:
        normed = self._norm(x.float().unflatten(-1, self._sizes), self._ones, self._eps).flatten(-2)
        return (normed * self._weight).to(x.dtype)


class GatedResidual:
    """Streams [T, S * H] -> what a part takes of them, [T, H]; `inject` adds to them what it gives."""

    def __init__(self, spec: GatedResidualSpec, scope: Scope) -> None:
        """Args:
        scope: Of the layer, or of the network's body.
        """
        own = scope / spec.name
        self._num = spec.num_streams
        self._norm = StreamNorm(own / "hc_norm", spec.num_streams, spec.hidden_size, spec.eps)
        self._down, self._up, *inject = (Linear.of(own, each) for each in spec.projections())
        self._inject = inject[0] if inject else None

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """What the part takes, and the normed streams, [T, S * H], for `inject`."""
        normed = self._norm(streams)
        shares = torch.sigmoid(self._up(F.silu(self._down(normed) / self._num)))
        return (shares * normed).unflatten(-1, (self._num, -1)).mean(dim=-2), normed

    def inject(self, streams: Tensor, normed: Tensor, given: Tensor) -> Tensor:
        """Streams and `given` [T, H] of the part -> streams."""
        assert self._inject is not None
        weights = 2 * torch.sigmoid(self._inject(normed) / self._num)  # [T, S]
        return streams + (given[:, None] * weights[..., None]).flatten(1)


class NGramTable:
    """ids [T, G] -> the rows of each token side by side, [T, G * row]. The checkpoint has them in pieces, which stay
    where they are mapped; on a device they lie one behind the other. In FP8 they stay so, and rows that are looked up
    are multiplied by one factor."""

    def __init__(self, spec: NGramSpec, scope: Scope) -> None:
        row = spec.embed_dim // len(spec.head_sizes)
        self._shard_rows, self._row = spec.shard_rows, row
        begins = range(0, spec.num_rows, spec.shard_rows)
        sizes = [min(spec.shard_rows, spec.num_rows - begin) for begin in begins]
        names = [f"shard_{shard}" for shard in range(len(sizes))]
        self._dtype, stored = scope.dtype, torch.float8_e4m3fn if spec.is_float8 else None
        self._parameters = [
            (scope / name).parameter("weight", size, row, dtype=stored) for name, size in zip(names, sizes, strict=True)
        ]
        self._factor = scope.parameter("weight_scale", 1, dtype=torch.float32) if spec.is_float8 else None
        pieces = [f"{scope.prefix}{name}.weight" for name in names]
        scope.packed("weight", (spec.num_rows, row), lambda table: zip(pieces, table.split(sizes), strict=True))
        self._adjacent = None if scope.device.type == "cpu" else AdjacentParameters(self._parameters)
        self._tables: list[Tensor]
        self._scale: Tensor | None
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        if self._adjacent is not None:
            self._tables, self._shard_rows = [self._adjacent.take()], sum(each.shape[0] for each in self._parameters)
        else:
            self._tables = [parameter.take() for parameter in self._parameters]
        self._scale = None if self._factor is None else self._factor.take()

    def __call__(self, ids: Tensor) -> Tensor:
        if len(self._tables) == 1:
            return self._read(self._tables[0], ids).flatten(1)
        ordered, order = ids.flatten().sort()
        counts = torch.bincount(ordered // self._shard_rows, minlength=len(self._tables)).tolist()
        rows = [
            self._read(table, of_shard - shard * self._shard_rows)
            for shard, (table, of_shard) in enumerate(zip(self._tables, ordered.split(counts), strict=True))
            if len(of_shard)
        ]
        found = torch.empty(len(order), self._row, dtype=rows[0].dtype)
        return found.index_copy_(0, order, torch.cat(rows)).view(len(ids), -1)

    def _read(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows [..., row] of a table."""
        if self._scale is None:
            return F.embedding(ids, table)
        rows = F.embedding(ids, table.view(torch.uint8)).view(table.dtype)
        return (rows.float() * self._scale).to(self._dtype)


class LastTokens:
    """Token ids [T] -> those before each one, the last one first, and whether they are in its text, [T, num] both: a
    text begins behind a boundary."""

    def __init__(self, scope: Scope, num: int, boundary_token_id: int) -> None:
        self._boundary, self._num = boundary_token_id, num
        wide = dataclasses.replace(scope, dtype=torch.float32)
        self._look_back = wide.op(ops.causal_conv1d, taps=num + 1)
        # Convolutions that take one of the tokens before and nothing else, stored tap by tap as kernels read them.
        self._before = torch.eye(num + 1, device=scope.device)[:-1].flip(0).t().contiguous().t()

    def __call__(self, token_ids: Tensor, state: Tensor, layout: PagedLayout) -> tuple[Tensor, Tensor]:
        """`state` [num_blocks, num, num] float32."""
        # Counted from the boundary, so that zeros, which stand before the beginning, are boundaries.
        own = (token_ids - self._boundary).float()[:, None].expand(-1, self._num)
        before = self._look_back(own.contiguous(), self._before, None, state, layout, activation=None)
        seen = (before != 0).cumprod(dim=1).bool()
        return torch.where(seen, before, 0).long() + self._boundary, seen


class NGramEmbedding:
    """Streams [T, S * H] -> what is added to them."""

    def __init__(self, spec: NGramSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the mixer itself.
        """
        self._spec, self._index = spec, index
        table = scope / "ple_embedding"
        self._table = NGramTable(spec, table / "ngram_embedding")
        self._stored = table.parameter("layer_multipliers", spec.max_tokens, dtype=torch.int64, optional=True)
        self._project = MergedLinear(scope, *(Linear.of(scope, each) for each in spec.projections()))
        self._norm_key, self._norm_query, self._norm_conv = (
            StreamNorm(scope / name, spec.num_streams, spec.hidden_size, spec.eps)
            for name in ("norm_key", "norm_query", "norm_conv")
        )
        self._taps = (scope / "conv1d").parameter("weight", spec.stream_size, 1, spec.conv_kernel)
        self._convolve = scope.op(ops.causal_conv1d, taps=spec.num_past + 1)
        self._last = LastTokens(scope, spec.max_tokens - 1, spec.boundary_token_id)
        sizes = torch.tensor(spec.head_sizes, dtype=torch.int64)
        self._sizes, self._offsets = sizes.to(scope.device), (sizes.cumsum(0) - sizes).to(scope.device)
        self._multipliers = torch.tensor(spec.multipliers, device=scope.device)
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        taps = self._taps.take()[:, 0]
        spread = taps.new_zeros(self._spec.num_past + 1, len(taps))
        spread[:: self._spec.max_tokens] = taps.t()
        self._weight = spread.t()
        if self._stored.tensor is not None:
            self._multipliers = self._stored.take()

    def __call__(self, streams: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        spec, sizes = self._spec, (self._spec.num_streams, self._spec.hidden_size)
        (conv_state, token_state), layout = batch.states_of_layer(self._index)
        key, value = self._project(self._table(self._ids(batch.input_ids, token_state, layout)))
        gate = self._norm_key(key).unflatten(-1, sizes) * self._norm_query(streams).unflatten(-1, sizes)
        gate = gate.sum(dim=-1, keepdim=True) / math.sqrt(spec.hidden_size)  # [T, S, 1]
        gate = torch.sigmoid(gate.abs().clamp_min(1e-6).sqrt() * gate.sign())
        gated = (gate * value[:, None]).flatten(1)
        return gated + self._convolve(self._norm_conv(gated), self._weight, None, conv_state, layout, activation="silu")

    def _ids(self, token_ids: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
        """[T, G]: rows of the table."""
        spec = self._spec
        before, _ = self._last(token_ids, state, layout)
        tokens = torch.cat((token_ids[:, None], before), dim=1)  # [T, N]
        hashed, found = tokens * self._multipliers, []
        mixed = hashed[:, 0]
        for place in range(1, spec.max_tokens):
            mixed = mixed ^ hashed[:, place]
            found.append(mixed)
        heads = len(self._sizes) // len(found)
        return torch.stack(found, dim=1).repeat_interleave(heads, dim=1) % self._sizes + self._offsets


class BlockIndex:
    """Keeps keys of tokens, and of each whole block the mean key, normed and rotated; finds blocks by it."""

    table: RotaryTable
    """Rotation of the attention. Set by the network."""

    def __init__(self, spec: BlockIndexSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has the keys.
        scope: Scope of the index itself.
        """
        self._spec, self._index = spec, index
        self._project = Linear.of(scope, spec.projection())
        self._query_norm = OffsetRMSNorm(scope / "q_layernorm", spec.head_dim, spec.eps)
        self._key_norm = OffsetRMSNorm(scope / "k_layernorm", spec.head_dim, spec.eps)
        self._rotate = Rotary(scope, spec.rotary_dim)
        self._write = scope.op(ops.write_latent_cache)
        self._find = scope.op(ops.index_topk_blocks)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor | None:
        """x [T, H] -> positions [T, K] of the tokens that each one attends to, -1 for none; None for all."""
        spec = self._spec
        keys, layout = batch.of_layer(self._index)
        query, key = self._project(x).split((spec.num_heads * spec.head_dim, spec.head_dim), dim=-1)
        if spec.num_axes > 1:
            key = torch.cat((key, self._digits(batch.positions).to(key.dtype)), dim=1)
        self._write(key.contiguous(), keys, layout.slot_mapping)
        self._complete(keys, layout)
        if max(layout.kv_lens) // spec.block_tokens <= spec.num_blocks:
            return None
        query = self._rotate(self._query_norm(query.unflatten(-1, (spec.num_heads, -1))), cos, sin)
        own = keys[..., : spec.head_dim]
        found: Tensor = self._find(query, own, layout, block_tokens=spec.block_tokens, k=spec.num_blocks)
        return found

    def _digits(self, positions: Tensor) -> Tensor:
        """[T] or [A, T] -> [T, A * digits], the last digit first."""
        of_axes = positions.expand(self._spec.num_axes, -1).t()  # [T, A]
        return torch.stack([of_axes >> 8 * digit & 255 for digit in range(POSITION_DIGITS)], dim=2).flatten(1)

    def _positions(self, digits: Tensor) -> Tensor:
        """[T, A * digits] -> [A, T]."""
        places = torch.tensor([256**digit for digit in range(POSITION_DIGITS)], device=digits.device)
        positions: Tensor = (digits.long().unflatten(1, (-1, POSITION_DIGITS)) * places).sum(2)
        return positions.t()

    def _complete(self, keys: Tensor, layout: PagedLayout) -> None:
        """Put the key of each block that the step completes in the place of its last token's, which nobody needs any
        more: whoever takes the token back takes the block back."""
        completed = self._completed(layout)
        if completed is None:
            return
        positions, slots = completed
        stored = keys[slots // layout.block_size, slots % layout.block_size]  # [B, R, D + digits]
        rows, digits = stored.split((self._spec.head_dim, stored.shape[2] - self._spec.head_dim), dim=2)
        if self._spec.num_axes > 1:
            positions = self._positions(digits[:, 0])
        mean = self._key_norm(rows.float().mean(dim=1).to(rows.dtype))
        cos, sin = self.table(positions, max(layout.kv_lens))
        rotated = self._rotate(mean[:, None], cos, sin)[:, 0]
        self._write(torch.cat((rotated, digits[:, -1]), dim=1), keys, slots[:, -1])

    def _completed(self, layout: PagedLayout) -> tuple[Tensor, Tensor] | None:
        """Positions [B] of the first token, and slots [B, R] of all tokens, of the blocks that the step completes; None
        where it completes none. Worked out once per step."""
        if COMPLETED not in layout.derived:
            size, sequences, begins = self._spec.block_tokens, list[int](), list[int]()
            for number, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
                of_sequence = range((kv_len - query_len) // size * size, kv_len - size + 1, size)
                begins += of_sequence
                sequences += [number] * len(of_sequence)
            layout.derived[COMPLETED] = None
            if begins:
                first, rows = (to_device(each, layout.block_table.device) for each in (begins, sequences))
                positions = first[:, None] + torch.arange(size, device=first.device)
                blocks = layout.block_table[rows[:, None], positions // layout.block_size].long()
                layout.derived[COMPLETED] = first, blocks * layout.block_size + positions % layout.block_size
        completed: tuple[Tensor, Tensor] | None = layout.derived[COMPLETED]
        return completed


class BlockSparseAttention(SelfAttention):
    """x [T, H] -> [T, H]: gated attention over all tokens, or over those that an index found."""

    __slots__ = ("_attend_to", "_locate", "_scale", "index")

    index: BlockIndex
    """Set by the layer."""

    def __init__(self, spec: BlockSparseAttentionSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._scale = spec.scale
        self._locate, self._attend_to = scope.op(ops.position_slots), scope.op(ops.sparse_attention)

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no index."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:  # type: ignore[override]  # nobody quantizes it
        query, key, value = map(self._heads, self._qkv(x))
        query, gate = query.unflatten(1, (-1, 2)).unbind(2)
        query = self._write(query, key, value, cos, sin, batch)
        found = self.index(x, cos, sin, batch)
        if found is None:
            attended = self._attend.attend(query, batch)
        else:
            cache, layout = batch.of_layer(self.cache)
            slots = self._locate(found, layout)
            attended = self._attend_to(query, cache, slots, scale=self._scale, kv_scale=self._attend.kv_scale)
        assert self._gate is not None
        return self.o_proj(self._gate(gate.flatten(1), attended.flatten(1)))


class HyperLayer:
    """Streams [T, S * H] -> the same; the first layer gets one stream, [T, H]."""

    def __init__(self, spec: HyperLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its first mixer's cache in a batch.
        scope: Scope of the layer.
        """
        assert spec.feed_forward is not None
        mixer, *beside = spec.mixers
        self._repeats = spec.residuals[0].num_streams if spec.is_first else 1
        self.mixer = build_mixer(mixer, index, scope)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self.index: BlockIndex | None = None
        self._ngrams: NGramEmbedding | None = None
        for each in beside:
            part = build_mixer(each, index + 1, scope)
            if isinstance(part, BlockIndex) and isinstance(self.mixer, BlockSparseAttention):
                self.index = self.mixer.index = part
            else:
                assert isinstance(part, NGramEmbedding)
                self._ngrams = part
        self._around_mixer, self._around_experts = (GatedResidual(each, scope) for each in spec.residuals)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        streams = x if self._repeats == 1 else x.repeat(1, self._repeats)
        if self._ngrams is not None:
            streams = streams + self._ngrams(streams, cos, sin, batch)
        taken, normed = self._around_mixer(streams)
        streams = self._around_mixer.inject(streams, normed, self.mixer(taken, cos, sin, batch))
        taken, normed = self._around_experts(streams)
        return self._around_experts.inject(streams, normed, self.feed_forward(taken)), None


class HyperLM(DecoderLM):
    """The network: in the place of the last norm its streams are joined."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, HyperNetworkSpec)
        self._joined = GatedResidual(spec.joined, scope / spec.body)
        for layer, rotation in zip(self.layers, self._rotations, strict=True):
            if isinstance(layer, HyperLayer) and layer.index is not None and rotation is not None:
                layer.index.table = self._tables[rotation]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T] tokens -> hidden states [T, H]; writes the step's keys, values and states."""
        return self._joined(super().forward(batch))[0]
