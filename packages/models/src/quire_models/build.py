"""Modules from records: what a network's description (`spec.py`) is made of."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec, SparseMoESpec
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import DecoderLayer, Mixer, ParallelBlock, PostLNBlock, SequentialBlock
from quire_models.layers.context_parallel import make_latent_attention
from quire_models.layers.convolution import GatedShortConvolution
from quire_models.layers.gated_delta import GatedDeltaNet
from quire_models.layers.mamba1 import Mamba1Mixer
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import MLP, GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import (
    GatedDeltaSpec,
    LatentSelfAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    SelfAttentionSpec,
    ShortConvSpec,
)
from quire_models.spec import FeedForwardSpec, LayerSpec, MixerSpec, NormSpec

__all__ = ["build_feed_forward", "build_layer", "build_mixer", "class_of"]

_MIXERS: dict[type, Callable[[Any, int, Scope], Mixer]] = {
    SelfAttentionSpec: SelfAttention,
    LatentSelfAttentionSpec: make_latent_attention,
    Mamba1Spec: Mamba1Mixer,
    Mamba2Spec: Mamba2Mixer,
    ShortConvSpec: GatedShortConvolution,
    GatedDeltaSpec: GatedDeltaNet,
}
_FEED_FORWARDS: dict[type, Callable[[Any, Scope], Callable[[Any], Tensor]]] = {
    GatedMLPSpec: lambda spec, scope: GatedMLP(spec, within(scope, spec.name)),
    MLPSpec: lambda spec, scope: MLP(spec, within(scope, spec.name)),
    SparseMoESpec: SparseMoE,
}


def class_of(name: str) -> Any:
    """The class, or function, that a record's `built_by` names: "module:class"."""
    module, _, member = name.partition(":")
    return getattr(import_module(module), member)


def within(scope: Scope, name: str) -> Scope:
    """The scope of a part; without a name, of the whole."""
    return scope / name if name else scope


def build_mixer(spec: MixerSpec, index: int, scope: Scope) -> Mixer:
    """The mixer of a layer.

    Args:
        index: Number of its cache in a batch.
        scope: Scope of the layer.
    """
    own: str = getattr(spec, "built_by", "")
    make = class_of(own) if own else _MIXERS[type(spec)]
    mixer: Mixer = make(spec, index, within(scope, spec.name))
    return mixer


def build_feed_forward(spec: FeedForwardSpec, scope: Scope) -> Callable[[Any], Tensor]:
    """The feed-forward network of a layer.

    Args:
        scope: Scope of the layer.
    """
    own: str = getattr(spec, "built_by", "")
    make = class_of(own) if own else _FEED_FORWARDS[type(spec)]
    network: Callable[[Any], Tensor] = make(spec, scope)
    return network


def build_layer(spec: LayerSpec, index: int, scope: Scope) -> DecoderLayer:
    """A layer of a decoder.

    Args:
        index: Number of its first mixer's cache in a batch.
        scope: Scope of the layer.
    """
    if spec.built_by:
        own: DecoderLayer = class_of(spec.built_by)(spec, index, scope)
        return own

    def norm(of: NormSpec | None) -> Callable[[Tensor], Tensor] | None:
        if of is None or not of.built_by:
            return None if of is None else make_norm(of, scope)
        own: Callable[[Tensor], Tensor] = class_of(of.built_by)(of, within(scope, of.name))
        return own

    mixer = build_mixer(spec.mixers[0], index, scope) if spec.mixers else None
    feed_forward = None if spec.feed_forward is None else build_feed_forward(spec.feed_forward, scope)
    if spec.arrangement == "sequential":
        return SequentialBlock(
            mixer=mixer,
            feed_forward=feed_forward,
            input_norm=norm(spec.input_norm),
            attention_out_norm=norm(spec.attention_out_norm),
            feed_forward_norm=norm(spec.feed_forward_norm),
            feed_forward_out_norm=norm(spec.feed_forward_out_norm),
            residual_factor=spec.residual_factor,
        )
    assert mixer is not None
    assert feed_forward is not None
    if spec.arrangement == "parallel":
        assert spec.input_norm is not None
        return ParallelBlock(
            mixer=mixer,
            feed_forward=feed_forward,
            input_norm=make_norm(spec.input_norm, scope),
            feed_forward_norm=norm(spec.feed_forward_norm),
        )
    assert spec.attention_out_norm is not None
    assert spec.feed_forward_out_norm is not None
    return PostLNBlock(
        mixer=mixer,
        feed_forward=feed_forward,
        mixer_norm=make_norm(spec.attention_out_norm, scope),
        feed_forward_norm=make_norm(spec.feed_forward_out_norm, scope),
    )
