"""A pooler as data: what makes vectors, classes or scores of hidden states, and how texts are put to it. Free of torch.

The order is: head per token, pooling method, head of the text, dimensions, activation. Most checkpoints have one of
the heads or none. Tensors are named as in the checkpoint; `Pooler` gets them beside the spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire_interfaces import ConfigError, PoolerConfig, PoolingParams, PoolingTask, RequestError

__all__ = [
    "NO_HEAD",
    "Activation",
    "ActivationSpec",
    "DenseSpec",
    "DualEncoderSpec",
    "LateInteractionSpec",
    "LayerNormSpec",
    "NormalizeSpec",
    "PoolerSpec",
    "PoolingHeadSpec",
    "PoolingMethod",
    "TokenTaskSpec",
]

Activation = Literal[
    "identity", "relu", "silu", "gelu", "gelu_erf", "sigmoid", "tanh", "softmax", "log1p_relu", "log1p_log1p_relu"
]
"""Function of a layer's outputs, named as by op `activation`: gelu is the tanh approximation, gelu_erf the exact one.
log1p_relu is log(1 + relu(x)) (SPLADE, arXiv 2109.10086, eq. 1). softmax goes over the last dimension, the others
element by element."""
PoolingMethod = Literal["CLS", "LAST", "MEAN", "MAX", "SUM", "WEIGHTEDMEAN", "MEAN_SQRT_LEN"]
"""What makes one vector of a text's: the first, the last, their mean, the largest of each column, their sum, their mean
with positions from 1 as weights (SGPT, arXiv 2202.08904, eq. 2), or their sum / sqrt(tokens)."""
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify", "plugin"})
"""Tasks whose result has a vector per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """A function of each vector x [N, width]."""

    activation: Activation

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No tensors."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizeSpec:
    """Each vector x [N, width] divided by its length, before further layers."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No tensors."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """activation(x @ weight.T + bias), of x [N, in_features] -> [N, out_features]; plus x where it has a residual."""

    weight: str
    """Name of the tensor [out_features, in_features]."""
    bias: str | None = None
    """Name of the tensor [out_features]."""
    in_features: int
    out_features: int
    activation: Activation = "identity"
    use_residual: bool = False
    """x is added to the output, through `residual` where there is one."""
    residual: str | None = None
    """Name of the tensor [out_features, in_features] that x goes through before it is added."""
    rows: tuple[int, ...] = ()
    """Rows of the checkpoint's tensor `weight` that are the matrix, where it is an LM head whose logits of some tokens
    are asked for; empty for all of them."""
    minus_rows: tuple[int, ...] = ()
    """Rows that are subtracted from those of `rows`, one from each, so that outputs are differences of logits; empty
    for none."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of its tensors."""
        matrix = (self.out_features, self.in_features)
        shapes: dict[str | None, tuple[int, ...]] = {self.weight: matrix, self.bias: matrix[:1], self.residual: matrix}
        return {name: shape for name, shape in shapes.items() if name is not None}


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

    steps: tuple[DenseSpec | LayerNormSpec | ActivationSpec | NormalizeSpec, ...] = ()

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
class LateInteractionSpec:
    """How texts are put to a model whose vectors per token are compared by MaxSim (ColBERT, arXiv 2004.12832). A query
    and a document begin differently: behind the first special token stands a marker, one token."""

    query_prefix: str = ""
    """Marker of queries, a token of the tokenizer; empty for none."""
    document_prefix: str = ""
    """Marker of documents, a token of the tokenizer; empty for none."""
    query_length: int | None = None
    """Tokens of a query that are read; shorter ones are filled up to it where `do_query_expansion` says so."""
    document_length: int | None = None
    """Tokens of a document that are read."""
    do_query_expansion: bool = False
    """Queries are filled up with tokens whose vectors count (query augmentation, section 3.2)."""
    expansion_token: str = ""
    """The token that they are filled up with: the tokenizer's mask, or the end of a text where it has none."""
    attend_to_expansion_tokens: bool = False
    """The other tokens of the query attend to those of the expansion."""
    skiplist_words: tuple[str, ...] = ()
    """Tokens of documents whose vectors are left out."""
    query_suffix: str = ""
    """Text behind a query, which then gets no special tokens of the tokenizer: its prompt and this have them (ColPali's
    augmentation, arXiv 2407.01449, section 4.1)."""
    image_document: str = ""
    """Text of a document that is an image, with the token that stands for it; empty where documents are texts."""
    image_prompt: str = ""
    """The part of it that a text beside the image takes the place of; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSpec:
    """How texts are put to a model that reads texts and images apart (CLIP, SigLIP). A prompt is a text or an image,
    whose vector is not pooled: its tower has done that."""

    text_length: int | None = None
    """Tokens that texts are filled up to, which the others attend to; None where they are not."""
    padding_token: str = ""
    """What they are filled up with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec:
    """The pooler of a checkpoint."""

    hidden_size: int
    """Width of the hidden states."""
    methods: tuple[PoolingMethod, ...] = ("LAST",)
    """Pooling methods, whose vectors are put one behind the other."""
    token_method: Literal["ALL", "STEP"] = "ALL"
    """Which tokens the tasks per token keep: all, or those that are `step_tag_id`."""
    token_head: PoolingHeadSpec = NO_HEAD
    """What each token goes through before the method (SPLADE's masked-language-model head)."""
    head: PoolingHeadSpec = NO_HEAD
    """What the pooled vector goes through; of the tasks per token, every token."""
    activation: Activation = "identity"
    """Of the logits of classes and scores."""
    use_activation: bool = True
    """Logits go through the activation, unless the request says otherwise."""
    normalize: bool = True
    """Embeddings are divided by their length, unless the request says otherwise."""
    dimensions: tuple[int, ...] | None = None
    """Dimensions that embeddings may be cut to (Matryoshka, arXiv 2205.13147); empty for any, None for no choice."""
    default_dimensions: int | None = None
    """Dimensions that embeddings are cut to, unless the request says otherwise; None for all."""
    tasks: frozenset[PoolingTask] = frozenset({"embed", "token_embed"})
    task: PoolingTask | None = None
    """Task of requests that name none, one of `tasks`; None for the first that there is, in the order of
    `default_task`."""
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
    embedding_tasks: tuple[str, ...] = ()
    """Tasks that the checkpoint has adapters of, by number (Jina Embeddings v3)."""
    merged_task: str | None = None
    """The one of them whose adapter is part of the weights; None where texts choose."""
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
    max_embed_len: int | None = None
    """Tokens of the longest text that is embedded; None for as many as the network takes."""
    embeds_in_chunks: bool = False
    """Texts longer than the network takes are embedded in chunks, up to `max_embed_len`."""
    do_lower_case: bool = False
    """Texts are put in lower case before they are tokenized."""
    late_interaction: LateInteractionSpec | None = None
    """How texts are put to a model of vectors per token; None for other models."""
    dual_encoder: DualEncoderSpec | None = None
    """How texts are put to a model that reads images apart from them; None for other models."""
    notes: tuple[str, ...] = ()
    """What the checkpoint leaves open, and what was taken; for the report at the start."""

    @property
    def embedding_size(self) -> int:
        """Numbers of the result of one text, or of one token."""
        width = self.token_head.out_features(self.hidden_size)
        return self.head.out_features(width * len(self.methods))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of all heads."""
        heads = [self.token_head, self.head, *(task.head for task in self.token_tasks.values())]
        return {name: shape for head in heads for name, shape in head.shapes().items()}

    @property
    def default_task(self) -> PoolingTask:
        """Task of a request that names none. A model with classes of texts and of tokens is one of rewards, which are
        asked for by token.

        Raises:
            RequestError: The checkpoint has no task.
        """
        if self.task is not None:
            return self.task
        order: tuple[PoolingTask, ...] = ("embed", "token_classify", "classify", "score", "token_embed")
        for task in order:
            if task in self.tasks:
                return task
        raise RequestError("this model pools nothing; serve one that embeds or classifies", param="task")

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """The parameters of a request with this pooler's own values where it has none.

        Raises:
            RequestError: The pooler has no such task, or cannot do what the parameters say.
        """
        params = params.with_task(params.task or self.default_task)
        assert params.task is not None
        if params.task not in self.tasks and params.task != "plugin":
            raise RequestError(
                f"this model has no task {params.task!r}; it has {', '.join(sorted(self.tasks))}",
                param="task",
                code="unsupported_task",
            )
        self._check_embedding_task(params.embedding_task)
        if params.late_chunk_edges is not None:
            self._check_late_chunking(params)
        if self.token_method != "STEP" or params.task not in TOKEN_TASKS:
            for name in ("step_tag_id", "returned_token_ids"):
                if getattr(params, name) is not None:
                    raise RequestError(
                        f"{name} is of models with pooling method STEP and of their tasks per token; leave it out",
                        param=name,
                        code="unsupported_combination",
                    )
            return self._with_dimensions(params)
        return dataclasses.replace(
            self._with_dimensions(params),
            step_tag_id=self.step_tag_id if params.step_tag_id is None else params.step_tag_id,
            returned_token_ids=params.returned_token_ids or self.returned_token_ids,
        )

    def _check_late_chunking(self, params: PoolingParams) -> None:
        if params.task != "embed" or self.methods != ("MEAN",) or self.token_head.steps or self.embeds_in_chunks:
            how = "reads long texts in chunks" if self.embeds_in_chunks else f"pools by {'+'.join(self.methods)}"
            raise RequestError(
                f"late_chunking takes a model that embeds by the mean of tokens, and this one {how}; leave it out",
                param="late_chunking",
                code="unsupported",
            )

    def _check_embedding_task(self, task: str | None) -> None:
        if task is None:
            return
        if not self.embedding_tasks:
            raise RequestError(
                f"this model has no adapters of tasks, {task!r} or others; leave task out", param="embedding_task"
            )
        if task not in self.embedding_tasks:
            raise RequestError(
                f"this model has no adapter of task {task!r}; it has those of {', '.join(self.embedding_tasks)}",
                param="embedding_task",
            )
        if self.merged_task not in (None, task):
            raise RequestError(
                f"this server embeds all texts for the task {self.merged_task} (default_task); start it without "
                "default_task to have requests choose",
                param="embedding_task",
                code="unsupported_combination",
            )

    def _with_dimensions(self, params: PoolingParams) -> PoolingParams:
        if params.dimensions is None:
            is_cut = self.default_dimensions is not None and params.task in ("embed", "token_embed")
            return dataclasses.replace(params, dimensions=self.default_dimensions) if is_cut else params
        if self.dimensions is None:
            raise RequestError(
                f"dimensions ({params.dimensions}) cannot be chosen: the model is not known to be trained for shorter "
                "embeddings (Matryoshka); leave them out",
                param="dimensions",
                code="unsupported_dimensions",
            )
        if self.dimensions and params.dimensions not in self.dimensions:
            listed = ", ".join(map(str, self.dimensions))
            raise RequestError(f"dimensions must be one of {listed}, got {params.dimensions}", param="dimensions")
        if params.dimensions > self.embedding_size:
            raise RequestError(
                f"dimensions must be at most {self.embedding_size}, got {params.dimensions}", param="dimensions"
            )
        return params

    def with_config(self, config: PoolerConfig) -> PoolerSpec:
        """This pooler with what `config` sets. Classes of texts are also given by token where the task of `config` is
        "token_classify": each token goes through the head.

        Raises:
            ConfigError: Embeddings cannot be cut to the dimensions that `config` names, or there is no such task.
        """
        tasks = self.tasks
        if config.task == "token_classify" and "classify" in tasks:
            tasks |= {"token_classify"}
        if config.task is not None and config.task not in tasks:
            raise ConfigError(
                f"task must be one of this model's, {', '.join(sorted(tasks))}; is {config.task!r}", field="task"
            )
        changes = {
            "task": config.task,
            "tasks": tasks,
            "methods": config.seq_pooling_type and (config.seq_pooling_type,),
            "token_method": config.tok_pooling_type,
            "normalize": config.use_activation,
            "use_activation": config.use_activation,
            "default_dimensions": config.dimensions,
            "max_embed_len": config.max_embed_len,
            "embeds_in_chunks": config.enable_chunked_processing,
            "logit_mean": config.logit_mean,
            "logit_sigma": config.logit_sigma,
            "step_tag_id": config.step_tag_id,
            "returned_token_ids": config.returned_token_ids,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        pooler = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        try:
            pooler._with_dimensions(PoolingParams(dimensions=config.dimensions))
        except RequestError as error:
            raise ConfigError(str(error), field="dimensions") from None
        return pooler
