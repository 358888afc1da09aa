"""What a finished step means for its requests: new tokens, verified drafts, ends, blocks to remember."""

from __future__ import annotations

from collections.abc import Callable

from quire_interfaces import (
    BlockAllocator,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    RequestFailure,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from quire_scheduler.state import RequestState
from quire_scheduler.stopping import append_tokens

__all__ = ["ResultTaker", "failure_news"]

Finish = Callable[[RequestState, FinishReason], None]


def failure_news(request_id: str, failure: RequestFailure) -> EngineCoreOutput:
    """The last news of a request that cannot go on."""
    return EngineCoreOutput(
        request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=failure.message,
        error_code=failure.code,
        error_param=failure.param,
    )


class ResultTaker:
    """Applies step results to request states.

    Args:
        allocator: Told which blocks are complete.
        counters: Its token and draft counters are raised here.
        num_speculative_tokens: Most draft tokens to keep per request; 0 ignores drafts that are guesses.
        finish: Ends a request wherever it is, freeing its row and blocks.
    """

    def __init__(
        self, allocator: BlockAllocator, counters: SchedulerStats, num_speculative_tokens: int, finish: Finish
    ) -> None:
        self._allocator = allocator
        self._counters = counters
        self._num_speculative = num_speculative_tokens
        self._finish = finish
        self.drafts_follow = num_speculative_tokens > 0
        """Whether results may bring proposals: then a request's next step waits for its last result."""

    def take(
        self,
        members: list[RequestState],
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        news: list[EngineCoreOutput],
    ) -> None:
        """Apply one step.

        Args:
            members: Per entry of `output`, the state it spoke of.
            output: The plan.
            result: What came out.
            news: Appended to: one per request that has any.
        """
        step_id = output.step_id
        sampled = result.sampled_token_ids
        if self._num_speculative:
            self.drafts_follow = result.drafts_follow
            self._counters.draft_seconds_total += result.draft_seconds
            self._counters.draft_saved_seconds += result.draft_saved_seconds
        assert result.step_id == step_id, f"result of step {result.step_id} for step {step_id}"
        assert len(sampled) == len(members), f"{len(sampled)} results for {len(members)} entries"
        if result.failed_rows or result.logprobs or result.prompt_logprobs or output.draft_token_ids:
            for index, state in enumerate(members):
                if state.request.status != RequestStatus.FINISHED and step_id >= state.valid_from_step:
                    self._take_entry(index, state, output, result, news)
            return
        ends = map(int.__add__, output.num_computed_tokens, output.num_scheduled_tokens)
        finished = RequestStatus.FINISHED
        for state, tokens, samples, end in zip(members, sampled, output.samples, ends, strict=True):
            # A request that stopped one step ago, or whose earlier step failed: this result is of no use.
            if state.request.status is finished or step_id < state.valid_from_step:
                continue
            if samples:
                self._take_tokens(state, tokens, end, step_id, 0, news)
            else:
                self._computed(state, end, step_id)
        if result.draft_token_ids or result.forced_token_ids:
            self._keep_drafts(members, output, result)

    def _take_entry(
        self,
        index: int,
        state: RequestState,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        news: list[EngineCoreOutput],
    ) -> None:
        """Apply one entry of a step in which something out of the ordinary happened."""
        row, start = output.rows[index], output.num_computed_tokens[index]
        request = state.request
        if row in result.failed_rows:
            self._finish(state, FinishReason.ERROR)
            news.append(failure_news(request.request_id, result.failed_rows[row]))
            return
        num_news = len(news)
        prompt_logprobs = None
        if row in result.prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(state, start, result.prompt_logprobs[row])
        end = start + output.num_scheduled_tokens[index]
        if output.samples[index]:
            num_drafts = len(output.draft_token_ids.get(row, ()))
            is_guess = row not in output.forced_rows
            self._take_tokens(state, result.sampled_token_ids[index], end, output.step_id, num_drafts, news, is_guess)
            if row in result.logprobs:
                news[-1].logprobs = result.logprobs[row][: len(news[-1].new_token_ids)]
        else:
            self._computed(state, end, output.step_id)
        if prompt_logprobs:
            if len(news) == num_news:
                news.append(EngineCoreOutput(request.request_id, [], num_cached_tokens=request.num_cached_tokens))
            news[-1].prompt_logprobs = prompt_logprobs
        self._keep_draft(row, state, result)

    def _take_tokens(
        self,
        state: RequestState,
        tokens: list[int],
        end: int,
        step_id: int,
        num_drafts: int,
        news: list[EngineCoreOutput],
        is_guess: bool = True,
    ) -> None:
        """Append what was sampled, take back what rejected drafts had advanced, and see whether it is over."""
        request = state.request
        num_sampled = len(tokens)
        assert 0 < num_sampled <= 1 + num_drafts, f"{request.request_id}: {num_sampled} tokens, {num_drafts} drafts"
        request.num_in_flight_tokens -= 1 + num_drafts
        counters = self._counters
        if num_drafts:
            num_rejected = num_drafts + 1 - num_sampled
            end -= num_rejected
            if request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= num_rejected
        if num_drafts and is_guess:
            counters.num_drafts_total += 1
            counters.num_draft_tokens_total += num_drafts
            counters.num_accepted_tokens_total += num_sampled - 1
            for position in range(num_sampled - 1):
                counters.num_accepted_tokens_per_pos_total[position] += 1
        if not request.output_token_ids:
            counters.num_prompt_tokens_total += len(request.prompt_token_ids)
            num_cached = min(request.num_cached_tokens, len(request.prompt_token_ids))
            counters.num_cached_prompt_tokens_total += num_cached
            counters.num_external_prompt_tokens_total += min(state.num_external_tokens, max(num_cached, 0))
        num_taken, reason, stop_token_id = append_tokens(state, tokens)
        counters.num_generation_tokens_total += num_taken
        if end >= state.cache_at:
            self._computed(state, end, step_id)
        if reason is None:
            news.append(EngineCoreOutput(request.request_id, tokens, None, None, None, None, request.num_cached_tokens))
            return
        self._finish(state, reason)
        news.append(
            EngineCoreOutput(
                request.request_id,
                tokens[:num_taken],
                finish_reason=reason,
                stop_token_id=stop_token_id,
                num_cached_tokens=request.num_cached_tokens,
            )
        )

    def _computed(self, state: RequestState, end: int, step_id: int) -> None:
        """The KV of the first `end` tokens is there now: let the allocator remember whole blocks of known tokens."""
        request = state.request
        # In a step from before a preemption, `end` speaks of blocks that the request no longer holds.
        if request.status != RequestStatus.RUNNING or step_id < state.admitted_step:
            return
        num_known = min(end, state.num_tokens)
        if num_known >= state.cache_at:
            state.cache_at = self._allocator.cache_blocks(request, num_known)

    def _new_prompt_logprobs(
        self, state: RequestState, start: int, logprobs: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """The part that the client does not have yet; a preempted request computes its prompt again."""
        num_sent = state.num_prompt_logprobs_sent
        state.num_prompt_logprobs_sent = max(num_sent, start + len(logprobs))
        return logprobs[max(0, num_sent - start) :]

    def _keep_drafts(self, members: list[RequestState], output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for row, state in zip(output.rows, members, strict=True):
            if output.step_id >= state.valid_from_step:
                self._keep_draft(row, state, result)

    def _keep_draft(self, row: int, state: RequestState, result: ModelRunnerOutput) -> None:
        """Keep a proposal for the next step. A guess follows the last known token, so none may be in flight; of tokens
        that are certain, those in flight are the first ones."""
        request = state.request
        if request.status != RequestStatus.RUNNING:
            return
        if row in result.forced_token_ids:
            request.draft_token_ids = result.forced_token_ids[row][request.num_in_flight_tokens :]
            request.draft_parents = []
            state.drafts_are_forced = True
        elif row in result.draft_token_ids and request.num_in_flight_tokens == 0:
            request.draft_token_ids = result.draft_token_ids[row][: self._num_speculative]
            request.draft_parents = result.draft_parents.get(row, [])
            state.drafts_are_forced = False
