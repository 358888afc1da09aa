"""What checkpoints have behind their networks in place of an LM head, as poolers: classifiers of texts and of tokens,
masked language models, rewards. Free of torch.

Names of tensors are those of Transformers' classes. What files of sentence-transformers say beside config.json, and
which method a body without a head is pooled by, is read by `quire_pooling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import HIDDEN_ACTS
from quire_models.spec import NetworkSpec
from quire_pooling.modules import activation_of
from quire_pooling.spec import Activation, DenseSpec, LayerNormSpec, PoolerSpec, PoolingHeadSpec, PoolingMethod

__all__ = [
    "DECODER_HEADS",
    "HeadKind",
    "class_activation",
    "class_names",
    "classifier_kind",
    "decoder_pooler",
    "dense",
    "head_activation",
    "layer_norm",
    "masked_lm",
    "roberta_heads",
    "text_classifier",
    "token_classifier",
    "tower_class",
]

HeadKind = Literal["none", "text_classifier", "token_classifier", "masked_lm", "reward", "process_reward", "value_head"]
"""What a checkpoint's class has behind its network: nothing; classes of a text, or of each token; a weight of each word
of the vocabulary (SPLADE, arXiv 2109.10086); a reward of a text, by two layers (Qwen2.5-Math); one of each of its steps
(arXiv 2501.07301); a reward of a text by one layer (InternLM2)."""

DECODER_HEADS: frozenset[HeadKind] = frozenset(
    {"none", "text_classifier", "token_classifier", "reward", "process_reward"}
)
"""Kinds that decoders have."""

_CLASSIFIERS: dict[str, HeadKind] = {
    "ForSequenceClassification": "text_classifier",
    "ForTokenClassification": "token_classifier",
}

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_erf": "gelu_erf", "relu": "relu", "silu": "silu"}
"""A name of `config_fields.HIDDEN_ACTS`, right-hand side -> that of a pooler's step, where it has that function."""

_BIDIRECTIONAL_METHODS: dict[str, PoolingMethod] = {"last": "LAST", "avg": "MEAN", "cls": "CLS"}
"""`pooling` of config.json, which rerankers with bidirectional attention have (Llama Nemotron Rerank) -> method."""


def classifier_kind(architecture: str) -> HeadKind | None:
    """The classes that a class with towers tells apart, by its name; None where it has none."""
    return next((kind for end, kind in _CLASSIFIERS.items() if architecture.endswith(end)), None)


def tower_class(architecture: str) -> str:
    """The class whose towers a class has: of one with classes, which Transformers may not have, that which generates
    with the same network."""
    end = next((end for end in _CLASSIFIERS if architecture.endswith(end)), "")
    return f"{architecture.removesuffix(end)}ForConditionalGeneration" if end else architecture


def class_names(config: Fields) -> tuple[str, ...]:
    """Names of the classes by number: `id2label`, or as many as `num_labels`; two where config.json says neither, as
    Transformers has it.

    Raises:
        CheckpointError: `id2label` does not name the classes from 0 on.
    """
    named = config.get("id2label")
    if not named:
        return tuple(f"LABEL_{number}" for number in range(config.integer("num_labels", default=2, minimum=1)))
    try:
        by_number = {int(number): str(name) for number, name in named.items()}
        return tuple(by_number[number] for number in range(len(by_number)))
    except (AttributeError, KeyError, ValueError):
        raise CheckpointError(
            f"{config.source}: id2label must name classes by their numbers from 0 on, is {named!r}"
        ) from None


def class_activation(config: Fields, num_classes: int) -> Activation:
    """What makes probabilities of logits: as sentence-transformers wrote it into config.json, or else by
    `problem_type`: softmax, sigmoid for classes that do not exclude each other and for a single one, nothing for
    regression.

    Raises:
        CheckpointError: The class that sentence-transformers names is not one of torch, or not known.
    """
    inner = config.object("sentence_transformers")
    name = config.text("sbert_ce_default_activation_function", default=None)
    name = (None if inner is None else inner.text("activation_fn", default=None)) or name
    if name is not None:
        return activation_of(name, config.source)
    problem = config.text("problem_type", default=None)
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or num_classes == 1 else "softmax"


def head_activation(config: Fields, field: str, default: str) -> Activation:
    """The activation that a field of config.json names, of a step of a head.

    Raises:
        CheckpointError: Another one than steps of heads have.
    """
    name = config.text(field, default=default)
    if name == "tanh":
        return "tanh"
    function = _ACTIVATIONS.get(HIDDEN_ACTS.get(name, ""))
    if function is None:
        raise CheckpointError(f"{config.source}: {field} {name!r} is not supported in a head")
    return function


def dense(
    name: str, in_features: int, out_features: int, activation: Activation = "identity", *, bias: bool = True
) -> DenseSpec:
    """A linear layer whose tensors are `name`.weight and `name`.bias, and the function of its outputs."""
    return DenseSpec(
        weight=f"{name}.weight",
        bias=f"{name}.bias" if bias else None,
        in_features=in_features,
        out_features=out_features,
        activation=activation,
    )


