"""LongCat-Flash (Meituan LongCat Team 2025, arXiv:2509.01322): two latent attentions and two feed-forward networks in a
layer, beside experts whose result skips the second half (shortcut), some of which give their input back; and, as in
LongCat-Flash-Lite (2026, arXiv:2601.21204), embeddings of the last tokens together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.decoder_sizes import DecoderSizes
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.qwen4_exp import MAX_EXACT_TOKENS
from quire_models.feed_forward_spec import GatedMLPSpec, Routing, SparseMoESpec
from quire_models.mixer_spec import LatentSelfAttentionSpec, RecurrentSpec
from quire_models.spec import (
    CheckpointNames,
    LayerSpec,
    LinearSpec,
    NetworkSpec,
    NormSpec,
    StateInputs,
    Weight,
    inside,
    recast,
)

__all__ = ["HashedNGramSpec", "ScaledLatentSpec", "ShortcutLayerSpec", "ZeroExpertsSpec", "spec", "spec_of_ngram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLatentSpec(LatentSelfAttentionSpec):
    """Latent attention whose latents have a factor behind their norm."""

    latent_factor: float
    built_by: ClassVar[str] = "quire_models.families.longcat_flash_layers:ScaledLatentAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroExpertsSpec(SparseMoESpec):
    """Experts, some of which give their input back: the router knows them behind those that compute."""

    num_zero: int
    built_by: ClassVar[str] = "quire_models.families.longcat_flash_layers:ZeroExperts"

    def weights(self) -> Iterator[Weight]:
        """Those of the experts, with a router of more outputs."""
        routed = {f"{self.name}.{name}" for name in (f"{self.router}.weight", self.correction_bias)}
        for weight in SparseMoESpec.weights(self):
            rows = weight.shape[0] + (self.num_zero if weight.name in routed else 0)
            yield weight._replace(shape=(rows, *weight.shape[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedNGramSpec(RecurrentSpec):
    """Adds to the embedding of a token what hashes of the last tokens choose from tables, and takes the mean."""

    name: str = "ngram_embeddings"
    hidden_size: int
    vocab_size: int
    max_tokens: int
    """Tokens of the longest n-gram."""
    table_sizes: tuple[int, ...]
    """Rows of each table, those of two tokens first."""
    boundary_token_id: int
    """N-grams do not reach beyond it."""
    reads_token_ids: ClassVar[bool] = True
    built_by: ClassVar[str] = "quire_models.families.longcat_flash_layers:HashedNGrams"

    @property
    def row(self) -> int:
        """Width of a table."""
        return self.hidden_size // len(self.table_sizes)

    @property
    def width(self) -> int:
        """Rows, and what is made of them, added up."""
        return 3 * self.hidden_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last token ids, as often as they are looked up."""
        last = self.max_tokens - 1
        return (StateTensor("tokens", (last, last), "float32"),)

    @property
    def state_inputs(self) -> StateInputs:
        """The token ids in float32."""
        return StateInputs(0, wide=self.max_tokens - 1)

    def projections(self) -> tuple[LinearSpec, ...]:
        """From the row of each table to the hidden size."""
        return tuple(
            LinearSpec(name=f"post_projs.{table}", in_features=self.row, out_features=self.hidden_size)
            for table in range(len(self.table_sizes))
        )

    def weights(self) -> Iterator[Weight]:
        """The tables and the projections."""
        for table, rows in enumerate(self.table_sizes):
            yield Weight(f"{self.name}.embedders.{table}.weight", (rows, self.row), "n-gram embedding")
        for linear in self.projections():
            yield from inside(self.name, linear.weights("n-gram embedding"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutLayerSpec(LayerSpec):
    """x + attention, + network, + attention, + network, each behind a norm; experts read what the first network does,
    and what they give is added last. The first layer may have n-gram embeddings behind its two mixers."""

    networks: tuple[GatedMLPSpec, GatedMLPSpec]
    second_input_norm: NormSpec
    second_feed_forward_norm: NormSpec
    built_by: ClassVar[str] = "quire_models.families.longcat_flash_layers:ShortcutLayer"

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Its norms, in the order in which they are applied."""
        first = (self.input_norm, self.feed_forward_norm)
        return (*(norm for norm in first if norm is not None), self.second_input_norm, self.second_feed_forward_norm)

    def weights(self) -> Iterator[Weight]:
        """Those of its parts, and of the networks beside the experts."""
        yield from LayerSpec.weights(self)
        for network in self.networks:
            yield from inside(self.name, network.weights())


def spec(config: Fields) -> NetworkSpec:
    """Latents have the factor that their width would need for a variance of one (sec. 2.3.1)."""
    return _network(config)


def spec_of_ngram(config: Fields) -> NetworkSpec:
    """Tables have `ngram_vocab_size_ratio` * vocab_size rows and a few more, each another number: `emb_split_num` for
    each length of an n-gram up to `emb_neighbor_num`."""
    lengths = config.integer("emb_neighbor_num", minimum=2)
    num = (lengths - 1) * config.integer("emb_split_num", minimum=1)
    vocab_size, hidden = config.integer("vocab_size", minimum=1), config.integer("hidden_size", minimum=1)
    rows = config.number("ngram_vocab_size_ratio", minimum=0.0) * vocab_size
    if hidden % num:
        raise CheckpointError(f"{config.source}: hidden_size ({hidden}) must be a multiple of {num} tables of n-grams")
    if vocab_size > MAX_EXACT_TOKENS:
        raise CheckpointError(f"{config.source}: vocab_size must be at most {MAX_EXACT_TOKENS}, is {vocab_size}")
    eos = config.get("eos_token_id")
    if eos is not None and not isinstance(eos, int):
        raise CheckpointError(f"{config.source}: eos_token_id must be one token, where n-grams end, is {eos!r}")
    ngrams = HashedNGramSpec(
        hidden_size=hidden,
        vocab_size=vocab_size,
        max_tokens=lengths,
        table_sizes=tuple(int(rows + 2 * table + 1) for table in range(num)),
        boundary_token_id=2 if eos is None else eos,
    )
    return _network(config, ngrams)


def _network(config: Fields, ngrams: HashedNGramSpec | None = None) -> NetworkSpec:
    config.fixed("mla_scale_q_lora", True)
    config.fixed("mla_scale_kv_lora", True)
    config.fixed("attention_method", "MLA")
    config.fixed("zero_expert_type", "identity")
    config.fixed("use_longcat_dsa", False)
    config.fixed("norm_topk_prob", False)
    config.skip("num_hidden_layers", "mtp_*", "num_nextn_predict_layers", "nextn_use_scmoe", "topk_method", "*_dtype")
    named = config.named(num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size")
    sizes, attention = latent_attention(named.with_default("rope_theta", 1e7).with_default("rms_norm_eps", 1e-5))
    if attention.q_lora_rank is None:
        raise CheckpointError(f"{config.source}: q_lora_rank is missing; queries have a latent here")
    scaled = recast(
        ScaledLatentSpec,
        replace(attention, scale=attention.scale * (sizes.hidden_size / attention.q_lora_rank) ** 0.5),
        latent_factor=(sizes.hidden_size / attention.kv_lora_rank) ** 0.5,
    )
    experts = _experts(config, sizes)
    pair = (replace(scaled, name="self_attn.0"), replace(scaled, name="self_attn.1"))

    def layer(number: int) -> ShortcutLayerSpec:
        return ShortcutLayerSpec(
            name=f"model.layers.{number}",
            mixers=(*pair, ngrams) if ngrams is not None and number == 0 else pair,
            feed_forward=experts,
            input_norm=sizes.rms_norm("input_layernorm.0"),
            feed_forward_norm=sizes.rms_norm("post_attention_layernorm.0"),
            second_input_norm=sizes.rms_norm("input_layernorm.1"),
            second_feed_forward_norm=sizes.rms_norm("post_attention_layernorm.1"),
            networks=(sizes.gated_mlp("mlps.0"), sizes.gated_mlp("mlps.1")),
        )

    return sizes.network(
        (layer(number) for number in sizes.layers),
        caches_by_mixer=True,
        checkpoint=CheckpointNames(
            ignored_prefixes=("model.mtp.",),
            # Transformers writes matrices of experts that compute nothing.
            ignored_suffixes=tuple(
                f".experts.{number}.{name}.weight"
                for number in range(experts.num_experts, experts.num_experts + experts.num_zero)
                for name in experts.names
            ),
            renamed=(
                ("model.ngram_embeddings.word_embeddings.", "model.embed_tokens."),
                ("model.ngram_embeddings.", "model.layers.0.ngram_embeddings."),
            ),
        ),
    )


def _experts(config: Fields, sizes: DecoderSizes) -> ZeroExpertsSpec:
    num, zero = config.integer("n_routed_experts", minimum=1), config.integer("zero_expert_num", default=0, minimum=0)
    top_k = config.integer("moe_topk", minimum=1)
    if top_k > num + zero:
        raise CheckpointError(f"{config.source}: moe_topk ({top_k}) must be at most {num + zero}, all experts")
    return ZeroExpertsSpec(
        hidden_size=sizes.hidden_size,
        num_experts=num,
        num_zero=zero,
        intermediate_size=config.integer("expert_ffn_hidden_size", minimum=1),
        act=sizes.act,
        routing=Routing(top_k=top_k, scoring="softmax", scale=config.number("routed_scaling_factor", default=1.0)),
        router="router.classifier",
        router_bias=config.flag("router_bias", default=False),
        correction_bias="router.e_score_correction_bias",
    )
