"""What the sampler knows about each row for as long as a request lives in it.

Numbers are tensors on the device, indexed by row; lists of tokens are index tensors made once, in `set_row`; sets and
dictionaries on the host say which rows need which work, so that a step in which nobody wants a thing does not touch
it. Knows nothing of tokens sampled so far: these are the runner's `token_ids`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces import ConfigError, LogitsProcessor, RequestError, SamplingParams
from quire_ops import DrawTable, PenaltyTable
from quire_sampling.config import SamplingConfig
from quire_sampling.dry import Dry
from quire_sampling.extras import XTC, DynamicTemperature
from quire_sampling.mirostat import KeptMirostat, Mirostat

__all__ = ["BadWords", "MinTokens", "SamplingState", "TokenValues", "inv_temperature_of"]

MOST_OBSERVED = 32
"""Log probabilities beyond which finding them for rows that want fewer costs too much time and memory."""
_NUM_KEPT_LISTS = 8
"""Tables of long lists that are kept for further rows with the same list."""
_LEAST_TEMPERATURE = 1e-6  # float32 must have room for its reciprocal; the result is greedy long before


class TokenValues(NamedTuple):
    """logit_bias of one row: `values` [M] float32 to add at `ids` [M] int64."""

    ids: Tensor
    values: Tensor


class BadWords(NamedTuple):
    """Bad words of one row and of similar length: `prefixes` [W, L] int64, right-aligned with -1 for "anything"; `last`
    [W] int64."""

    prefixes: Tensor
    last: Tensor


class MinTokens(NamedTuple):
    """No token of `stop_ids` [M] int64 among the first `num_tokens` output tokens."""

    num_tokens: int
    stop_ids: Tensor


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
        self.registry: dict[str, LogitsProcessor] = dict(logits_processors or {})
        for name in always:
            if name not in self.registry:
                raise ConfigError(f"there is no logits processor {name!r} to run always; {self._choices()}")
        self.always = tuple(always)

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_num_seqs,), value, dtype=dtype, device=self.device)

        self.draws = full(0, torch.bool)
        self.seeds = full(0, torch.int64)
        self.num_prompt_tokens = full(0, torch.int64)
        self.inv_temperature = full(1, torch.float32)
        self.top_k = full(vocab_size, torch.int64)
        self.top_p = full(1, torch.float64)
        self.min_log2 = full(-math.inf, torch.float32)
        self.repetition_penalty = full(1, torch.float32)
        self.presence_penalty = full(0, torch.float32)
        self.frequency_penalty = full(0, torch.float32)

        self.random: set[int] = set()
        """Rows that draw; all others are greedy."""
        self.filtered: dict[int, int] = {}
        """Rows that draw with top_k, top_p or min_p -> top_k (vocab_size for none)."""
        self.penalized: set[int] = set()
        self.edited: set[int] = set()
        """Rows with an entry in any of the next seven tables."""
        self.allowed: dict[int, Tensor] = {}
        self.bad_words: dict[int, tuple[BadWords, ...]] = {}
        self.min_tokens: dict[int, MinTokens] = {}
        self.bias: dict[int, TokenValues] = {}
        self.processors: dict[int, tuple[str, ...]] = {}
        self.dry: dict[int, Dry] = {}
        self.sigmas: dict[int, float] = {}
        """top_n_sigma, of rows that draw."""
        self.dynatemp: dict[int, DynamicTemperature] = {}
        self.xtc: dict[int, XTC] = {}
        self.mirostat: dict[int, Mirostat] = {}
        self._kept_mirostat = KeptMirostat()
        # The completions of one request, and requests of one client, share long lists; nobody changes the tables.
        self._bad_words_of = functools.lru_cache(_NUM_KEPT_LISTS)(self._bad_words)
        self._allowed_of = functools.lru_cache(_NUM_KEPT_LISTS)(self._allowed_ids)
        self.num_logprobs: dict[int, int] = {}
        """Rows that want logprobs -> how many besides the sampled token's."""
        self.named_logprobs: dict[int, Tensor] = {}
        """Rows that want those of certain tokens -> the ids."""
        self.needs_logits: set[int] = set()
        """Rows whose logits are changed or looked at; all others just draw or take the most likely token."""
        self.needs_host: set[int] = set()
        """Those of them that want more than penalties and a few log probabilities: what is done with their logits is
        decided on the host."""

    @property
    def num_observed(self) -> int:
        """Log probabilities that are found for every row, whoever asked for them, where the host has no word."""
        return min(self.config.max_logprobs, self.vocab_size, MOST_OBSERVED)

    @property
    def num_mask_words(self) -> int:
        """Words of a row of `TokenMasks.bitmask`."""
        return -(-self.vocab_size // 32)

    def draw_table(self) -> DrawTable:
        """The rows as op `draw` takes them; the tensors stay the same ones."""
        return DrawTable(
            draws=self.draws,
            seeds=self.seeds,
            num_prompt_tokens=self.num_prompt_tokens,
            inv_temperature=self.inv_temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_log2=self.min_log2,
        )

    def penalty_table(self) -> PenaltyTable:
        """The rows as op `penalize` takes them; the tensors stay the same ones."""
        return PenaltyTable(
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            num_prompt_tokens=self.num_prompt_tokens,
        )

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
            request_id: Under which Mirostat finds its state again after a preemption; never used for two requests.

        Raises:
            RequestError: a token id outside the vocabulary, more logprobs than allowed, or an unknown logits
                processor. The row is then clear.
        """
        self.clear_row(row)
        try:
            self._set_lists(row, params, stop_token_ids)
            self._set_extras(row, params, request_id)
        except RequestError:
            self.clear_row(row)
            raise
        self.seeds[row] = (seed + 2**63) % 2**64 - 2**63
        self.num_prompt_tokens[row] = num_prompt_tokens
        if not params.greedy:
            self._set_draw(row, params)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1, 0, 0):
            self.penalized.add(row)
            self._set_penalties(row, penalties)
        if any(row in rows for rows in (self.edited, self.dynatemp, self.xtc, self.mirostat, self.named_logprobs)):
            self.needs_host.add(row)
        if self.num_logprobs.get(row, 0) > self.num_observed:
            self.needs_host.add(row)
        if row in self.penalized or row in self.num_logprobs or row in self.needs_host:
            self.needs_logits.add(row)

    def clear_row(self, row: int) -> None:
        """Forget the request in this row. Clearing an empty row does nothing."""
        self.draws[row] = False
        if row in self.penalized:
            self._set_penalties(row, (1, 0, 0))
        for rows in (self.random, self.penalized, self.edited, self.needs_logits, self.needs_host):
            rows.discard(row)
        if row in self.mirostat:
            self._kept_mirostat.keep(self.mirostat[row])
        tables: tuple[dict[int, Any], ...] = (
            self.filtered, self.allowed, self.bad_words, self.min_tokens, self.bias, self.processors, self.num_logprobs,
            self.named_logprobs, self.dry, self.sigmas, self.dynatemp, self.xtc, self.mirostat,
        )  # fmt: skip
        for table in tables:
            table.pop(row, None)

    def reads_history(self, row: int) -> bool:
        """Whether a token of this row may depend on the tokens before it other than through its logits."""
        return row in self.penalized or row in self.edited or row in self.mirostat

    def _set_penalties(self, row: int, penalties: tuple[float, float, float]) -> None:
        self.repetition_penalty[row], self.presence_penalty[row], self.frequency_penalty[row] = penalties

    def _set_draw(self, row: int, params: SamplingParams) -> None:
        self.random.add(row)
        self.draws[row] = True
        self.inv_temperature[row] = inv_temperature_of(torch.tensor(params.temperature, dtype=torch.float64)).item()
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_k[row], self.top_p[row] = top_k, params.top_p
        self.min_log2[row] = math.log2(params.min_p) if params.min_p > 0 else -math.inf
        if top_k < self.vocab_size or params.top_p < 1 or params.min_p > 0:
            self.filtered[row] = top_k

    def _set_extras(self, row: int, params: SamplingParams, request_id: str | None) -> None:
        if params.dry_multiplier > 0:
            breakers = self._ids("dry_sequence_breakers", _only_ids(params.dry_sequence_breakers))
            self.dry[row] = Dry.of(params, breakers)
            self.edited.add(row)
        if params.greedy:
            return
        if params.top_n_sigma > 0:
            self.sigmas[row] = params.top_n_sigma
            self.edited.add(row)
        if params.dynatemp_range > 0:
            self.dynatemp[row] = DynamicTemperature.of(params)
        if params.mirostat_mode:
            self.mirostat[row] = self._kept_mirostat.take(request_id, params)
        elif params.xtc_probability > 0:
            self.xtc[row] = XTC(params.xtc_probability, params.xtc_threshold)

    def _set_lists(self, row: int, params: SamplingParams, stop_token_ids: Collection[int]) -> None:
        if params.allowed_token_ids is not None:
            self.allowed[row] = self._allowed_of(params.allowed_token_ids)
        if params.bad_words_token_ids:
            self.bad_words[row] = self._bad_words_of(tuple(map(tuple, params.bad_words_token_ids)))
        stop_ids = sorted(i for i in set(stop_token_ids) if 0 <= i < self.vocab_size)
        if params.min_tokens > 0 and stop_ids:
            self.min_tokens[row] = MinTokens(params.min_tokens, self._ids("stop_token_ids", stop_ids))
        if params.logit_bias:
            biases = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))
            values = torch.from_numpy(biases).to(self.device)
            self.bias[row] = TokenValues(self._ids("logit_bias", list(params.logit_bias)), values)
        names = self.always + self._chosen(params)
        if names:
            self.processors[row] = names
        if any(row in t for t in (self.allowed, self.bad_words, self.min_tokens, self.bias, self.processors)):
            self.edited.add(row)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            is_named = name == "logprobs" and params.logprob_token_ids is not None
            if wanted is not None and wanted > self.config.max_logprobs and not is_named:
                raise RequestError(
                    f"{name} must be at most {self.config.max_logprobs} on this server, got {wanted}; ask for fewer "
                    f"or raise max_logprobs",
                    param=name,
                )
        if params.logprobs is not None:
            self.num_logprobs[row] = min(params.logprobs, self.vocab_size)
        if params.logprob_token_ids is not None:
            self.named_logprobs[row] = self._ids("logprob_token_ids", params.logprob_token_ids)

    def _chosen(self, params: SamplingParams) -> tuple[str, ...]:
        names = (params.extra_args or {}).get("logits_processors", ())
        if not isinstance(names, (list, tuple)):
            raise RequestError(
                f"extra_args.logits_processors must be a list of names, got {names!r}",
                param="extra_args.logits_processors",
            )
        return tuple(self._known(name) for name in names)

    def _known(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self.registry:
            raise RequestError(
                f"there is no logits processor {name!r}; {self._choices()}", param="extra_args.logits_processors"
            )
        return name

    def _choices(self) -> str:
        return f"registered: {', '.join(sorted(self.registry)) or 'none'}"

    def _bad_words(self, words: Sequence[Sequence[int]]) -> tuple[BadWords, ...]:
        """The words by length, at most twice as long as needed in each table: one long word among thousands of short
        ones must not make all of them long."""
        by_width: dict[int, list[Sequence[int]]] = {}
        for word in words:
            by_width.setdefault(1 << (len(word) - 1).bit_length(), []).append(word)
        return tuple(self._bad_words_of_width(width, group) for width, group in sorted(by_width.items()))

    def _bad_words_of_width(self, width: int, words: Sequence[Sequence[int]]) -> BadWords:
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        table = np.full((len(words), width), -1, dtype=np.int64)
        # Row by row, the places of a right-aligned word are in the order in which its tokens come.
        table[np.arange(width) >= width - lengths[:, None]] = self._checked(
            "bad_words_token_ids", [*itertools.chain.from_iterable(words)]
        )
        tokens = torch.from_numpy(table).to(self.device)
        return BadWords(tokens[:, :-1].contiguous(), tokens[:, -1].contiguous())

    def _allowed_ids(self, ids: tuple[int, ...]) -> Tensor:
        return self._ids("allowed_token_ids", sorted(set(ids)))

    def _ids(self, param: str, ids: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._checked(param, ids)).to(self.device)

    def _checked(self, param: str, ids: Sequence[int]) -> NDArray[np.int64]:
        array = np.array(ids, dtype=np.int64)
        outside = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(outside):
            raise RequestError(
                f"{param} must hold token ids below the vocabulary size {self.vocab_size}, got {array[outside[0]]}",
                param=param,
            )
        return array


def inv_temperature_of(temperature: Tensor) -> Tensor:
    """log2(e) / temperature, of a scalar float64."""
    return math.log2(math.e) / temperature.clamp(min=_LEAST_TEMPERATURE)


def _only_ids(breakers: Sequence[str | int]) -> list[int]:
    texts = [each for each in breakers if isinstance(each, str)]
    if texts:
        raise RequestError(
            f"dry_sequence_breakers holds the text {texts[0]!r}, and the sampler knows no tokenizer: give token ids",
            param="dry_sequence_breakers",
        )
    return [each for each in breakers if isinstance(each, int)]
