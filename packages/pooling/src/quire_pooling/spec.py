"""A pooler as data: what makes vectors, classes or scores of hidden states, and how texts are put to it. Free of torch.

The order is: head per token, pooling method, head of the text, dimensions, activation. Most checkpoints have one of
the heads or none. Tensors are named as in the checkpoint; `Pooler` gets them beside the spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire_interfaces import PoolerConfig, PoolingTask

__all__ = ["NO_HEAD", "Activation", "DenseSpec", "LayerNormSpec", "PoolerSpec", "PoolingHeadSpec", "TokenTaskSpec"]

Activation = Literal["identity", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softmax", "log1p_relu"]
"""Function of a layer's outputs: log1p_relu is log(1 + relu(x)) (SPLADE, arXiv 2109.10086, eq. 1); softmax goes over
the last dimension, the others element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """activation(x @ weight.T + bias), of x [N, in_features] -> [N, out_features]."""

    weight: str
    """Name of the tensor [out_features, in_features]."""
    bias: str | None = None
    """Name of the tensor [out_features]."""
    in_features: int
    out_features: int
    activation: Activation = "identity"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of its tensors."""
        bias = {} if self.bias is None else {self.bias: (self.out_features,)}
        return {self.weight: (self.out_features, self.in_features), **bias}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormSpec:
    """Layer normalization (arXiv 1607.06450) of x [N, size]."""

    weight: str
    """Name of the tensor [size]."""
    bias: str | None = None
    """Name of the tensor [size]."""
    size: int
    eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of its tensors."""
        return {name: (self.size,) for name in (self.weight, self.bias) if name is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingHeadSpec:
    """A chain of small layers over vectors [N, in] -> [N, out]."""

    steps: tuple[DenseSpec | LayerNormSpec, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of all steps."""
        return {name: shape for step in self.steps for name, shape in step.shapes().items()}

    def out_features(self, in_features: int) -> int:
        """Width of what comes out when vectors of `in_features` go in."""
        widths = [step.out_features for step in self.steps if isinstance(step, DenseSpec)]
        return widths[-1] if widths else in_features


NO_HEAD = PoolingHeadSpec()
"""The vectors as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTaskSpec:
    """A task per token that has a head of its own (BGE-M3's sparse and ColBERT vectors beside the dense one)."""

    head: PoolingHeadSpec
    activation: Activation = "identity"
    """Of the head's outputs, unless the request says no."""
    normalize: bool = False
    """Each vector is divided by its length, unless the request says no."""
    skip_token_ids: frozenset[int] = frozenset()
    """Tokens that are left out of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec:
    """The pooler of a checkpoint."""

    hidden_size: int
    """Width of the hidden states."""
    methods: tuple[str, ...] = ("LAST",)
    """Pooling methods, whose vectors are put one behind the other: CLS, LAST, MEAN, MAX, WEIGHTEDMEAN (positions from 1
    as weights, arXiv 2202.08904), MEAN_SQRT_LEN (sum / sqrt(tokens))."""
    token_method: str = "ALL"
    """ALL, or STEP: which tokens the tasks per token keep."""
    token_head: PoolingHeadSpec = NO_HEAD
    """What each token goes through before the method (SPLADE's masked-language-model head)."""
    head: PoolingHeadSpec = NO_HEAD
    """What the pooled vector goes through; of the tasks per token, every token."""
    activation: Activation = "identity"
    """Of the logits of classes and scores, unless the request says no."""
    normalize: bool = True
    """Embeddings are divided by their length, unless the request says no."""
    dimensions: tuple[int, ...] | None = ()
    """Dimensions that embeddings may be cut to (Matryoshka, arXiv 2205.13147); empty for any, None for none but all."""
    tasks: frozenset[PoolingTask] = frozenset({"embed", "token_embed"})
    token_tasks: Mapping[PoolingTask, TokenTaskSpec] = field(default_factory=dict)
    """Tasks per token whose head is not `head`."""
    labels: tuple[str, ...] = ()
    """Names of the classes, by number."""
    logit_mean: float | None = None
    """Subtracted from logits before the activation."""
    logit_sigma: float | None = None
    """Divides logits, less `logit_mean`, before the activation."""
    step_tag_id: int | None = None
    """Token whose states method STEP keeps; None for all tokens."""
    returned_token_ids: tuple[int, ...] | None = None
    """Columns of the outputs that method STEP keeps; None for all."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text that is put before a text."""
    default_prompt_name: str | None = None
    """The prompt where a request names none."""
    include_prompt: bool = True
    """The prompt's tokens are pooled with the rest."""
    similarity: str | None = None
    """How embeddings are compared: "cosine", "dot", "euclidean" or "manhattan"; None where the checkpoint is silent."""
    max_seq_length: int | None = None
    """Tokens of a text that are read; None for as many as the network takes."""
    do_lower_case: bool = False
    """Texts are put in lower case before they are tokenized."""

    @property
    def embedding_size(self) -> int:
        """Numbers of the result of one text, or of one token."""
        width = self.token_head.out_features(self.hidden_size)
        return self.head.out_features(width * len(self.methods))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of all heads."""
        heads = [self.token_head, self.head, *(task.head for task in self.token_tasks.values())]
        return {name: shape for head in heads for name, shape in head.shapes().items()}

    def with_config(self, config: PoolerConfig) -> PoolerSpec:
        """This pooler with what `config` sets."""
        changes = {
            "methods": None if config.seq_pooling_type is None else (config.seq_pooling_type,),
            "token_method": config.tok_pooling_type,
            "normalize": config.use_activation,
            "activation": "identity" if config.use_activation is False else None,
            "logit_mean": config.logit_mean,
            "logit_sigma": config.logit_sigma,
            "step_tag_id": config.step_tag_id,
            "returned_token_ids": config.returned_token_ids,
        }
        return dataclasses.replace(self, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
