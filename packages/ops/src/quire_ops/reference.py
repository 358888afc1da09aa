"""The reference backend: what each op means, in plain torch, slowly and in float64 where rounding matters.

Shapes and dtypes are declared in `declarations.py`. These functions are the specification that every other backend is
tested against; they are never meant to be fast. Results are cast to the dtype of the main input at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.declarations import PagedLayout
from quire_ops.fp8_tokens import FP8_GROUP
from quire_ops.grouped import dequantize
from quire_ops.kv_reference import decode_row, encode_row
from quire_ops.rounding import QuantizedTokens, Rounding, round_rows
from quire_ops.step_inputs import GroupInputs, HostInts, RowTable, StepInputs

__all__ = [
    "activation",
    "add_rms_norm",
    "add_rms_norm_quant",
    "biased_paged_attention",
    "embedding",
    "encoder_attention",
    "fp8_linear",
    "gate_quant",
    "gated_linear",
    "gelu_and_mul",
    "grouped_linear",
    "head_linear",
    "int8_linear",
    "latent_attention",
    "layer_norm",
    "linear",
    "lm_head",
    "lm_head_argmax",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "rotary_embedding",
    "sigmoid_and_mul",
    "silu_and_mul",
    "step_inputs",
    "w8a8_linear",
    "write_kv_cache",
    "write_latent_cache",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Op `linear`."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """Op `lm_head`."""
    return (x.double() @ weight.double().T).float()


def lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Op `lm_head_argmax`."""
    peaks, ids = lm_head(x, weight).max(dim=-1)  # torch promises the first of equals
    return ids, peaks


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """Op `int8_linear`."""
    return _wide_or_not(x, weight.double() * scale.double()[:, None], bias, wide=wide)


def w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """Op `w8a8_linear`."""
    tokens, step, dtype = _rounded(x, Rounding(torch.int8, input_scale))
    out = (tokens.long() @ weight.long().T).double() * step.double()[:, None] * scale.double()
    out = out if bias is None else out + bias.double()
    return out.to(torch.float32 if wide else dtype)


def fp8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
) -> Tensor:
    """Op `fp8_linear`."""
    tokens, step, dtype = _rounded(x, Rounding(torch.float8_e4m3fn, input_scale, by_group=scale.shape[1] > 1))
    inputs = tokens.shape[1]
    size = inputs if scale.shape[1] == 1 else FP8_GROUP
    rows, columns = (
        part.double() * of_group.double().repeat_interleave(size, dim=1)[:, :inputs]
        for part, of_group in ((tokens, step), (weight, scale))
    )
    out = rows @ columns.T
    out = out if bias is None else out + bias.double()
    return out.to(torch.float32 if wide else dtype)


def _rounded(x: Tensor | QuantizedTokens, rounding: Rounding) -> QuantizedTokens:
    return x if isinstance(x, QuantizedTokens) else round_rows(x, rounding)


def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, wide: bool = False
) -> Tensor:
    """Op `grouped_linear`."""
    return _wide_or_not(x, dequantize(weight, scale, zero, x.shape[1], torch.float64), bias, wide=wide)


def _wide_or_not(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    out = linear(x.double(), weight, bias)
    return out.to(torch.float32 if wide else x.dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Op `embedding`."""
    return torch.stack([weight[token] for token in ids.tolist()]) if len(ids) else weight[:0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Op `rms_norm`."""
    wide = x.double()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Op `add_rms_norm`."""
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Op `layer_norm`."""
    wide = x.double()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.double()
    return (out if bias is None else out + bias.double()).to(x.dtype)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Op `rotary_embedding`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].double(), x[..., half:].double()
    cosine, sine = cos[..., :half].double(), sin[..., half:].double()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `silu_and_mul`."""
    wide = gate.double()
    return (wide * torch.sigmoid(wide) * up.double()).to(gate.dtype)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `gelu_and_mul`."""
    wide = gate.double()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1.0 + torch.tanh(inner)) * up.double()).to(gate.dtype)


