"""Recurrent ops on sequences that are cut into steps anyhow: unwritten states NaN, blocks left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from ops_layouts import Layout
from torch import Tensor

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LENS = [1, 2, 3, 17, 64, 65, 150]
"""Of the sequences; the torch backend's chunks have 64 tokens. Tests of slower backends cut a case's `inputs`."""


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


class ConvCase:
    """x is a piece of a wider row, as it is behind a projection."""

    name = "causal_conv1d"
    channels, taps = 21, 4

    def __init__(self, dtype: torch.dtype, *, bias: bool = True, activation: str | None = "silu") -> None:
        self.state_shape, self.state_dtype = (self.taps - 1, self.channels), torch.float32
        self.weight = rand(self.channels, self.taps, dtype=dtype)
        self.bias = rand(self.channels, dtype=dtype) if bias else None
        self.activation = activation
        self.inputs = [rand(n, self.channels + 11, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        x = rows[:, 4 : 4 + self.channels]
        return function(x, self.weight, self.bias, state, layout, activation=self.activation)


class DynamicConvCase:
    name = "dynamic_conv1d"
    channels, groups, taps = 21, 7, 4

    def __init__(self, dtype: torch.dtype) -> None:
        self.state_shape, self.state_dtype = (self.taps - 1, self.channels), torch.float32
        self.weight = rand(self.channels, self.taps, dtype=dtype)
        self.inputs = [rand(n, self.channels + self.groups * self.taps + 3, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        x, dynamic, _ = rows.split([self.channels, self.groups * self.taps, 3], dim=-1)
        return function(x, self.weight, dynamic.unflatten(-1, (self.groups, self.taps)), state, layout)


class Mamba2Case:
    name = "mamba2_scan"

    def __init__(
        self, dtype: torch.dtype, *, heads: int = 6, groups: int = 2, size: int = 5, numbers: int = 24
    ) -> None:
        self.shape = (heads, size, groups, numbers)
        self.state_shape, self.state_dtype = (heads, size, numbers), torch.float32
        self.fixed = (-rand(heads).exp(), rand(heads), rand(heads))
        self.inputs = [rand(n, heads * size + heads + 2 * groups * numbers + 3, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        heads, size, groups, numbers = self.shape
        x, dt, b, c, _ = rows.split([heads * size, heads, groups * numbers, groups * numbers, 3], dim=-1)
        a, d, dt_bias = self.fixed
        x = x.unflatten(-1, (heads, size))
        b, c = b.unflatten(-1, (groups, numbers)), c.unflatten(-1, (groups, numbers))
        return function(x, dt, a, b, c, d, dt_bias, state, layout, dt_limit=(0.1, 2.0))


class Mamba1Case:
    name = "selective_scan"

    def __init__(self, dtype: torch.dtype, *, channels: int = 19, numbers: int = 16) -> None:
        self.channels, self.numbers = channels, numbers
        self.state_shape, self.state_dtype = (channels, numbers), torch.float32
        self.fixed = (-rand(channels, numbers).exp(), rand(channels), rand(channels))
        self.inputs = [rand(n, 2 * channels + 2 * numbers + 3, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        x, dt, b, c, _ = rows.split([self.channels, self.channels, self.numbers, self.numbers, 3], dim=-1)
        a, d, dt_bias = self.fixed
        return function(x.contiguous(), dt.contiguous(), a, b, c, d, dt_bias, state, layout)


class DeltaCase:
    name = "gated_delta_rule"

    def __init__(self, dtype: torch.dtype, *, keys: int = 2, values: int = 4, key: int = 12, value: int = 20) -> None:
        self.shape = (keys, values, key, value)
        self.state_shape, self.state_dtype = (values, key, value), torch.float32
        self.fixed = (rand(values), rand(values))
        self.inputs = [rand(n, 2 * keys * key + values * value + 2 * values + 3, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        keys, values, key, value = self.shape
        q, k, v, a, b, _ = rows.split([keys * key, keys * key, values * value, values, values, 3], dim=-1)
        q, k, v = q.unflatten(-1, (keys, key)), k.unflatten(-1, (keys, key)), v.unflatten(-1, (values, value))
        return function(q, k, v, a, b, *self.fixed, state, layout)


class ChannelDeltaCase:
    name = "channel_delta_rule"

    def __init__(self, dtype: torch.dtype, *, heads: int = 3, key: int = 12, value: int = 20) -> None:
        self.shape = (heads, key, value)
        self.state_shape, self.state_dtype = (heads, key, value), torch.float32
        self.inputs = [rand(n, heads * (3 * key + value + 1) + 3, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        heads, key, value = self.shape
        parts = rows.split([heads * key, heads * key, heads * value, heads * key, heads, 3], dim=-1)
        q, k, v, decay = (each.unflatten(-1, (heads, -1)) for each in parts[:4])
        strength = 2 * torch.sigmoid(parts[4].float())
        return function(q, k, v, -decay.float().exp(), strength, state, layout)


class WkvCase:
    name = "wkv"

    def __init__(self, dtype: torch.dtype, *, channels: int = 21) -> None:
        self.channels = channels
        self.state_shape, self.state_dtype = (3, channels), torch.float32
        self.fixed = (-rand(channels).exp(), rand(channels))
        self.inputs = [2 * rand(n, 2 * channels, dtype=dtype) for n in LENS]

    def __call__(self, function: Callable[..., Tensor], rows: Tensor, state: Tensor, layout: Layout) -> Tensor:
        key, value = rows.split(self.channels, dim=-1)
        return function(key, value, *self.fixed, state, layout)


CASES: dict[str, Callable[[torch.dtype], Any]] = {
    "dynamic conv": DynamicConvCase,
    "conv": ConvCase,
    "conv-plain": lambda dtype: ConvCase(dtype, bias=False, activation=None),
    "mamba2": Mamba2Case,
    "mamba2-wide": lambda dtype: Mamba2Case(dtype, heads=3, groups=1, size=17, numbers=64),
    "mamba2-narrow": lambda dtype: Mamba2Case(dtype, heads=4, groups=4, size=8, numbers=3),
    "mamba1": Mamba1Case,
    "mamba1-wide": lambda dtype: Mamba1Case(dtype, channels=64, numbers=5),
    "wkv": WkvCase,
    "delta": DeltaCase,
    "delta-wide": lambda dtype: DeltaCase(dtype, keys=1, values=3, key=32, value=33),
    "delta-channels": ChannelDeltaCase,
    "delta-equal-heads": lambda dtype: DeltaCase(dtype, keys=3, values=3, key=7, value=16),
}


class Steps:
    """Sequences of a case through an op, some tokens at a time, on one cache of states."""

    def __init__(self, case: Any, block_size: int, rng: random.Random) -> None:
        self.case, self.size = case, block_size
        self.lens = [len(rows) for rows in case.inputs]
        self.tables: list[list[int]] = []
        ids = list(range(1, sum(-(-n // block_size) for n in self.lens) + 1))
        rng.shuffle(ids)
        for n in self.lens:
            self.tables.append([ids.pop() for _ in range(-(-n // block_size))])
        # Beside a state is other content of the same block, as in a pool that several layers share.
        num_blocks = 1 + sum(map(len, self.tables))
        width = torch.Size(case.state_shape).numel()
        self.memory = torch.full((num_blocks, width + 5), float("nan"), dtype=case.state_dtype)
        self.state = self.memory[:, :width].unflatten(1, case.state_shape)
        self.done = [0] * len(self.lens)
        self.results: list[list[Tensor]] = [[] for _ in self.lens]
        self.rng = rng

    def step(self, function: Callable[..., Tensor], counts: dict[int, int]) -> None:
        tables, starts = [], [0]
        width = max(-(-(self.done[i] + n) // self.size) for i, n in counts.items())
        for i, n in counts.items():
            end = self.done[i] + n
            first = max(self.done[i] - 1, 0) // self.size
            kept = range(max(end // self.size - 1, 0), -(-end // self.size))
            # The block manager gives blocks inside of a step no place for a state; an op stores one where it may.
            table = [0] * width
            for j, block in enumerate(self.tables[i][: -(-end // self.size)]):
                if j == first or j in kept or (first < j < kept.start and self.rng.random() < 0.3):
                    table[j] = block
            tables.append(table)
            starts.append(starts[-1] + n)
        layout = Layout(
            block_table=torch.tensor(tables, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
            block_size=self.size,
            query_lens=list(counts.values()),
            kv_lens=[self.done[i] + n for i, n in counts.items()],
        )
        rows = torch.cat([self.case.inputs[i][self.done[i] : self.done[i] + n] for i, n in counts.items()])
        before = rows.clone()
        out = self.case(function, rows, self.state, layout)
        assert torch.equal(rows, before), "inputs are not changed"
        for i, part in zip(counts, out.split(list(counts.values())), strict=True):
            self.results[i].append(part.clone())
            self.done[i] += counts[i]
        assert self.memory[:, self.memory.shape[1] - 5 :].isnan().all()

    def run(self, function: Callable[..., Tensor], chunk: Callable[[], int]) -> list[Tensor]:
        while True:
            left = {i: n - self.done[i] for i, n in enumerate(self.lens) if self.done[i] < n}
            if not left:
                return [torch.cat(parts) for parts in self.results]
            names = list(left)
            self.rng.shuffle(names)
            self.step(function, {i: min(left[i], chunk()) for i in names[: self.rng.randint(1, len(names))]})

    def last_states(self) -> list[Tensor]:
        return [self.state[table[-1]] for table in self.tables]


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype, scale: float = 1.0) -> bool:
    return bool((got.double() - wanted.double()).abs().max() <= scale * TOLERANCE[dtype] * wanted.double().abs().max())
