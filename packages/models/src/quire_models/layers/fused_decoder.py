"""A network's layers in one call, where a backend of op `decoder_stack` serves beside its `paged_attention`.

Knows layers as data; does not know what is before and behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quire_attention import ForwardBatch
from quire_distributed import SharedMemoryCollectives
from quire_models.config import ModelConfig
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.scope import Scope
from quire_ops import (
    AttentionWeights,
    CrossAttentionWeights,
    DecodeNetwork,
    DecoderLayerWeights,
    DecodeRows,
    DecoderStack,
    GatedDeltaWeights,
    GatedWeights,
    LatentAttentionWeights,
    LinearWeights,
    Mamba2Weights,
    MLPWeights,
    NormWeights,
    Op,
    OpBackend,
    RoutedExperts,
    RunDecode,
    RunDecoder,
    ShortConvWeights,
    is_in_blocks,
    ops,
)
from quire_ops.kv_format import QUANTIZED

__all__ = ["FusedDecoder"]

P = ParamSpec("P")
R = TypeVar("R")

_GATES = ("silu", "gelu")
"""Functions of gated networks that op `decoder_stack` has."""


class FusedDecoder:
    """The layers and the norm behind them."""

    def __init__(self, scope: Scope, stack: DecoderStack, run: RunDecoder) -> None:
        self._scope, self._stack, self._run = scope, stack, run
        self._caches: tuple[Tensor, ...] | None = None
        self._reads_caches = False

    @classmethod
    def bind(
        cls,
        scope: Scope,
        config: ModelConfig,
        layers: Sequence[DecoderLayerWeights | None],
        norm: NormWeights,
        stage: tuple[tuple[DecoderLayerWeights, ...], NormWeights | None] | None = None,
    ) -> FusedDecoder | None:
        """Args:
        layers: In the order in which they were made; None for one that is not such data.
        stage: Layers of this pipeline stage and the norm behind them, where those before are of all stages, without
            numbers; None for all of them.

        Returns:
            None where no backend takes the layers, or ranks share them that do not meet in shared memory.
        """
        stack = cls._stack_of(scope, config, layers, norm)
        if stack is not None and scope.tp_group is not None:
            stack = _of_ranks(stack, scope)
        backend = None if stack is None else _choose(scope, stack, ops.decoder_stack)
        if stack is None or backend is None:
            return None
        if stage is not None:
            stack = dataclasses.replace(stack, layers=stage[0], final_norm=stage[1])
        return cls(scope, stack, backend.function(stack))

    @classmethod
    def keeps_gates_wide(
        cls, scope: Scope, config: ModelConfig, layers: Sequence[DecoderLayerWeights | None], norm: NormWeights
    ) -> bool:
        """Whether one rank would compute these layers in one call, without rounding gates before they are multiplied.
        Arguments as those of `bind`."""
        stack = cls._stack_of(scope, config, layers, norm)
        if stack is None or stack.rounds_steps:
            return False
        return _choose(scope, stack, ops.decoder_stack) is not None

    @staticmethod
    def _stack_of(
        scope: Scope, config: ModelConfig, layers: Sequence[DecoderLayerWeights | None], norm: NormWeights
    ) -> DecoderStack | None:
        """The layers as data for op `decoder_stack`; None where some are not."""
        known = [layer for layer in layers if layer is not None]
        has_memory = not isinstance(norm.weight, FakeTensor)
        if not has_memory or len(known) < len(layers) or not all(_fits(layer) for layer in known):
            return None
        return DecoderStack(
            layers=tuple(known),
            final_norm=norm,
            hidden_size=config.hidden_size,
            dtype=scope.dtype,
            rotary_dim=getattr(config.network.attention, "rotary_dim", 0),
            rounds_steps=not _rounds_less(known, norm),
        )

    @property
    def batch_invariant(self) -> bool:
        """Whether the call promises a row's bits whatever else is in the step."""
        return self._scope.choose(ops.decoder_stack).batch_invariant

    def serves(self, batch: ForwardBatch) -> bool:
        """Whether the call computes this step: it reads the format of the caches, and takes nothing down for states
        that are stored when drafts have been verified. Windows are its own."""
        if any(group.replay is not None or group.paths_have_windows for group in batch.attention):
            return False
        if batch.kv_caches is not self._caches:
            self._caches, self._reads_caches = batch.kv_caches, self._reads(batch.kv_caches)
        return self._reads_caches

    def _reads(self, kv_caches: tuple[Tensor, ...]) -> bool:
        """Whether the call reads the caches of its attention."""
        for layer in self._stack.layers:
            if isinstance(layer.mixer, AttentionWeights | CrossAttentionWeights | LatentAttentionWeights):
                dtype = kv_caches[layer.cache].dtype
                is_latent = isinstance(layer.mixer, LatentAttentionWeights)
                quantized = dtype == torch.uint8 if is_latent else dtype in QUANTIZED
                if dtype != self._scope.dtype and not quantized:
                    return False
        return True

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        taps: dict[int, Tensor],
    ) -> Tensor:
        """Hidden states [T, hidden_size] behind the norm, as `RunDecoder` gives them.

        Args:
            x: [T, hidden_size], what the first layer takes.
            rotations: Cosines and signed sines [T, 1, R] of each rotation of the network.
            taps: Layer -> [T, hidden_size], for the residual stream before it.
        """
        caches, states = batch.kv_caches, batch.states
        return self._run(
            x, rotations, batch.attention, batch.group_of_layer, caches, states, lora=batch.lora, taps=taps
        )

    def bind_decode(
        self,
        rows: DecodeRows,
        embedding: Embedding,
        head: LMHead,
        rotations: Sequence[Callable[[int], tuple[Tensor, Tensor]]],
        **factors: Any,
    ) -> RunDecode | None:
        """The network joined with the rows of a runner (op `decode_step`), where nothing but embedding and head stands
        before its layers and behind its norm; None where no backend serves it.

        Args:
            rotations: Each: length -> cosines and signed sines of all positions below it, at least.
            factors: Fields of `DecodeNetwork`.
        """
        backend, weights = _choose(self._scope, self._stack, ops.decode_step), head.stack_weights()
        if backend is None or weights is None or not self._reads(rows.kv_caches):
            return None
        network = DecodeNetwork(
            embedding=embedding.weights, embedding_rows=embedding.rank_rows, stack=self._stack, head=weights,
            rotations=tuple(rotations), **factors,
        )  # fmt: skip
        return backend.function(network, rows)