def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Op `sigmoid_and_mul`."""
    return (torch.sigmoid(gate.double()) * up.double()).to(gate.dtype)


def activation(x: Tensor, name: str) -> Tensor:
    """Op `activation`."""
    wide = x.double()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x / (1.0 + torch.exp(-x)),
        "gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_erf": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)),
        "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
        "tanh": torch.tanh,
        "expm1": torch.expm1,
    }
    return functions[name](wide).to(x.dtype)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: Rounding
) -> tuple[QuantizedTokens, Tensor]:
    """Op `add_rms_norm_quant`."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return round_rows(normed, rounding), total


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Op `gated_linear`."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return silu_and_mul(gate, up) if activation == "silu" else gelu_and_mul(gate, up)


def gate_quant(gate: Tensor, up: Tensor, activation: str, rounding: Rounding) -> QuantizedTokens:
    """Op `gate_quant`."""
    return round_rows({"silu": silu_and_mul, "gelu": gelu_and_mul}[activation](gate, up), rounding)


def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Op `write_kv_cache`: one row at a time."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        for head in range(num_kv_heads):
            for which, x in enumerate((key[token, head], value[token, head])):
                scale = 1.0 if kv_scale is None else float(kv_scale[which, head])
                kv_cache[block, which, head, offset] = encode_row(x, kv_cache.dtype, scale)


def rope_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scale: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Op `rope_and_write_kv`."""
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps)
    write_kv_cache(rotary_embedding(key, cos, sin), value, kv_cache, slot_mapping, kv_scale)
    return rotary_embedding(query, cos, sin)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Op `paged_attention`: one query token at a time, over exactly the tokens that it may see. With `bias`, op
    `biased_paged_attention`."""
    out = torch.empty_like(query)
    group_size = query.shape[1] // kv_cache.shape[2]
    tables = layout.block_table.tolist()
    token = 0
    for blocks, query_len, kv_len in zip(tables, layout.query_lens, layout.kv_lens, strict=True):
        seen_by = [_places(layout, token + i, kv_len - query_len + i, sliding_window) for i in range(query_len)]
        first = min(map(min, seen_by))
        pairs = _pairs(kv_cache, blocks, first, kv_len, kv_scale)
        for places in seen_by:
            seen = pairs[torch.tensor(places) - first]  # [L, 2, Hkv, D]
            keys = seen[:, 0].repeat_interleave(group_size, dim=1)  # [L, Hq, D]
            values = seen[:, 1].repeat_interleave(group_size, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[token].double(), keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if alibi_slopes is not None:
                distance = torch.arange(len(places) - 1, -1, -1)
                scores = scores - alibi_slopes.double()[:, None] * distance
            if bias is not None:
                distance = torch.arange(len(places) - 1, -1, -1)
                scores = scores + bias.double()[:, distance.clamp_max(bias.shape[1] - 1)]
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
            weights = torch.softmax(scores, dim=-1)[:, : len(seen)]
            out[token] = torch.einsum("hl,lhd->hd", weights, values).to(query.dtype)
            token += 1
    return out


def biased_paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    bias: Tensor,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Op `biased_paged_attention`."""
    return paged_attention(query, kv_cache, layout, scale=scale, kv_scale=kv_scale, bias=bias)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Op `encoder_attention`: one token at a time, over exactly the tokens that it may see."""
    out = torch.empty_like(query)
    group_size = query.shape[1] // key.shape[1]
    begin = 0
    for length in lens:
        for token in range(begin, begin + length):
            seen = [other for other in range(begin, begin + length) if window is None or abs(other - token) <= window]
            keys = key[seen].double().repeat_interleave(group_size, dim=1)  # [L, Hq, D]
            values = value[seen].double().repeat_interleave(group_size, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[token].double(), keys) * scale
            if bias is not None:
                most = bias.shape[1] // 2
                scores += bias.double()[:, [most + max(-most, min(other - token, most)) for other in seen]]
            out[token] = torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=-1), values).to(query.dtype)
        begin += length
    return out


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Op `head_linear`."""
    return torch.einsum("thi,hoi->tho", x.double(), weight.double()).to(x.dtype)


def write_latent_cache(row: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """Op `write_latent_cache`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        latent_cache[divmod(slot, latent_cache.shape[1])] = row[token]


