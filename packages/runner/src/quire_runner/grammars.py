"""`RowGrammars`: the matchers of the rows whose output has a form, and the masks of a step.

A matcher follows the tokens that are certain: it is made when a row is filled, goes through what a preempted request
had produced already, and moves on when a step's tokens are known. So the mask of a step needs nothing but the step
before it on the host, and nobody waits for a result: steps run in order. Draft tokens are walked and taken back. Knows
matchers through their Protocol; knows no grammar.

Shape legend: M masked logit rows of this step, W = ceil(vocab_size / 32) words of a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from quire_interfaces.errors import RequestError
from quire_interfaces.grammar import GrammarMatcher, GrammarSource
from quire_interfaces.platforms import platform_of_type
from quire_interfaces.step import ModelRunnerOutput, NewRow, RequestFailure, SchedulerOutput
from quire_sampling import TokenMasks

__all__ = ["RowGrammars"]

_logger = logging.getLogger(__name__)


class RowGrammars:
    """Matchers by row.

    Args:
        source: Makes them; None when this runner takes no structured outputs.
        vocab_size: Width of the logits.
        device: Where the logits are.
    """

    def __init__(self, source: GrammarSource | None, vocab_size: int, device: torch.device) -> None:
        self._source = source
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._matchers: dict[int, GrammarMatcher] = {}
        self._copies: Any = None
        self._platform = platform_of_type(device.type)
        self._buffer = torch.zeros(0, self._num_words, dtype=torch.int32)
        self._words: list[memoryview] = []

    @property
    def is_used(self) -> bool:
        """Whether any row has a matcher."""
        return bool(self._matchers)

    def has(self, row: int) -> bool:
        """Whether the row has a matcher."""
        return row in self._matchers

    def has_any(self, rows: Collection[int]) -> bool:
        """Whether one of the rows has a matcher."""
        return not self._matchers.keys().isdisjoint(rows)

    def fill(self, new: NewRow) -> None:
        """Put a request into its row: a matcher that has seen all of its output so far.

        Raises:
            RequestError: there is no grammar for it, or its output does not follow the grammar.
        """
        params = new.sampling_params.structured_outputs
        if params is None:
            return
        if self._source is None:
            raise RequestError("this engine takes no structured outputs", param="structured_outputs")
        matcher = self._source.new_matcher(params)
        for token_id in new.token_ids[new.num_prompt_tokens :]:
            if not matcher.accept(token_id):
                raise RequestError(f"token {token_id} of the output so far does not follow the grammar")
        self._matchers[new.row] = matcher

    def free(self, row: int) -> None:
        """Forget the row's matcher, if it has one."""
        self._matchers.pop(row, None)

    def masks(
        self, output: SchedulerOutput, entry_ends: Sequence[int]
    ) -> tuple[TokenMasks | None, dict[int, RequestFailure]]:
        """Masks of the step's logit rows. On an accelerator this works while it computes the logits.

        Args:
            output: The step.
            entry_ends: Per entry: the logit rows of it and of those before it.

        Returns:
            The masks, None when no row needs one; and per row whose grammar failed, why.
        """
        if not self._matchers:
            return None, {}
        self._reserve(entry_ends[-1])
        indices: list[int] = []
        failed: dict[int, RequestFailure] = {}
        begin = 0
        for row, end in zip(output.rows, entry_ends, strict=True):
            # Chunks of prompts have no logit rows.
            if end > begin and (matcher := self._matchers.get(row)) is not None:
                try:
                    self._walk(matcher, output.draft_token_ids.get(row, []), begin, end, indices)
                except RequestError as error:
                    failed[row] = RequestFailure.of(error)
                except Exception as error:  # a library's accident with one output is this output's failure
                    _logger.exception("the grammar of row %d failed", row)
                    failed[row] = RequestFailure(f"its grammar failed: {type(error).__name__}: {error}")
            begin = end
        return (TokenMasks(indices, self._to_device(len(indices))) if indices else None), failed

    def _walk(self, matcher: GrammarMatcher, drafts: list[int], begin: int, end: int, indices: list[int]) -> None:
        """Fill the masks of one entry, before and behind each of its drafts; the matcher comes back to where it was."""
        num_accepted = 0
        try:
            # Drafts that are certain have one logit row only, behind the last of them.
            for place in range(end - 1 - len(drafts), end):
                if place >= begin and not matcher.allows_all:
                    matcher.fill_bitmask(self._words[len(indices)])
                    indices.append(place)
                if place + 1 < end:
                    if not matcher.accept(drafts[num_accepted]):
                        return  # this draft cannot be sampled, so what follows it is void
                    num_accepted += 1
        finally:
            matcher.rollback(num_accepted)

    def accept(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, RequestFailure]:
        """Move on by the tokens that were sampled, and say in `result` which tokens are certain to follow them.

        Returns:
            Per row that left its grammar (a bug of somebody), what happened.
        """
        failed: dict[int, RequestFailure] = {}
        if not self._matchers:
            return failed
        for row, tokens in zip(output.rows, result.sampled_token_ids, strict=True):
            matcher = self._matchers.get(row)
            if matcher is None or not tokens:
                continue
            for token_id in tokens:
                # The request ends with its end token; drafts behind it and steps in flight mean nothing.
                if not matcher.is_terminated and not matcher.accept(token_id):
                    why = f"token {token_id} was sampled although the grammar does not allow it"
                    failed[row] = RequestFailure(why)
                    break
            else:
                if forced := matcher.forced_token_ids():
                    result.forced_token_ids[row] = forced
        return failed

    def follow(self, row: int, drafts: list[int]) -> list[int]:
        """The drafts up to the first one that the row's grammar does not take; all where it has none."""
        matcher = self._matchers.get(row)
        if matcher is None:
            return drafts
        num_accepted = 0
        while num_accepted < len(drafts) and matcher.accept(drafts[num_accepted]):
            num_accepted += 1
        matcher.rollback(num_accepted)
        return drafts[:num_accepted]

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self._words):
            return
        self._buffer = torch.zeros(
            2 * num_rows, self._num_words, dtype=torch.int32, pin_memory=self._platform.pins_memory
        )
        self._words = [memoryview(row) for row in self._buffer.numpy()]

    def _to_device(self, num_masks: int) -> Tensor:
        """The first masks, copied beside the computation where there is a device to copy to."""
        masks = self._buffer[:num_masks]
        if not self._platform.module:
            return masks.to(self._device)
        runtime = self._platform.runtime()
        if self._copies is None:
            self._copies = runtime.Stream(self._device)
        current = runtime.current_stream(self._device)
        with runtime.stream(self._copies):
            copied = masks.to(self._device, non_blocking=True)
        current.wait_stream(self._copies)
        copied.record_stream(current)
        return copied
