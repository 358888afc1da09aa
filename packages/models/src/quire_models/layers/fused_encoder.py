"""An encoder's layers in one call, where a backend of op `encoder_stack` serves.

Knows layers as data; does not know what is before and behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quire_interfaces import ConfigError
from quire_models.layers.encoder import EncoderLayer
from quire_models.layers.norm import FusableNorm
from quire_models.layers.scope import Scope
from quire_ops import EncoderLayerWeights, EncoderStack, GatedWeights, LinearWeights, RunEncoder, is_in_blocks, ops
from quire_ops.encoder_stack import INPUT_GROUP
from quire_quantization import Int8GroupedLinear

__all__ = ["bind_encoder"]

_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_erf", "sigmoid", "tanh", "relu", "relu2"})
"""Functions of feed-forward parts that op `encoder_stack` has."""


def bind_encoder(
    scope: Scope,
    hidden_size: int,
    layers: Sequence[EncoderLayer],
    rotations: Sequence[int | None],
    position_biases: Sequence[Tensor | None],
    final_norm: Callable[[Tensor], Tensor] | None,
) -> RunEncoder | None:
    """All layers and the norm behind them, ready to run.

    Args:
        scope: Scope of any layer of the network.
        hidden_size: Size of the residual stream.
        layers: In their order, with their weights.
        rotations: Of each layer, which of the pass's rotations it has; None for none.
        position_biases: Of each layer, as op `encoder_attention` takes them; None for none.
        final_norm: None for none.

    Returns:
        None where no backend takes the layers, or ranks share them.

    Raises:
        ConfigError: that is so, and the linear method is for this op alone.
    """
    rounds_inputs = scope.linear_method.name == Int8GroupedLinear.name
    stack = _stack(scope, hidden_size, layers, rotations, position_biases, final_norm, rounds_inputs=rounds_inputs)
    if stack is not None:
        parts = [layer.attention for layer in stack.layers]
        if isinstance(parts[0].q.weight, FakeTensor):  # the network has no memory
            return None
        head_dim = max(each.q.weight.shape[0] // each.num_heads for each in parts)
        backend = scope.choose(ops.encoder_stack, head_dim=head_dim)
        if backend.name != "reference":
            scope.chosen.append(backend)
            return backend.function(stack)
    if rounds_inputs:
        reason = "op encoder_stack does not have them" if stack is None else "no compiled kernel takes them here"
        raise ConfigError(
            f"quantization {Int8GroupedLinear.name!r} is for encoders whose layers run in one call, and these do not "
            f"({reason}); use int8, which leaves tokens as they are, or w8a8, which rounds them with one scale each",
            field="quantization",
        )
    return None


def _stack(
    scope: Scope,
    hidden_size: int,
    layers: Sequence[EncoderLayer],
    rotations: Sequence[int | None],
    position_biases: Sequence[Tensor | None],
    final_norm: Callable[[Tensor], Tensor] | None,
    *,
    rounds_inputs: bool,
) -> EncoderStack | None:
    """The layers as the op takes them; None where it does not."""
    if scope.tp_group is not None:
        return None
    parts = [
        layer.fused_weights(rotation, bias)
        for layer, rotation, bias in zip(layers, rotations, position_biases, strict=True)
    ]
    known = [part for part in parts if part is not None]
    rotary_dims = {layer.attention.rotary_dim for layer in layers} - {0}
    if not known or len(known) < len(parts) or len(rotary_dims) > 1:
        return None
    if not all(_fits(layer, rounds_inputs=rounds_inputs) for layer in known):
        return None
    if not isinstance(final_norm, FusableNorm | None):
        return None
    return EncoderStack(
        layers=tuple(known),
        final_norm=None if final_norm is None else final_norm.fused_weights(),
        hidden_size=hidden_size,
        dtype=scope.dtype,
        rotary_dim=next(iter(rotary_dims), 0),
        rounds_inputs=rounds_inputs,
    )


def _fits(layer: EncoderLayerWeights, *, rounds_inputs: bool) -> bool:
    """Whether the op takes all matrices, and has the function between them."""
    attention, part = layer.attention, layer.feed_forward
    if part.activation not in _ACTIVATIONS:
        return False
    matrices = [attention.q, attention.k, attention.v, attention.o, part.up, part.down]
    matrices += [part.gate] if isinstance(part, GatedWeights) else []
    return all(_is_taken(matrix, rounds_inputs=rounds_inputs) for matrix in matrices)


def _is_taken(matrix: LinearWeights, *, rounds_inputs: bool) -> bool:
    """Whether a matrix is plain, or int8 with a scale per output; or, where inputs are rounded, per group
    of them. None of those in blocks."""
    if matrix.lora is not None or matrix.input_scale is not None or not matrix.weight.is_contiguous():
        return False
    if not rounds_inputs:
        return matrix.scale is None or (matrix.scale.ndim == 1 and not is_in_blocks(matrix))
    if matrix.weight.dtype != torch.int8 or matrix.scale is None or matrix.scale.ndim != 3:
        return False
    return matrix.scale.shape[1] == -(-matrix.weight.shape[1] // INPUT_GROUP) and matrix.zero is None
