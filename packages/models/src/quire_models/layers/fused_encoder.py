"""An encoder's layers in one call, where a backend of op `encoder_stack` serves.

Knows layers as data; does not know what is before and behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quire_models.layers.encoder import EncoderLayer
from quire_models.layers.norm import FusableNorm
from quire_models.layers.scope import Scope
from quire_ops import EncoderLayerWeights, EncoderStack, GatedWeights, LinearWeights, RunEncoder, ops

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
    """
    if scope.tp_group is not None:
        return None
    parts = [
        layer.fused_weights(rotation, bias)
        for layer, rotation, bias in zip(layers, rotations, position_biases, strict=True)
    ]
    known = [part for part in parts if part is not None]
    rotary_dims = {layer.attention.rotary_dim for layer in layers} - {0}
    if not known or len(known) < len(parts) or len(rotary_dims) > 1 or not all(map(_fits, known)):
        return None
    if not isinstance(final_norm, FusableNorm | None):
        return None
    if isinstance(known[0].feed_forward_norm.weight, FakeTensor):  # the network has no memory
        return None
    stack = EncoderStack(
        layers=tuple(known),
        final_norm=None if final_norm is None else final_norm.fused_weights(),
        hidden_size=hidden_size,
        dtype=scope.dtype,
        rotary_dim=next(iter(rotary_dims), 0),
    )
    head_dim = max(layer.attention.q.weight.shape[0] // layer.attention.num_heads for layer in known)
    backend = scope.choose(ops.encoder_stack, head_dim=head_dim)
    if backend.name == "reference":
        return None
    scope.chosen.append(backend)
    return backend.function(stack)


def _fits(layer: EncoderLayerWeights) -> bool:
    """Whether all matrices are plain, or int8 with a scale per output, and the function is one of the op's."""
    attention, part = layer.attention, layer.feed_forward
    if part.activation not in _ACTIVATIONS:
        return False
    matrices = [attention.q, attention.k, attention.v, attention.o, part.up, part.down]
    matrices += [part.gate] if isinstance(part, GatedWeights) else []
    return all(map(_is_taken, matrices))


def _is_taken(matrix: LinearWeights) -> bool:
    if matrix.lora is not None or matrix.input_scale is not None or not matrix.weight.is_contiguous():
        return False
    return matrix.scale is None or matrix.scale.ndim == 1