def _of_ranks(stack: DecoderStack, scope: Scope) -> DecoderStack | None:
    """The layers of one of several ranks; None where these cannot meet inside one call."""
    if not isinstance(scope.tp_group, SharedMemoryCollectives) or scope.expert_parallel is not None:
        return None
    return dataclasses.replace(stack, group=scope.tp_group)


def _choose(scope: Scope, stack: DecoderStack, op: Op[P, R]) -> OpBackend[P, R] | None:
    """The backend of an op that takes the whole stack, if it is the one that serves attention."""
    sizes: dict[str, int] = {}
    for layer in stack.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionWeights):
            queries = _outputs(mixer.q) // _outputs(mixer.k) // (2 if mixer.gated else 1)
            sizes["head_dim"] = max(mixer.head_dim, sizes.get("head_dim", 0))
            sizes["queries_per_kv_head"] = max(queries, sizes.get("queries_per_kv_head", 0))
        elif isinstance(mixer, CrossAttentionWeights):
            sizes["head_dim"] = max(mixer.head_dim, sizes.get("head_dim", 0))
        elif isinstance(mixer, GatedDeltaWeights):
            sizes["key_head_dim"] = mixer.key_dim
        if isinstance(mixer, Mamba2Weights | GatedDeltaWeights | ShortConvWeights):
            sizes["taps"] = mixer.taps.shape[1]
    if scope.head_shards and "queries_per_kv_head" in sizes:  # as one rank chooses, which has all heads
        sizes["queries_per_kv_head"] = max(each.num_heads // each.num_kv_heads for each in scope.head_shards.values())
    backend = scope.choose(op, **sizes)
    return backend if backend.name == scope.attention_backend.name else None


def _outputs(linear: LinearWeights) -> int:
    """Outputs of a linear layer, of all ranks."""
    return sum(linear.rank_sizes) or linear.weight.shape[0]


def _inputs(layer: DecoderLayerWeights) -> list[tuple[LinearWeights, ...]]:
    """The matrices of a layer, those of its experts aside, by what they take: alike in a tuple."""
    mixer, part = layer.mixer, layer.feed_forward
    groups: list[tuple[LinearWeights, ...]] = []
    if isinstance(mixer, AttentionWeights):
        groups += [(mixer.q, mixer.k, mixer.v), (mixer.o,)]
    elif isinstance(mixer, CrossAttentionWeights):
        groups += [(mixer.q,), (mixer.o,)]
    elif isinstance(mixer, LatentAttentionWeights):
        groups += [(mixer.q_down, mixer.kv_down), (mixer.o,)]
        groups += [] if mixer.q_up is None else [(mixer.q_up,)]
    elif isinstance(mixer, GatedDeltaWeights):
        groups += [mixer.in_proj, (mixer.out_proj,)]
    elif mixer is not None:
        groups += [(mixer.in_proj,), (mixer.out_proj,)]
    gated = part.shared if isinstance(part, RoutedExperts) else part
    if isinstance(gated, GatedWeights):
        groups += [(gated.gate, gated.up), (gated.down,)]
    elif isinstance(gated, MLPWeights):
        groups += [(gated.up,), (gated.down,)]
    return groups


def _form(weights: LinearWeights) -> tuple[torch.dtype | None, int | None, bool]:
    scale = weights.scale
    if scale is None or is_in_blocks(weights):  # which are decoded to plain ones
        return None, None, True
    return weights.weight.dtype, None if scale is None else scale.ndim, weights.input_scale is None


def _fits(layer: DecoderLayerWeights) -> bool:
    """Whether matrices that take the same input are kept in one way, and functions are those of op `decoder_stack`."""
    part = layer.feed_forward
    gated = part.shared if isinstance(part, RoutedExperts) else part
    if isinstance(gated, GatedWeights):
        sides = (gated.gate, gated.up)
        gate, up = (None if one.scale is None or is_in_blocks(one) else one.scale.shape for one in sides)
        if gate != up or gated.activation not in _GATES:
            return False
    return all(len({_form(weights) for weights in group}) == 1 for group in _inputs(layer))


def _rounds_less(layers: Sequence[DecoderLayerWeights], norm: NormWeights) -> bool:
    """Whether the network is of the first kind that ran in one call: attention and gated networks or experts one behind
    the other, RMS norms of one epsilon, matrices in one form. Its gates have stayed as wide as they are summed."""
    forms: set[Any] = set()
    widths: set[tuple[bool, int]] = set()
    norms = [norm]
    for layer in layers:
        mixer, part = layer.mixer, layer.feed_forward
        if not isinstance(mixer, AttentionWeights) or not isinstance(part, GatedWeights | RoutedExperts):
            return False
        if layer.parallel or mixer.gated or mixer.alibi_slopes is not None:
            return False
        places = (layer.input_norm, layer.attention_out_norm, layer.feed_forward_norm, layer.feed_forward_out_norm)
        norms += [each for each in places if each is not None]
        if mixer.q_norm is not None and mixer.norm_eps != norm.eps:
            return False
        gated = part.shared if isinstance(part, RoutedExperts) else part
        if gated is not None:
            widths.add((gated is part, sum(gated.rank_widths) or len(gated.gate.weight)))
        forms |= {_form(weights) for group in _inputs(layer) for weights in group}
    is_one = len(forms) == 1 and len(widths) == len({kind for kind, _ in widths})
    return is_one and all(each.kind == "rms" and each.eps == norm.eps for each in norms)
