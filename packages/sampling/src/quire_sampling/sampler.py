"""The sampler: one call turns the logits of a step into one token per logit row.

Order of operations, per request as its `SamplingParams` ask: token masks (structured output), the options that edit
logits (`quire_sampling.options`), with repetition, presence and frequency penalties among them; then greedy, or
temperature (fixed or by an option), min_p, top_k, top_p, options that filter, and the sampling of a token. An option
that samples the token itself takes the place of all filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_ops import EditLogits, Penalize, Sample, SampleMasked, to_device, uniform
from quire_ops.sampling import integer_weights, log2_weights
from quire_sampling.blocks import block_max
from quire_sampling.edit_lists import EditLists
from quire_sampling.logprobs import LogprobTensors, token_logprobs
from quire_sampling.masks import TokenMasks, apply_token_masks_, check_masks
from quire_sampling.nucleus import Filters, keep_nucleus_
from quire_sampling.option import EditOption, EditStage, RowLogits, RowWeights
from quire_sampling.options import EDITS, FILTERS, TEMPERATURES, TOKENS
from quire_sampling.output import SamplerOutput
from quire_sampling.penalties import Penalties, apply_penalties_
from quire_sampling.sample import greedy, sample_filtered, sample_plain, sample_top_k, sample_weights
from quire_sampling.state import SampleMethod, SampleMode, SamplingState, inv_temperature_of

__all__ = ["DeviceEdits", "Sampler"]

_EDITS_BEFORE_PENALTIES = tuple(option for option in EDITS if option.stage < EditStage.PENALIZE)
_OBSERVED_EDITS = tuple(option.name for option in EDITS if option.is_observed)
_EDITS_AFTER_PENALTIES = tuple(option for option in EDITS if option.stage >= EditStage.PENALIZE)


class DeviceEdits(NamedTuple):
    """What `Sampler.sample_in_mode` edits logits by, all of it on the device."""

    token_ids: Tensor
    """[max_num_seqs, max_model_len] integer: history by request row, valid up to and with the positions sampled at."""
    mask_of: Tensor
    """[N] int64, the mask of each row of logits, -1 for none."""
    bitmask: Tensor
    """[M, W] int32 masks (`TokenMasks.bitmask`)."""


class Sampler:
    """Samples for the rows of a `SamplingState`; holds nothing itself.

    A request's token at an output position depends on its logits, parameters, seed and that position only: not on
    the batch, its row, or whether the position was reached by a draft token.

    Args:
        state: The rows.
        sample: Op `sample` of a backend, for the state's device; None samples with torch, the same tokens.
        sample_masked: Op `sample_masked` of a backend; None lays masks over the logits first, for the same tokens.
        penalize: Op `penalize` of a backend; None does it with torch.
        edit_logits: Op `edit_logits` of a backend, for steps that are sampled without the host; None leaves rows with
            lists of tokens to the host. The state must have no rows yet.
    """

    def __init__(
        self,
        state: SamplingState,
        sample: Sample | None = None,
        sample_masked: SampleMasked | None = None,
        penalize: Penalize | None = None,
        edit_logits: EditLogits | None = None,
    ) -> None:
        self.state = state
        self._sample = sample
        self._sample_masked = sample_masked
        self._penalize = penalize
        self._edit_logits = edit_logits
        if edit_logits is not None:
            state.edit_lists = EditLists(state.sample_table.num_prompt_tokens, state.vocab_size)

    @property
    def device_modes(self) -> tuple[SampleMode, ...]:
        """Modes that `sample_in_mode` knows with the ops that there are."""
        if self._sample is None:
            return ()
        if self._sample_masked is None or self._penalize is None:
            return (SampleMode.SAMPLED,)
        return (SampleMode.SAMPLED, SampleMode.EDITED, SampleMode.OBSERVED)

    def sample_in_mode(
        self, mode: SampleMode, logits: Tensor, rows: Tensor, positions: Tensor, edits: DeviceEdits | None = None
    ) -> tuple[Tensor, ...]:
        """Sample one token per logit row without the host: what `sample` gives for rows whose mode is at most this one.

        Args:
            mode: One of `device_modes`.
            logits: [N, V] float32; working memory, unless the mode is SAMPLED.
            rows: [N] int64 on the device, the request row of each.
            positions: [N] int64 on the device: position of the last token that the logits have seen.
            edits: Histories and masks; needed by the modes above SAMPLED.

        Returns:
            Tokens [N] int64 and the largest logits [N] float32, which are not finite where a row has failed; in mode
            OBSERVED also log probabilities, `num_observed` of each row (what `LogprobTensors` has behind the tokens).
        """
        logits = logits.contiguous()
        if mode is SampleMode.SAMPLED:
            assert self._sample is not None
            tokens, max_logits = self._sample(logits, rows, positions, self.state.sample_table)
            return torch.where(max_logits.isfinite(), tokens, 0), max_logits
        assert self._penalize is not None
        assert self._sample_masked is not None
        assert edits is not None
        raw = logits.clone() if mode is SampleMode.OBSERVED else None
        if self._edit_logits is not None and self.state.edit_lists is not None:
            self._edit_logits(logits, rows, positions, edits.token_ids, self.state.edit_lists.table)
        self._penalize(logits, rows, positions, edits.token_ids, self.state.penalty_table)
        tokens, max_logits = self._sample_masked(
            logits, rows, positions, self.state.sample_table, edits.mask_of, edits.bitmask
        )
        tokens = torch.where(max_logits.isfinite(), tokens, 0)
        if raw is None:
            return tokens, max_logits
        return tokens, max_logits, *token_logprobs(raw, tokens, self.state.num_observed)[1:]

    def output(self, sampled: tuple[Tensor, ...], rows: list[int]) -> SamplerOutput:
        """The output of `sample_in_mode` for these rows [N], as `sample` gives it."""
        output = SamplerOutput(sampled[0], rows, sampled[1])
        observed = [i for i, row in enumerate(rows) if row in self.state.num_logprobs] if len(sampled) > 2 else []
        if observed:
            index = to_device(observed, sampled[0].device)
            output.logprob_indices = observed
            output.num_logprobs = [self.state.num_logprobs[rows[i]] for i in observed]
            tensors = (each.index_select(0, index) for each in (sampled[0], *sampled[2:]))
            output.logprob_tensors = LogprobTensors(*tensors)
        return output

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Tensor,
        token_ids: Tensor,
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """Sample one token per logit row.

        A row with k draft tokens has k + 1 logit rows: one after its last accepted token, one after each draft.

        Args:
            logits: [N, V] floating point. float32 logits are used as working memory and overwritten.
            rows: Per logit row: the request row.
            positions: [N] int64 on the device: sequence position (0 is the first prompt token) of the last token that
                the logits have seen; the new token belongs at this position + 1.
            token_ids: [max_num_seqs, max_model_len] integer on the device: history by request row, drafts included,
                valid up to and with the positions asked for. Only read.
            masks: Which tokens may be sampled, for the logit rows that have a mask. Log probabilities are those of the
                logits before it.

        Returns:
            Tokens on the device, log probabilities and failures on demand.
        """
        state = self.state
        rows = list(rows)
        if logits.shape != (len(rows), state.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {state.vocab_size}], got {list(logits.shape)}")
        logits = logits.to(torch.float32).contiguous()
        row_index = to_device(rows, logits.device)
        only_reads, is_reshaped = state.only_reads(rows), not state.reshaped.isdisjoint(rows)
        observed = [i for i, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        raw = None
        if observed:  # a copy, unless nothing will write to the logits
            is_whole = len(observed) == len(rows) and masks is None and only_reads
            raw = logits if is_whole else logits.index_select(0, to_device(observed, logits.device))
        sample_masked = self._sample_masked if only_reads and not is_reshaped else None
        if masks is not None and sample_masked is None:
            apply_token_masks_(logits, masks)
        errors = self._edit(logits, rows, row_index, positions, token_ids)
        if raw is not None and any(state.settings[name] for name in _OBSERVED_EDITS):
            self._observe_edits(raw, logits, rows, observed)
        if masks is not None and sample_masked is not None:
            check_masks(logits, masks)
            mask_of = to_device(masks.mask_of(len(rows)).numpy(), logits.device)
            bitmask = masks.bitmask.to(logits.device, non_blocking=True)
            tokens, max_logits = sample_masked(logits, row_index, positions, state.sample_table, mask_of, bitmask)
        elif self._sample is not None and not is_reshaped:
            tokens, max_logits = self._sample(logits, row_index, positions, state.sample_table)
        else:
            maxima = block_max(logits)
            max_logits = maxima.amax(-1)
            tokens = self._sample_by_method(logits, maxima, rows, row_index, positions)
        output = SamplerOutput(torch.where(max_logits.isfinite(), tokens, 0), rows, max_logits, errors)
        if raw is not None:
            self._add_logprobs(output, raw, observed)
        return output

    def _observe_edits(self, raw: Tensor, logits: Tensor, rows: list[int], observed: list[int]) -> None:
        """Put edited logits in the place of raw ones [M, V] in rows whose log probabilities are those of them."""
        for place, i in enumerate(observed):
            if any(rows[i] in self.state.settings[name] for name in _OBSERVED_EDITS):
                raw[place] = logits[i]

    def _add_logprobs(self, output: SamplerOutput, raw: Tensor, observed: list[int]) -> None:
        """Log probabilities of logit rows `observed` [M], whose raw logits are [M, V]."""
        state, rows = self.state, [output.rows[i] for i in observed]
        output.logprob_indices = observed
        output.num_logprobs = [state.num_logprobs[row] for row in rows]
        tokens = output.token_ids.index_select(0, to_device(observed, raw.device))
        tensors = token_logprobs(raw, tokens, max(output.num_logprobs))
        named = {place: state.named_logprobs[row] for place, row in enumerate(rows) if row in state.named_logprobs}
        output.logprob_tensors = tensors.naming(raw, named) if named else tensors

    def _edit(
        self, logits: Tensor, rows: list[int], row_index: Tensor, positions: Tensor, token_ids: Tensor
    ) -> dict[int, str]:
        """Everything that changes raw logits; returns the logit rows whose requests must fail, with the reasons."""
        state = self.state
        errors: dict[int, str] = {}
        edited = [(i, row) for i, row in enumerate(rows) if row in state.edited] if state.edited else []
        views = [
            (i, row, RowLogits(logits[i], token_ids[row], positions[i], state.sample_table.num_prompt_tokens[row]))
            for i, row in edited
        ]

        def apply(options: Sequence[EditOption[Any]]) -> None:
            for option in options if views else ():
                settings = state.settings[option.name]
                for i, row, view in views if settings else ():
                    if row in settings and (error := option.apply(settings[row], view)) is not None:
                        errors.setdefault(i, error)

        apply(_EDITS_BEFORE_PENALTIES)
        penalized = [i for i, row in enumerate(rows) if row in state.penalized] if state.penalized else []
        if penalized and self._penalize is not None:
            self._penalize(logits, row_index, positions, token_ids, state.penalty_table)
        elif penalized:
            self._penalize_with_torch(logits, to_device(penalized, logits.device), row_index, positions, token_ids)
        apply(_EDITS_AFTER_PENALTIES)
        return errors

    def _penalize_with_torch(
        self, logits: Tensor, which: Tensor, row_index: Tensor, positions: Tensor, token_ids: Tensor
    ) -> None:
        table, index = self.state.penalty_table, row_index[which]
        penalties = Penalties(table.repetition, table.presence, table.frequency).take(index)
        num_prompt_tokens = table.num_prompt_tokens[index]
        apply_penalties_(logits, which, token_ids, index, positions[which], num_prompt_tokens, penalties)

    def _sample_by_method(
        self, logits: Tensor, maxima: Tensor, rows: list[int], row_index: Tensor, positions: Tensor
    ) -> Tensor:
        """Rows of each method go their own way; the usual batch is of one method only."""
        members_of: dict[SampleMethod, list[int]] = {}
        for i, row in enumerate(rows):
            members_of.setdefault(self.state.methods.get(row, SampleMethod.GREEDY), []).append(i)
        if len(members_of) == 1:
            return self._sample_with(next(iter(members_of)), logits, maxima, rows, row_index, positions)
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for method, members in members_of.items():
            index = to_device(members, logits.device)
            tokens[index] = self._sample_with(
                method, logits[index], maxima[index], [rows[i] for i in members], row_index[index], positions[index]
            )
        return tokens

    def _sample_with(
        self,
        method: SampleMethod,
        logits: Tensor,
        maxima: Tensor,
        rows: list[int],
        row_index: Tensor,
        positions: Tensor,
    ) -> Tensor:
        state, table = self.state, self.state.sample_table
        if method is SampleMethod.GREEDY:
            return greedy(logits, maxima)
        seeds, output_positions = table.seeds[row_index], positions + 1 - table.num_prompt_tokens[row_index]
        u = uniform(seeds, output_positions)
        inv_temperature = self._inv_temperature(logits, rows, row_index)
        if method is SampleMethod.PLAIN:
            return sample_plain(logits, maxima, inv_temperature, u)
        filters = Filters(table.top_k[row_index], table.top_p[row_index], table.min_log2[row_index])
        if method is SampleMethod.TOP_K:
            k = max(state.small_top_k[row] for row in rows)
            return sample_top_k(logits, maxima, inv_temperature, filters, u, k)
        if method is SampleMethod.FILTERED:
            return sample_filtered(logits, maxima, inv_temperature, filters, u)
        log2 = log2_weights(logits, maxima.amax(-1), inv_temperature)
        weights = integer_weights(log2)
        if method is SampleMethod.OPTION_FILTERED:
            keep_nucleus_(weights, log2, logits, filters)
        views = [
            RowWeights(
                weights[i : i + 1], log2[i : i + 1], logits[i : i + 1], seeds[i], output_positions[i], u[i : i + 1]
            )
            for i in range(len(rows))
        ]
        if method is SampleMethod.OPTION:
            return torch.cat([self._sample_by_option(row, view) for row, view in zip(rows, views, strict=True)])
        for option in FILTERS:
            for row, view in zip(rows, views, strict=True):
                if (settings := state.settings[option.name].get(row)) is not None:
                    option.apply(settings, view)
        return sample_weights(weights, u)

    def _sample_by_option(self, row: int, view: RowWeights) -> Tensor:
        """The token [1] of a row with a `TokenOption`."""
        option = next(option for option in TOKENS if row in self.state.settings[option.name])
        return option.apply(self.state.settings[option.name][row], view)

    def _inv_temperature(self, logits: Tensor, rows: list[int], row_index: Tensor) -> Tensor:
        """log2(e) / temperature of each row, [N] float32."""
        inv_temperature = self.state.sample_table.inv_temperature[row_index]
        for option in TEMPERATURES:
            settings = self.state.settings[option.name]
            for i, row in enumerate(rows) if settings else ():
                if row in settings:
                    inv_temperature[i] = inv_temperature_of(option.apply(settings[row], logits[i]))
        return inv_temperature
