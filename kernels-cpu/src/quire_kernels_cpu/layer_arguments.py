"""The layers of a decoder as the C interface takes them: a `SublayerArgument` for each mixer and feed-forward network.

Knows the structs of `csrc/kernels.h` and the layers of `quire_ops.layer_weights`; the arithmetic is in `csrc/decoder.h`
and what it includes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.matrix import matrix_argument
from quire_kernels_cpu.moe import CompiledExperts
from quire_kernels_cpu.routing import routing_rule
from quire_ops import (
    AttentionWeights,
    CrossAttentionWeights,
    DecoderLayerWeights,
    DecoderStack,
    FeedForwardWeights,
    GatedDeltaWeights,
    GatedWeights,
    LatentAttentionWeights,
    LinearWeights,
    LoraWeights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    NormWeights,
    RoutedExperts,
    ShortConvWeights,
)

__all__ = ["ACTIVATIONS", "NORM_KINDS", "LayerArguments"]

ACTIVATIONS = ("silu", "gelu", "swigluoai", "sigmoid", "tanh", "gelu_erf", "expm1", "relu", "relu2")
"""In the order of `Activation` in `csrc/elementwise.h`."""
NORM_KINDS = ("none", "rms", "layer")
"""In the order of `NormKind` in `csrc/elementwise.h`."""
_KINDS = {
    AttentionWeights: 0,
    CrossAttentionWeights: 0,
    LatentAttentionWeights: 1,
    Mamba2Weights: 2,
    GatedDeltaWeights: 3,
    ShortConvWeights: 4,
    GatedWeights: 5,
    MLPWeights: 6,
    RoutedExperts: 7,
}
"""In the order of `SublayerKind` in `csrc/decoder.h`."""


class LayerArguments:
    """The layers of a stack. Keeps the tensors and structs that it points to."""

    def __init__(self, stack: DecoderStack) -> None:
        self._stack = stack
        self._kept: list[Any] = []
        self.lora: list[LoraWeights | None] = []
        """Adapters of the sublayers' matrices, in the order in which the library takes them."""
        self._sublayers: list[tuple[int, dict[str, Any]]] = []
        """Cache, and the fields of each sublayer but its group."""
        for index, layer in enumerate(stack.layers):
            self._add_layer(index, layer)
        self.final_norm = self._norm(stack.final_norm)

    def sublayers(self, group_of_layer: tuple[int, ...]) -> ctypes.Array[ctypes.Structure]:
        """The array of the C interface, for caches of these groups."""
        struct = STRUCTS["SublayerArgument"]
        groups = group_of_layer or (0,)
        made = (struct(**fields, cache=cache, group=groups[cache]) for cache, fields in self._sublayers)
        return (struct * len(self._sublayers))(*made)

    def _add_layer(self, index: int, layer: DecoderLayerWeights) -> None:
        common = {"layer": index, "residual_factor": layer.residual_factor}
        if layer.mixer is not None:
            norms = {"norm": self._norm(layer.input_norm), "out_norm": self._norm(layer.attention_out_norm)}
            self._sublayers.append((layer.cache, {**common, **norms, **self._part(layer.mixer)}))
        if layer.feed_forward is not None:
            norms = {"norm": self._norm(layer.feed_forward_norm), "out_norm": self._norm(layer.feed_forward_out_norm)}
            fields = {**common, **norms, **self._part(layer.feed_forward), "parallel": layer.parallel}
            self._sublayers.append((layer.cache, fields))

    def _norm(self, norm: NormWeights | None) -> ctypes.Structure:
        struct = STRUCTS["NormArgument"]
        if norm is None:
            return struct()
        weight, bias = self._floats(norm.weight), self._floats(norm.bias)
        return struct(weight=weight, bias=bias, kind=NORM_KINDS.index(norm.kind), eps=norm.eps)

    def _floats(self, vector: Tensor | None) -> int | None:
        """Where the vector lies in float32, as the library takes it."""
        if vector is None:
            return None
        self._kept.append(vector.float().contiguous())
        return int(self._kept[-1].data_ptr())

    def _numbers(self, tensor: Tensor | None) -> int | None:
        """Where a tensor of the network's type lies."""
        if tensor is None:
            return None
        assert tensor.dtype == self._stack.dtype
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, weights: LinearWeights, inputs: int | None = None) -> ctypes.Structure:
        """inputs: None for the size of the residual stream."""
        inputs = self._stack.hidden_size if inputs is None else inputs
        rank_sizes = self._sizes(weights.rank_sizes) if weights.rank_sizes else None
        return matrix_argument(*weights[:5], inputs=inputs, rank_sizes=rank_sizes)

    def _sizes(self, sizes: tuple[int, ...]) -> int:
        """Where it lies what each rank has of something that ranks share out."""
        assert self._stack.group is not None
        self._kept.append((ctypes.c_int64 * len(sizes))(*sizes))
        return ctypes.addressof(self._kept[-1])

    def _part(self, part: MixerWeights | FeedForwardWeights) -> dict[str, Any]:
        """What the sublayer of a part says of it."""
        self._kept.append(part)
        adapted: tuple[LinearWeights, ...] = ()
        argument: ctypes.Structure
        if isinstance(part, AttentionWeights):
            argument, adapted = self._attention(part), (part.q, part.k, part.v, part.o)
        elif isinstance(part, CrossAttentionWeights):
            argument, adapted = self._cross_attention(part), (part.q, part.o)
        elif isinstance(part, GatedWeights):
            argument, adapted = self._gated(part), part[:3]
        elif isinstance(part, MLPWeights):
            argument, adapted = self._mlp(part), (part.up, part.down)
        elif isinstance(part, LatentAttentionWeights):
            argument = self._latent_attention(part)
        elif isinstance(part, Mamba2Weights):
            argument = self._mamba2(part)
        elif isinstance(part, GatedDeltaWeights):
            argument = self._gated_delta(part)
        elif isinstance(part, ShortConvWeights):
            argument = self._short_conv(part)
        else:
            argument = self._experts(part)
        self._kept.append(argument)
        first = len(self.lora) if any(each.lora is not None for each in adapted) else -1
        if first >= 0:
            self.lora += [each.lora for each in adapted]
        return {"kind": _KINDS[type(part)], "part": ctypes.addressof(argument), "first_lora": first}

    def _attention(self, part: AttentionWeights) -> ctypes.Structure:
        query_size = _outputs(part.q) // (2 if part.gated else 1)
        return STRUCTS["AttentionArgument"](
            q=self._matrix(part.q),
            k=self._matrix(part.k),
            v=self._matrix(part.v),
            o=self._matrix(part.o, sum(part.rank_widths) or query_size),
            q_norm=self._floats(part.q_norm),
            k_norm=self._floats(part.k_norm),
            kv_scale=self._floats(part.kv_scale),
            sinks=self._floats(part.sinks),
            slopes=self._floats(part.alibi_slopes),
            rank_widths=self._sizes(part.rank_widths) if part.rank_widths else None,
            num_heads=query_size // part.head_dim,
            num_kv_heads=_outputs(part.k) // part.head_dim,
            head_dim=part.head_dim,
            rotary_dim=self._stack.rotary_dim,
            window=part.sliding_window or 0,
            rotation=-1 if part.rotation is None else part.rotation,
            interleaved=part.interleaved,
            norm_of_all_heads=part.q_norm is not None and part.q_norm.shape[0] > part.head_dim,
            norm_after_rotation=part.norm_after_rotation,
            gated=part.gated,
            rounds_steps=self._stack.rounds_steps and part.rotates_in_steps,
            int8_products=part.int8_products,
            eps=part.norm_eps,
            scale=part.scale,
            soft_cap=part.soft_cap or 0.0,
        )

    def _cross_attention(self, part: CrossAttentionWeights) -> ctypes.Structure:
        query_size = _outputs(part.q)
        return STRUCTS["AttentionArgument"](
            q=self._matrix(part.q),
            o=self._matrix(part.o, query_size),
            kv_scale=self._floats(part.kv_scale),
            num_heads=query_size // part.head_dim,
            num_kv_heads=part.num_kv_heads,
            head_dim=part.head_dim,
            rotation=-1,
            scale=part.scale,
        )

    def _latent_attention(self, part: LatentAttentionWeights) -> ctypes.Structure:
        heads, rank, plain = part.key_up.shape
        value_dim, q_rank = part.value_up.shape[1], 0 if part.q_up is None else _outputs(part.q_down)
        for absorbed in (part.key_up, part.value_up):
            assert absorbed[0].is_contiguous()
            assert absorbed.dtype == self._stack.dtype
        fields: dict[str, Any] = {}
        if part.q_up is not None and part.q_norm is not None:
            fields = {"q_up": self._matrix(part.q_up, q_rank), "q_norm": self._floats(part.q_norm.weight)}
        return STRUCTS["LatentAttentionArgument"](
            **fields,
            q_down=self._matrix(part.q_down),
            kv_down=self._matrix(part.kv_down),
            o=self._matrix(part.o, sum(part.rank_widths) or heads * value_dim),
            kv_norm=self._floats(part.kv_norm.weight),
            key_up=part.key_up.data_ptr(),
            value_up=part.value_up.data_ptr(),
            key_up_stride=part.key_up.stride(0),
            value_up_stride=part.value_up.stride(0),
            rank_widths=self._sizes(part.rank_widths) if part.rank_widths else None,
            num_heads=heads,
            nope_dim=plain,
            rotary_dim=self._stack.rotary_dim,
            rank=rank,
            value_dim=value_dim,
            q_rank=q_rank,
            rotation=part.rotation,
            interleaved=part.interleaved,
            eps=part.kv_norm.eps,
            scale=part.scale,
        )

    def _mamba2(self, part: Mamba2Weights) -> ctypes.Structure:
        norm = part.norm
        return STRUCTS["Mamba2Argument"](
            in_proj=self._matrix(part.in_proj),
            out_proj=self._matrix(part.out_proj, len(part.a) * part.head_dim),
            taps=self._numbers(part.taps.t()),
            conv_bias=self._numbers(part.conv_bias),
            a=self._floats(part.a),
            d=self._floats(part.d),
            dt_bias=self._floats(part.dt_bias),
            norm=self._floats(norm.weight),
            heads=len(part.a),
            head_dim=part.head_dim,
            groups=part.num_groups,
            state_size=part.state_size,
            num_taps=part.taps.shape[1],
            norm_groups=0 if norm.weight is None else norm.groups,
            norm_before_gate=norm.before_gate,
            eps=norm.eps,
            dt_min=part.dt_limit[0],
            dt_max=part.dt_limit[1],
        )

    def _gated_delta(self, part: GatedDeltaWeights) -> ctypes.Structure:
        names = ("in_qkv", "in_a") if part.by_key_head else ("in_qkv", "in_z", "in_a", "in_b")
        matrices = {name: self._matrix(each) for name, each in zip(names, part.in_proj, strict=True)}
        return STRUCTS["GatedDeltaArgument"](
            **matrices,
            out_proj=self._matrix(part.out_proj, len(part.a_log) * part.value_dim),
            taps=self._numbers(part.taps.t()),
            a_log=self._floats(part.a_log),
            dt_bias=self._floats(part.dt_bias),
            norm=self._floats(part.norm.weight),
            key_heads=part.key_heads,
            value_heads=len(part.a_log),
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            num_taps=part.taps.shape[1],
            by_key_head=part.by_key_head,
            eps=part.norm.eps,
        )

    def _short_conv(self, part: ShortConvWeights) -> ctypes.Structure:
        return STRUCTS["ShortConvArgument"](
            in_proj=self._matrix(part.in_proj),
            out_proj=self._matrix(part.out_proj),
            taps=self._numbers(part.taps.t()),
            conv_bias=self._numbers(part.conv_bias),
            num_taps=part.taps.shape[1],
        )

    def _gated(self, part: GatedWeights) -> ctypes.Structure:
        inner = sum(part.rank_widths) or part.gate.weight.shape[0]
        return STRUCTS["GatedArgument"](
            gate=self._matrix(part.gate),
            up=self._matrix(part.up),
            down=self._matrix(part.down, inner),
            rank_widths=self._sizes(part.rank_widths) if part.rank_widths else None,
            inner=inner,
            activation=ACTIVATIONS.index(part.activation),
            rounds_steps=self._stack.rounds_steps,
        )

    def _mlp(self, part: MLPWeights) -> ctypes.Structure:
        inner = sum(part.rank_widths) or part.up.weight.shape[0]
        return STRUCTS["MlpArgument"](
            up=self._matrix(part.up),
            down=self._matrix(part.down, inner),
            rank_widths=self._sizes(part.rank_widths) if part.rank_widths else None,
            inner=inner,
            activation=ACTIVATIONS.index(part.activation),
        )

    def _experts(self, part: RoutedExperts) -> ctypes.Structure:
        experts = CompiledExperts(part.experts)
        self._kept.append(experts)
        fields = {} if part.shared is None else {"shared": self._gated(part.shared)}
        return STRUCTS["ExpertsArgument"](
            **fields,
            experts=experts.handle(self._stack.dtype),
            router=self._matrix(LinearWeights(part.router)),
            router_bias=self._floats(part.router_bias),
            choice_bias=self._floats(part.choice_bias),
            shared_gate=self._numbers(part.shared_gate),
            rule=routing_rule(part.rule, len(part.router)),
            num_experts=len(part.router),
        )


def _outputs(linear: LinearWeights) -> int:
    """Outputs of a linear layer, of all ranks."""
    return sum(linear.rank_sizes) or linear.weight.shape[0]
