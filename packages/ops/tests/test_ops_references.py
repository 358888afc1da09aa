"""References against other ways to write the same formula: torch in float64, complex numbers, plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ops_layouts import Layout
from torch import Tensor

from quire_ops import ActivationScheme, Experts, LinearWeights, PenaltyTable, RoutingRule, RowTable, kv_cache_shape, ops
from quire_ops.activation_quant import FP8_GROUP, quantize_fp8, quantize_int8, quantize_tokens

DOUBLE = torch.float64


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def one_sequence(length: int, queries: int, block_size: int = 4) -> Layout:
    """The last tokens of one sequence, whose blocks are in reverse order."""
    blocks = list(range(-(-length // block_size), 0, -1))
    places = range(length - queries, length)
    return Layout(
        block_table=torch.tensor([blocks], dtype=torch.int32),
        query_start_loc=torch.tensor([0, queries], dtype=torch.int32),
        slot_mapping=torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in places]),
        block_size=block_size,
        query_lens=[queries],
        kv_lens=[length],
    )


def test_products() -> None:
    x, weight, bias = rand(5, 7), rand(6, 7), rand(6)
    assert torch.allclose(ops.linear(x, weight, bias), F.linear(x, weight, bias))
    logits = ops.lm_head(x.float(), weight.float())
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, F.linear(x.float(), weight.float()), atol=1e-6)
    gate, up = F.linear(x, torch.cat((weight, weight.flip(0))), torch.cat((bias, bias))).chunk(2, -1)
    both = ops.gated_linear(x, torch.cat((weight, weight.flip(0))), torch.cat((bias, bias)), "silu")
    assert torch.allclose(both, F.silu(gate) * up)
    gain, residual = rand(7), rand(5, 6)
    normed = F.rms_norm(x, (7,), gain, 1e-5)
    assert torch.allclose(ops.norm_linear(x, gain, 1e-5, weight, bias, None), F.linear(normed, weight, bias))
    gate, up = F.linear(normed, weight).chunk(2, -1)
    assert torch.allclose(ops.norm_linear(x, gain, 1e-5, weight, None, "gelu"), F.gelu(gate, approximate="tanh") * up)
    assert torch.allclose(ops.linear_add(x, weight, bias, residual), residual + F.linear(x, weight, bias))
    heads, matrices = rand(3, 4, 7), rand(4, 6, 7)
    assert torch.allclose(ops.head_linear(heads, matrices)[:, 2], F.linear(heads[:, 2], matrices[2]))


def test_argmax_is_the_first_of_equals() -> None:
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    ids, max_logits = ops.lm_head_argmax(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [float("nan"), 0.0]]), weight)
    assert ids[:2].tolist() == [1, 3]
    assert max_logits[:2].tolist() == [2.0, 1.0]
    assert max_logits[2].isnan()


def test_embedding_of_tokens_and_of_none() -> None:
    weight = rand(9, 4)
    assert torch.equal(ops.embedding(torch.tensor([3, 3, 0]), weight), weight[[3, 3, 0]])
    assert ops.embedding(torch.empty(0, dtype=torch.int64), weight).shape == (0, 4)


def test_norms() -> None:
    x, residual, weight, bias = rand(3, 8), rand(3, 8), rand(8), rand(8)
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, [8], weight, 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.allclose(normed, F.rms_norm(x + residual, [8], weight, 1e-5))
    for w, b in ((weight, bias), (weight, None), (None, None)):
        assert torch.allclose(ops.layer_norm(x, w, b, 1e-5), F.layer_norm(x, [8], w, b, 1e-5))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "expm1": torch.expm1,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = torch.linspace(-9, 9, 181, dtype=DOUBLE)
    assert torch.allclose(ops.activation(x, name), ACTIVATIONS[name](x), atol=1e-14)


def test_gates() -> None:
    gate, up = rand(4, 5), rand(4, 5)
    assert torch.allclose(ops.silu_and_mul(gate, up), F.silu(gate) * up)
    assert torch.allclose(ops.gelu_and_mul(gate, up), F.gelu(gate, approximate="tanh") * up)
    assert torch.allclose(ops.sigmoid_and_mul(gate[:, :1], up), torch.sigmoid(gate[:, :1]) * up)


def test_rotation_is_a_product_of_complex_numbers() -> None:
    x, angle = rand(6, 2, 8), rand(6, 1, 4)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(ops.rotary_embedding(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_what_is_written_is_found_and_attended_to() -> None:
    length, queries, scale = 11, 3, 0.3
    whole, part = one_sequence(length, length), one_sequence(length, queries)
    query, key, value = rand(length, 4, 8), rand(length, 2, 8), rand(length, 2, 8)
    cache = torch.full(kv_cache_shape(4, 4, 2, 8), torch.nan, dtype=DOUBLE)
    ops.write_kv_cache(key, value, cache, whole.slot_mapping)
    heads = [x.transpose(0, 1) for x in (query, key, value)]
    wanted = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
    assert torch.allclose(ops.paged_attention(query, cache, whole, scale=scale), wanted)
    assert torch.allclose(ops.paged_attention(query[-queries:], cache, part, scale=scale), wanted[-queries:])
    bias = rand(4, 4)  # of distances 0, 1, 2, and from 3 on
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = bias[:, distance.clamp(0, 3)].masked_fill(distance < 0, -torch.inf)
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
    assert torch.allclose(ops.biased_paged_attention(query, cache, whole, scale=scale, bias=bias), wanted)
    factors = rand(length).exp()
    scores = torch.einsum("hid,hjd->hij", heads[0], heads[1].repeat_interleave(2, dim=0)) * scale
    capped = (0.5 * torch.tanh(scores / 0.5) * factors[:, None]).masked_fill(distance < 0, -torch.inf)
    wanted = torch.einsum("hij,hjd->ihd", capped.softmax(-1), heads[2].repeat_interleave(2, dim=0))
    options = {"scale": scale, "soft_cap": 0.5, "factors": factors}
    assert torch.allclose(ops.tempered_paged_attention(query, cache, whole, **options), wanted)
    relative, profiles = rand(length, 4, 3), rand(3, 5)  # of distances 0 to 4
    mixed = (relative @ profiles).transpose(0, 1).gather(2, distance.clamp(0, 4).expand(4, -1, -1))
    mask = mixed.masked_fill(distance > 4, 0.0).masked_fill((distance < 0) | (distance > 7), -torch.inf)
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
    biases = {"relative": relative, "profiles": profiles}
    sinks = rand(length, 4)  # as keys of their own, whose values are zeros
    own = torch.cat((mask, sinks.T[..., None]), dim=-1)
    padded = [F.pad(part, (0, 0, 0, 1)) for part in heads[1:]]
    drained = F.scaled_dot_product_attention(heads[0], *padded, attn_mask=own, scale=scale, enable_gqa=True)
    got = ops.relative_paged_attention(query, cache, whole, scale=scale, sliding_window=8, sinks=sinks, **biases)
    assert torch.allclose(got, drained.transpose(0, 1))
    assert torch.allclose(
        ops.relative_paged_attention(query, cache, whole, scale=scale, sliding_window=8, **biases), wanted
    )
    rotated = torch.full_like(cache, torch.nan)
    one, none = torch.ones(length, 1, 8, dtype=DOUBLE), torch.zeros(length, 1, 8, dtype=DOUBLE)
    weight = rand(8)
    got = ops.rope_and_write_kv(
        query, key, value, one, none, rotated, whole.slot_mapping, query_norm=weight, key_norm=weight, eps=1e-6
    )
    assert torch.allclose(got, F.rms_norm(query, [8], weight, 1e-6))
    ops.write_kv_cache(F.rms_norm(key, [8], weight, 1e-6), value, cache, whole.slot_mapping)
    assert torch.allclose(rotated, cache, equal_nan=True)


def test_encoders_see_both_directions() -> None:
    query, key, value = rand(9, 4, 8), rand(9, 2, 8), rand(9, 2, 8)
    got = ops.encoder_attention(query, key, value, [4, 5], scale=0.2)
    for rows in (slice(0, 4), slice(4, 9)):
        heads = [x[rows].transpose(0, 1) for x in (query, key, value)]
        wanted = F.scaled_dot_product_attention(*heads, scale=0.2, enable_gqa=True).transpose(0, 1)
        assert torch.allclose(got[rows], wanted)


def test_latent_attention_has_the_beginning_of_its_key_as_value() -> None:
    length, rank = 10, 6
    layout, entries, query = one_sequence(length, length), rand(length, 8), rand(length, 3, 8)
    cache = torch.full((4, 4, 8), torch.nan, dtype=DOUBLE)
    ops.write_latent_cache(entries, cache, layout.slot_mapping)
    keys = entries.expand(3, -1, -1)
    wanted = F.scaled_dot_product_attention(query.transpose(0, 1), keys, keys, is_causal=True, scale=0.2)
    got = ops.latent_attention(query, cache, layout, scale=0.2, rank=rank)
    assert torch.allclose(got, wanted.transpose(0, 1)[..., :rank])
    positions = torch.arange(length).expand(length, -1)
    slots = ops.position_slots(positions.where(positions <= torch.arange(length)[:, None], -1), layout)
    assert torch.allclose(ops.sparse_latent_attention(query, cache, slots, scale=0.2, rank=rank), got)


def test_convolution_of_a_whole_sequence() -> None:
    x, weight, bias = rand(9, 5), rand(5, 4), rand(5)
    layout = one_sequence(9, 9, block_size=16)
    state = torch.zeros(2, 3, 5)
    got = ops.causal_conv1d(x, weight, bias, state, layout, activation="silu")
    wanted = F.silu(F.conv1d(F.pad(x.T[None], (3, 0)), weight[:, None], bias, groups=5)[0].T)
    assert torch.allclose(got, wanted)
    assert torch.allclose(state[1].double(), x[-3:], atol=1e-6)
    dynamic = rand(9, 1, 4)
    got = ops.dynamic_conv1d(x, weight, dynamic, state, layout)
    windows = F.pad(x.T, (3, 0)).unfold(1, 4, 1).transpose(0, 1)  # [T, C, K]
    assert torch.allclose(got, (windows * (weight + dynamic)).sum(-1))
    assert torch.allclose(state[1].double(), x[-3:], atol=1e-6)


@pytest.mark.parametrize("static", [0.0, 0.02])
def test_int8_of_tokens(static: float) -> None:
    x = torch.randn(5, 40)
    x[1], x[2, 3], x[3, 0] = 0.0, torch.inf, torch.nan
    tokens, scales = quantize_int8(x, torch.tensor([static]))
    for row, (numbers, scale) in enumerate(zip(tokens.tolist(), scales.tolist(), strict=True)):
        if row in (2, 3):
            assert math.isnan(scale)
            continue
        assert scale == pytest.approx(static or float(x[row].abs().max()) / 127)
        for number, value in zip(numbers, x[row].tolist(), strict=True):
            bounded = max(-128.0 * scale, min(127.0 * scale, value))
            assert abs(number * scale - bounded) <= 0.5001 * scale


@pytest.mark.parametrize("by_group", [False, True])
def test_fp8_of_tokens(by_group: bool) -> None:
    x = torch.randn(4, 300) * torch.logspace(-3, 3, 4)[:, None]
    x[2], x[3, 200] = 0.0, torch.inf
    tokens, scales = quantize_fp8(x, torch.zeros(1), by_group=by_group)
    assert scales.shape == (4, 3 if by_group else 1)
    size = FP8_GROUP if by_group else 300
    wide = tokens.float() * scales.repeat_interleave(size, 1)[:, :300]
    assert ((wide - x).abs() <= 2**-4 * x.abs() + 2**-9 * scales.repeat_interleave(size, 1)[:, :300])[:3].all()
    assert scales[3].isnan().tolist() == ([False, True, False] if by_group else [True])


def test_quantized_weights_are_products_with_what_they_stand_for() -> None:
    x, elements, scale, bias = rand(3, 128), torch.randint(-127, 128, (6, 128)), rand(6).abs(), rand(6)
    weight = elements.to(torch.int8)
    wanted = F.linear(x, elements * scale[:, None], bias)
    assert torch.allclose(ops.int8_linear(x, weight, scale, bias), wanted)
    scheme = ActivationScheme(torch.int8, torch.zeros(1))
    quantized = quantize_tokens(x, scheme)
    assert quantize_tokens(quantized, scheme) is quantized
    rows = quantized.tokens.double() * quantized.scales.double()[:, None]
    wanted = F.linear(rows, elements * scale[:, None], bias)
    for given in (x, quantized):
        assert torch.allclose(ops.w8a8_linear(given, weight, scale, torch.zeros(1), bias), wanted)
    normed, total = ops.add_rms_norm_quant(x, x, torch.ones(128, dtype=DOUBLE), 1e-5, scheme)
    assert torch.equal(total, 2 * x)
    assert torch.equal(normed.tokens, quantize_tokens(F.rms_norm(2 * x, [128], None, 1e-5), scheme).tokens)
    assert torch.equal(ops.gate_quant(x, x, "silu", scheme).tokens, quantize_tokens(F.silu(x) * x, scheme).tokens)


def test_routing_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    ids, weights = ops.route_experts(logits, None, RoutingRule(top_k=2, scoring="softmax", renormalize=True))
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.softmax(torch.tensor([[3.0, 2.0]]), -1))
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0])
    ids, weights = ops.route_experts(logits, bias, RoutingRule(top_k=1, scoring="sigmoid", scale=2.0))
    assert ids.tolist() == [[2]]
    assert torch.allclose(weights, 2 * torch.sigmoid(torch.tensor([[2.0]])))
    rule = RoutingRule(top_k=1, scoring="sigmoid", num_groups=2, topk_groups=1, group_best=2)
    assert ops.route_experts(torch.tensor([[2.0, -9.0, 1.0, 0.9]]), None, rule)[0].tolist() == [[2]]


def test_experts_by_hand() -> None:
    matrices = [[LinearWeights(rand(*shape)) for _ in range(3)] for shape in ((5, 4), (5, 4), (4, 5))]
    gate, up, down = map(tuple, matrices)
    run = ops.fused_moe(Experts(gate=gate, up=up, down=down, activation="silu"))
    x, ids, weights = rand(2, 4), torch.tensor([[2, 0], [1, 2]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    got = run(x, ids, weights)
    for token in range(2):
        wanted = torch.zeros(4, dtype=DOUBLE)
        for expert, share in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            inner = F.silu(gate[expert].weight @ x[token]) * (up[expert].weight @ x[token])
            wanted += share * (down[expert].weight @ inner)
        assert torch.allclose(got[token], wanted)


def test_penalties_by_hand() -> None:
    """Token 1 is in the prompt, 2 twice in the output, 3 once, behind the last known position."""
    table = PenaltyTable(
        repetition=torch.tensor([2.0]), presence=torch.tensor([0.5]), frequency=torch.tensor([0.25]),
        num_prompt_tokens=torch.tensor([1]),
    )  # fmt: skip
    logits = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    history = torch.tensor([[1, 2, 2, 3]], dtype=torch.int32)
    ops.penalize(logits, torch.tensor([0]), torch.tensor([2]), history, table)
    assert logits.tolist() == [[1.0, 0.5, -2.0 - 0.5 - 0.5, 1.0]]


def test_inputs_of_a_step_by_hand() -> None:
    """Row 1 computes positions 2 and 3, row 0 position 4, whose window of three begins in its second block."""
    token_ids = torch.arange(20, dtype=torch.int32).view(2, 10)
    table = RowTable(torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32), 2, sliding_window=3)
    rows, starts, ends = (torch.tensor(x).numpy() for x in ([1, 0], [2, 4], [4, 5]))
    inputs = ops.step_inputs(token_ids, (table,), rows, starts, ends)
    assert inputs.input_ids.tolist() == [12, 13, 4]
    assert inputs.positions.tolist() == [2, 3, 4]
    assert inputs.query_start_loc.tolist() == [0, 2, 3]
    assert inputs.seq_lens.tolist() == [4, 5]
    (group,) = inputs.groups
    assert group.block_table.tolist() == [[4, 5, 0], [0, 8, 9]]
    assert group.slot_mapping.tolist() == [10, 11, 18]
