"""Reading what decoder-only families have in common from config.json, under the names of Llama. Free of torch.

A family's `spec` gives its own names (`Fields.named`), calls `decoder_sizes`, and puts its network together from the
parts that `DecoderSizes` makes: each has the network's sizes, and takes what is the family's own as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import GATED_ACTS, head_size, hidden_act
from quire_models.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec, Routing, SparseMoESpec
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.rope_config import RopeConfig, parse_rope
from quire_models.spec import (
    EmbeddingSpec,
    FeedForwardSpec,
    FusedRows,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    NetworkSpec,
    NormSpec,
    PositionSpec,
)

__all__ = ["DecoderSizes", "decoder_sizes", "expert_counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder, and the parts of a network of these sizes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Dimensions of a head that are rotated, from the first; 0 for positions that come another way."""
    rope: RopeConfig | None
    eps: float
    """Of every norm, layer norms included."""
    act: str
    """A name of `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""
    tied: bool
    """The LM head is the embedding."""
    max_model_len: int
    """Tokens of context, rope scaling included."""

    @property
    def layers(self) -> range:
        """Numbers of the layers."""
        return range(self.num_layers)

    def attention(self, *, bias: bool = False, **fields: Any) -> SelfAttentionSpec:
        """Self-attention of these sizes.

        Args:
            bias: Of all projections.
            fields: Others of `SelfAttentionSpec`.
        """
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.head_dim**-0.5,
            "rope": self.rope,
            "rotary_dim": self.rotary_dim,
            "qkv_bias": bias,
            "out_bias": bias,
        }
        return SelfAttentionSpec(**sizes | fields)

    def encoder_attention(self, name: str, *, bias: bool, **fields: Any) -> EncoderAttentionSpec:
        """Attention of an encoder's tokens to each other, or of a decoder's to them; `fields` are others of
        `EncoderAttentionSpec`."""
        values: dict[str, Any] = {"scale": self.head_dim**-0.5, "kv_heads": self.num_kv_heads} | fields
        return EncoderAttentionSpec(
            name=name,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            bias=bias,
            **values,
        )

    def head_norms(self, query: str = "q_norm", key: str = "k_norm", **fields: Any) -> dict[str, Any]:
        """Fields of `SelfAttentionSpec` for RMS norms of each query and key head; `fields` are others of `NormSpec`."""
        norms = zip(("q_norm", "k_norm"), (query, key), strict=True)
        return {field: self.rms_norm(name, self.head_dim, **fields) for field, name in norms}

    def projection_norms(self) -> dict[str, Any]:
        """Fields of `SelfAttentionSpec` for RMS norms over all query heads, and all key heads, at once."""
        widths = {"q_norm": self.num_heads * self.head_dim, "k_norm": self.num_kv_heads * self.head_dim}
        return {name: self.rms_norm(name, width, over_heads=True) for name, width in widths.items()}

    def gated_mlp(self, name: str = "mlp", inner: int | None = None, **fields: Any) -> GatedMLPSpec:
        """A feed-forward network with a gate.

        Args:
            inner: Its width; None for the intermediate size.
            fields: Others of `GatedMLPSpec`.
        """
        values: dict[str, Any] = {
            "act": self.act,
            "intermediate_size": self.intermediate_size if inner is None else inner,
        } | fields
        return GatedMLPSpec(name=name, hidden_size=self.hidden_size, **values)

    def mlp(self, name: str = "mlp", names: tuple[str, str] = ("fc1", "fc2"), **fields: Any) -> MLPSpec:
        """A feed-forward network without a gate; `fields` are others of `MLPSpec`."""
        values: dict[str, Any] = {"act": self.act, "intermediate_size": self.intermediate_size} | fields
        return MLPSpec(name=name, names=names, hidden_size=self.hidden_size, **values)

    def moe(self, num_experts: int, inner: int, routing: Routing, **fields: Any) -> SparseMoESpec:
        """A mixture of experts that are `inner` wide; `fields` are others of `SparseMoESpec`."""
        values: dict[str, Any] = {"act": self.act, "hidden_size": self.hidden_size} | fields
        return SparseMoESpec(num_experts=num_experts, intermediate_size=inner, routing=routing, **values)

    def rms_norm(self, name: str, size: int | None = None, **fields: Any) -> NormSpec:
        """An RMS norm of the stream, or of `size` numbers; `fields` are others of `NormSpec`."""
        return NormSpec(name=name, size=self.hidden_size if size is None else size, **{"eps": self.eps} | fields)

    def layer_norm(self, name: str, size: int | None = None, **fields: Any) -> NormSpec:
        """A layer norm with weight and bias; see `rms_norm`."""
        return self.rms_norm(name, size, **{"kind": "layer", "has_bias": True} | fields)

    def pre_norm(
        self,
        layer: int,
        mixer: MixerSpec,
        feed_forward: FeedForwardSpec | None = None,
        *,
        prefix: str = "model.layers",
        norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
        norm: Callable[[str], NormSpec] | None = None,
        **fields: Any,
    ) -> LayerSpec:
        """A layer with a norm before each part, as Llama's.

        Args:
            feed_forward: None for a gated network without biases.
            norms: Names of the two norms, or of one that both parts share.
            norm: Name of a norm -> the norm; None for RMS norms.
            fields: Others of `LayerSpec`.
        """
        norm = norm or self.rms_norm
        return LayerSpec(
            name=f"{prefix}.{layer}",
            mixers=(mixer,),
            feed_forward=feed_forward or self.gated_mlp(),
            input_norm=norm(norms[0]),
            feed_forward_norm=norm(norms[1]) if len(norms) > 1 else None,
            **fields,
        )

    def post_norm(self, layer: int, mixer: MixerSpec, feed_forward: FeedForwardSpec | None = None) -> LayerSpec:
        """A layer with an RMS norm behind each part (OLMo 2); see `pre_norm`."""
        return LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(mixer,),
            feed_forward=feed_forward or self.gated_mlp(),
            attention_out_norm=self.rms_norm("post_attention_layernorm"),
            feed_forward_out_norm=self.rms_norm("post_feedforward_layernorm"),
        )

    def fused_qkv(self, module: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")) -> FusedRows:
        """A matrix of all queries, then all keys, then all values."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return FusedRows(module=module, parts=tuple(zip(names, (query, kv, kv), strict=True)))

    def fused_heads(self, module: str) -> FusedRows:
        """A matrix in which each key-value head follows its query heads, and its value head follows it."""
        rows = {"q_proj": self.num_heads // self.num_kv_heads * self.head_dim, "k_proj": self.head_dim}
        return FusedRows(module=module, parts=(*rows.items(), ("v_proj", self.head_dim)), groups=self.num_kv_heads)

    def fused_gate_up(self, module: str, inner: int | None = None) -> FusedRows:
        """A matrix of a feed-forward network's gate, then of what it weighs."""
        rows = self.intermediate_size if inner is None else inner
        return FusedRows(module=module, parts=(("gate_proj", rows), ("up_proj", rows)))

    def embedding(self, name: str = "embed_tokens", **fields: Any) -> EmbeddingSpec:
        """The embedding; `fields` are others of `EmbeddingSpec`."""
        return EmbeddingSpec(name=name, num_tokens=self.vocab_size, **{"size": self.hidden_size} | fields)

    def positions(self, name: str, offset: int = 0) -> PositionSpec:
        """Learned positions of the whole context, from the row `offset` on."""
        return PositionSpec(name=name, num_positions=self.max_model_len, size=self.hidden_size, offset=offset)

    def network(
        self,
        layers: Iterable[LayerSpec],
        *,
        final_norm: NormSpec | str | None = "norm",
        kind: Callable[..., NetworkSpec] = NetworkSpec,
        **fields: Any,
    ) -> NetworkSpec:
        """The network of these layers.

        Args:
            kind: Class of its record.
            final_norm: A norm, or the name of an RMS norm; None for none.
            fields: Others of that record.
        """
        values: dict[str, Any] = {"embedding": self.embedding(), "head": HeadSpec(tied=self.tied)} | fields
        return kind(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            max_model_len=self.max_model_len,
            layers=tuple(layers),
            final_norm=self.rms_norm(final_norm) if isinstance(final_norm, str) else final_norm,
            **values,
        )

    def encoder_network(self, layers: Iterable[LayerSpec], **fields: Any) -> NetworkSpec:
        """The network of an encoder alone, whose names have no prefix; `fields` are others of `EncoderSpec`."""
        head = HeadSpec(tied=self.tied)
        values: dict[str, Any] = {"body": "", "final_norm": None, "head": head} | fields
        return self.network(layers, kind=EncoderSpec, max_encoder_len=self.max_model_len, **values)


def decoder_sizes(
    config: Fields,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    act: str = "silu",
    acts: Container[str] = GATED_ACTS,
    partial: float | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    rotary: bool = True,
    inner_factor: int | None = None,
    context: int | None = None,
) -> DecoderSizes:
    """Sizes that are read alike everywhere, for full attention and whole-head rotation.

    Args:
        tied: Whether embedding and LM head share weights when config.json does not say.
        head_dim: The class's own default; None divides the hidden size.
        act: The class's default activation, as config.json would name it; `acts` are those that the network takes.
        partial: The class's default share of a head that is rotated; None when the network rotates whole heads.
        theta: The class's default base of the rotation.
        eps: The class's default epsilon of norms.
        rotary: Positions come by rotation; nothing of it is read otherwise.
        inner_factor: The class's default width of the feed-forward network in hidden sizes; None for none.
        context: The class's default context in tokens; None when it must be given.

    Raises:
        CheckpointError: A field is missing or wrong.
    """
    heads = config.integer("num_attention_heads", minimum=1)
    kv_heads = config.integer("num_key_value_heads", default=heads, minimum=1)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    layers = config.integer("num_hidden_layers", minimum=1)
    hidden_size = config.integer("hidden_size", minimum=1)
    positions = config.integer("max_position_embeddings", minimum=1, **{} if context is None else {"default": context})
    size = head_size(config, hidden_size, heads, head_dim)
    rope = _rope(config, positions, size, theta=theta, partial=partial) if rotary else None
    inner = {} if inner_factor is None else {"default": inner_factor * hidden_size}
    return DecoderSizes(
        vocab_size=config.integer("vocab_size", minimum=1),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", minimum=1, **inner),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rotary_dim=0 if rope is None else int(size * rope.partial_rotary_factor),
        rope=rope,
        eps=config.number("rms_norm_eps", default=eps, minimum=0.0),
        act=hidden_act(config, default=act, acts=acts),
        tied=config.flag("tie_word_embeddings", default=tied),
        max_model_len=positions if rope is None else rope.context_length(positions),
    )


def _rope(config: Fields, positions: int, size: int, *, theta: float, partial: float | None) -> RopeConfig:
    rope = parse_rope(config, max_position_embeddings=positions, theta=theta, partial=partial or 1.0)
    if partial is None and rope.partial_rotary_factor != 1.0:
        raise CheckpointError(
            f"{config.source}: partial_rotary_factor {rope.partial_rotary_factor} is not supported; this architecture "
            "rotates whole heads"
        )
    rotary_dim = int(size * rope.partial_rotary_factor)
    if rotary_dim % 2 or rotary_dim < 2:
        raise CheckpointError(f"{config.source}: head_dim must be even for rotary embedding, is {size}")
    if rope.kind == "dynamic" and rotary_dim == 2:
        raise CheckpointError(f"{config.source}: dynamic rope scaling needs a head_dim greater than 2")
    for name, divisors in (("long_factor", rope.divisors), ("short_factor", rope.short_divisors)):
        if rope.kind == "longrope" and len(divisors) != rotary_dim // 2:
            raise CheckpointError(
                f"{config.source}: {name} must have {rotary_dim // 2} numbers, one for each pair of rotated "
                f"dimensions, has {len(divisors)}"
            )
    return rope


def expert_counts(config: Fields, experts: str, per_token: str) -> tuple[int, int]:
    """Experts of a layer and of a token, from the fields of these names.

    Raises:
        CheckpointError: A token has more experts than there are.
    """
    num = config.integer(experts, minimum=1)
    chosen = config.integer(per_token, minimum=1)
    if chosen > num:
        raise CheckpointError(f"{config.source}: {per_token} ({chosen}) must be at most {experts} ({num})")
    return num, chosen
