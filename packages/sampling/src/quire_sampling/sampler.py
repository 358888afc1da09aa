"""The sampler: one call turns the logits of a step into one token per logit row.

Order of operations, per request as its `SamplingParams` ask:
token masks (structured output), allowed_token_ids, bad words, min_tokens, logit_bias, custom logits processors,
penalties, DRY, top_n_sigma; then greedy, or temperature (fixed or dynamic), min_p, top_k, top_p, XTC and the draw.
Mirostat takes the place of min_p, top_k, top_p and XTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from quire_ops import Draw, DrawMasked, Penalize, to_device, uniform
from quire_ops.drawing import log2_weights
from quire_sampling.blocks import block_max
from quire_sampling.draw import SMALL_TOP_K, draw, draw_among_top, draw_filtered, greedy
from quire_sampling.dry import apply_dry_
from quire_sampling.edits import apply_processors_, edit_row_
from quire_sampling.extras import draw_with_xtc, dynamic_temperature, keep_top_sigmas_
from quire_sampling.logprobs import LogprobTensors, token_logprobs
from quire_sampling.masks import TokenMasks, apply_token_masks_, check_masks
from quire_sampling.mirostat import draw_mirostat
from quire_sampling.nucleus import Filters
from quire_sampling.output import SamplerOutput
from quire_sampling.penalties import Penalties, apply_penalties_
from quire_sampling.state import SamplingState, inv_temperature_of

__all__ = ["Sampler"]


class _Kind(Enum):
    """How a row's token is chosen."""

    GREEDY = auto()
    UNFILTERED = auto()
    AMONG_TOP = auto()
    FILTERED = auto()
    XTC = auto()
    MIROSTAT = auto()


