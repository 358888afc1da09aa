"""The sampler: one call turns the logits of a step into one token per logit row.

Order of operations, per request as its `SamplingParams` ask:
allowed_token_ids, bad words, min_tokens, logit_bias, custom logits processors, penalties; then greedy, or
temperature, min_p, top_k, top_p and the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_sampling.blocks import block_max
from quire_sampling.draw import Filters, draw, draw_filtered, greedy, weights_
from quire_sampling.edits import apply_processors_, edit_row_
from quire_sampling.logprobs import token_logprobs
from quire_sampling.output import SamplerOutput
from quire_sampling.penalties import apply_penalties_
from quire_sampling.rng import uniform
from quire_sampling.state import SamplingState

__all__ = ["Sampler"]

_PENALTY_CHUNK_ROWS = 64  # bounds the [rows, V] table of counts


class Sampler:
    """Samples for the rows of a `SamplingState`; holds nothing itself.

    A request's token at an output position depends on its logits, parameters, seed and that position only: not on
    the batch, its row, or whether the position was reached by a draft token.
    """

    def __init__(self, state: SamplingState) -> None:
        self.state = state

    def sample(self, logits: Tensor, rows: Sequence[int], positions: Tensor, token_ids: Tensor) -> SamplerOutput:
        """Sample one token per logit row.

        A row with k draft tokens has k + 1 logit rows: one after its last accepted token, one after each draft.

        Args:
            logits: [N, V] floating point. float32 logits are used as working memory and overwritten.
            rows: Per logit row: the request row.
            positions: [N] int64 on the device: sequence position (0 is the first prompt token) of the last token that
                the logits have seen; the new token belongs at this position + 1.
            token_ids: [max_num_seqs, max_model_len] integer on the device: history by request row, drafts included,
                valid up to and with the positions asked for. Only read.

        Returns:
            Tokens on the device, log probabilities and failures on demand.
        """
        state = self.state
        rows = list(rows)
        if logits.shape != (len(rows), state.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {state.vocab_size}], got {list(logits.shape)}")
        logits = logits.to(torch.float32)
        row_index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        wanted = [i for i, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        raw = logits[wanted].clone() if wanted else None
        errors = self._edit(logits, rows, row_index, positions, token_ids)
        maxima = block_max(logits)
        tokens = self._choose(logits, maxima, rows, row_index, positions)
        peaks = maxima.amax(-1)
        output = SamplerOutput(torch.where(peaks.isfinite(), tokens, 0), rows, peaks, errors)
        if raw is not None:
            output.logprob_indices = wanted
            output.num_logprobs = [state.num_logprobs[rows[i]] for i in wanted]
            output.logprob_tensors = token_logprobs(raw, output.token_ids[wanted], max(output.num_logprobs))
        return output

    def _edit(
        self, logits: Tensor, rows: list[int], row_index: Tensor, positions: Tensor, token_ids: Tensor
    ) -> dict[int, str]:
        """Everything that changes raw logits; returns the rows whose custom processors failed."""
        state = self.state
        errors: dict[int, str] = {}
        edited = state.allowed.keys() | state.bad_words.keys() | state.min_tokens.keys() | state.bias.keys()
        edited |= state.processors.keys()
        if edited:
            for i, row in enumerate(rows):
                if row not in edited:
                    continue
                edit_row_(state, row, logits[i], token_ids[row], positions[i])
                if row in state.processors and row not in errors:
                    error = apply_processors_(state, row, logits[i], token_ids[row], int(positions[i]))
                    if error is not None:
                        errors[row] = error
        if state.penalized:
            penalized = [i for i, row in enumerate(rows) if row in state.penalized]
            for start in range(0, len(penalized), _PENALTY_CHUNK_ROWS):
                chunk = torch.tensor(penalized[start : start + _PENALTY_CHUNK_ROWS], device=logits.device)
                self._penalize(logits, chunk, row_index[chunk], positions[chunk], token_ids)
        return errors

    def _penalize(self, logits: Tensor, chunk: Tensor, row_index: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        state = self.state
        part = logits[chunk]
        apply_penalties_(
            part,
            token_ids[row_index],
            positions,
            state.num_prompt_tokens[row_index],
            state.repetition_penalty[row_index],
            state.presence_penalty[row_index],
            state.frequency_penalty[row_index],
        )
        logits[chunk] = part

    def _choose(self, logits: Tensor, maxima: Tensor, rows: list[int], row_index: Tensor, positions: Tensor) -> Tensor:
        """Greedy, unfiltered and filtered rows each go their own way; the usual batch is of one kind only."""
        state = self.state
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for i, row in enumerate(rows):
            kinds[0 if row not in state.random else 2 if row in state.filtered else 1].append(i)
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for kind, members in enumerate(kinds):
            if not members:
                continue
            whole = len(members) == len(rows)
            index = torch.tensor(members, device=logits.device)
            part = logits if whole else logits[index]
            part_maxima = maxima if whole else maxima[index]
            if kind == 0:
                tokens[index] = greedy(part, part_maxima)
            else:
                tokens[index] = self._draw(part, part_maxima, row_index[index], positions[index], kind == 2)
        return tokens

    def _draw(self, logits: Tensor, maxima: Tensor, row_index: Tensor, positions: Tensor, filtered: bool) -> Tensor:
        state = self.state
        u = uniform(state.seeds[row_index], positions + 1 - state.num_prompt_tokens[row_index])
        temperature = state.temperature[row_index]
        if not filtered:
            return draw(weights_(logits, maxima, temperature), u)
        filters = Filters(state.top_k[row_index], state.top_p[row_index], state.min_p[row_index])
        return draw_filtered(logits, maxima, temperature, filters, u)
