"""What one request wants pooled, how a server pools, and what comes back. Names and meanings follow vLLM.

Pooling turns the hidden states of a text into a vector (embed), into classes or a score (classify, score), or into one
of these per token (token_embed, token_classify). Knows ranges and contradictions; which tasks a checkpoint has, and
which dimensions, knows `quire_pooling`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from quire_interfaces.errors import ConfigError, RequestError, wrong_value
from quire_interfaces.sampling_bounds import MAX_TOKEN_ID, are_token_ids
from quire_interfaces.settings import Settings, at_least, one_of, setting

__all__ = ["POOLING_TASKS", "PooledOutput", "PoolerConfig", "PoolingParams", "PoolingTask"]

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "score", "transcribe", "plugin"]
"""What a request wants: one vector per text, class probabilities per text, the same two per token, one number per text
or pair of texts, the tokens of a sound with their times, or whatever an IO processor plug-in makes of the hidden
states."""
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
"""Every pooling task."""
SEQ_POOLING_TYPES = ("CLS", "LAST", "MEAN", "MAX", "WEIGHTEDMEAN", "MEAN_SQRT_LEN")
"""Pooling methods that make one vector of a text."""
TOK_POOLING_TYPES = ("ALL", "STEP")
"""Pooling methods that keep one vector per token: of all tokens, or of those that are the step tag."""
MAX_TOKEN_IDS = 1024
"""Largest number of `returned_token_ids` and of `skip_token_ids`."""
_EMBED_TASKS = ("embed", "token_embed", "plugin", None)


class PooledOutput(NamedTuple):
    """Pooled data of one request, as it crosses between processes."""

    data: bytes
    """float32, little-endian, in row-major order."""
    shape: tuple[int, ...]
    """[dimensions], or [tokens, dimensions] of the tasks per token. Of a sound [tokens, 4]: each token's id, the
    natural logarithm of its probability, the first of its frames, and the frame behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Pooling parameters of one request.

    Raises:
        RequestError: with `param` set, when a value is out of range or two values contradict each other.
    """

    task: PoolingTask | None = None
    """What to compute; None for the task of the route or method that is called."""
    dimensions: int | None = None
    """Leading dimensions to keep of each embedding (Matryoshka embeddings, arXiv 2205.13147), before normalization;
    None keeps all. Only for embeddings, and only where the checkpoint was trained for it."""
    use_activation: bool | None = None
    """Whether embeddings are normalized to length 1, and logits of classes go through sigmoid or softmax; None does as
    the checkpoint says."""
    step_tag_id: int | None = None
    """Keep the tokens with this id only (method STEP of process reward models); None for the checkpoint's own."""
    returned_token_ids: tuple[int, ...] | None = None
    """Columns of the logits to keep, in this order (method STEP); None for the checkpoint's own."""
    skip_token_ids: tuple[int, ...] | None = None
    """Tokens whose vectors are left out of the tasks per token, such as punctuation in documents of ColBERT (arXiv
    2004.12832, section 3.3); None for the checkpoint's own."""
    embedding_task: str | None = None
    """What the text is embedded for, a task that the checkpoint has an adapter of (Jina Embeddings v3, arXiv
    2409.10173, section 3); None for none, or for the one that the server was started for."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt to read, the rest is cut off; -1 for as many as the model reads, None to refuse longer
    prompts."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a prompt is cut off; None for the tokenizer's own."""
    prompt_length: int = 0
    """Number of tokens at the start, special ones included, that belong to the task's prompt and are left out of
    the pooled vector, where the checkpoint says so (sentence-transformers' `include_prompt: false`)."""
    expansion_length: int = 0
    """Number of tokens at the end that the others do not attend to, and whose vectors count: mask tokens that fill up a
    query of ColBERT (arXiv 2004.12832, section 3.2), where the checkpoint says so."""
    late_chunk_edges: tuple[int, ...] | None = None
    """Positions at which parts of the text begin, then that behind the last part: each part gets an embedding, of its
    tokens as they read all of the text (late chunking, arXiv 2409.04701). None for one embedding of the text."""
    extra_kwargs: dict[str, Any] | None = None
    """For plug-ins; the engine does not look inside."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            raise wrong_value("task", self.task, f"be one of {', '.join(POOLING_TASKS)}")
        _check_whole("dimensions", self.dimensions, 1)
        _check_whole("step_tag_id", self.step_tag_id, 0)
        _check_whole("prompt_length", self.prompt_length, 0)
        _check_whole("expansion_length", self.expansion_length, 0)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise wrong_value("use_activation", self.use_activation, "be true or false")
        if self.truncate_prompt_tokens != -1:
            _check_whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, also=" or -1")
        if self.embedding_task is not None and not isinstance(self.embedding_task, str):
            raise wrong_value("embedding_task", self.embedding_task, "be the name of a task")
        if self.truncation_side not in (None, "left", "right"):
            raise wrong_value("truncation_side", self.truncation_side, 'be "left" or "right"')
        if self.extra_kwargs is not None and not isinstance(self.extra_kwargs, dict):
            raise wrong_value("extra_kwargs", self.extra_kwargs, "be an object")
        for name in ("returned_token_ids", "skip_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if self.late_chunk_edges is not None:
            object.__setattr__(self, "late_chunk_edges", _edges(self.late_chunk_edges))
        if self.dimensions is not None and self.task not in _EMBED_TASKS:
            raise RequestError(
                f"dimensions ({self.dimensions}) are of embeddings, and task {self.task!r} gives none; leave them out",
                param="dimensions",
                code="unsupported_combination",
            )

    def with_task(self, task: PoolingTask) -> PoolingParams:
        """These parameters for `task`.

        Raises:
            RequestError: They are for another task, or have values that `task` does not take.
        """
        if self.task is not None and self.task != task:
            raise wrong_value("task", self.task, f"be {task!r} here, or be left out")
        return self if self.task == task else dataclasses.replace(self, task=task)


def _check_whole(name: str, value: Any, minimum: int, also: str = "") -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_TOKEN_ID:
        raise wrong_value(name, value, f"be a whole number of at least {minimum}{also}")


def _edges(values: Any) -> tuple[int, ...]:
    edges = tuple(values)
    is_rising = len(edges) > 1 and edges[0] >= 0 and all(first < second for first, second in pairwise(edges))
    if not is_rising:
        raise wrong_value("late_chunk_edges", values, "be at least two positions, each behind the one before")
    return edges


def _token_ids(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise wrong_value(name, values, "be a list of token ids")
    token_ids = tuple(values)
    if not 0 < len(token_ids) <= MAX_TOKEN_IDS or not are_token_ids(token_ids):
        raise wrong_value(name, values, f"hold 1 to {MAX_TOKEN_IDS} token ids")
    return token_ids


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "be true or false"


def _finite(value: Any) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and math.isfinite(value) else "be a finite number"


def _nonzero(value: Any) -> str | None:
    return _finite(value) or (None if value else "not be 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig(Settings):
    """How a server pools (`--pooler-config`); what is None is as the checkpoint says. `from_dict` reads it from JSON.

    Raises:
        ConfigError: with `field` set, when a value is wrong or two values contradict each other.
    """

    task: str | None = setting(None, help="Task of requests that name none.", check=one_of(*POOLING_TASKS))
    pooling_type: str | None = setting(
        None,
        help="Pooling method; sets seq_pooling_type or tok_pooling_type.",
        check=one_of(*SEQ_POOLING_TYPES, *TOK_POOLING_TYPES),
    )
    seq_pooling_type: str | None = setting(
        None, help="Pooling method of the tasks that give one result per text.", check=one_of(*SEQ_POOLING_TYPES)
    )
    tok_pooling_type: str | None = setting(
        None, help="Pooling method of the tasks that give one result per token.", check=one_of(*TOK_POOLING_TYPES)
    )
    use_activation: bool | None = setting(
        None, help="Normalize embeddings, and apply sigmoid or softmax to logits of classes.", check=_boolean
    )
    dimensions: int | None = setting(
        None, help="Leading dimensions to keep of each embedding.", unit="dimensions", check=at_least(1)
    )
    enable_chunked_processing: bool = setting(
        False,
        help="Embed prompts longer than the context in chunks, averaged by their tokens.",
        check=_boolean,
    )
    max_embed_len: int | None = setting(
        None,
        help="Longest prompt that is embedded: above the context where prompts are embedded in chunks, else below it.",
        unit="tokens",
        check=at_least(1),
    )
    logit_mean: float | None = setting(
        None, help="Subtracted from logits of classes before the activation (Platt scaling).", check=_finite
    )
    logit_sigma: float | None = setting(
        None, help="Divides logits of classes, less logit_mean, before the activation.", check=_nonzero
    )
    logit_bias: float | None = setting(None, help="Older name of logit_mean.", check=_finite)
    logit_scale: float | None = setting(None, help="1 / logit_sigma, its older form.", check=_nonzero)
    step_tag_id: int | None = setting(None, help="Id of the token whose states method STEP keeps.", check=at_least(0))
    returned_token_ids: tuple[int, ...] | None = setting(None, help="Columns of the logits that method STEP keeps.")

    def __post_init__(self) -> None:
        for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, value.upper())
        Settings.__post_init__(self)
        try:
            object.__setattr__(self, "returned_token_ids", _token_ids("returned_token_ids", self.returned_token_ids))
        except RequestError as error:
            raise ConfigError(str(error), field="returned_token_ids") from None
        if self.pooling_type is not None:
            name = "seq_pooling_type" if self.pooling_type in SEQ_POOLING_TYPES else "tok_pooling_type"
            self._take(name, self.pooling_type, "pooling_type")
        if self.logit_bias is not None:
            self._take("logit_mean", self.logit_bias, "logit_bias")
        if self.logit_scale is not None:
            self._take("logit_sigma", 1 / self.logit_scale, "logit_scale")

    def _take(self, name: str, value: Any, source: str) -> None:
        """Set the field `name` to what its other name `source` says."""
        if getattr(self, name) not in (None, value):
            raise ConfigError(f"{source} and {name} say two things: {value!r}, {getattr(self, name)!r}", field=source)
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PoolerConfig:
        """The configuration of a JSON object. `normalize`, `activation` and `softmax` are older names of
        `use_activation`, `pooling_task` and `pooling_target` other ones of `task`.

        Raises:
            ConfigError: an unknown field, a wrong value, or values that contradict each other.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"pooler_config must be an object, is {values!r}", field="pooler_config")
        fields = dict.fromkeys(("normalize", "activation", "softmax"), "use_activation")
        fields |= dict.fromkeys(("pooling_task", "pooling_target"), "task")
        fields |= {field.name: field.name for field in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(f"pooler_config has no field {name!r}; it has {', '.join(fields)}", field=name)
            field = fields[name]
            if arguments.setdefault(field, value) != value:
                raise ConfigError(f"{name} and {field} say two things: {value!r}, {arguments[field]!r}", field=name)
        return cls(**arguments)
