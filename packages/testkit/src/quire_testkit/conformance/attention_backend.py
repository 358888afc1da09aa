"""What every `AttentionBackend` must do, as tests to inherit. Needs torch and quire_attention.

    class TestMyBackend(AttentionBackendSuite):
        def make_backend(self): return AttentionBackend("mine", op_table())

Each test attends densely, one token at a time in float64, and compares. Slots that must not be read hold NaN.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from quire_attention import AttentionBackend
from quire_interfaces import KV_CACHE_DTYPES, kv_row_bytes
from quire_ops import CACHE_TORCH_DTYPES, PagedLayout, kv_cache_shape, ops
from quire_ops.kv_reference import decode_row, encode_row

__all__ = ["AttentionBackendSuite"]

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 32
SCALE = HEAD_DIM**-0.5
CHUNKS = ((20, 1, 1, 1), (5, 9, 6, 1), (1, 1, 1, 30))
"""Of each sequence: its tokens in each step."""
NARROW_CHUNKS = ((11, 1), (4, 6), (1, 10))
"""The same, where formats of rows are what matters."""


class AttentionBackendSuite:
    """Tests of the `AttentionBackend` contract. Implement `make_backend`; override nothing else."""

    def make_backend(self) -> AttentionBackend:
        """The backend under test."""
        raise NotImplementedError

    def test_declares_itself(self) -> None:
        backend = self.make_backend()
        assert backend.name == backend.op_backend.name
        assert backend.op_backend.op is ops.paged_attention

    def test_steps_equal_dense_attention(self) -> None:
        for dtype in self.make_backend().op_backend.dtypes or (torch.float32, torch.bfloat16, torch.float16):
            self._run(dtype, window=None, soft_cap=None)

    def test_sliding_window(self) -> None:
        if self._has("sliding_window"):
            for window in (1, 7, 1000):
                self._run(torch.float32, window=window, soft_cap=None)

    def test_soft_cap(self) -> None:
        if self._has("soft_cap"):
            self._run(torch.float32, window=None, soft_cap=2.0)

    def test_sinks(self) -> None:
        if self._has("sinks"):
            sinks = torch.linspace(-2.0, 2.0, KV_HEADS * GROUP)
            for window in (None, 7):
                self._run(torch.float32, window=window, soft_cap=None, sinks=sinks)

    def test_alibi_slopes(self) -> None:
        if self._has("alibi"):
            slopes = torch.logspace(-0.5, -2.5, KV_HEADS * GROUP)
            for window in (None, 7):
                self._run(torch.float32, window=window, soft_cap=None, alibi_slopes=slopes)

    def test_result_does_not_depend_on_neighbours(self) -> None:
        alone = self._run(torch.float32, window=None, soft_cap=None, only=0)
        together = self._run(torch.float32, window=None, soft_cap=None)
        assert (alone[0] - together[0]).abs().max() <= 1e-6

    def test_narrow_caches(self) -> None:
        kv_scale = torch.tensor([[0.5, 3.0], [2.0, 0.1]])
        cache_dtypes = self.make_backend().op_backend.cache_dtypes
        names = KV_CACHE_DTYPES if cache_dtypes is None else cache_dtypes
        for name in sorted(set(names) - {"float32", "bfloat16", "float16"}):
            for window, scale in ((7, None), (None, kv_scale)):
                self._run(torch.float32, window=window, soft_cap=None, cache_dtype=name, kv_scale=scale,
                          chunks=NARROW_CHUNKS)  # fmt: skip

    def _has(self, feature: str) -> bool:
        features = self.make_backend().op_backend.features
        return features is None or feature in features

    def _run(
        self,
        dtype: torch.dtype,
        *,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        only: int | None = None,
        cache_dtype: str | None = None,
        kv_scale: Tensor | None = None,
        chunks: tuple[tuple[int, ...], ...] = CHUNKS,
    ) -> list[Tensor]:
        """Three sequences in mixed steps (prefill, chunk, decode); every output is compared. Returns them all."""
        backend = self.make_backend()
        block_size = 8
        rng = random.Random(0)
        lengths = [sum(parts) for parts in chunks]
        tokens = [self._tokens(i, length, dtype) for i, length in enumerate(lengths)]
        blocks = list(range(1, 1 + sum(-(-length // block_size) for length in lengths)))
        rng.shuffle(blocks)
        tables = []
        for length in lengths:
            count = -(-length // block_size)
            tables.append(blocks[:count])
            blocks = blocks[count:]
        num_blocks = 1 + sum(map(len, tables))
        kept = dtype if cache_dtype is None else CACHE_TORCH_DTYPES[cache_dtype]
        row_size = HEAD_DIM if cache_dtype is None else kv_row_bytes(cache_dtype, HEAD_DIM) // kept.itemsize
        cache = torch.empty(kv_cache_shape(num_blocks, block_size, KV_HEADS, row_size), dtype=kept)
        cache.view(torch.uint8).fill_(255)  # NaN, or the NaN of a scale, in every format
        outputs: list[list[Tensor]] = [[], [], []]
        done = [0, 0, 0]
        chosen = range(3) if only is None else (only,)
        for step in range(len(chunks[0])):
            parts = [(i, done[i], done[i] + chunks[i][step]) for i in chosen]
            metadata = self._metadata(parts, tables, block_size)
            query, key, value = (torch.cat([tokens[i][j][a:b] for i, a, b in parts]) for j in range(3))
            backend.write_kv_cache(key, value, cache, metadata.slot_mapping, kv_scale)
            out = backend.paged_attention(
                query,
                cache,
                metadata,
                scale=SCALE,
                sliding_window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                kv_scale=kv_scale,
            )
            assert out.dtype == dtype
            assert out.shape == query.shape
            for (i, _, end), piece in zip(parts, out.split([b - a for _, a, b in parts]), strict=True):
                outputs[i].append(piece)
                done[i] = end
        results = []
        for i in chosen:
            got = torch.cat(outputs[i]).double()
            query, key, value = tokens[i]
            key, value = (self._kept(x, kept, kv_scale, which) for which, x in enumerate((key, value)))
            wanted = self._dense(query, key, value, window, soft_cap, sinks, alibi_slopes)
            tolerance = 2e-5 if dtype in (torch.float32, torch.float64) else 2e-2
            assert torch.isfinite(got).all()
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
            results.append(got)
        return results

    def _kept(self, x: Tensor, dtype: torch.dtype, kv_scale: Tensor | None, which: int) -> Tensor:
        """Keys or values as a cache of this dtype keeps them."""
        kept = torch.empty(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for head in range(x.shape[1]):
                scale = 1.0 if kv_scale is None else float(kv_scale[which, head])
                kept[token, head] = decode_row(encode_row(x[token, head], dtype, scale), scale)
        return kept

    def _tokens(self, seed: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        query, key, value = (torch.randn(length, n, HEAD_DIM, generator=generator).to(dtype) for n in heads)
        return query, key, value

    def _metadata(self, parts: list[tuple[int, int, int]], tables: list[list[int]], block_size: int) -> PagedLayout:
        widest = max(len(tables[i]) for i, _, _ in parts)
        starts = [0]
        for _, begin, end in parts:
            starts.append(starts[-1] + end - begin)
        slots = [tables[i][p // block_size] * block_size + p % block_size for i, a, b in parts for p in range(a, b)]
        return PagedLayout(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            block_table=torch.tensor(
                [tables[i] + [0] * (widest - len(tables[i])) for i, _, _ in parts], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            block_size=block_size,
            query_lens=[end - begin for _, begin, end in parts],
            kv_lens=[end for _, _, end in parts],
        )

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        length = query.shape[0]
        keys = key.double().repeat_interleave(GROUP, dim=1)
        values = value.double().repeat_interleave(GROUP, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * SCALE
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * distance
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, values)
