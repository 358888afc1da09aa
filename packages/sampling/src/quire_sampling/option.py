"""What a sampler option is: a record that says when it acts, what it keeps of a request, and what it does.

The modules of `quire_sampling.options` hold one record or a few each, in `OPTIONS`. A row's settings are compiled once,
when a request is put into the row; a row that does not use an option costs nothing.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire_interfaces import LogitsProcessor, RequestError, SamplingParams
from quire_sampling.edit_lists import TokenList

__all__ = [
    "EditOption",
    "EditStage",
    "FilterOption",
    "RequestContext",
    "RowLogits",
    "RowWeights",
    "SamplerOption",
    "TemperatureOption",
    "TokenOption",
    "Vocabulary",
]

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Checks token ids, and puts them where the logits are."""

    size: int
    device: torch.device

    def check(self, param: str, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The ids as an array [M] int64.

        Raises:
            RequestError: One is outside of the vocabulary; `param` is the field that holds it.
        """
        array = np.array(ids, dtype=np.int64)
        outside = np.flatnonzero((array < 0) | (array >= self.size))
        if len(outside):
            raise RequestError(
                f"{param} must hold token ids below the vocabulary size {self.size}, got {array[outside[0]]}",
                param=param,
            )
        return array

    def ids(self, param: str, ids: Sequence[int]) -> Tensor:
        """The ids as a tensor [M] int64 on the device; raises as `check` does."""
        return torch.from_numpy(self.check(param, ids)).to(self.device)


class RequestContext(NamedTuple):
    """What an option may read of a request besides its `SamplingParams`."""

    vocabulary: Vocabulary
    stop_token_ids: Collection[int]
    """All tokens that end the request, ids outside of the vocabulary included."""
    processors: Mapping[str, LogitsProcessor]
    """The registered logits processors by name."""
    always: Sequence[str]
    """Names of the processors that run for every request."""


class RowLogits(NamedTuple):
    """What an `EditOption` works on: one row of logits, and the tokens before it."""

    logits: Tensor
    """[V] float32, to be changed in place."""
    history: Tensor
    """[max_model_len] integer: token ids of the sequence, valid up to and with `position`."""
    position: Tensor
    """Scalar int64: sequence position of the last known token."""
    num_prompt_tokens: Tensor
    """Scalar int64."""


class RowWeights(NamedTuple):
    """What a `FilterOption` or a `TokenOption` works on: the weights of one row at its temperature
    (`quire_ops.sampling`)."""

    weights: Tensor
    """[1, V] int64; 0 where the token cannot be sampled. To be changed in place."""
    log2: Tensor
    """[1, V] float32: logarithms of the weights before any filter."""
    logits: Tensor
    """[1, V] float32: settle the order among equal weights."""
    seed: Tensor
    """Scalar int64: the request's seed."""
    output_position: Tensor
    """Scalar int64: index of the token among the outputs."""
    uniform: Tensor
    """[1] float64 in [0, 1): the number that the token is sampled with."""


class EditStage(IntEnum):
    """When an option edits the logits. Options of one stage commute."""

    EXCLUDE = 0
    """Takes tokens out: sets logits to -inf."""
    BIAS = 1
    PROCESS = 2
    """Custom logits processors. Repetition, presence and frequency penalties follow."""
    PENALIZE = 3
    TRUNCATE = 4
    """Takes tokens out by their logits. Greedy requests ignore it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOption(Generic[Settings]):
    """What all options have; each is one of the four kinds below."""

    name: str
    """The field of `SamplingParams` that switches it on."""
    compile: Callable[[SamplingParams, RequestContext], Settings | None]
    """Settings of a row; None where the request does not use the option. Raises RequestError."""
    is_stateful: bool = False
    """The settings learn from each token: they are kept for a request that leaves its row and comes back."""

    @property
    def edits_greedy(self) -> bool:
        """Whether greedy requests use the option."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOption(SamplerOption[Settings]):
    """Changes logits, before the temperature."""

    stage: EditStage
    apply: Callable[[Settings, RowLogits], str | None]
    """Edits a row in place; returns why its request must fail, or None."""
    as_lists: Callable[[Settings], Sequence[TokenList]] | None = None
    """The same as lists of tokens, which captured steps find on the device (`edit_lists.py`); None where it is none."""
    is_observed: bool = False
    """Log probabilities are those of the logits that all edits leave, not of the raw ones."""

    @property
    def edits_greedy(self) -> bool:
        return self.stage < EditStage.TRUNCATE


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureOption(SamplerOption[Settings]):
    """Takes the place of a fixed temperature. Greedy requests ignore it."""

    apply: Callable[[Settings, Tensor], Tensor]
    """Logits [V] float32, edited, to the row's temperature, a scalar float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOption(SamplerOption[Settings]):
    """Takes tokens out by their weights, after min_p, top_k and top_p. Greedy requests ignore it."""

    apply: Callable[[Settings, RowWeights], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOption(SamplerOption[Settings]):
    """Samples the token itself, in place of all filters. Greedy requests ignore it."""

    apply: Callable[[Settings, RowWeights], Tensor]
    """The token, [1] int64. Rows of one request come in the order of their positions."""
