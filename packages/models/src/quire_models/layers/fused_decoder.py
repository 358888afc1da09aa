"""A network's layers in one call, where a backend of op `decoder_stack` serves beside its `paged_attention`.

Knows layers as data; does not know what is before and behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.feed_forward_spec import GatedMLPSpec, SparseMoESpec
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.norm import OffsetRMSNorm, RMSNorm
from quire_models.layers.scope import Scope
from quire_models.spec import NetworkSpec
from quire_ops import (
    DecodeNetwork,
    DecoderLayerWeights,
    DecodeRows,
    DecoderStack,
    Op,
    OpBackend,
    RoutedExperts,
    RunDecode,
    RunDecoder,
    ops,
)
from quire_ops.kv_format import QUANTIZED

__all__ = ["FusedDecoder"]

P = ParamSpec("P")
R = TypeVar("R")

_ACTIVATIONS = ("silu", "gelu")
"""Those that op `decoder_stack` has."""


class FusedDecoder:
    """The layers and the norm behind them."""

    def __init__(self, scope: Scope, config: ModelConfig, data: DecoderStack, run: RunDecoder) -> None:
        self._scope, self._config, self._data, self._run = scope, config, data, run

    @classmethod
    def bind(
        cls,
        scope: Scope,
        config: ModelConfig,
        layers: Sequence[DecoderLayerWeights | None],
        norm: RMSNorm | OffsetRMSNorm,
    ) -> FusedDecoder | None:
        """Args:
        layers: In the order in which they were made; None for one that is not such data.

        Returns:
            None where no backend takes the layers.
        """
        known = [layer for layer in layers if layer is not None]
        backend = _choose(scope, config, ops.decoder_stack)
        activation = _activation(config.network)
        if backend is None or len(known) < len(layers) or not _alike(known) or activation not in _ACTIVATIONS:
            return None
        attentions = scope.attentions.values()
        data = DecoderStack(
            layers=tuple(
                dataclasses.replace(layer, kv_scale=attention.kv_scale)
                for layer, attention in zip(known, attentions, strict=True)
            ),
            final_norm=norm.weight,
            dtype=scope.dtype,
            head_dim=config.head_dim,
            rotary_dim=config.network.attention.rotary_dim,
            eps=norm.eps,
            activation=activation,
        )
        return cls(scope, config, data, backend.function(data))

    @property
    def batch_invariant(self) -> bool:
        """Whether the call promises a row's bits whatever else is in the step."""
        return self._scope.choose(ops.decoder_stack).batch_invariant

    def reads(self, kv_cache: Tensor) -> bool:
        """Whether the ops that take the whole stack read such a cache."""
        return kv_cache.dtype == self._scope.dtype or kv_cache.dtype in QUANTIZED

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        taps: dict[int, Tensor],
    ) -> Tensor:
        """See `RunDecoder`."""
        caches, lora = batch.kv_caches, batch.lora
        return self._run(x, rotations, batch.attention, batch.group_of_layer, caches, lora=lora, taps=taps)

    def bind_decode(
        self,
        rows: DecodeRows,
        embedding: Embedding,
        head: LMHead,
        rotations: Sequence[Callable[[int], tuple[Tensor, Tensor]]],
        **factors: Any,
    ) -> RunDecode | None:
        """See `Network.bind_decode`: op `decode_step`, of a network that has nothing else before its layers and behind
        its norm than these.

        Args:
            factors: Fields of `DecodeNetwork`.
        """
        backend, weights = _choose(self._scope, self._config, ops.decode_step), head.stack_weights()
        if backend is None or weights is None or not self.reads(rows.kv_caches[0]):
            return None
        network = DecodeNetwork(
            embedding=embedding.weight, stack=self._data, head=weights, rotations=tuple(rotations), **factors
        )
        return backend.function(network, rows)


def _activation(network: NetworkSpec) -> str | None:
    """The activation of all gated networks, those beside experts included; None where they differ."""
    parts = [layer.feed_forward for layer in network.layers]
    parts += [part.shared for part in parts if isinstance(part, SparseMoESpec)]
    acts = {part.act for part in parts if isinstance(part, GatedMLPSpec)} or {"silu"}
    return acts.pop() if len(acts) == 1 else None


def _choose(scope: Scope, config: ModelConfig, op: Op[P, R]) -> OpBackend[P, R] | None:
    """The backend of an op that takes the whole stack, if it is the one that serves attention."""
    sizes = {"head_dim": config.head_dim, "queries_per_kv_head": config.num_heads // config.num_kv_heads}
    backend = scope.choose(op, **sizes)
    return backend if backend.name == scope.attention_backend.name else None


def _alike(layers: list[DecoderLayerWeights]) -> bool:
    """Whether all matrices but those of experts are kept in one way, as far as op `decoder_stack` asks for that."""
    forms: set[tuple[torch.dtype, int | None, bool]] = set()
    widths: set[tuple[bool, int]] = set()
    for layer in layers:
        matrices = [layer.q, layer.k, layer.v, layer.o]
        part = layer.feed_forward
        gated = part.shared if isinstance(part, RoutedExperts) else part
        if gated is not None:
            matrices += gated
            widths.add((gated is part, len(gated.gate.weight)))
            gate, up = (None if one.scale is None else one.scale.shape for one in (gated.gate, gated.up))
            if gate != up:
                return False
        for one in matrices:
            forms.add((one.weight.dtype, None if one.scale is None else one.scale.ndim, one.input_scale is None))
    return len(forms) == 1 and len(widths) == len({kind for kind, _ in widths})
