"""The part of a network that one tensor-parallel rank has, as a description of its own. Free of torch.

Knows which layers have a rule: self-attention is split by heads, so that a rank's KV cache has its own heads only, and
latent attention is, too, whose latents each rank keeps. The other linear layers are split by outputs where they are
built (`layers/linear.py`); what has no rule is replicated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from quire_models.encoder_spec import CrossLayerSpec, EncoderAttentionSpec, EncoderDecoderSpec
from quire_models.mixer_spec import LatentSelfAttentionSpec, SelfAttentionSpec
from quire_models.shards import split_heads
from quire_models.spec import LayerSpec, NetworkSpec

__all__ = ["interleave", "shard"]


def shard(network: NetworkSpec, rank: int, size: int) -> NetworkSpec:
    """The network of rank `rank` of `size` tensor-parallel ranks; with one rank, the network itself."""
    return network if size == 1 or not network.shares_heads else _shard(network, rank, size)


def _shard(network: NetworkSpec, rank: int, size: int) -> NetworkSpec:
    layers = tuple(_shard_layer(layer, rank, size) for layer in network.layers)
    if isinstance(network, EncoderDecoderSpec):
        of_encoder = tuple(_shard_layer(layer, rank, size) for layer in network.encoder_layers)
        return dataclasses.replace(network, layers=layers, encoder_layers=of_encoder)
    return dataclasses.replace(network, layers=layers)


def interleave(network: NetworkSpec, dcp_size: int) -> NetworkSpec:
    """The network whose attention to all tokens keeps these interleaved over decode context parallel ranks; with one
    rank, the network itself. Windows, chunks, states and families' own attention stay as they are."""
    return network if dcp_size == 1 else _interleave(network, dcp_size)


def _interleave(network: NetworkSpec, dcp_size: int) -> NetworkSpec:
    layers = tuple(layer if layer.built_by else _interleave_layer(layer, dcp_size) for layer in network.layers)
    return dataclasses.replace(network, layers=layers)


def _interleave_layer(layer: LayerSpec, dcp_size: int) -> LayerSpec:
    return dataclasses.replace(layer, mixers=tuple(_interleave_mixer(mixer, dcp_size) for mixer in layer.mixers))


def _interleave_mixer(mixer: Any, dcp_size: int) -> Any:
    return dataclasses.replace(mixer, dcp_size=dcp_size) if _keeps_all_tokens(mixer) else mixer


def _keeps_all_tokens(mixer: Any) -> bool:
    """Whether it is one of the shared attentions, to all tokens before."""
    if type(mixer) is SelfAttentionSpec:
        return mixer.sliding_window is None and mixer.chunk_tokens is None
    return type(mixer) is LatentSelfAttentionSpec and mixer.indexer is None


def _shard_layer(layer: LayerSpec, rank: int, size: int) -> LayerSpec:
    if layer.built_by:  # a family's own layer: nothing is known of its attention
        return layer
    mixers = tuple(_shard_mixer(mixer, rank, size) for mixer in layer.mixers)
    if isinstance(layer, CrossLayerSpec):
        return dataclasses.replace(layer, mixers=mixers, cross=_shard_encoder_attention(layer.cross, rank, size))
    return dataclasses.replace(layer, mixers=mixers)


def _shard_mixer(mixer: Any, rank: int, size: int) -> Any:
    if isinstance(mixer, LatentSelfAttentionSpec):
        return _shard_latents(mixer, rank, size)
    if type(mixer) is EncoderAttentionSpec:
        return _shard_encoder_attention(mixer, rank, size)
    is_known = type(mixer) is SelfAttentionSpec or getattr(mixer, "splits_heads", False)
    if not is_known or mixer.heads is not None:
        return mixer
    # Norms over all heads at once, or with a weight for each head, need them all.
    if any(norm is not None and (norm.over_heads or norm.num_heads) for norm in (mixer.q_norm, mixer.k_norm)):
        return mixer
    heads = split_heads(mixer.num_heads, mixer.num_kv_heads, rank, size, mixer.dcp_size)
    if heads is None:
        return mixer
    return dataclasses.replace(
        mixer, num_heads=heads.num_local_heads, num_kv_heads=heads.num_local_kv_heads, heads=heads
    )


def _shard_encoder_attention(mixer: EncoderAttentionSpec, rank: int, size: int) -> EncoderAttentionSpec:
    heads = split_heads(mixer.num_heads, mixer.num_kv_heads, rank, size)
    if heads is None or mixer.heads is not None:
        return mixer
    return dataclasses.replace(mixer, num_heads=heads.num_local_heads, kv_heads=heads.num_local_kv_heads, heads=heads)


def _shard_latents(mixer: LatentSelfAttentionSpec, rank: int, size: int) -> LatentSelfAttentionSpec:
    """Latent attention with some of the heads, over the latents of all tokens; whole where tokens are interleaved."""
    heads = split_heads(mixer.num_heads, mixer.num_heads, rank, size) if mixer.dcp_size == 1 else None
    if heads is None or mixer.heads is not None:
        return mixer
    return dataclasses.replace(mixer, num_heads=heads.num_local_heads, heads=heads)
