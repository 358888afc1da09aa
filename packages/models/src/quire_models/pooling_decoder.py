"""Decoders whose hidden states are pooled: without an LM head, with a head of classes or rewards. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.pooling_heads import HeadKind, decoder_pooler
from quire_models.spec import NetworkSpec, recast
from quire_models.transformers_backend.config import FallbackSpec, fallback_spec

__all__ = ["FallbackBodySpec", "as_pooling_decoder", "fallback_body_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackBodySpec(FallbackSpec):
    """Of a network that Transformers runs without an LM head."""

    built_by: ClassVar[str] = "quire_models.transformers_backend.pooled:TransformersBody"


def as_pooling_decoder(network: NetworkSpec, config: Fields, head: HeadKind) -> NetworkSpec:
    """A decoder without its LM head, which the checkpoint need not bring and which is not loaded. Names of the body may
    have its prefix or not, since classes of bodies alone have none.

    Args:
        config: config.json.
        head: What the checkpoint's class has instead.

    Raises:
        CheckpointError: A field of the head is wrong, or hidden states have another width than the head takes.
    """
    if network.head.project_out is not None:
        raise CheckpointError(
            f"{config.source}: hidden states of this network are projected to the width of its embedding, "
            f"{network.embedding.size}, which is not supported where they are pooled"
        )
    checkpoint = network.checkpoint
    outermost = network.body.partition(".")[0]
    if outermost and not checkpoint.default_prefix:
        checkpoint = replace(checkpoint, default_prefix=f"{outermost}.")
    ignored = (*checkpoint.ignored_prefixes, f"{network.head.name}.", f"{outermost}.{network.head.name}.", "score.")
    return replace(
        network,
        has_lm_head=False,
        pooler=decoder_pooler(config, head, network.hidden_size),
        checkpoint=replace(checkpoint, ignored_prefixes=ignored),
    )


def fallback_body_spec(config: Fields, head: HeadKind) -> NetworkSpec:
    """A decoder that Transformers runs, in a class with a head of classes: as `fallback_spec`.

    Args:
        config: config.json.
        head: What the class has.

    Raises:
        CheckpointError: A field of the head is wrong.
    """
    network = fallback_spec(config)
    pooler = decoder_pooler(config, head, network.hidden_size)
    return replace(recast(FallbackBodySpec, network), has_lm_head=False, pooler=pooler)