def layer_norm(name: str, size: int, eps: float, *, bias: bool = True) -> LayerNormSpec:
    """A layer norm whose tensors are `name`.weight and `name`.bias."""
    return LayerNormSpec(weight=f"{name}.weight", bias=f"{name}.bias" if bias else None, size=size, eps=eps)


def text_classifier(
    config: Fields,
    hidden_size: int,
    steps: Sequence[DenseSpec | LayerNormSpec] = (),
    *,
    last: str = "classifier",
    bias: bool = True,
    method: PoolingMethod = "CLS",
) -> PoolerSpec:
    """Classes of a text: the pooled hidden state goes through `steps`, then through the layer `last`. With one class
    alone the output is a score."""
    names = class_names(config)
    return PoolerSpec(
        hidden_size=hidden_size,
        methods=(method,),
        head=PoolingHeadSpec(steps=(*steps, dense(last, hidden_size, len(names), bias=bias))),
        activation=class_activation(config, len(names)),
        normalize=False,
        tasks=frozenset({"classify", "score"} if len(names) == 1 else {"classify"}),
        labels=names,
    )


def token_classifier(
    config: Fields,
    hidden_size: int,
    steps: Sequence[DenseSpec | LayerNormSpec] = (),
    *,
    last: str = "classifier",
) -> PoolerSpec:
    """Classes of each token of a text: hidden states go through `steps`, then through the layer `last`."""
    names = class_names(config)
    return PoolerSpec(
        hidden_size=hidden_size,
        head=PoolingHeadSpec(steps=(*steps, dense(last, hidden_size, len(names)))),
        activation=class_activation(config, len(names)),
        normalize=False,
        tasks=frozenset({"token_classify"}),
        labels=names,
    )


def masked_lm(
    hidden_size: int,
    vocab_size: int,
    steps: Sequence[DenseSpec | LayerNormSpec],
    *,
    weight: str,
    bias: str | None,
    width: int = 0,
) -> PoolerSpec:
    """A weight of each word of the vocabulary (SPLADE, arXiv 2109.10086, eq. 1): log(1 + relu(logit)), the largest of
    all tokens of a text.

    Args:
        steps: What hidden states go through before the logits.
        weight: Name of the tensor [vocab_size, width]: the table of tokens where both are one.
        bias: Name of the tensor [vocab_size]; None for none.
        width: Of what the steps give; 0 for the hidden size.
    """
    decoder = DenseSpec(
        weight=weight, bias=bias, in_features=width or hidden_size, out_features=vocab_size, activation="log1p_relu"
    )
    return PoolerSpec(
        hidden_size=hidden_size,
        methods=("MAX",),
        token_head=PoolingHeadSpec(steps=(*steps, decoder)),
        normalize=False,
        dimensions=None,
        tasks=frozenset({"embed", "token_embed"}),
        similarity="dot",
    )


def roberta_heads(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """The heads of RoBERTa, which MPNet and Jina's networks have too: they do not use the pooler.

    Args:
        network: The body of the checkpoint's class.
    """
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(
            config, size, [dense("classifier.dense", size, size, "tanh")], last="classifier.out_proj"
        )
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    steps = (dense("lm_head.dense", size, size, "gelu_erf"), layer_norm("lm_head.layer_norm", size, eps))
    weight = network.embedding_name if network.head.tied else "lm_head.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="lm_head.bias")


def decoder_pooler(config: Fields, kind: HeadKind, hidden_size: int) -> PoolerSpec | None:
    """The head of a decoder's class: the layer `score`, over the last token of a text or over all of them; two layers
    of this name in Qwen2.5-Math's reward models."""
    if kind == "text_classifier":
        config.fixed("temperature", 1, 1.0)
        method = _BIDIRECTIONAL_METHODS.get(config.text("pooling", default="last"))
        if method is None:
            raise CheckpointError(f"{config.source}: pooling must be one of {', '.join(_BIDIRECTIONAL_METHODS)}")
        return text_classifier(config, hidden_size, last="score", bias=False, method=method)
    if kind == "token_classifier":
        return token_classifier(config, hidden_size, last="score")
    if kind in ("reward", "process_reward", "value_head"):
        return _reward(config, hidden_size, kind)
    return None


def _reward(config: Fields, hidden_size: int, kind: HeadKind) -> PoolerSpec:
    """A number of a text, or two of each token that ends a step: that the step is wrong, and that it is right."""
    is_process = kind == "process_reward"
    num_outputs = 2 if is_process else 1
    steps = [dense("score.0", hidden_size, hidden_size, "relu"), dense("score.2", hidden_size, num_outputs)]
    if kind == "value_head":
        steps = [dense("v_head", hidden_size, 1, bias=False)]
    return PoolerSpec(
        hidden_size=hidden_size,
        head=PoolingHeadSpec(steps=tuple(steps)),
        activation="softmax" if is_process else "identity",
        normalize=False,
        tasks=frozenset({"token_classify"} if is_process else {"classify", "score", "token_classify"}),
        token_method="STEP" if is_process else "ALL",
        labels=class_names(config.with_default("num_labels", num_outputs))[:num_outputs],
    )