class Sampler:
    """Samples for the rows of a `SamplingState`; holds nothing itself.

    A request's token at an output position depends on its logits, parameters, seed and that position only: not on
    the batch, its row, or whether the position was reached by a draft token.

    Args:
        state: The rows.
        draw: Op `draw` of a backend, for the state's device; None draws with torch, the same tokens.
        draw_masked: Op `draw_masked` of a backend; None lays masks over the logits first, for the same tokens.
        penalize: Op `penalize` of a backend; None does it with torch.
    """

    def __init__(
        self,
        state: SamplingState,
        draw: Draw | None = None,
        draw_masked: DrawMasked | None = None,
        penalize: Penalize | None = None,
    ) -> None:
        self.state = state
        self._draw = draw
        self._draw_masked = draw_masked
        self._penalize = penalize

    def only_penalizes(self, rows: Sequence[int]) -> bool:
        """Whether `draw_edited` gives all that these rows want, or `draw_observed` if log probabilities are wanted."""
        return self.state.needs_host.isdisjoint(rows)

    def wants_logprobs(self, rows: Sequence[int]) -> bool:
        """Whether any of these rows wants log probabilities."""
        return not self.state.num_logprobs.keys().isdisjoint(rows)

    def only_draws(self, rows: Sequence[int]) -> bool:
        """Whether op `draw` on the unchanged logits gives all that these rows want. Then `sample` may be left out,
        unless there are masks: `SamplerOutput(token_ids, rows, peaks)` says the same."""
        return self.state.needs_logits.isdisjoint(rows)

    def takes_most_likely(self, rows: Sequence[int]) -> bool:
        """The same, and none of these rows draws: only the largest logits matter."""
        return self.only_draws(rows) and self.state.random.isdisjoint(rows)

    @property
    def draws_in_one_call(self) -> bool:
        """Whether there is `draw`."""
        return self._draw is not None

    @property
    def edits_in_one_call(self) -> bool:
        """Whether there is `draw_edited`."""
        return self._draw_masked is not None and self._penalize is not None

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `sample` does for rows that want nothing else (`only_draws`), without a word from the host.

        Args:
            logits: [N, V] float32.
            rows: [N] int64 on the device.
            positions: As in `sample`.

        Returns:
            Tokens [N] int64 and the largest logits [N] float32, which are not finite where a row has failed.
        """
        assert self._draw is not None
        tokens, peaks = self._draw(logits.contiguous(), rows, positions, self.state.draw_table())
        return torch.where(peaks.isfinite(), tokens, 0), peaks

    def draw_edited(
        self, logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, mask_of: Tensor, bitmask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for rows that want penalties or masks besides (`only_penalizes`).

        Args:
            logits: [N, V] float32, working memory.
            rows: [N] int64 on the device.
            positions: As in `sample`.
            token_ids: As in `sample`.
            mask_of: [N], and
            bitmask: [M, W], as op `draw_masked` takes them, on the device.
        """
        assert self._penalize is not None
        assert self._draw_masked is not None
        logits = logits.contiguous()
        self._penalize(logits, rows, positions, token_ids, self.state.penalty_table())
        tokens, peaks = self._draw_masked(logits, rows, positions, self.state.draw_table(), mask_of, bitmask)
        return torch.where(peaks.isfinite(), tokens, 0), peaks

    def draw_observed(
        self, logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, mask_of: Tensor, bitmask: Tensor
    ) -> tuple[Tensor, ...]:
        """`draw_edited` with log probabilities, of all rows and `num_observed` of each. Arguments are the same.

        Returns:
            Tokens and largest logits, then what `LogprobTensors` has behind the tokens; see `output`.
        """
        raw = logits.clone()
        tokens, peaks = self.draw_edited(logits, rows, positions, token_ids, mask_of, bitmask)
        return tokens, peaks, *token_logprobs(raw, tokens, self.state.num_observed)[1:]

    def output(self, drawn: tuple[Tensor, ...], rows: list[int]) -> SamplerOutput:
        """What `draw`, `draw_edited` or `draw_observed` gave for these rows [N], as `sample` gives it."""
        output = SamplerOutput(drawn[0], rows, drawn[1])
        wanted = [i for i, row in enumerate(rows) if row in self.state.num_logprobs] if len(drawn) > 2 else []
        if wanted:
            index = to_device(wanted, drawn[0].device)
            output.logprob_indices = wanted
            output.num_logprobs = [self.state.num_logprobs[rows[i]] for i in wanted]
            output.logprob_tensors = LogprobTensors(*(each.index_select(0, index) for each in (drawn[0], *drawn[2:])))
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
        wanted = [i for i, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        raw = None
        if wanted:
            index = to_device(wanted, logits.device)
            # A copy, unless nothing will write to the logits.
            only_reads = masks is None and self._only_reads(rows)
            raw = logits if len(wanted) == len(rows) and only_reads else logits.index_select(0, index)
        is_plain = not (state.dynatemp or state.xtc or state.mirostat)
        draw_masked = self._draw_masked if masks is not None and is_plain and self._only_reads(rows) else None
        if masks is not None and draw_masked is None:
            apply_token_masks_(logits, masks)
        errors = self._edit(logits, rows, row_index, positions, token_ids)
        if masks is not None and draw_masked is not None:
            check_masks(logits, masks)
            mask_of = to_device(masks.mask_of(len(rows)).numpy(), logits.device)
            bitmask = masks.bitmask.to(logits.device, non_blocking=True)
            tokens, peaks = draw_masked(logits, row_index, positions, state.draw_table(), mask_of, bitmask)
        elif self._draw is not None and is_plain:
            tokens, peaks = self._draw(logits, row_index, positions, state.draw_table())
        else:
            maxima = block_max(logits)
            tokens, peaks = self._choose(logits, maxima, rows, row_index, positions), maxima.amax(-1)
        output = SamplerOutput(torch.where(peaks.isfinite(), tokens, 0), rows, peaks, errors)
        if raw is not None:
            output.logprob_indices = wanted
            output.num_logprobs = [state.num_logprobs[rows[i]] for i in wanted]
            tensors = token_logprobs(raw, output.token_ids.index_select(0, index), max(output.num_logprobs))
            if state.named_logprobs:
                named = {place: rows[i] for place, i in enumerate(wanted) if rows[i] in state.named_logprobs}
                tensors = tensors.naming(raw, {place: state.named_logprobs[row] for place, row in named.items()})
            output.logprob_tensors = tensors
        return output

    def _only_reads(self, rows: list[int]) -> bool:
        """Whether sampling for `rows` leaves the logits as they are."""
        state = self.state
        return not any(row in state.penalized or row in state.edited for row in rows)

    def _edit(
        self, logits: Tensor, rows: list[int], row_index: Tensor, positions: Tensor, token_ids: Tensor
    ) -> dict[int, str]:
        """Everything that changes raw logits; returns the logit rows whose custom processors failed."""
        state = self.state
        errors: dict[int, str] = {}
        if state.edited:
            for i, row in enumerate(rows):
                if row not in state.edited:
                    continue
                edit_row_(state, row, logits[i], token_ids[row], positions[i])
                if row in state.processors:
                    error = apply_processors_(state, row, logits[i], token_ids[row], int(positions[i]))
                    if error is not None:
                        errors[i] = error
        penalized = [i for i, row in enumerate(rows) if row in state.penalized] if state.penalized else []
        if penalized and self._penalize is not None:
            self._penalize(logits, row_index, positions, token_ids, state.penalty_table())
        elif penalized:
            which = to_device(penalized, logits.device)
            index = row_index[which]
            penalties = Penalties(state.repetition_penalty, state.presence_penalty, state.frequency_penalty)
            apply_penalties_(
                logits,
                which,
                token_ids,
                index,
                positions[which],
                state.num_prompt_tokens[index],
                penalties.take(index),
            )
        if state.dry or state.sigmas:
            for i, row in enumerate(rows):
                if (dry := state.dry.get(row)) is not None:
                    apply_dry_(logits[i], dry, token_ids[row], int(positions[i]))
                if (sigmas := state.sigmas.get(row)) is not None:
                    keep_top_sigmas_(logits[i], sigmas)
        return errors

    def _choose(self, logits: Tensor, maxima: Tensor, rows: list[int], row_index: Tensor, positions: Tensor) -> Tensor:
        """Each kind of row goes its own way; the usual batch is of one kind only."""
        kinds: dict[_Kind, list[int]] = {}
        for i, row in enumerate(rows):
            kinds.setdefault(self._kind(row), []).append(i)
        if len(kinds) == 1:
            return self._choose_kind(next(iter(kinds)), logits, maxima, rows, row_index, positions)
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for kind, members in kinds.items():
            index = to_device(members, logits.device)
            kind_rows = [rows[i] for i in members]
            tokens[index] = self._choose_kind(
                kind, logits[index], maxima[index], kind_rows, row_index[index], positions[index]
            )
        return tokens

    def _kind(self, row: int) -> _Kind:
        if row not in self.state.random:
            return _Kind.GREEDY
        if row in self.state.mirostat:
            return _Kind.MIROSTAT
        if row in self.state.xtc:
            return _Kind.XTC
        top_k = self.state.filtered.get(row)
        if top_k is None:
            return _Kind.UNFILTERED
        return _Kind.AMONG_TOP if top_k <= SMALL_TOP_K else _Kind.FILTERED

    def _choose_kind(
        self, kind: _Kind, logits: Tensor, maxima: Tensor, rows: list[int], row_index: Tensor, positions: Tensor
    ) -> Tensor:
        state = self.state
        if kind is _Kind.GREEDY:
            return greedy(logits, maxima)
        seeds, places = state.seeds[row_index], positions + 1 - state.num_prompt_tokens[row_index]
        u = uniform(seeds, places)
        inv_temperature = state.inv_temperature[row_index]
        for i, row in enumerate(rows) if state.dynatemp else ():
            if (dynatemp := state.dynatemp.get(row)) is not None:
                inv_temperature[i] = inv_temperature_of(dynamic_temperature(logits[i], dynatemp))
        if kind is _Kind.UNFILTERED:
            return draw(logits, maxima, inv_temperature, u)
        peaks = maxima.amax(-1)
        if kind is _Kind.MIROSTAT:
            log2 = log2_weights(logits, peaks, inv_temperature)
            return draw_mirostat(log2, logits, u, [state.mirostat[row] for row in rows], places.tolist())
        filters = Filters(state.top_k[row_index], state.top_p[row_index], state.min_log2[row_index])
        if kind is _Kind.XTC:
            log2 = log2_weights(logits, peaks, inv_temperature)
            return draw_with_xtc(log2, logits, filters, u, seeds, places, [state.xtc[row] for row in rows])
        if kind is _Kind.AMONG_TOP:
            return draw_among_top(logits, maxima, inv_temperature, filters, u, max(state.filtered[r] for r in rows))
        return draw_filtered(logits, maxima, inv_temperature, filters, u)
