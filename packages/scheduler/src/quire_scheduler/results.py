"""What a finished step means for its requests: new tokens, verified drafts, ends, complete blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import compress, repeat
from operator import ge
from typing import Any

from quire_interfaces import (
    BlockAllocator,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestFailure,
    RequestStatus,
    SchedulerStats,
    TokenLogprobs,
)
from quire_scheduler.drafts import DraftRule
from quire_scheduler.running import RunningStates, ScheduledStep
from quire_scheduler.state import RequestState
from quire_scheduler.stopping import append_tokens, is_stop

__all__ = ["ResultTaker", "failure_output"]

Finish = Callable[[RequestState, FinishReason], None]

_NONES = (repeat(None),) * 4
"""Columns of nothing: as many as an output has before its cached tokens, and behind them."""

_new_output: Callable[[tuple[Any, ...]], EngineCoreOutput] = partial(tuple.__new__, EngineCoreOutput)
"""Makes an output of all its fields, as `EngineCoreOutput._make` does, which is a call in Python for each."""


def failure_output(request_id: str, failure: RequestFailure) -> EngineCoreOutput:
    """The last output of a request that cannot go on."""
    return EngineCoreOutput(request_id, [], FinishReason.ERROR, failure=failure)


class ResultTaker:
    """Applies step results to request states.

    Args:
        allocator: Learns which blocks are complete.
        running: The running requests; a request whose drafts were rejected is to be looked at again.
        drafts: Keeps proposals and counts what became of them.
        counters: Its token counters are raised here.
        finish: Ends a request wherever it is, freeing its row and blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        running: RunningStates,
        drafts: DraftRule,
        counters: SchedulerStats,
        finish: Finish,
    ) -> None:
        self._allocator = allocator
        self._running = running
        self._drafts = drafts
        self._counters = counters
        self._finish = finish
        self._stop_token_ids: Counter[int] = Counter()
        """Token id -> number of running requests that it ends."""

    def entered_row(self, request: Request) -> None:
        """Results of the request are to come."""
        self._stop_token_ids.update(request.stop_token_ids)

    def left_row(self, request: Request) -> None:
        """Results of the request may still come, of steps that are in flight."""
        counts = self._stop_token_ids
        for token_id in request.stop_token_ids:
            counts[token_id] -= 1
            if not counts[token_id]:
                del counts[token_id]

    def take(self, step: ScheduledStep, result: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        """Apply one step.

        Args:
            step: What was planned.
            result: What came of it.
            outputs: Appended to: one for each request with new tokens, prompt logprobs or an end, in order.
        """
        num_entries, num_decodes = len(step.members), len(step.decodes.states)
        assert result.step_id == step.output.step_id, f"result of step {result.step_id} for {step.output.step_id}"
        assert len(result.sampled_token_ids) == num_entries, f"{len(result.sampled_token_ids)} of {num_entries} results"
        begin = 0
        if step.departed or result.failed_rows or result.logprobs or result.prompt_logprobs:
            for index in self._special_decodes(step, result):
                if begin < index:
                    self._take_decodes(step, begin, index, result, outputs)
                self._take_entry(step, index, result, outputs)
                begin = index + 1
        if begin < num_decodes:
            self._take_decodes(step, begin, num_decodes, result, outputs)
        for index in range(num_decodes, num_entries):
            self._take_entry(step, index, result, outputs)
        if result.draft_token_ids or result.forced_token_ids:
            for row, state in zip(step.output.rows, step.members, strict=True):
                if result.step_id >= state.valid_from_step:
                    self._running.refresh(state)
                    self._drafts.keep(row, state.request, result)

    def _special_decodes(self, step: ScheduledStep, result: ModelRunnerOutput) -> list[int]:
        """Indexes of the decodes to be looked at one by one: those that are no decodes any more, or got more than a
        token."""
        departed = set(step.departed)
        rows = result.failed_rows.keys() | result.logprobs.keys() | result.prompt_logprobs.keys()
        entries = zip(step.decodes.states, step.decodes.rows, strict=True)
        return [index for index, (state, row) in enumerate(entries) if state in departed or row in rows]

    def _take_decodes(
        self, step: ScheduledStep, begin: int, end: int, result: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> None:
        """Apply the entries [begin, end): requests of the batch of decodes, each with one sampled token."""
        decodes, sampled, positions = step.decodes, result.sampled_token_ids, step.output.num_computed_tokens
        request_ids, output_token_ids = decodes.request_ids, decodes.output_token_ids
        num_cached, check_from = decodes.num_cached_tokens, decodes.check_from
        if end - begin < len(sampled):
            entries = slice(begin, end)
            sampled, positions = sampled[entries], positions[entries]
            request_ids, output_token_ids = request_ids[entries], output_token_ids[entries]
            num_cached, check_from = num_cached[entries], check_from[entries]
        token_ids = [token_id for (token_id,) in sampled]
        for tokens, token_id in zip(output_token_ids, token_ids, strict=True):
            tokens.append(token_id)
        self._counters.num_generation_tokens_total += end - begin
        columns = zip(request_ids, sampled, *_NONES, num_cached, *_NONES, strict=False)
        new = list(map(_new_output, columns))
        checked = list(compress(range(begin, end), map(ge, positions, check_from)))
        if not self._stop_token_ids.keys().isdisjoint(token_ids):
            stops = self._stop_token_ids
            checked = sorted({*checked, *(i for i, token_id in enumerate(token_ids, begin) if token_id in stops)})
        for index in checked:
            new[index - begin] = self._check_decode(step, index, new[index - begin])
        outputs += new

    def _check_decode(self, step: ScheduledStep, index: int, output: EngineCoreOutput) -> EngineCoreOutput:
        """Look whether a decode completed a block, and whether its token, which was appended, ends the request.

        Returns:
            The request's output, with the end if it is one.
        """
        state, end = step.members[index], step.output.num_computed_tokens[index] + 1
        state.num_tokens = num_tokens = end + 1
        self._computed(state, end, step.output.step_id)
        step.decodes.check_from[index] = state.check_from
        (token_id,) = output.new_token_ids
        if is_stop(state.request, token_id):
            output = output._replace(finish_reason=FinishReason.STOP, stop_token_id=token_id)
        elif num_tokens >= state.limit:
            output = output._replace(finish_reason=FinishReason.LENGTH)
        if output.finish_reason is not None:
            self._finish(state, output.finish_reason)
        return output

    def _take_entry(
        self, step: ScheduledStep, index: int, result: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> None:
        """Apply one entry, whatever happened in it."""
        state, output = step.members[index], step.output
        request = state.request
        # A request that stopped one step ago, or whose earlier step failed: this result is of no use.
        if request.status == RequestStatus.FINISHED or output.step_id < state.valid_from_step:
            return
        self._running.refresh(state)
        row, start = output.rows[index], output.num_computed_tokens[index]
        if row in result.failed_rows:
            self._finish(state, FinishReason.ERROR)
            outputs.append(failure_output(request.request_id, result.failed_rows[row]))
            return
        end = start + output.num_scheduled_tokens[index]
        new = None
        if output.samples[index]:
            num_drafts = len(output.draft_token_ids[row]) if row in output.draft_token_ids else 0
            is_guess = row not in output.forced_rows
            new = self._take_tokens(
                state, result.sampled_token_ids[index], end, output.step_id, num_drafts, is_guess=is_guess
            )
            if row in result.logprobs:
                new = new._replace(logprobs=result.logprobs[row][: len(new.new_token_ids)])
            if row in result.pooled:
                new = new._replace(new_token_ids=[], stop_token_id=None, pooled=result.pooled[row])
        else:
            self._computed(state, end, output.step_id)
        if row in result.prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(state, start, result.prompt_logprobs[row])
            if prompt_logprobs:
                new = new or EngineCoreOutput(request.request_id, [], num_cached_tokens=request.num_cached_tokens)
                new = new._replace(prompt_logprobs=prompt_logprobs)
        if new is not None:
            outputs.append(new)

    def _take_tokens(
        self, state: RequestState, tokens: list[int], end: int, step_id: int, num_drafts: int, *, is_guess: bool
    ) -> EngineCoreOutput:
        """Append what was sampled, take back what rejected drafts had advanced, and see whether the request is over."""
        request = state.request
        num_sampled = len(tokens)
        assert 0 < num_sampled <= 1 + num_drafts, f"{request.request_id}: {num_sampled} tokens, {num_drafts} drafts"
        request.num_in_flight_tokens -= 1 + num_drafts
        if num_drafts:
            num_rejected = num_drafts + 1 - num_sampled
            end -= num_rejected
            if num_rejected and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= num_rejected
                self._running.uncover(state)
            if is_guess:
                self._drafts.verified(num_drafts, num_sampled - 1)
        if not request.output_token_ids:
            self._count_prompt(request)
        num_appended, reason, stop_token_id = append_tokens(state, tokens)
        if request.pooling_params is None:
            self._counters.num_generation_tokens_total += num_appended
        if end >= state.cache_at:
            self._computed(state, end, step_id)
        if reason is None:
            return EngineCoreOutput(request.request_id, tokens, None, None, None, None, request.num_cached_tokens)
        self._finish(state, reason)
        return EngineCoreOutput(
            request.request_id,
            tokens[:num_appended],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _count_prompt(self, request: Request) -> None:
        """Count the prompt of a request that reached its first token."""
        counters = self._counters
        num_cached = min(request.num_cached_tokens, len(request.prompt_token_ids))
        counters.num_prompt_tokens_total += len(request.prompt_token_ids)
        counters.num_cached_prompt_tokens_total += num_cached
        counters.num_external_prompt_tokens_total += min(request.num_external_tokens, max(num_cached, 0))

    def _computed(self, state: RequestState, end: int, step_id: int) -> None:
        """The KV of the first `end` tokens is there now: let the allocator remember whole blocks of known tokens."""
        request = state.request
        # In a step from before a preemption, `end` speaks of blocks that the request no longer holds.
        if request.status != RequestStatus.RUNNING or step_id < state.admitted_step:
            return
        num_known = min(end, state.num_tokens)
        if num_known >= state.cache_at:
            state.cache_at = self._allocator.cache_blocks(request, num_known)
            # A decode at position p computes p + 1 tokens and knows p + 2.
            state.check_from = min(state.limit - 2, state.cache_at - 1)

    def _new_prompt_logprobs(
        self, state: RequestState, start: int, logprobs: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """The part that the client does not have yet; a preempted request computes its prompt again."""
        num_sent = state.num_prompt_logprobs_sent
        state.num_prompt_logprobs_sent = max(num_sent, start + len(logprobs))
        return logprobs[max(0, num_sent - start) :]
