"""Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa whose positions come by rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import EncoderSpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import HeadKind, roberta_heads
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec, recast
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "TaskSpec", "pooler", "spec"]

NAMES = ProjectionNames("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec(EncoderSpec):
    """An encoder whose checkpoint has adapters of several tasks beside its weights (section 3): one of them is made
    part of the weights when they are loaded, or each text has its own."""

    num_tasks: int
    """Number of the adapters of each weight."""
    task_index: int | None = None
    """Which of them becomes part of the weights; None where texts choose."""
    lora_rank: int
    """Rank of each adapter."""
    lora_scale: float
    """Factor of what it adds to a weight."""
    built_by: ClassVar[str] = "quire_models.families.jina_embeddings_v3_layers:TaskEncoder"


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere. The first checkpoints have adapters of tasks beside each weight: that
    of `default_task` counts for all texts, and each text chooses where config.json does not name one."""
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    if config.get("rotary_emb_base") is not None:
        named = named.named(rope_theta="rotary_emb_base")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, theta=20_000.0, context=8194)
    attention = sizes.encoder_attention("mixer", bias=True, names=NAMES, rope=sizes.rope)
    layers = (
        LayerSpec(
            name=f"encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=sizes.mlp("mlp", ("fc1", "fc2")),
            attention_out_norm=sizes.layer_norm("norm1"),
            feed_forward_out_norm=sizes.layer_norm("norm2"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=1, minimum=1),
        token_types="embeddings.token_type_embeddings",
        norm=sizes.layer_norm("emb_ln"),
    )
    names = CheckpointNames(
        removed_prefixes=("roberta.",),
        ignored_prefixes=("pooler.", "lm_head.", "classifier."),
        ignored_suffixes=(".lora_A", ".lora_B"),
        renamed=(("parametrizations.weight.original", "weight"), ("lm_head.decoder.bias", "lm_head.bias")),
        fused=(sizes.fused_qkv("mixer.Wqkv", NAMES[:3]),),
    )
    network = sizes.encoder_network(layers, embedding=embedding, checkpoint=names)
    tasks, task = config.texts("lora_adaptations"), config.text("default_task", default=None)
    if task is None and not tasks:
        return network
    if task is not None and task not in tasks:
        raise CheckpointError(
            f"{config.source}: default_task {task!r} has no adapter; there are {', '.join(tasks) or 'none'}"
        )
    rank = config.integer("lora_rank", default=4, minimum=1)
    return recast(
        TaskSpec,
        network,
        num_tasks=len(tasks),
        task_index=None if task is None else tasks.index(task),
        lora_rank=rank,
        lora_scale=config.number("lora_alpha", default=1.0) / rank,
    )


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Those of RoBERTa."""
    return roberta_heads(config, kind, network)