def latent_attention(query: Tensor, latent_cache: Tensor, layout: PagedLayout, *, scale: float, rank: int) -> Tensor:
    """Op `latent_attention`: one query token at a time, over exactly the tokens that it may see."""
    out = query.new_empty(*query.shape[:2], rank)
    block_size, token = latent_cache.shape[1], 0
    for blocks, query_len, kv_len in zip(layout.block_table.tolist(), layout.query_lens, layout.kv_lens, strict=True):
        rows = [latent_cache[blocks[place // block_size], place % block_size] for place in range(kv_len)]
        for place in range(kv_len - query_len, kv_len):
            seen = torch.stack([rows[p] for p in _places(layout, token, place)]).double()  # [L, W]
            weights = torch.softmax(query[token].double() @ seen.T * scale, dim=-1)
            out[token] = (weights @ seen[:, :rank]).to(query.dtype)
            token += 1
    return out


def _places(layout: PagedLayout, token: int, place: int, sliding_window: int | None = None) -> list[int]:
    """Where the tokens are that a token sees, in the order of their positions; its own place is the last."""
    if layout.paths is None or int(layout.paths[token, 0]) < 0:
        places = list(range(place + 1))
    else:
        position, root, *path = layout.paths[token].tolist()
        places = [*range(root), *path[: position + 1 - root]]
    return places if sliding_window is None else places[-sliding_window:]


def _pairs(kv_cache: Tensor, blocks: list[int], begin: int, end: int, kv_scale: Tensor | None) -> Tensor:
    """[end - begin, 2, Hkv, D] float64: keys and values at these places of one sequence."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    scales = torch.ones(2, num_kv_heads) if kv_scale is None else kv_scale
    rows = [
        decode_row(kv_cache[blocks[place // block_size], which, head, place % block_size], float(scales[which, head]))
        for place in range(begin, end)
        for which in range(2)
        for head in range(num_kv_heads)
    ]
    return torch.stack(rows).view(end - begin, 2, num_kv_heads, -1)


def decode_inputs(token_ids: Tensor, tables: tuple[RowTable, ...], spans: Tensor) -> StepInputs:
    """Op `decode_inputs`: by op `step_inputs`, and zeros up to the width of the tables."""
    rows, starts, ends, _ = spans.cpu().numpy()
    inputs = step_inputs(token_ids, tables, rows, starts, ends)
    groups = tuple(
        GroupInputs(
            F.pad(group.block_table, (0, table.table.shape[1] - group.block_table.shape[1])), group.slot_mapping
        )
        for group, table in zip(inputs.groups, tables, strict=True)
    )
    return inputs._replace(groups=groups)


def step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    """Op `step_inputs`: one token at a time."""
    spans = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    tokens = [(row, position) for row, start, end in spans for position in range(start, end)]
    query_start_loc = [0]
    for _, start, end in spans:
        query_start_loc.append(query_start_loc[-1] + end - start)

    def block_table(table: RowTable) -> list[list[int]]:
        window = table.sliding_window
        width = max(-(-end // table.block_size) for _, _, end in spans)
        found = []
        for row, start, end in spans:
            first = 0 if window is None else max(start - window + 1, 0)
            seen = range(first // table.block_size, -(-end // table.block_size))
            found.append([int(table.table[row, block]) if block in seen else 0 for block in range(width)])
        return found

    def slots(table: RowTable) -> list[int]:
        size = table.block_size
        return [int(table.table[row, position // size]) * size + position % size for row, position in tokens]

    device = token_ids.device
    return StepInputs(
        input_ids=torch.tensor([int(token_ids[token]) for token in tokens], dtype=torch.int64, device=device),
        positions=torch.tensor([position for _, position in tokens], dtype=torch.int64, device=device),
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=device),
        groups=tuple(
            GroupInputs(
                torch.tensor(block_table(table), dtype=torch.int32, device=device),
                torch.tensor(slots(table), dtype=torch.int64, device=device),
            )
            for table in tables
        ),
    )
