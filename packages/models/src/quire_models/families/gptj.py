"""GPT-J (Wang & Komatsuzaki 2021): parts side by side behind one norm, neighbours rotated in part of each head; and
CodeGen (Nijkamp et al. 2022), with fused projections in four pieces."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.gpt2 import GPT2_NAMES, MASKS
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, FusedRows, HeadSpec, NetworkSpec

__all__ = ["PARTS", "spec", "spec_of_codegen"]

PARTS = 4
"""Pieces in which a checkpoint of CodeGen keeps its fused projections, for the devices it was trained on."""


def spec(config: Fields) -> NetworkSpec:
    """The first `rotary_dim` dimensions of each head are rotated. The first checkpoints hold the causal mask."""
    sizes = decoder_sizes(config.named(**GPT2_NAMES), act="gelu_new", acts=ACTIVATIONS, eps=1e-5, inner_factor=4)
    rotary_dim = config.integer("rotary_dim", default=64, minimum=2)
    if rotary_dim % 2 or rotary_dim > sizes.head_dim:
        raise CheckpointError(
            f"{config.source}: rotary_dim must be even and at most the {sizes.head_dim} dimensions of a head, is "
            f"{rotary_dim}"
        )
    attention = sizes.attention(
        name="attn", rotary_dim=rotary_dim, interleaved=True, names=ProjectionNames(out="out_proj")
    )
    mlp = sizes.mlp(names=("fc_in", "fc_out"))
    layers = (
        sizes.pre_norm(
            layer,
            attention,
            mlp,
            prefix="transformer.h",
            norms=("ln_1",),
            norm=sizes.layer_norm,
            arrangement="parallel",
        )
        for layer in sizes.layers
    )
    return sizes.network(
        layers,
        body="transformer",
        embedding=sizes.embedding("wte"),
        final_norm=sizes.layer_norm("ln_f"),
        head=HeadSpec(tied=sizes.tied, bias=True),
        checkpoint=CheckpointNames(ignored_suffixes=MASKS),
    )


def spec_of_codegen(config: Fields) -> NetworkSpec:
    """Each piece has queries, values and keys, in this order."""
    network = spec(config)
    heads, size = network.attention.num_heads, network.attention.query_size
    if heads % PARTS:
        raise CheckpointError(f"{config.source}: n_head must be a multiple of {PARTS}, is {heads}")
    parts = tuple((name, size // PARTS) for name in ("q_proj", "v_proj", "k_proj"))
    fused = FusedRows(module="attn.qkv_proj", parts=parts, groups=PARTS)
    return replace(network, checkpoint=replace(network.checkpoint, fused=(fused,)))
