"""A layer's attention in random steps, on every backend that is there, against dense attention in float64."""

from __future__ import annotations

import random

import pytest
import torch
from attention_sequences import Options, Sequences, Shape, batch_of, dense
from torch import Tensor

from quire_attention import Attention, AttentionBackend, select_attention_backend
from quire_attention.chunks import chunked
from quire_interfaces import kv_row_bytes
from quire_ops import CACHE_TORCH_DTYPES, OpRequest, op_table, ops
from quire_ops.kv_reference import decode_row, encode_row

SHAPES = {
    "grouped heads": Shape(),
    "one head for all": Shape(heads=6, kv_heads=1, head_dim=24, block_size=3),
    "a head each": Shape(heads=3, kv_heads=3, head_dim=8, block_size=16),
    "wide": Shape(heads=2, kv_heads=1, head_dim=128, block_size=1),
}
OPTIONS = {
    "plain": Options(),
    "window": Options(sliding_window=5),
    "window of one": Options(sliding_window=1),
    "cap": Options(soft_cap=1.5),
    "sinks": Options(sinks=True),
    "slopes": Options(slopes=True),
    "window, cap and sinks": Options(sliding_window=7, soft_cap=2.0, sinks=True),
    "window and slopes": Options(sliding_window=6, slopes=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = [
    backend.name
    for backend in op_table().backends(ops.paged_attention)
    if backend.unavailable is None and "cpu" in (backend.devices or {"cpu"})
]
each_backend = pytest.mark.parametrize("name", NAMES)


def backend_of(name: str, shape: Shape, *features: str) -> AttentionBackend:
    sizes = {
        "head_dim": shape.head_dim,
        "queries_per_kv_head": shape.heads // shape.kv_heads,
        "block_size": shape.block_size,
    }
    request = OpRequest(sizes=sizes, features=frozenset(features))
    return select_attention_backend(request, name).backend


def close(got: Tensor, wanted: Tensor) -> bool:
    assert torch.isfinite(got).all()
    return bool((got.double() - wanted).abs().max() <= TOLERANCE[got.dtype] * wanted.abs().max())


@each_backend
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_steps_equal_dense_attention(name: str, shape: str, options: str) -> None:
    sizes, chosen, scale = SHAPES[shape], OPTIONS[options], SHAPES[shape].head_dim ** -0.5
    backend = backend_of(name, sizes)
    sequences = Sequences(sizes, [1, 9, 30, 17], random.Random(len(options)))
    sinks = torch.linspace(-1.0, 2.0, sizes.heads) if chosen.sinks else None
    slopes = torch.logspace(-0.5, -2.0, sizes.heads) if chosen.slopes else None
    layer = Attention(
        backend, 0, scale=scale, sliding_window=chosen.sliding_window, soft_cap=chosen.soft_cap, alibi_slopes=slopes
    )
    cache = sequences.cache()
    while (counts := sequences.next_step()) is not None:
        batch = batch_of([sequences.metadata(counts)], [cache], [0])
        sequences.take(layer(*sequences.of_step(counts), batch, sinks), counts)
    for got, tensors in zip(sequences.results(), sequences.tensors, strict=True):
        assert close(got, dense(*tensors, scale, chosen, sinks=sinks, slopes=slopes))


@each_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_compute_dtype(name: str, dtype: torch.dtype) -> None:
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    sequences = Sequences(sizes, [12, 5], random.Random(2), dtype)
    layer, cache = Attention(backend, 0, scale=0.25), sequences.cache()
    while (counts := sequences.next_step()) is not None:
        batch = batch_of([sequences.metadata(counts)], [cache], [0])
        sequences.take(layer(*sequences.of_step(counts), batch), counts)
    for got, tensors in zip(sequences.results(), sequences.tensors, strict=True):
        assert got.dtype == dtype
        assert close(got, dense(*tensors, 0.25))


@each_backend
@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_narrow_caches_with_scales_of_the_layer(name: str, cache_dtype: str) -> None:
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    sequences = Sequences(sizes, [11, 6], random.Random(4))
    dtype = CACHE_TORCH_DTYPES[cache_dtype]
    cache = sequences.cache(dtype, kv_row_bytes(cache_dtype, sizes.head_dim) // dtype.itemsize)
    layer = Attention(backend, 0, scale=0.25)
    scales = torch.tensor([[0.5, 2.0], [1.5, 0.25]]) if cache_dtype.startswith("fp8") else torch.ones(2, 2)
    layer.kv_scale = scales
    while (counts := sequences.next_step()) is not None:
        batch = batch_of([sequences.metadata(counts)], [cache], [0])
        sequences.take(layer(*sequences.of_step(counts), batch), counts)

    def stored(x: Tensor, which: int) -> Tensor:
        kept = [[decode_row(encode_row(row, dtype, float(scales[which, head])), float(scales[which, head]))
                 for head, row in enumerate(token)] for token in x]  # fmt: skip
        return torch.stack([torch.stack(token) for token in kept])

    for got, (query, key, value) in zip(sequences.results(), sequences.tensors, strict=True):
        assert close(got, dense(query, stored(key, 0), stored(value, 1), 0.25))


@each_backend
def test_layers_of_two_groups_have_caches_and_places_of_their_own(name: str) -> None:
    """Layers 0 and 2 share a group, layer 1 has other blocks, of another size."""
    lens, seeds, scale = [7, 13], random.Random(5), 0.3
    per_layer = [Sequences(Shape(block_size=size), lens, seeds) for size in (4, 3, 4)]
    per_layer[2].tables = per_layer[0].tables
    backend = backend_of(name, per_layer[0].shape)
    layers = [Attention(backend, i, scale=scale) for i in range(3)]
    caches = [sequences.cache() for sequences in per_layer]
    while (counts := per_layer[0].next_step()) is not None:
        batch = batch_of([per_layer[0].metadata(counts), per_layer[1].metadata(counts)], caches, [0, 1, 0])
        assert batch.of_layer(2)[0] is caches[2]
        assert batch.of_layer(2)[1] is batch.of_layer(0)[1] is batch.attention[0]
        outs = [layer(*own.of_step(counts), batch) for layer, own in zip(layers, per_layer, strict=True)]
        for own, out in zip(per_layer, outs, strict=True):
            own.take(out, counts)
    for own in per_layer:
        for got, tensors in zip(own.results(), own.tensors, strict=True):
            assert close(got, dense(*tensors, scale))


@each_backend
@pytest.mark.parametrize("chunk_tokens", [4, 8, 12])
def test_chunks_in_any_steps(name: str, chunk_tokens: int) -> None:
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    sequences = Sequences(sizes, [3, 25, 16], random.Random(chunk_tokens))
    layer, cache = Attention(backend, 0, scale=0.25, chunk_tokens=chunk_tokens), sequences.cache()
    assert layer.is_chunked
    assert not Attention(backend, 0, scale=0.25).is_chunked
    while (counts := sequences.next_step()) is not None:
        metadata = sequences.metadata(counts)
        pieces = chunked(metadata, chunk_tokens)
        assert pieces is chunked(metadata, chunk_tokens), "worked out once per step"
        assert sum(pieces.query_lens) == sum(metadata.query_lens)
        assert max(pieces.kv_lens) <= chunk_tokens
        assert pieces.seq_lens.tolist() == pieces.kv_lens
        assert pieces.query_start_loc.diff().tolist() == pieces.query_lens
        batch = batch_of([metadata], [cache], [0])
        sequences.take(layer(*sequences.of_step(counts), batch), counts)
    for got, tensors in zip(sequences.results(), sequences.tensors, strict=True):
        assert close(got, dense(*tensors, 0.25, chunk_tokens=chunk_tokens))


@each_backend
def test_rotating_and_writing_in_one_is_writing_what_was_rotated(name: str) -> None:
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    layer = Attention(backend, 0, scale=0.25)
    assert layer.rotates == (backend.rope_and_write_kv is not None)
    if not layer.rotates:
        return
    sequences = Sequences(sizes, [10, 4], random.Random(8))
    together, apart = sequences.cache(), sequences.cache()
    angles = torch.arange(16)[:, None] * torch.logspace(0, -2, sizes.head_dim // 2)
    table = [torch.cat((angles.cos(), angles.cos()), 1)[:, None], torch.cat((-angles.sin(), angles.sin()), 1)[:, None]]
    norm = torch.linspace(0.5, 1.5, sizes.head_dim)
    while (counts := sequences.next_step()) is not None:
        query, key, value = sequences.of_step(counts)
        cos, sin = (each[sequences.positions(counts)] for each in table)
        metadata = sequences.metadata(counts)
        got = layer.rope_and_write_kv(
            query, key, value, cos, sin, batch_of([metadata], [together], [0]), query_norm=norm, key_norm=norm, eps=1e-6
        )
        rotated = ops.rotary_embedding(ops.rms_norm(key, norm, 1e-6), cos, sin)
        layer.write(rotated, value, batch_of([metadata], [apart], [0]))
        assert close(got, ops.rotary_embedding(ops.rms_norm(query, norm, 1e-6), cos, sin).double())
        sequences.take(query, counts)
    written = torch.isfinite(apart)
    assert torch.equal(written, torch.isfinite(together))
    assert (apart[written] - together[written]).abs().max() <= 2e-6


@each_backend
def test_cross_attention_lets_every_token_see_the_whole_input(name: str) -> None:
    """Each token of the step is a sequence of one query over all that the encoder of its request has read."""
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    inputs = Sequences(sizes, [9, 5], random.Random(3))
    layer, cache = Attention(backend, 0, scale=0.25), inputs.cache()
    counts = {0: 9, 1: 5}
    _, key, value = inputs.of_step(counts)
    layer.write(key, value, batch_of([inputs.metadata(counts)], [cache], [0]))
    owners = [0, 0, 0, 1, 1]
    query = torch.randn(len(owners), sizes.heads, sizes.head_dim)
    metadata = inputs.metadata(counts)
    metadata.block_table = metadata.block_table[owners]
    metadata.query_start_loc = torch.arange(len(owners) + 1, dtype=torch.int32)
    metadata.query_lens, metadata.kv_lens = [1] * len(owners), [inputs.lens[owner] for owner in owners]
    metadata.seq_lens = torch.tensor(metadata.kv_lens, dtype=torch.int32)
    out = layer.attend(query, batch_of([metadata], [cache], [0]))
    for token, owner in enumerate(owners):
        _, keys, values = inputs.tensors[owner]
        last = torch.cat((torch.zeros(len(keys) - 1, *query.shape[1:]), query[token : token + 1]))
        assert close(out[token], dense(last, keys, values, 0.25)[-1])


@each_backend
def test_a_step_changes_only_its_own_slots(name: str) -> None:
    sizes = SHAPES["grouped heads"]
    backend = backend_of(name, sizes)
    sequences = Sequences(sizes, [14, 6], random.Random(6))
    layer, cache = Attention(backend, 0, scale=0.25), sequences.cache()
    while (counts := sequences.next_step()) is not None:
        before = cache.clone()
        metadata = sequences.metadata(counts)
        query, key, value = sequences.of_step(counts)
        layer.write(key, value, batch_of([metadata], [cache], [0]))
        slots = metadata.slot_mapping
        at = slots // sizes.block_size, slots % sizes.block_size
        assert torch.equal(cache[at[0], 0, :, at[1]], key)
        assert torch.equal(cache[at[0], 1, :, at[1]], value)
        cache_copy = cache.clone()
        cache_copy[at[0], :, :, at[1]] = before[at[0], :, :, at[1]]
        assert torch.equal(cache_copy.view(torch.uint8), before.view(torch.uint8))
        sequences.take(query, counts)
