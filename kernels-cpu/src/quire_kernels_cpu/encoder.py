"""All layers of an encoder in one call of the compiled kernels: op `encoder_stack`.

Knows the C interface of an encoder; the arithmetic is in `csrc/encoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, empty_like

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import MAX_HEAD_DIM, backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.decoder import pointers_to
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.layer_arguments import ACTIVATIONS, NORM_KINDS
from quire_kernels_cpu.matrix import matrix_argument
from quire_ops import (
    EncoderLayerWeights,
    EncoderStack,
    GatedWeights,
    LinearWeights,
    NormWeights,
    SizeRule,
    is_in_blocks,
    ops,
)
from quire_ops.encoder_stack import INPUT_GROUP, RunEncoder

__all__ = ["Encoder", "encoder_stack"]


@backend_for(ops.encoder_stack, sizes={"head_dim": SizeRule(maximum=MAX_HEAD_DIM)})
def encoder_stack(stack: EncoderStack) -> RunEncoder:
    """Weights are plain, or int8 with a scale per output (op `int8_linear`); where inputs are rounded, int8 in
    groups (op `grouped_linear`). Activations stay in float32 between products."""
    return Encoder(stack)


class Encoder:
    """An encoder of the library. Keeps the weights that it points to."""

    def __init__(self, stack: EncoderStack) -> None:
        self._stack = stack
        self._dtype = DTYPES[stack.dtype]
        self._kept: list[Any] = [stack]
        layers = (STRUCTS["EncoderLayerArgument"] * len(stack.layers))(*map(self._layer, stack.layers))
        argument = STRUCTS["EncoderArgument"](
            layers=ctypes.addressof(layers),
            num_layers=len(layers),
            hidden=stack.hidden_size,
            rotary_dim=stack.rotary_dim,
            rounds_inputs=stack.rounds_inputs,
            final_norm=self._norm(stack.final_norm),
        )
        self._handle: int | None = library().quire_encoder_new(self._dtype, ctypes.byref(argument))

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            library().quire_encoder_delete(self._dtype, self._handle)

    def __call__(self, x: Tensor, lens: Sequence[int], rotations: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run all layers over some texts: `RunEncoder`."""
        assert sum(lens) == len(x)
        assert x.dtype == self._stack.dtype
        x = x.contiguous()
        hidden = empty_like(x)
        if not len(x):
            return hidden
        cosines = [cos.contiguous() for cos, _ in rotations]
        sines = [sin.contiguous() for _, sin in rotations]
        cos, sin = pointers_to(cosines), pointers_to(sines)
        texts = (ctypes.c_int64 * len(lens))(*lens)
        step = STRUCTS["EncoderStep"](
            x=x.data_ptr(),
            hidden=hidden.data_ptr(),
            cos=ctypes.addressof(cos),
            sin=ctypes.addressof(sin),
            lens=ctypes.addressof(texts),
            tokens=len(x),
            num_texts=len(lens),
            num_rotations=len(rotations),
        )
        library().quire_encoder_run(self._dtype, self._handle, ctypes.byref(step))
        return hidden

    def _layer(self, layer: EncoderLayerWeights) -> ctypes.Structure:
        attention, part = layer.attention, layer.feed_forward
        width, inner = attention.q.weight.shape[0], part.up.weight.shape[0]
        head_dim = width // attention.num_heads
        gate = {"gate": self._matrix(part.gate)} if isinstance(part, GatedWeights) else {}
        return STRUCTS["EncoderLayerArgument"](
            **gate,
            q=self._matrix(attention.q),
            k=self._matrix(attention.k),
            v=self._matrix(attention.v),
            o=self._matrix(attention.o, width),
            up=self._matrix(part.up),
            down=self._matrix(part.down, inner),
            attention_norm=self._norm(layer.attention_norm),
            feed_forward_norm=self._norm(layer.feed_forward_norm),
            num_heads=attention.num_heads,
            num_kv_heads=attention.k.weight.shape[0] // head_dim,
            head_dim=head_dim,
            bias=self._floats(attention.bias),
            max_distance=0 if attention.bias is None else attention.bias.shape[1] // 2,
            inner=inner,
            activation=ACTIVATIONS.index(part.activation),
            post_ln=layer.is_post_ln,
            window=-1 if attention.sliding_window is None else attention.sliding_window,
            rotation=-1 if attention.rotation is None else attention.rotation,
            scale=attention.scale,
        )

    def _matrix(self, weights: LinearWeights, inputs: int | None = None) -> ctypes.Structure:
        """inputs: None for the size of the residual stream."""
        assert weights.input_scale is None
        if self._stack.rounds_inputs:
            assert weights.weight.dtype == torch.int8
            assert weights.zero is None
            assert weights.scale is not None
            assert weights.scale.shape[1] == -(-weights.weight.shape[1] // INPUT_GROUP)
        else:
            assert weights.scale is None or weights.scale.ndim == 1
            assert not is_in_blocks(weights)
        assert weights.weight.is_contiguous()
        return matrix_argument(*weights[:5], inputs=self._stack.hidden_size if inputs is None else inputs)

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
