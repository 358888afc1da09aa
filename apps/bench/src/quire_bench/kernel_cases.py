"""What a benchmark of an op runs: its arguments for a shape, and the bytes and operations that nobody can do without.

Bytes count each input that is read and each output that is written once; operations count a multiplication and an
addition as two. Knows ops by their declarations in `quire_ops`; does not know backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_bench.batch_spec import SequenceLens, parse_batch
from quire_interfaces import ConfigError
from quire_ops import Experts, LinearWeights, PagedLayout, kv_cache_shape
from quire_ops.block_formats import BLOCK_FORMATS, block_header
from quire_ops.grouped import block_groups

__all__ = ["CASES", "KernelCase", "KernelWork", "make_work"]

Shape = dict[str, Any]


class KernelWork(NamedTuple):
    """One call of an op on memory of its own."""

    prepare: Callable[[Callable[..., Any]], Callable[[], Any]]
    """A backend's function -> the call that is measured."""
    num_bytes: int
    flop: int
    sizes: dict[str, int]
    """What the op table is asked with."""
    memory_bytes: int = 0
    """Of its tensors, where that is more than what a call moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """How an op is measured."""

    op: str
    defaults: Shape
    """Every dimension with the value that it has where a plan says nothing."""
    make: Callable[[Shape, torch.dtype, torch.device], KernelWork]


def make_work(op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    """Arguments and counts of one call.

    Args:
        shape: Dimensions by name; what is missing is the case's own.
        device: "meta" counts without any memory.

    Raises:
        ConfigError: There is no such case or dimension, or a dimension has no value that it can have.
    """
    if op not in CASES:
        raise ConfigError(f"there is no benchmark of op {op!r}; choose one of {', '.join(sorted(CASES))}", field="op")
    case = CASES[op]
    for name, value in shape.items():
        if name not in case.defaults:
            choices = ", ".join(case.defaults)
            raise ConfigError(f"op {op!r} has no dimension {name!r}; its dimensions are {choices}", field=name)
        if type(value) is not type(case.defaults[name]):
            wanted = "a text" if isinstance(case.defaults[name], str) else "a whole number"
            raise ConfigError(f"{name} of op {op!r} must be {wanted}, got {value!r}", field=name)
        if isinstance(value, int) and not 1 <= value <= 1 << 20:
            raise ConfigError(f"{name} of op {op!r} must be from 1 to {1 << 20}, got {value}", field=name)
    return case.make(case.defaults | shape, dtype, device)


def _random(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(sizes, dtype=dtype, device=device)
    return torch.randn(sizes, dtype=dtype, device=device)


def _integers(low: int, high: int, *sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(sizes, dtype=dtype, device=device)
    return torch.randint(low, high, sizes, dtype=dtype, device=device)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _norm(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    x, weight = (
        _random(*size, dtype=dtype, device=device) for size in ((shape["rows"], shape["size"]), (shape["size"],))
    )
    return KernelWork(lambda f: lambda: f(x, weight, 1e-6), 2 * _bytes(x) + _bytes(weight), 4 * x.numel(), {})


def _add_norm(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    rows, size = shape["rows"], shape["size"]
    x, residual, weight = (_random(*s, dtype=dtype, device=device) for s in ((rows, size), (rows, size), (size,)))
    return KernelWork(lambda f: lambda: f(x, residual, weight, 1e-6), 4 * _bytes(x) + _bytes(weight), 5 * x.numel(), {})


def _gate(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    gate, up = (_random(shape["rows"], shape["size"], dtype=dtype, device=device) for _ in range(2))
    return KernelWork(lambda f: lambda: f(gate, up), 3 * _bytes(gate), 5 * gate.numel(), {})


def _product(
    shape: Shape, dtype: torch.dtype, device: torch.device, weights: list[Tensor], out_bytes: int, call: Any
) -> KernelWork:
    rows, outputs, inputs = shape["rows"], shape["outputs"], shape["inputs"]
    x = _random(rows, inputs, dtype=dtype, device=device)
    num_bytes = _bytes(x, *weights) + out_bytes * rows
    return KernelWork(lambda f: lambda: call(f, x), num_bytes, 2 * rows * outputs * inputs, {})


def _linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _random(shape["outputs"], shape["inputs"], dtype=dtype, device=device)
    return _product(shape, dtype, device, [weight], shape["outputs"] * dtype.itemsize, lambda f, x: f(x, weight, None))


def _gated_linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _random(2 * shape["outputs"], shape["inputs"], dtype=dtype, device=device)
    out_bytes = shape["outputs"] * dtype.itemsize
    work = _product(shape, dtype, device, [weight], out_bytes, lambda f, x: f(x, weight, None, "silu"))
    return work._replace(flop=2 * work.flop + 5 * shape["rows"] * shape["outputs"])


def _lm_head(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _random(shape["outputs"], shape["inputs"], dtype=dtype, device=device)
    return _product(shape, dtype, device, [weight], 4 * shape["outputs"], lambda f, x: f(x, weight))


def _lm_head_argmax(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _random(shape["outputs"], shape["inputs"], dtype=dtype, device=device)
    return _product(shape, dtype, device, [weight], 12, lambda f, x: f(x, weight))


def _int8_linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _integers(-127, 128, shape["outputs"], shape["inputs"], dtype=torch.int8, device=device)
    scale = _random(shape["outputs"], dtype=dtype, device=device)
    out_bytes = shape["outputs"] * dtype.itemsize
    return _product(shape, dtype, device, [weight, scale], out_bytes, lambda f, x: f(x, weight, scale, None))


def _int4_linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    outputs, inputs = shape["outputs"], shape["inputs"]
    weight = _integers(0, 256, outputs, 64 * -(-inputs // 128), dtype=torch.uint8, device=device)
    scale = block_groups(_random(outputs, -(-inputs // 128), dtype=dtype, device=device))
    call = lambda f, x: f(x, weight, scale, None, None)  # noqa: E731
    return _product(shape, dtype, device, [weight, scale], outputs * dtype.itemsize, call)


def _block_linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    form = shape["form"]
    forms = [name for name, layout in BLOCK_FORMATS.items() if not layout.grid]
    if form not in forms:
        raise ConfigError(f"form of op 'block_linear' must be one of {', '.join(forms)}, got {form!r}", field="form")
    if shape["inputs"] % BLOCK_FORMATS[form].inputs:
        raise ConfigError(
            f"inputs of {form} are whole blocks of {BLOCK_FORMATS[form].inputs}, got {shape['inputs']}", field="inputs"
        )
    size = (shape["outputs"], BLOCK_FORMATS[form].row_bytes(shape["inputs"]))
    weight = _integers(0, 256, *size, dtype=torch.uint8, device=device)
    weight &= 0x3B  # whatever is a scale is a number of moderate size then
    header = block_header(form, torch.linspace(-1, 1, 16)).to(device)
    out_bytes = shape["outputs"] * dtype.itemsize
    return _product(shape, dtype, device, [weight, header], out_bytes, lambda f, x: f(x, weight, header, None))


def _embedding(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    weight = _random(shape["vocab_size"], shape["size"], dtype=dtype, device=device)
    ids = _integers(0, shape["vocab_size"], shape["rows"], dtype=torch.int64, device=device)
    num_bytes = 2 * shape["rows"] * shape["size"] * dtype.itemsize
    return KernelWork(lambda f: lambda: f(ids, weight), num_bytes, 0, {}, _bytes(weight))


def _rotary(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    rows, head_dim = shape["rows"], shape["head_dim"]
    x = _random(rows, shape["heads"], head_dim, dtype=dtype, device=device)
    cos, sin = (_random(rows, 1, head_dim, dtype=dtype, device=device) for _ in range(2))
    num_bytes = 2 * _bytes(x) + _bytes(cos, sin)
    return KernelWork(lambda f: lambda: f(x, cos, sin), num_bytes, 3 * x.numel(), {"head_dim": head_dim})


def _layout(lens: list[SequenceLens], block_size: int, device: torch.device) -> tuple[PagedLayout, int]:
    counts = torch.tensor([-(-one.kv_len // block_size) for one in lens])
    ids = torch.randperm(int(counts.sum())) + 1
    table = torch.zeros(len(lens), int(counts.max()), dtype=torch.int64)
    slots = []
    for row, (one, blocks) in enumerate(zip(lens, ids.split(counts.tolist()), strict=True)):
        table[row, : len(blocks)] = blocks
        positions = torch.arange(one.kv_len - one.query_len, one.kv_len)
        slots.append(blocks[positions // block_size] * block_size + positions % block_size)
    starts = torch.tensor([0, *(one.query_len for one in lens)]).cumsum(0)
    kv_lens = [one.kv_len for one in lens]
    layout = PagedLayout(
        block_table=table.int().to(device), query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device), slot_mapping=torch.cat(slots).to(device),
        block_size=block_size, query_lens=[one.query_len for one in lens], kv_lens=kv_lens,
    )  # fmt: skip
    return layout, int(counts.sum()) + 1


def _cache(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[PagedLayout, Tensor]:
    layout, num_blocks = _layout(parse_batch(shape["batch"]), shape["block_size"], device)
    sizes = kv_cache_shape(num_blocks, shape["block_size"], shape["kv_heads"], shape["head_dim"])
    return layout, _random(*sizes, dtype=dtype, device=device)


def _write(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    layout, cache = _cache(shape, dtype, device)
    sizes = (sum(layout.query_lens), shape["kv_heads"], shape["head_dim"])
    key, value = (_random(*sizes, dtype=dtype, device=device) for _ in range(2))
    return KernelWork(
        lambda f: lambda: f(key, value, cache, layout.slot_mapping, None), 4 * _bytes(key), 0,
        {"head_dim": shape["head_dim"]}, _bytes(cache),
    )  # fmt: skip


def _attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    layout, cache = _cache(shape, dtype, device)
    heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    if heads % kv_heads:
        raise ConfigError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})", field="heads")
    query = _random(sum(layout.query_lens), heads, head_dim, dtype=dtype, device=device)
    lens = list(zip(layout.query_lens, layout.kv_lens, strict=True))
    pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in lens)  # of tokens of which one sees the other
    read = 2 * sum(layout.kv_lens) * kv_heads * head_dim * dtype.itemsize
    return KernelWork(
        lambda f: lambda: f(query, cache, layout, scale=head_dim**-0.5), read + 2 * _bytes(query),
        4 * pairs * heads * head_dim,
        {"head_dim": head_dim, "block_size": shape["block_size"], "queries_per_kv_head": heads // kv_heads},
        _bytes(cache),
    )  # fmt: skip


def _moe(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    rows, experts, top_k, size, inner = (shape[name] for name in ("rows", "experts", "top_k", "size", "inner"))
    if top_k > experts:
        raise ConfigError(f"top_k ({top_k}) must be at most experts ({experts})", field="top_k")

    def layers(outputs: int, inputs: int) -> tuple[LinearWeights, ...]:
        return tuple(map(LinearWeights, _random(experts, outputs, inputs, dtype=dtype, device=device).unbind()))

    stack = Experts(gate=layers(inner, size), up=layers(inner, size), down=layers(size, inner), activation="silu")
    x, weights = _random(rows, size, dtype=dtype, device=device), torch.rand(rows, top_k, device=device)
    ids = torch.rand(rows, experts, device=device).topk(top_k).indices
    used = min(experts, rows * top_k) if ids.is_meta else len(ids.unique())

    def prepare(function: Callable[..., Any]) -> Callable[[], Any]:
        run = function(stack)
        return lambda: run(x, ids, weights)

    num_bytes = 3 * used * size * inner * dtype.itemsize + 2 * _bytes(x)
    memory_bytes = 3 * experts * size * inner * dtype.itemsize + 4 * rows * experts
    return KernelWork(prepare, num_bytes, 6 * rows * top_k * size * inner, {}, memory_bytes)


def _maxsim(shape: Shape, dtype: torch.dtype, device: torch.device) -> KernelWork:
    query_len, document_len, count, size = (shape[name] for name in ("query_len", "document_len", "documents", "size"))
    query, documents = (_random(n, size, dtype=dtype, device=device) for n in (query_len, count * document_len))
    lens = [document_len] * count
    num_bytes, flop = _bytes(query, documents) + 4 * count, 2 * query_len * documents.numel()
    return KernelWork(lambda f: lambda: f(query, documents, [query_len], lens), num_bytes, flop, {})


_ROWS: Shape = {"rows": 32, "size": 4096}
_PRODUCT: Shape = {"rows": 1, "outputs": 4096, "inputs": 4096}
_HEADS: Shape = {"batch": "8xq1k1k", "kv_heads": 8, "head_dim": 128, "block_size": 16}

CASES: dict[str, KernelCase] = {
    op: KernelCase(op=op, defaults=defaults, make=make)
    for op, defaults, make in (
        ("rms_norm", _ROWS, _norm),
        ("add_rms_norm", _ROWS, _add_norm),
        ("silu_and_mul", _ROWS | {"size": 14336}, _gate),
        ("gelu_and_mul", _ROWS | {"size": 14336}, _gate),
        ("linear", _PRODUCT, _linear),
        ("gated_linear", _PRODUCT | {"outputs": 14336}, _gated_linear),
        ("lm_head", _PRODUCT | {"outputs": 32000}, _lm_head),
        ("lm_head_argmax", _PRODUCT | {"outputs": 32000}, _lm_head_argmax),
        ("int8_linear", _PRODUCT, _int8_linear),
        ("grouped_linear", _PRODUCT, _int4_linear),
        ("block_linear", _PRODUCT | {"form": "Q4_K"}, _block_linear),
        ("embedding", _ROWS | {"vocab_size": 32000}, _embedding),
        ("rotary_embedding", {"rows": 32, "heads": 32, "head_dim": 128}, _rotary),
        ("write_kv_cache", _HEADS, _write),
        ("paged_attention", _HEADS | {"heads": 32}, _attention),
        ("maxsim", {"query_len": 32, "document_len": 180, "documents": 100, "size": 128}, _maxsim),
        ("fused_moe", {"rows": 8, "experts": 8, "top_k": 2, "size": 1024, "inner": 768}, _moe),
    )
}
"""Op -> how it is measured; `grouped_linear` with int4 in groups of 128, `block_linear` in blocks of `form`,
`gated_linear` with `outputs` of gate, as many of up."""
