"""Ling 2.5 and Ring 2.5 (inclusionAI 2026): lightning attention in most layers, latent attention in the last one of
each group, and the experts of Ling 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.bailing_moe import bailing_experts
from quire_models.families.deepseek_v2 import latent_attention, whole_rotations
from quire_models.families.glm4_moe import grouped_network
from quire_models.mixer_spec import RecurrentSpec
from quire_models.rope_config import RopeConfig
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = ["RotatedLightningSpec", "spec"]

_RENAMED = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.", ".self_attn."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedLightningSpec(RecurrentSpec):
    """Linear attention that forgets (Qin et al. 2024, arXiv:2401.04658), of rotated queries and keys; behind it a norm
    of groups of channels, and a gate."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    head_dim: int
    depth: float
    """Number of the layer, as a share of the last one's: late layers forget more slowly."""
    rope: RopeConfig | None
    rotary_dim: int
    has_silu: bool
    """Queries, keys and values go through SiLU."""
    head_norms: tuple[NormSpec, ...]
    """Of queries and of keys; none for neither."""
    groups: int
    eps: float
    """Of the norm of groups."""
    qkv_bias: bool
    built_by: ClassVar[str] = "quire_models.families.bailing_moe_v2_5_layers:RotatedLightning"

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Queries, keys, values and gate, and the scan's copies of them."""
        return 5 * self.inner_size + 2 * 6 * self.inner_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """A matrix of each head."""
        return (StateTensor("kv", (self.num_heads, self.head_dim, self.head_dim), "float32"),)

    def projections(self) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """Queries with keys and values, gate, output."""
        hidden, inner = self.hidden_size, self.inner_size
        return (
            LinearSpec(name="query_key_value", in_features=hidden, out_features=3 * inner, bias=self.qkv_bias),
            LinearSpec(name="g_proj", in_features=hidden, out_features=inner),
            LinearSpec(name="dense", in_features=inner, out_features=hidden),
        )

    def weights(self) -> Iterator[Weight]:
        """Projections and norms."""
        for linear in self.projections():
            yield from inside(self.name, linear.weights("linear attention"))
        for norm in self.head_norms:
            yield from inside(self.name, norm.weights())
        yield Weight(f"{self.name}.g_norm.weight", (self.inner_size,), "linear attention")


def spec(config: Fields) -> NetworkSpec:
    """The last layer of every `layer_group_size` has latent attention. Forgetting follows from the number of the layer
    as vLLM and SGLang count it, from 0."""
    sizes = decoder_sizes(config, partial=1.0)
    config.fixed("use_bias", False)
    config.fixed("rms_norm_eps", 1e-6)  # which norms of latents have, whatever it is
    period = config.integer("layer_group_size", minimum=1)
    if sizes.num_layers % period:
        raise CheckpointError(
            f"{config.source}: layer_group_size ({period}) must divide num_hidden_layers ({sizes.num_layers}); which "
            "layers of a group that is not whole have latent attention is not known"
        )
    latent_sizes, latent = latent_attention(whole_rotations(config))
    mixers = [
        latent if (layer + 1) % period == 0 else _lightning(config, sizes, layer / max(1, sizes.num_layers - 1))
        for layer in sizes.layers
    ]
    moe = bailing_experts(config, sizes, "gate.e_score_correction_bias")
    network = grouped_network(config, latent_sizes, mixers, moe)
    dense = ".self_attn.dense."
    latent_out = tuple(
        (f"model.layers.{layer}{dense}", f"model.layers.{layer}.self_attn.o_proj.")
        for layer in sizes.layers
        if mixers[layer] is latent
    )
    names = CheckpointNames(
        ignored_prefixes=(*network.checkpoint.ignored_prefixes, "model.mtp"), renamed=(*_RENAMED, *latent_out)
    )
    return replace(network, checkpoint=names)


def _lightning(config: Fields, sizes: DecoderSizes, depth: float) -> RotatedLightningSpec:
    """The linear attention of a layer at this depth, from 0 to 1."""
    has_silu = config.flag("linear_silu", default=False)
    groups = config.integer("group_norm_size", default=1, minimum=1)
    inner = sizes.num_heads * sizes.head_dim
    if inner % groups:
        raise CheckpointError(f"{config.source}: group_norm_size ({groups}) must divide all heads' width ({inner})")
    is_normed = config.flag("use_qk_norm", default=False)
    is_rotated = config.flag("linear_rope", default=True)
    return RotatedLightningSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        depth=depth,
        rope=sizes.rope if is_rotated else None,
        rotary_dim=sizes.rotary_dim if is_rotated else 0,
        has_silu=config.flag("use_linear_silu", default=has_silu),
        head_norms=tuple(sizes.head_norms("query_layernorm", "key_layernorm").values()) if is_normed else (),
        groups=groups,
        eps=sizes.eps,
        qkv_bias=config.flag("use_qkv_bias", default=False),
    )
