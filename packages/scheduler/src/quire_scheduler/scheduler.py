"""The continuous batching scheduler: chooses what each step computes, and takes in what it produced.

Knows token counts, rows, blocks by the allocator's word, and the order of requests. Does not know text, tensors, time,
processes, or how many steps the engine keeps in flight. Follows iteration-level scheduling (Yu et al., "Orca", OSDI
2022, section 3.1) with chunked prefills that share a step with decodes (Agrawal et al., "Sarathi-Serve", OSDI 2024,
section 4) and preemption by recompute (Kwon et al., "PagedAttention", SOSP 2023, section 4.5).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from quire_interfaces import (
    NULL_BLOCK_ID,
    AdmissionRule,
    BlockAllocator,
    ConfigError,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    NewRow,
    PauseState,
    Request,
    RequestError,
    RequestFailure,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
)
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.intake import QueueBound, check_encoder_input, token_limit
from quire_scheduler.policies import FCFSPolicy, PriorityPolicy
from quire_scheduler.results import ResultTaker, failure_news
from quire_scheduler.rows import RowPool
from quire_scheduler.rules import FreeRowRule, MaxRunningPerTenantRule
from quire_scheduler.state import OrderedStates, RequestState
from quire_scheduler.transfers import KVTransfers, Lookup

__all__ = ["Scheduler"]


class Scheduler:
    """Implements `quire_interfaces.Scheduler`; the contracts of the methods are written there.

    Each step has a budget of tokens. Running requests take from it first, in the order of the policy: one token for a
    decode, more for drafts to verify or for the rest of a prompt. Waiting requests share what is left. There are no
    phases: a request simply has tokens that are known (or on the device) and not computed yet.

    Args:
        config: Settings.
        allocator: The KV cache; this scheduler is its only user.
        policy: Order of requests; None takes the one that `config.policy` names.
        rules: Further admission rules, asked in this order after the free-row rule.
        transfers: Moves blocks between the allocator and a tier; None for memory alone.
        max_encoder_tokens: Most tokens that the network's encoder reads for one request, all of them in the request's
            first step. In one step encoders read at most `config.max_num_batched_tokens` tokens, beside the tokens of
            the decoder. 0 for networks without an encoder.

    Raises:
        ConfigError: an encoder input may be longer than what encoders read in a step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        *,
        policy: SchedulingPolicy | None = None,
        rules: Sequence[AdmissionRule] = (),
        transfers: KVTransfers | None = None,
        max_encoder_tokens: int = 0,
    ) -> None:
        if max_encoder_tokens > config.max_num_batched_tokens:
            raise ConfigError(
                f"the encoder reads up to {max_encoder_tokens} tokens of a request in one step, so "
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least that",
                field="max_num_batched_tokens",
            )
        self.config = config
        self._max_encoder_tokens = max_encoder_tokens
        self._encoder_budget = 0
        """What encoders may still read in the step that is being planned."""
        self._allocator = allocator
        self._policy = policy or (PriorityPolicy() if config.policy == "priority" else FCFSPolicy())
        self._rows = RowPool(config.max_num_seqs)
        self._transfers = transfers
        self._rules: tuple[AdmissionRule, ...] = (FreeRowRule(self._rows), *rules)
        if config.max_running_per_tenant:
            self._rules += (MaxRunningPerTenantRule(config.max_running_per_tenant),)
        if transfers is not None:
            self._rules += (transfers,)
        self._queue_bound = QueueBound(config.max_queued_requests)
        self._max_request_tokens = allocator.max_request_tokens(config.max_num_batched_tokens)
        self._pause_state = PauseState.RUNNING
        self._states: dict[str, RequestState] = {}
        self._running = OrderedStates()
        self._waiting = FairQueue()
        self._num_arrivals = 0
        self._next_step_id = 0
        self._in_flight: dict[int, list[RequestState]] = {}
        self._news: list[EngineCoreOutput] = []
        """News that did not come from a step; they go out with the next `update`."""
        self._out_of_blocks = False
        """The first waiting request found too few blocks, and nothing has changed since."""
        self._waits_for_blocks = False
        """In this step, a running request was left out because a load is about to give blocks back."""
        self._counters = SchedulerStats(num_accepted_tokens_per_pos_total=[0] * config.num_speculative_tokens)
        self._results = ResultTaker(allocator, self._counters, config.num_speculative_tokens, self._finish)

    def add_request(self, request: Request) -> None:
        """Queue a request. See `quire_interfaces.Scheduler.add_request`."""
        if request.request_id in self._states:
            raise RequestError(
                f"request id {request.request_id!r} is in use by a request that is not finished; choose another",
                param="request_id",
                code="duplicate_request_id",
            )
        check_encoder_input(request, self._max_encoder_tokens)
        limit = token_limit(
            request,
            max_model_len=self.config.max_model_len,
            max_request_tokens=self._max_request_tokens,
        )
        self._queue_bound.check(request, len(self._waiting), self._waiting.num_waiting(request.options.tenant))
        order = (self._policy.sort_key(request), self._num_arrivals)
        self._num_arrivals += 1
        state = RequestState(request=request, order=order, limit=limit, num_tokens=request.num_tokens)
        self._states[request.request_id] = state
        self._waiting.add(state)
        self._out_of_blocks = False

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests now. See `quire_interfaces.Scheduler.abort_requests`."""
        alive = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                self._finish(state, reason)
                alive.append(request_id)
        return alive

    def schedule(self, only: frozenset[str] | None = None) -> SchedulerOutput | None:
        """Plan the next step. See `quire_interfaces.Scheduler.schedule`."""
        step_id = self._next_step_id
        output = SchedulerOutput(
            step_id=step_id, rows=[], request_ids=[], num_computed_tokens=[], num_scheduled_tokens=[], samples=[]
        )
        members: list[RequestState] = []
        if self._pause_state != PauseState.ALL_HELD:
            num_preemptions = self._counters.num_preemptions_total
            self._waits_for_blocks = False
            self._encoder_budget = self.config.max_num_batched_tokens
            budget = self._schedule_running(output, members, only)
            # Whoever was preempted a moment ago would take the blocks that made room for the others.
            is_calm = num_preemptions == self._counters.num_preemptions_total and not self._waits_for_blocks
            if is_calm and budget > 0:
                budget = self._schedule_waiting(output, members, budget, only)
            output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget
        output.freed_rows = self._rows.take_freed()
        if self._transfers is not None:
            is_idle = not members and not self._in_flight
            num_tokens = output.total_num_scheduled_tokens
            output.kv_transfer = self._transfers.take_plan(num_tokens=num_tokens, is_idle=is_idle)
        if not members and not output.freed_rows and not self._news and output.kv_transfer is None:
            return None
        self._in_flight[step_id] = members
        self._next_step_id = step_id + 1
        return output

    def _schedule_running(
        self, output: SchedulerOutput, members: list[RequestState], only: frozenset[str] | None
    ) -> int:
        """Give running requests their tokens, in the order of the policy. Returns the budget that is left."""
        budget = self.config.max_num_batched_tokens
        waits_for_drafts = self._results.drafts_follow
        # Preemption takes requests off the end of this list, never before the one at hand.
        for state in self._running.states:
            if budget <= 0:
                break
            request = state.request
            in_flight = request.num_in_flight_tokens
            # All output that is allowed is on its way; or only its result brings drafts (and its true length).
            if state.num_tokens + in_flight >= state.limit or (in_flight and waits_for_drafts):
                continue
            if only is not None and request.request_id not in only:
                continue
            start = request.num_computed_tokens
            num_new = state.num_tokens + in_flight - start
            samples = True
            num_drafts = 0
            if num_new > 1:
                num_left = num_new
                num_new = self._chunk(num_left, budget)
                samples = num_new == num_left
                if num_new == 0:
                    continue
            elif request.draft_token_ids:
                num_drafts = self._take_drafts(state, budget, output)
                num_new += num_drafts
            num_ahead = self.config.num_lookahead_tokens if samples and waits_for_drafts else 0
            if start + num_new + num_ahead > state.num_slots and not self._grow(state, num_new, num_ahead, output):
                continue
            request.num_computed_tokens = start + num_new
            if samples:
                request.num_in_flight_tokens = in_flight + 1 + num_drafts
            members.append(state)
            output.rows.append(request.row)
            output.request_ids.append(request.request_id)
            output.num_computed_tokens.append(start)
            output.num_scheduled_tokens.append(num_new)
            output.samples.append(samples)
            budget -= num_new
        return budget

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """How many of `num_tokens` uncomputed tokens to compute now; 0 when they have to wait."""
        if not self.config.enable_chunked_prefill:
            return num_tokens if num_tokens <= budget else 0
        threshold = self.config.long_prefill_token_threshold
        return min(num_tokens, budget, threshold) if threshold else min(num_tokens, budget)

    def _take_drafts(self, state: RequestState, budget: int, output: SchedulerOutput) -> int:
        """Put the request's drafts into the step, as many as are of use. Nobody is preempted for a guess."""
        request = state.request
        # Of r tokens that may still come, at most r - 1 can be drafts: the last is the bonus token.
        num_open = state.limit - state.num_tokens - request.num_in_flight_tokens
        num_drafts = min(len(request.draft_token_ids), num_open - 1, budget - 1)
        drafts = request.draft_token_ids[:num_drafts] if num_drafts > 0 else []
        request.draft_token_ids = []
        if not drafts:
            return 0
        if request.num_computed_tokens + 1 + len(drafts) > state.num_slots:
            blocks = self._allocator.allocate(request, 1 + len(drafts))
            if blocks is None:
                return 0
            self._add_blocks(state, blocks, output)
        output.draft_token_ids[request.row] = drafts
        if request.draft_parents:
            output.draft_parents[request.row] = request.draft_parents[: len(drafts)]
        if state.drafts_are_forced:
            output.forced_rows.add(request.row)
        return len(drafts)

    def _grow(self, state: RequestState, num_new: int, num_ahead: int, output: SchedulerOutput) -> bool:
        """Get blocks for a running request, preempting from the end of the order; those for the tokens ahead only if
        they are free. False: it lost its own row, or is left out of this step."""
        if num_ahead:
            blocks = self._allocator.allocate(state.request, num_new + num_ahead)
            if blocks is not None:
                self._add_blocks(state, blocks, output)
                return True
            if state.request.num_computed_tokens + num_new <= state.num_slots:
                return True
        while True:
            blocks = self._allocator.allocate(state.request, num_new)
            if blocks is not None:
                self._add_blocks(state, blocks, output)
                return True
            if self._load_returns_blocks(is_alone=len(self._running) == 1):
                self._waits_for_blocks = True
                return False
            victim = self._victim(state)
            if len(self._running) == 1:
                self._fail(state, RequestFailure("the KV cache has too few blocks for this request alone"))
                return False
            self._preempt(victim)
            if victim is state:
                return False

    def _victim(self, state: RequestState) -> RequestState:
        """Whom to preempt for a running request: the latest one of the tenant with the most rows. Never who stands
        before it in the order, and so has tokens in this step already; the first of all is never preempted, so that
        somebody always gets on."""
        states = self._running.states
        last = states[-1]
        if self._waiting.num_running(last.request.options.tenant) == len(states):
            return last
        behind = states[bisect_left(states, state.order, key=lambda each: each.order) :]
        return max(behind, key=lambda each: (self._waiting.num_running(each.request.options.tenant), each.order))

    def _load_returns_blocks(self, *, is_alone: bool) -> bool:
        """Whether to wait for the blocks of a load rather than preempt somebody, or fail who is alone."""
        if self._transfers is None:
            return False
        return self._transfers.returns_blocks_soon or (is_alone and self._transfers.holds_blocks)

    def _add_blocks(self, state: RequestState, blocks: tuple[list[int], ...], output: SchedulerOutput) -> None:
        row = state.request.row
        earlier = output.new_block_ids.get(row)  # those for its drafts
        output.new_block_ids[row] = (
            blocks if earlier is None else tuple([*old, *new] for old, new in zip(earlier, blocks, strict=True))
        )
        state.num_slots = self._allocator.num_slots(state.request.request_id)

    def _schedule_waiting(
        self, output: SchedulerOutput, members: list[RequestState], budget: int, only: frozenset[str] | None
    ) -> int:
        """Admit waiting requests, the tenants in turn, each one's in the order of the policy. Returns the budget that
        is left."""
        for state in self._waiting.turns():
            if self._is_held(state) or (only is not None and state.request.request_id not in only):
                continue
            rule = self._refusing_rule(state.request)
            if rule is not None:
                if rule.holds_queue:
                    break
                continue
            num_new = self._admit(state, budget, output)
            if num_new == 0:
                if self._transfers is not None and not self._transfers.admits(state.request):
                    continue
                break
            members.append(state)
            budget -= num_new
            if budget <= 0:
                break
        return budget

    def _is_held(self, state: RequestState) -> bool:
        """Whether a waiting request may not run now for a reason of its own that the scheduler itself knows."""
        # A preempted request whose sampled token is on the device has no known tokens to be recomputed from yet.
        if state.request.num_in_flight_tokens:
            return True
        if self._pause_state == PauseState.RUNNING:
            return False
        return self._pause_state == PauseState.ALL_HELD or state.request.status == RequestStatus.WAITING

    def _refusing_rule(self, request: Request) -> AdmissionRule | None:
        for rule in self._rules:
            if not rule.admits(request):
                return rule
        return None

    def _admit(self, state: RequestState, budget: int, output: SchedulerOutput) -> int:
        """Move the first admissible request into a row. Returns its tokens in this step, 0 when it must wait."""
        request = state.request
        # With nobody running (or loading), nothing is left to wait for.
        may_wait = len(self._running) > 0 or (self._transfers is not None and self._transfers.holds_blocks)
        if may_wait and self._allocator.usage().num_free_blocks < state.num_blocks_wanted:
            self._out_of_blocks = True
            return 0
        try:
            cached = self._allocator.find_cached_prefix(request)
        except RequestError as error:  # token ids that cannot be hashed
            self._fail(state, RequestFailure.of(error))
            return 0
        if self._transfers is not None:
            lookup = self._transfers.look_up(state, cached)
            self._out_of_blocks = lookup is Lookup.NO_ROOM and may_wait
            if lookup is Lookup.LOADING or self._out_of_blocks:
                return 0
        num_encoder = 0 if cached.has_encoder else len(request.encoder_token_ids)
        if num_encoder > self._encoder_budget:
            return 0
        num_left = state.num_tokens - cached.num_tokens
        num_new = self._chunk(num_left, budget)
        if num_new == 0:
            return 0
        samples = num_new == num_left
        num_ahead = self.config.num_lookahead_tokens if samples else 0
        blocks = self._allocator.allocate(request, num_new + num_ahead, cached) if num_ahead else None
        blocks = blocks or self._allocator.allocate(request, num_new, cached)
        if blocks is None:
            self._out_of_blocks = True
            if not may_wait:
                self._fail(state, RequestFailure("the KV cache has too few blocks for this request alone"))
            return 0
        self._encoder_budget -= num_encoder
        self._enter_row(state, cached.num_tokens)
        output.new_rows.append(self._new_row(state, blocks, has_encoder=cached.has_encoder))
        output.rows.append(request.row)
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(cached.num_tokens)
        output.num_scheduled_tokens.append(num_new)
        output.samples.append(samples)
        request.num_computed_tokens += num_new
        request.num_in_flight_tokens = 1 if samples else 0
        return num_new

    def _enter_row(self, state: RequestState, num_cached: int) -> None:
        request = state.request
        self._waiting.remove(state)
        self._running.add(state)
        if request.status == RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
            if request.reads_prefix_cache:
                self._count_lookup(state, num_cached)
        request.status = RequestStatus.RUNNING
        request.row = self._rows.take()
        self._waiting.admitted(request)
        request.num_computed_tokens = num_cached
        state.num_slots = self._allocator.num_slots(request.request_id)
        state.cache_at = 0
        state.admitted_step = self._next_step_id
        state.num_blocks_wanted = 0
        for rule in self._rules:
            rule.admitted(request)

    def _count_lookup(self, state: RequestState, num_cached: int) -> None:
        counters = self._counters
        counters.prefix_cache_query_tokens_total += state.num_tokens
        counters.prefix_cache_hit_tokens_total += num_cached
        if state.num_memory_tokens >= 0:
            num_brought = min(num_cached, state.num_loadable_tokens) - state.num_memory_tokens
            state.num_external_tokens = max(0, num_brought)
            counters.prefix_cache_hit_tokens_total -= state.num_external_tokens
            counters.external_prefix_cache_query_tokens_total += state.num_tokens - state.num_memory_tokens
            counters.external_prefix_cache_hit_tokens_total += state.num_external_tokens

    def _new_row(self, state: RequestState, blocks: tuple[list[int], ...], *, has_encoder: bool) -> NewRow:
        request = state.request
        return NewRow(
            row=request.row,
            request_id=request.request_id,
            token_ids=request.token_ids(0, state.num_tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=blocks,
            sampling_params=request.sampling_params,
            seed=request.seed,
            num_encoder_tokens=len(request.encoder_token_ids),
            encoder_token_ids=[] if has_encoder else request.encoder_token_ids,
            stop_token_ids=request.stop_token_ids,
            adapter_slot=request.adapter_slot,
            adapter_version=request.adapter_version,
            cache_salt=request.options.cache_salt,
        )

    def _preempt(self, state: RequestState) -> None:
        """Take row and blocks from a running request; it waits at its place in the order to be computed anew."""
        block_ids = self._allocator.block_ids(state.request.request_id)
        held = sum(len(ids) - ids.count(NULL_BLOCK_ID) for ids in block_ids)
        state.num_blocks_wanted = held + 1
        state.request.num_preemptions += 1
        self._counters.num_preemptions_total += 1
        self._send_back(state)

    def _send_back(self, state: RequestState) -> None:
        self._leave_row(state)
        state.tier_asked = False
        state.request.status = RequestStatus.PREEMPTED
        state.request.num_computed_tokens = 0
        state.request.draft_token_ids = []
        self._waiting.add(state)

    def _leave_row(self, state: RequestState) -> None:
        request = state.request
        self._running.remove(state)
        self._waiting.left_row(request)
        self._allocator.free(request)
        self._rows.give_back(request.row)
        request.row = -1
        state.num_slots = 0
        self._out_of_blocks = False
        for rule in self._rules:
            rule.released(request)

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        """End a request wherever it is; its row and blocks are free at once."""
        request = state.request
        if request.status == RequestStatus.RUNNING:
            self._leave_row(state)
        else:
            self._waiting.remove(state)
            self._out_of_blocks = False
            if self._transfers is not None:
                self._transfers.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_in_flight_tokens = 0
        request.draft_token_ids = []
        del self._states[request.request_id]
        self._queue_bound.ended()

    def _fail(self, state: RequestState, failure: RequestFailure) -> None:
        self._finish(state, FinishReason.ERROR)
        self._news.append(failure_news(state.request.request_id, failure))

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step produced. See `quire_interfaces.Scheduler.update`."""
        members = self._in_flight.pop(output.step_id)
        if result.kv_transfer is not None and self._transfers is not None:
            self._transfers.take_output(result.kv_transfer)
        # Blocks may be free now, or another request first in the queue: one whose last token was still in flight.
        self._out_of_blocks = False
        news, self._news = self._news, []
        self._results.take(members, output, result, news)
        return news

    def discard_step(self, output: SchedulerOutput) -> None:
        """Undo a step that failed as a whole. See `quire_interfaces.Scheduler.discard_step`.

        All its requests are sent back to be computed anew, for nobody knows how far the runner came. Later steps that
        are in flight were built on this one: what they say about these requests is ignored.
        """
        for state in self._in_flight.pop(output.step_id):
            request = state.request
            if request.is_finished:
                continue
            state.valid_from_step = self._next_step_id
            request.num_in_flight_tokens = 0
            if request.status == RequestStatus.RUNNING:
                self._send_back(state)
        self._rows.tell_again(output.freed_rows)
        self._out_of_blocks = False

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._states)

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now. See `quire_interfaces.Scheduler.has_work`."""
        if self._rows.has_untold or self._news:
            return True
        if self._transfers is not None and self._transfers.has_plan(is_idle=not self._in_flight):
            return True
        if self._pause_state == PauseState.ALL_HELD:
            return False
        waits_for_drafts = self._results.drafts_follow
        for state in self._running:
            in_flight = state.request.num_in_flight_tokens
            if state.num_tokens + in_flight < state.limit and not (in_flight and waits_for_drafts):
                return True
        if self._out_of_blocks:
            return False
        for state in self._waiting.turns():
            if self._is_held(state):
                continue
            rule = self._refusing_rule(state.request)
            if rule is None or rule.holds_queue:
                return rule is None
        return False

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self._running), len(self._waiting)

    def pause(self, state: PauseState) -> None:
        """Hold new requests, or all, or none. Under NEW_HELD preempted requests go on: they are not new."""
        self._pause_state = PauseState(state)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget cached blocks. See `quire_interfaces.Scheduler.reset_prefix_cache`."""
        if preempt_running:
            for state in reversed(self._running.states.copy()):
                self._preempt(state)
        return self._allocator.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Gauges of this moment and counters since the start; a copy."""
        usage = self._allocator.usage()
        return dataclasses.replace(
            self._counters,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_deferred=sum(self._waiting_reason(state)[1] for state in self._waiting),
            num_preempted=sum(state.request.status == RequestStatus.PREEMPTED for state in self._waiting),
            num_accepted_tokens_per_pos_total=list(self._counters.num_accepted_tokens_per_pos_total),
            kv_cache_usage=1 - usage.num_free_blocks / usage.num_total_blocks if usage.num_total_blocks else 0.0,
        )

    def waiting_reasons(self) -> dict[str, int]:
        """Why requests wait, with how many each.

        Reasons: "paused", "tokens_in_flight" (preempted, its last token is still on the device), the name of the
        admission rule that refuses it, or "capacity" (KV blocks, the token budget, or its place in the order).
        """
        reasons: dict[str, int] = {}
        for state in self._waiting:
            reason, _ = self._waiting_reason(state)
            reasons[reason] = reasons.get(reason, 0) + 1
        return reasons

    def _waiting_reason(self, state: RequestState) -> tuple[str, bool]:
        """(why a waiting request does not run, whether for something of its own rather than for want of room)."""
        if self._is_held(state):
            return "tokens_in_flight" if state.request.num_in_flight_tokens else "paused", True
        rule = self._refusing_rule(state.request)
        if rule is None:
            return "capacity", False
        return rule.name, not rule.holds_queue
