"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): Kimi's delta attention, whose states fade channel by channel, beside
latent attention without positions; and Ling 3.0 (inclusionAI 2026), with positions and gates of heads there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.mixer_spec import LatentSelfAttentionSpec, RecurrentSpec
from quire_models.spec import CheckpointNames, LinearSpec, MixerSpec, NetworkSpec, StateInputs, Weight, inside, recast

__all__ = ["GatedLatentSpec", "KimiDeltaSpec", "UnrotatedLatentSpec", "spec", "spec_of_bailing"]

LAYER_KINDS = {"full_attention": True, "linear_attention": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrotatedLatentSpec(LatentSelfAttentionSpec):
    """Latent attention whose shared key is not rotated."""

    built_by: ClassVar[str] = "quire_models.families.kimi_linear_layers:UnrotatedLatentAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLatentSpec(LatentSelfAttentionSpec):
    """Latent attention whose heads have a gate each."""

    built_by: ClassVar[str] = "quire_models.families.kimi_linear_layers:GatedLatentAttention"

    def weights(self) -> Iterator[Weight]:
        """Those of latent attention, and the gates'."""
        yield from LatentSelfAttentionSpec.weights(self)
        yield from inside(self.name, self.gate().weights("attention"))

    def gate(self) -> LinearSpec:
        """From x to a number for each head."""
        return self.projection("g_proj", self.hidden_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec(RecurrentSpec):
    """Kimi's delta attention (sec. 3)."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel: int
    eps: float
    """Of the norm behind it."""
    rank: int | None
    """Width that decays and gates are projected from; None where they are projected at once."""
    lower_bound: float | None
    """Least logarithm of a decay; None for none."""
    a_log_shape: tuple[int, ...]
    built_by: ClassVar[str] = "quire_models.families.kimi_linear_layers:KimiDeltaAttention"

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Projected, convolved, and the rule's copies in float32."""
        return 8 * self.inner_size + 2 * 5 * self.inner_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolutions, and a matrix of each head."""
        return (
            StateTensor("conv", (self.conv_kernel - 1, 3 * self.inner_size), "float32"),
            StateTensor("delta", (self.num_heads, self.head_dim, self.head_dim), "float32"),
        )

    @property
    def state_inputs(self) -> StateInputs:
        """What is convolved, and comes of it; a decay of each channel and a strength of each head, in float32."""
        return StateInputs(6 * self.inner_size, wide=self.inner_size + self.num_heads)

    def projections(self) -> tuple[LinearSpec, ...]:
        """Layers that take the input: queries, keys, values, strengths, decays, gate."""
        inner, low = self.inner_size, self.rank is not None
        sizes = {"q_proj": inner, "k_proj": inner, "v_proj": inner, "b_proj": self.num_heads}
        sizes |= {
            "f_a_proj" if low else "f_proj": self.rank or inner,
            "g_a_proj" if low else "g_proj": self.rank or inner,
        }
        return tuple(
            LinearSpec(name=name, in_features=self.hidden_size, out_features=size) for name, size in sizes.items()
        )

    def second_projections(self) -> tuple[LinearSpec, ...]:
        """Layers that take what the last two of these give; none where that is all."""
        names = () if self.rank is None else ("f_b_proj", "g_b_proj")
        return tuple(LinearSpec(name=name, in_features=self.rank or 0, out_features=self.inner_size) for name in names)

    def weights(self) -> Iterator[Weight]:
        """Projections, convolutions, what decays are made of, and the norm."""
        part, inner = "linear attention", self.inner_size
        out = LinearSpec(name="o_proj", in_features=inner, out_features=self.hidden_size)
        for linear in (*self.projections(), *self.second_projections(), out):
            yield from inside(self.name, linear.weights(part))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            yield Weight(f"{self.name}.{name}.weight", (inner, 1, self.conv_kernel), part)
        yield Weight(f"{self.name}.o_norm.weight", (self.head_dim,), part)
        yield Weight(f"{self.name}.A_log", self.a_log_shape, part, is_wide=True)
        yield Weight(f"{self.name}.dt_bias", (inner,), part, is_wide=True)


_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_routed_experts": "num_experts",
}
"""Field -> what config.json calls it."""


def _named(config: Fields) -> Fields:
    for name, own in _NAMES.items():
        config = config.with_default(name, config.get(own))
    return config


def spec(config: Fields) -> NetworkSpec:
    """`linear_attn_config` says which layers attend to all tokens, counted from 1; else every fourth does."""
    config.fixed("moe_router_activation_func", "sigmoid")
    config.fixed("mla_use_nope", True)
    config.fixed("moe_layer_freq", 1)
    config = _named(config).with_default("rms_norm_eps", 1e-5)
    linear = config.object("linear_attn_config") or Fields({}, config.source)
    sizes, attention = latent_attention(config)
    delta = KimiDeltaSpec(
        hidden_size=sizes.hidden_size,
        num_heads=linear.integer("num_heads", default=config.integer("linear_num_heads", default=32), minimum=1),
        head_dim=linear.integer("head_dim", default=config.integer("linear_head_dim", default=128), minimum=1),
        conv_kernel=linear.integer(
            "short_conv_kernel_size", default=config.integer("linear_conv_kernel_dim", default=4), minimum=2
        ),
        eps=sizes.eps,
        rank=linear.integer("head_dim", default=config.integer("linear_head_dim", default=128), minimum=1),
        lower_bound=None,
        a_log_shape=(),
    )
    delta = replace(delta, a_log_shape=(1, 1, delta.num_heads, 1))
    unrotated = recast(UnrotatedLatentSpec, replace(attention, rope=None))  # type: ignore[arg-type]
    attends = _attends(config, linear, sizes.num_layers)
    mixers: list[MixerSpec] = [unrotated if each else delta for each in attends]
    return _network(config, sizes, mixers, dense_layers=1, names=("w1", "w3", "w2"))


def spec_of_bailing(config: Fields) -> NetworkSpec:
    """The last layer of every `layer_group_size` attends to all tokens."""
    config = _named(config).with_default("rope_theta", 6e6)
    bounded = config.flag("kda_safe_gate", default=True)
    sizes, attention = latent_attention(config.named(q_lora_rank="-", rope_interleave="-"))
    delta = KimiDeltaSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        head_dim=config.integer("linear_head_dim", default=config.integer("head_dim", default=128), minimum=1),
        conv_kernel=config.integer("short_conv_kernel_size", default=4, minimum=2),
        eps=sizes.eps,
        rank=None,
        lower_bound=config.number("kda_lower_bound", default=-5.0) if bounded else None,
        a_log_shape=(sizes.num_heads,),
    )
    period = config.integer("layer_group_size", default=6, minimum=1)
    default = [(layer + 1) % period == 0 for layer in sizes.layers]
    attends = layer_kinds(config, "layer_types", sizes.num_layers, LAYER_KINDS, default)
    gated = recast(GatedLatentSpec, attention)
    renamed = (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    )
    mixers: list[MixerSpec] = [gated if each else delta for each in attends]
    return _network(config, sizes, mixers, dense_layers=2, renamed=renamed)


def _network(
    config: Fields,
    sizes: DecoderSizes,
    mixers: Sequence[MixerSpec],
    *,
    dense_layers: int,
    renamed: tuple[tuple[str, str], ...] = ((".block_sparse_moe.", ".mlp."),),
    **fields: Any,
) -> NetworkSpec:
    """`dense_layers` is the class's default of `first_k_dense_replace`; `fields` are of the experts."""
    dense = config.integer("first_k_dense_replace", default=dense_layers, minimum=0)
    default = [layer >= dense for layer in sizes.layers]
    sparse = layer_kinds(config, "mlp_layer_types", sizes.num_layers, MLP_KINDS, default)
    network = grouped_network(config, sizes, mixers, grouped_moe(config, sizes, **fields), sparse=sparse)
    names = CheckpointNames(ignored_prefixes=network.checkpoint.ignored_prefixes, renamed=renamed)
    return replace(network, checkpoint=names)


def _attends(config: Fields, linear: Fields, layers: int) -> Sequence[bool]:
    """Per layer, whether it attends to all tokens."""
    listed = linear.get("full_attn_layers")
    linear.skip("kda_layers")
    if config.get("layer_types") is not None or listed is None:
        default = [layer > 0 and layer % 4 == 0 for layer in range(layers)]
        return layer_kinds(config, "layer_types", layers, LAYER_KINDS, default)
    if not isinstance(listed, list) or any(layer not in range(1, layers + 1) for layer in listed):
        raise CheckpointError(
            f"{config.source}: full_attn_layers must list some of the layers 1 to {layers}, is {listed!r}"
        )
    return [layer + 1 in listed for layer in range(layers)]
