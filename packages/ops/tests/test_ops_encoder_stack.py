"""The reference of op `encoder_stack` is what torch's own layers of encoders compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire_ops import (
    EncoderAttentionWeights,
    EncoderLayerWeights,
    EncoderStack,
    GatedWeights,
    LinearWeights,
    MLPWeights,
    NormWeights,
    ops,
)

HIDDEN, HEADS, INNER = 24, 3, 40
LENS = [4, 1, 7]


def linear_weights(weight: Tensor, bias: Tensor) -> LinearWeights:
    return LinearWeights(weight.detach(), bias.detach())


def norm_weights(norm: nn.LayerNorm) -> NormWeights:
    return NormWeights(kind="layer", weight=norm.weight.detach(), bias=norm.bias.detach(), eps=norm.eps)


def layer_weights(layer: nn.TransformerEncoderLayer) -> EncoderLayerWeights:
    """torch's layer as data."""
    attention = layer.self_attn
    parts = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    q, k, v = (linear_weights(*part) for part in parts)
    up, down = (linear_weights(each.weight, each.bias) for each in (layer.linear1, layer.linear2))
    return EncoderLayerWeights(
        attention=EncoderAttentionWeights(
            q=q,
            k=k,
            v=v,
            o=linear_weights(attention.out_proj.weight, attention.out_proj.bias),
            num_heads=HEADS,
            scale=(HIDDEN // HEADS) ** -0.5,
        ),
        attention_norm=norm_weights(layer.norm1),
        feed_forward=MLPWeights(up=up, down=down, activation="gelu_erf"),
        feed_forward_norm=norm_weights(layer.norm2),
        is_post_ln=not layer.norm_first,
    )


def stack_of(*layers: EncoderLayerWeights, final_norm: NormWeights | None = None) -> EncoderStack:
    return EncoderStack(layers=layers, final_norm=final_norm, hidden_size=HIDDEN, dtype=torch.float64, rotary_dim=0)


def test_layers_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for norm_first in (False, True):
        layers = [
            nn.TransformerEncoderLayer(
                HIDDEN, HEADS, INNER, 0.0, "gelu", batch_first=True, norm_first=norm_first, dtype=torch.float64
            )
            for _ in range(2)
        ]
        final_norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        nn.init.normal_(final_norm.bias)
        x = torch.randn(sum(LENS), HIDDEN, dtype=torch.float64)
        stack = stack_of(*map(layer_weights, layers), final_norm=norm_weights(final_norm))
        hidden = ops.encoder_stack(stack)(x, LENS, [])
        for text, result in zip(x.split(LENS), hidden.split(LENS), strict=True):
            expected = text[None]
            for layer in layers:
                expected = layer(expected)
            assert torch.allclose(result, final_norm(expected)[0])


def test_gates_windows_and_rotations_are_those_of_the_other_ops() -> None:
    torch.manual_seed(0)
    make = torch.nn.Linear(HIDDEN, INNER, dtype=torch.float64)
    gate, up = linear_weights(make.weight, make.bias), linear_weights(-make.weight, make.bias)
    down = LinearWeights(torch.randn(HIDDEN, INNER, dtype=torch.float64))
    matrices = [LinearWeights(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64)) for _ in range(4)]
    q, k, v, o = matrices
    norm = NormWeights(weight=torch.rand(HIDDEN, dtype=torch.float64), eps=1e-5)
    layer = EncoderLayerWeights(
        attention=EncoderAttentionWeights(q=q, k=k, v=v, o=o, num_heads=HEADS, scale=0.3, sliding_window=2, rotation=0),
        attention_norm=None,
        feed_forward=GatedWeights(gate, up, down, "silu"),
        feed_forward_norm=norm,
        is_post_ln=False,
    )
    x = torch.randn(12, HIDDEN, dtype=torch.float64)
    angles = torch.rand(12, 1, 2, dtype=torch.float64)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    query, key, value = ((x @ each.weight.T).view(12, HEADS, -1) for each in (q, k, v))
    query, key = (
        torch.cat((ops.rotary_embedding(each[..., :4], cos, sin), each[..., 4:]), -1) for each in (query, key)
    )
    attended = ops.encoder_attention(query, key, value, LENS, scale=0.3, window=2)
    expected = x + attended.flatten(1) @ o.weight.T
    inner = ops.rms_norm(expected, norm.weight, 1e-5) if norm.weight is not None else expected
    gated = ops.silu_and_mul(make(inner), inner @ -make.weight.T + make.bias)
    expected = expected + gated @ down.weight.T
    assert torch.allclose(ops.encoder_stack(stack_of(layer))(x, LENS, [(cos, sin)]), expected)
