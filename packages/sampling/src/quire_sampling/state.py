"""What the sampler knows about each row for as long as a request lives in it.

Numbers that kernels read are tensors on the device, indexed by row; the settings of each option are a mapping by row on
the host, so that a step in which nobody uses an option does not touch it. How a row is sampled is decided once, when a
request is put into it. Knows nothing of tokens sampled so far: these are the runner's `token_ids`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import ConfigError, LogitsProcessor, RequestError, SamplingParams
from quire_ops import PenaltyTable, SampleTable
from quire_sampling.config import SamplingConfig
from quire_sampling.edit_lists import EditLists, TokenList
from quire_sampling.option import EditOption, RequestContext, SamplerOption, Vocabulary
from quire_sampling.options import EDITS, FILTERS, OPTIONS, TOKENS
from quire_sampling.options.logits_processors import describe_processors
from quire_sampling.sample import SMALL_TOP_K

__all__ = ["SampleMethod", "SampleMode", "SamplingState", "inv_temperature_of"]

MOST_OBSERVED = 32
"""Log probabilities beyond which finding them for rows that want fewer costs too much time and memory."""
_NUM_LEFT_REQUESTS = 4096
"""Requests whose stateful options are kept after they left their rows."""
_LEAST_TEMPERATURE = 1e-6  # float32 must have room for its reciprocal; the result is greedy long before
_NO_PENALTIES = (1.0, 0.0, 0.0)


class SampleMode(IntEnum):
    """What sampling the token of a row takes; each mode does what the ones before it do, and more. The mode of a step
    is the largest of its rows' modes."""

    ARGMAX = 0
    """The token of the largest logit."""
    SAMPLED = 1
    """A token sampled by op `sample` from the logits as they are."""
    EDITED = 2
    """Penalties, token masks and lists of tokens may change the logits before."""
    OBSERVED = 3
    """Log probabilities are wanted besides."""
    HOST = 4
    """Options and log probabilities that the host works out row by row."""


class SampleMethod(Enum):
    """How the token of a row is found without op `sample`."""

    GREEDY = auto()
    PLAIN = auto()
    """Sampled from all tokens."""
    TOP_K = auto()
    """Sampled from the tokens of a small top_k."""
    FILTERED = auto()
    """Sampled from what top_k, top_p and min_p leave."""
    OPTION_FILTERED = auto()
    """Sampled from what these and `FilterOption`s leave."""
    OPTION = auto()
    """Sampled by a `TokenOption`."""


