"""Latents in fp8: the bytes of a row against a statement of the layout in numpy, and ops over such rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from ops_layouts import random_layout

from quire_interfaces import latent_row_bytes
from quire_ops import OpBackend, OpRequest, latent_width, op_table, ops, split_latent_cache

REQUEST = OpRequest(cache_dtype="fp8_ds_mla")
SHAPES = [(16, 24), (128, 136), (132, 140), (512, 576)]
"""(latent, entry)."""
NUMBERS = np.array(
    [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
"""What float8_e4m3 has, by its codes from 0 to 126: subnormal numbers, then 2^(e - 7) (1 + m / 8), up to 448."""


def serving(op) -> list[OpBackend]:
    found = [each for each in op_table().backends(op) if each.refusal(REQUEST) is None]
    assert len(found) > 1
    return [each for each in found if each.name != "reference"]


def stated_row(x: np.ndarray, rank: int) -> bytes:
    """The row of an entry [W] float32, number by number."""
    codes, scales = b"", b""
    for begin in range(0, rank, 128):
        group = x[begin : min(begin + 128, rank)]
        scale = np.maximum(np.abs(group).max() / np.float32(448), np.finfo(np.float32).tiny)
        assert scale.dtype == np.float32
        for number in group:
            size = np.float64(np.abs(number) / scale)  # in float32
            below = np.searchsorted(NUMBERS, size, side="right") - 1
            if below < 126:
                middle = (NUMBERS[below] + NUMBERS[below + 1]) / 2
                below += size > middle or (size == middle and below % 2)
            codes += bytes([below | (0x80 if np.signbit(number) else 0)])
        scales += scale.tobytes()
    bits = x[rank:].view(np.uint32).astype(np.uint64)
    rest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return codes + scales + rest.tobytes()


def entries_of(rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Entries large and small, with zeros, halves between two codes, and a group of nothing but zeros."""
    torch.manual_seed(rank)
    rows = torch.randn(7, width) * torch.tensor([1.0, 1e-3, 300.0, 1.0, 1e-20, 1.0, 1.0])[:, None]
    rows[3, :rank] = 0
    rows[5, :rank] = torch.linspace(-448, 448, rank) / 3
    halves = torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), 416.0])
    rows[6, :8], rows[6, 8:rank] = halves, 0.0
    return rows.to(dtype)


@pytest.mark.parametrize(("rank", "width"), SHAPES)
@pytest.mark.parametrize("backend", [*serving(ops.write_latent_cache), None], ids=lambda each: each and each.name)
def test_rows_are_the_stated_bytes(backend: OpBackend | None, rank: int, width: int) -> None:
    write = ops.write_latent_cache if backend is None else backend.function
    for dtype in (torch.float32, torch.bfloat16):
        entries = entries_of(rank, width, dtype)
        size = latent_row_bytes("fp8_ds_mla", width, rank)
        cache = torch.full((3, 4, size + 8), 0x7F, dtype=torch.uint8)[..., :size]
        assert latent_width(cache, rank) == width
        slots = torch.tensor([11, 0, 5, 4, 3, 8, 9])
        write(entries, cache, slots, rank)
        for entry, slot in zip(entries.float().numpy(), slots.tolist(), strict=True):
            assert cache[divmod(slot, 4)].numpy().tobytes() == stated_row(entry, rank)
        assert (cache[0, 1] == 0x7F).all()


def test_sizes_are_the_published_ones() -> None:
    assert latent_row_bytes("fp8_ds_mla", 576, 512) == 656
    cache = torch.zeros(2, 4, 656 + 256, dtype=torch.uint8)
    latents, keys = split_latent_cache(cache, 576, 512)
    assert latents.shape == (2, 4, 656)
    assert keys.shape == (2, 4, 128)
    keys[1, 2, 0] = 1.0
    assert cache[1, 2, 656:658].tolist() == [0x80, 0x3F]


def test_what_is_no_number_stays_none() -> None:
    for write in (ops.write_latent_cache, *(each.function for each in serving(ops.write_latent_cache))):
        entries, cache = torch.ones(1, 136), torch.zeros(1, 1, 148, dtype=torch.uint8)
        entries[0, 5] = torch.nan
        write(entries, cache, torch.tensor([0]), 128)
        query = torch.ones(1, 1, 136)
        for attend in (ops.sparse_latent_attention, *(each.function for each in serving(ops.sparse_latent_attention))):
            assert attend(query, cache, torch.tensor([[0]]), scale=1.0, rank=128).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "width"), [(16, 24), (192, 208)])
def test_attention_is_that_of_what_rows_stand_for(dtype: torch.dtype, rank: int, width: int) -> None:
    """Every op that reads latents, against its reference over a cache of these numbers in float64."""
    torch.manual_seed(1)
    lens = [(1, 17), (7, 25), (1, 40), (20, 20)]
    layout, num_blocks = random_layout(random.Random(0), lens, 8, shuffle=True)
    size = latent_row_bytes("fp8_ds_mla", width, rank)
    rows = torch.full((num_blocks, 8, size + 6), 0xFF, dtype=torch.uint8)[..., :size]  # not a number, everywhere
    plain = torch.full((num_blocks, 8, width), torch.nan, dtype=torch.float64)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            slot, entry = table[position // 8] * 8 + position % 8, torch.randn(1, width)
            ops.write_latent_cache(entry, rows, torch.tensor([slot]), rank)
            written = bytes(rows[divmod(slot, 8)].tolist())
            scales = np.frombuffer(written[rank : rank + 4 * -(-rank // 128)], np.float32).astype(np.float64)
            signs = [-1.0 if code & 0x80 else 1.0 for code in written[:rank]]
            latent = [sign * NUMBERS[code & 0x7F] for sign, code in zip(signs, written[:rank], strict=True)]
            latent = np.array(latent) * np.repeat(scales, 128)[:rank]
            rest = np.frombuffer(written[-2 * (width - rank) :], np.uint16).astype(np.uint32) << 16
            number = np.concatenate([latent, rest.view(np.float32).astype(np.float64)])
            plain[divmod(slot, 8)] = torch.from_numpy(number)
    query = torch.randn(sum(layout.query_lens), 3, width).to(dtype)
    ends = [kv_len - count + i + 1 for count, kv_len in lens for i in range(count)]
    found = torch.stack([torch.cat([torch.randperm(end)[:9], torch.full((9,), -1)])[:9] for end in ends])
    slots, visible = ops.position_slots(found, layout), torch.tensor(ends, dtype=torch.int32)
    options = {"scale": 0.2, "rank": rank}
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for op, places in (
        (ops.latent_attention, (layout,)),
        (ops.sparse_latent_attention, (slots,)),
        (ops.latent_attention_with_lse, (layout, visible)),
        (ops.sparse_latent_attention_with_lse, (slots,)),
    ):
        wanted = op(query.double(), plain, *places, **options)
        for attend in (op, *(each.function for each in serving(op) if each.refusal(OpRequest(dtype=dtype)) is None)):
            got = attend(query, rows, *places, **options)
            both = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
            for mine, other in both:
                assert (mine.double() - other.double()).abs().max() <= tolerance * other.double().abs().max()