class SamplingState:
    """Persistent sampling state of `max_num_seqs` rows. The runner writes it, the `Sampler` reads it.

    Args:
        max_num_seqs: Number of rows.
        vocab_size: Length of a row of logits.
        device: Where logits will be.
        logits_processors: By name, those a request may choose: `extra_args={"logits_processors": ["name"]}`.
        always: Names of the processors that run for every request, before the chosen ones.
        config: Limits.

    Raises:
        ConfigError: `always` names a processor that is not in `logits_processors`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always: Sequence[str] = (),
        config: SamplingConfig | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.config = config or SamplingConfig()
        vocabulary = Vocabulary(vocab_size, self.device)
        self._context = RequestContext(vocabulary, (), dict(logits_processors or {}), tuple(always))
        for name in always:
            if name not in self._context.processors:
                known = describe_processors(self._context)
                raise ConfigError(f"there is no logits processor {name!r} to run always; {known}")

        self.sample_table = SampleTable.greedy(max_num_seqs, vocab_size, self.device)
        """The rows as op `sample` takes them; the tensors stay the same ones."""
        self.penalty_table = PenaltyTable(
            repetition=torch.ones(max_num_seqs, device=self.device),
            presence=torch.zeros(max_num_seqs, device=self.device),
            frequency=torch.zeros(max_num_seqs, device=self.device),
            num_prompt_tokens=self.sample_table.num_prompt_tokens,
        )
        """The rows as op `penalize` takes them; the tensors stay the same ones."""
        self.edit_lists: EditLists | None = None
        """What op `edit_logits` reads; None where nobody has the op."""
        self.settings: dict[str, dict[int, Any]] = {option.name: {} for option in OPTIONS}
        """Name of each option -> row -> compiled settings, for the rows that use it."""
        self.methods: dict[int, SampleMethod] = {}
        """Rows that are not greedy -> how their tokens are found without op `sample`."""
        self.small_top_k: dict[int, int] = {}
        """Rows of method TOP_K -> top_k."""
        self.penalized: set[int] = set()
        """Rows with repetition, presence or frequency penalties."""
        self.edited: set[int] = set()
        """Rows with an `EditOption`."""
        self.reshaped: set[int] = set()
        """Rows with another option, which op `sample` does not know."""
        self.num_logprobs: dict[int, int] = {}
        """Rows that want logprobs -> how many besides the sampled token's."""
        self.named_logprobs: dict[int, Tensor] = {}
        """Rows that want the logprobs of certain tokens -> their ids [M] int64."""
        self._rows_by_mode: dict[SampleMode, set[int]] = {mode: set() for mode in reversed(SampleMode) if mode}
        self._request_ids: dict[int, str] = {}
        self._left: OrderedDict[tuple[str, str], Any] = OrderedDict()
        """(option, request id) -> settings of stateful options of requests that left their rows, the latest ones."""

    @property
    def num_observed(self) -> int:
        """Number of log probabilities that mode OBSERVED finds for every row."""
        return min(self.config.max_logprobs, self.vocab_size, MOST_OBSERVED)

    @property
    def num_mask_words(self) -> int:
        """Words of a row of `TokenMasks.bitmask`."""
        return -(-self.vocab_size // 32)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int] = (),
        request_id: str | None = None,
    ) -> None:
        """Put a request into a row, whatever was there before.

        Args:
            row: From 0 to max_num_seqs - 1.
            params: The request's parameters.
            seed: The request's seed, any integer (taken modulo 2**64).
            num_prompt_tokens: Length of the prompt; token positions from there on are outputs. After a preemption
                this is still the length of the original prompt.
            stop_token_ids: All tokens that would end the request: what min_tokens keeps from being sampled. Ids
                outside the vocabulary are left out, they cannot be sampled anyway.
            request_id: Under which stateful options find their state again after a preemption; never used for two
                requests.

        Raises:
            RequestError: a token id outside the vocabulary, more logprobs than allowed, or an unknown logits
                processor. The row is then clear.
        """
        self.clear_row(row)
        if request_id is not None:
            self._request_ids[row] = request_id
        try:
            self._set_options(row, params, self._context._replace(stop_token_ids=stop_token_ids))
            self._set_logprobs(row, params)
        except RequestError:
            self.clear_row(row)
            raise
        self.sample_table.seeds[row] = (seed + 2**63) % 2**64 - 2**63
        self.sample_table.num_prompt_tokens[row] = num_prompt_tokens
        if not params.greedy:
            self._set_sampling(row, params)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != _NO_PENALTIES:
            self.penalized.add(row)
            self._set_penalties(row, penalties)
        if row in self.edited and self.edit_lists is not None:
            self._set_edit_lists(row, self.edit_lists)
        mode = self._decide_mode(row)
        if mode is not SampleMode.ARGMAX:
            self._rows_by_mode[mode].add(row)

    def clear_row(self, row: int) -> None:
        """Forget the request in this row. Clearing an empty row does nothing."""
        self.sample_table.do_sample[row] = False
        if row in self.penalized:
            self._set_penalties(row, _NO_PENALTIES)
        for rows in (self.penalized, self.edited, self.reshaped, *self._rows_by_mode.values()):
            rows.discard(row)
        if self.edit_lists is not None:
            self.edit_lists.clear_row(row)
        request_id = self._request_ids.pop(row, None)
        for option in OPTIONS:
            settings = self.settings[option.name].pop(row, None)
            if option.is_stateful and settings is not None and request_id is not None:
                self._left[option.name, request_id] = settings
                if len(self._left) > _NUM_LEFT_REQUESTS:
                    self._left.popitem(last=False)
        tables: tuple[dict[int, Any], ...] = (
            self.methods, self.small_top_k, self.num_logprobs, self.named_logprobs,
        )  # fmt: skip
        for table in tables:
            table.pop(row, None)

    def mode_of(self, rows: Iterable[int]) -> SampleMode:
        """The mode of a step with these rows."""
        for mode, members in self._rows_by_mode.items():
            if members and not members.isdisjoint(rows):
                return mode
        return SampleMode.ARGMAX

    def only_reads(self, rows: Iterable[int]) -> bool:
        """Whether sampling for these rows leaves the logits as they are."""
        return self.edited.isdisjoint(rows) and self.penalized.isdisjoint(rows)

    def has_processors(self, row: int) -> bool:
        """Whether custom logits processors run for this row."""
        return row in self.settings["logits_processors"]

    def reads_history(self, row: int) -> bool:
        """Whether a token of this row may depend on the tokens before it other than through its logits."""
        if row in self.penalized or row in self.edited:
            return True
        return any(row in self.settings[option.name] for option in OPTIONS if option.is_stateful)

    def _set_options(self, row: int, params: SamplingParams, context: RequestContext) -> None:
        for option in OPTIONS:
            if params.greedy and not option.edits_greedy:
                continue
            settings = option.compile(params, context)
            if settings is None:
                continue
            if option.is_stateful:
                settings = self._left.pop((option.name, self._request_ids.get(row, "")), settings)
            self.settings[option.name][row] = settings
            (self.edited if isinstance(option, EditOption) else self.reshaped).add(row)
        if self._uses(row, TOKENS):
            for option in FILTERS:
                self.settings[option.name].pop(row, None)

    def _uses(self, row: int, options: Iterable[SamplerOption[Any]]) -> bool:
        return any(row in self.settings[option.name] for option in options)

    def _set_logprobs(self, row: int, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            is_named = name == "logprobs" and params.logprob_token_ids is not None
            if number is not None and number > self.config.max_logprobs and not is_named:
                raise RequestError(
                    f"{name} must be at most {self.config.max_logprobs} on this server, got {number}; ask for fewer "
                    f"or raise max_logprobs",
                    param=name,
                )
        if params.logprobs is not None:
            self.num_logprobs[row] = min(params.logprobs, self.vocab_size)
        if params.logprob_token_ids is not None:
            ids = self._context.vocabulary.ids("logprob_token_ids", params.logprob_token_ids)
            self.named_logprobs[row] = ids

    def _set_edit_lists(self, row: int, edit_lists: EditLists) -> None:
        """Put the edits of a row where captured steps find them, if all of them are lists of tokens."""
        lists: list[TokenList] = []
        for option in EDITS:
            settings = self.settings[option.name].get(row)
            if settings is None:
                continue
            if option.as_lists is None:
                return
            lists += option.as_lists(settings)
        edit_lists.set_row(row, lists)

    def _set_penalties(self, row: int, penalties: tuple[float, float, float]) -> None:
        table = self.penalty_table
        table.repetition[row], table.presence[row], table.frequency[row] = penalties

    def _set_sampling(self, row: int, params: SamplingParams) -> None:
        table = self.sample_table
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        table.do_sample[row] = True
        table.inv_temperature[row] = inv_temperature_of(torch.tensor(params.temperature, dtype=torch.float64)).item()
        table.top_k[row], table.top_p[row] = top_k, params.top_p
        table.min_log2[row] = math.log2(params.min_p) if params.min_p > 0 else -math.inf
        self.methods[row] = self._decide_method(row, params, top_k)
        if self.methods[row] is SampleMethod.TOP_K:
            self.small_top_k[row] = top_k

    def _decide_method(self, row: int, params: SamplingParams, top_k: int) -> SampleMethod:
        if self._uses(row, TOKENS):
            return SampleMethod.OPTION
        if self._uses(row, FILTERS):
            return SampleMethod.OPTION_FILTERED
        if top_k == self.vocab_size and params.top_p == 1 and params.min_p == 0:
            return SampleMethod.PLAIN
        return SampleMethod.TOP_K if top_k <= SMALL_TOP_K else SampleMethod.FILTERED

    def _decide_mode(self, row: int) -> SampleMode:
        is_listed = self.edit_lists is not None and row in self.edit_lists.rows
        if (row in self.edited and not is_listed) or row in self.reshaped or row in self.named_logprobs:
            return SampleMode.HOST
        if row in self.num_logprobs:
            return SampleMode.OBSERVED if self.num_logprobs[row] <= self.num_observed else SampleMode.HOST
        if row in self.penalized or row in self.edited:
            return SampleMode.EDITED
        return SampleMode.SAMPLED if row in self.methods else SampleMode.ARGMAX


def inv_temperature_of(temperature: Tensor) -> Tensor:
    """log2(e) / temperature, of a scalar float64."""
    return math.log2(math.e) / temperature.clamp(min=_LEAST_TEMPERATURE)
