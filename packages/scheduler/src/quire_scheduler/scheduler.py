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
    CachedPrefix,
    ConfigError,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
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
from quire_scheduler.drafts import DraftRule
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.intake import QueueBound, token_limit
from quire_scheduler.policies import FCFSPolicy, PriorityPolicy
from quire_scheduler.results import ResultTaker, failure_output
from quire_scheduler.rows import RowPool, new_row
from quire_scheduler.rules import FreeRowRule, MaxRunningPerTenantRule, RuleSet, latency_rules, tenant_rules
from quire_scheduler.running import NO_DECODES, RunningStates, ScheduledStep
from quire_scheduler.state import RequestState, order_of

__all__ = ["Scheduler"]


class Scheduler:
    """Implements `quire_interfaces.Scheduler`; the contracts of the methods are written there.

    Each step has a budget of tokens. Running requests take from it first, in the order of the policy: one token for a
    decode, more for the rest of a prompt, or where a rule offers more. Waiting requests share what remains. There are
    no phases: a request simply has tokens that are known (or on the device) and not computed yet.

    Args:
        config: Settings.
        allocator: The KV cache; this scheduler is its only user.
        policy: Order of requests; None takes the one that `config.policy` names.
        rules: Resources that requests need beside tokens and blocks, asked in this order after the free-row rule.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        *,
        policy: SchedulingPolicy | None = None,
        rules: Sequence[AdmissionRule] = (),
    ) -> None:
        self.config = config
        self._allocator = allocator
        self._policy = policy or (PriorityPolicy() if config.policy == "priority" else FCFSPolicy())
        self._rows = RowPool(config.max_num_seqs)
        drafts = DraftRule(config.num_speculative_tokens, config.num_lookahead_tokens)
        self._waiting = FairQueue()
        # What bounds prompts by time comes behind what else may cut them: it counts what remains.
        resources = [FreeRowRule(self._rows), *tenant_rules(config, self._waiting), *rules, *latency_rules(config)]
        self._rules = RuleSet([*resources, drafts])
        self._watchers: list[AdmissionRule] = []
        """The rules that have a say about running requests in the step that is being planned."""
        self._queue_bound = QueueBound(config.max_queued_requests)
        self._max_request_tokens = allocator.max_request_tokens(config.max_num_batched_tokens)
        self._pause_state = PauseState.RUNNING
        self._states: dict[str, RequestState] = {}
        self._in_flight: dict[int, ScheduledStep] = {}
        self._running = RunningStates(self._in_flight)
        self._num_arrivals = 0
        self._next_step_id = 0
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that did not come from a step; they go out with the next `update`."""
        self._out_of_blocks = False
        """The first waiting request found too few blocks, and nothing has changed since."""
        self._waits_for_blocks = False
        """In this step, a running request was left out because a rule is about to give blocks back."""
        self._counters = SchedulerStats()
        self._results = ResultTaker(allocator, self._running, drafts, self._counters, self._finish)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self._states:
            raise RequestError(
                f"request id {request.request_id!r} is in use by a request that is not finished; choose another",
                param="request_id",
                code="duplicate_request_id",
            )
        for rule in self._rules:
            rule.check(request)
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

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Hold to other bounds from the next step on: tokens of a step, requests that run, that wait, and of a tenant.
        What runs goes on.

        Raises:
            ConfigError: the runner has no rows for more requests, there was no bound for tenants at the start, or the
                bound on the time between tokens is another one.
        """
        if config.max_inter_token_latency != self.config.max_inter_token_latency:
            raise ConfigError(
                f"max_inter_token_latency is that of the start, {self.config.max_inter_token_latency}, got "
                f"{config.max_inter_token_latency}; start again to change it",
                field="max_inter_token_latency",
            )
        if config.max_num_seqs > self._rows.num_rows:
            raise ConfigError(
                f"max_num_seqs must be at most {self._rows.num_rows}, for which memory was taken at the start, got "
                f"{config.max_num_seqs}",
                field="max_num_seqs",
            )
        running_bounds = [rule for rule in self._rules if isinstance(rule, MaxRunningPerTenantRule)]
        if bool(config.max_running_per_tenant) != bool(running_bounds):
            raise ConfigError(
                "max_running_per_tenant can be changed where it was set at the start, and not to 0",
                field="max_running_per_tenant",
            )
        self.config = config
        self._rows.num_kept_free = self._rows.num_rows - config.max_num_seqs
        self._queue_bound.max_queued_requests = config.max_queued_requests
        for rule in running_bounds:
            rule.max_running = config.max_running_per_tenant
        self._out_of_blocks = False

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests now, wherever they are, without an output. Returns the ids that were alive."""
        alive = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                self._finish(state, reason)
                alive.append(request_id)
        return alive

    def schedule(self, only: frozenset[str] | None = None) -> SchedulerOutput | None:
        """Plan the next step and move its requests on; None when nothing is to be computed, freed or moved."""
        output = SchedulerOutput(
            step_id=self._next_step_id,
            rows=[],
            request_ids=[],
            num_computed_tokens=[],
            num_scheduled_tokens=[],
            samples=[],
        )
        is_idle = not self._in_flight
        step = self._in_flight[output.step_id] = ScheduledStep(output, [], NO_DECODES)
        if self._pause_state != PauseState.ALL_HELD:
            self._watchers = [rule for rule in self._rules.may_watch if rule.is_watching]
            num_preemptions = self._counters.num_preemptions_total
            self._waits_for_blocks = False
            self._schedule_running(step, only)
            # Whoever was preempted a moment ago would take the blocks that made room for the others.
            is_calm = num_preemptions == self._counters.num_preemptions_total and not self._waits_for_blocks
            if is_calm and self._waiting and self._budget(step) > 0:
                self._schedule_waiting(step, only)
        if self._rows.has_untold:
            output.freed_rows = self._rows.take_freed()
        is_needed = bool(step.members or output.freed_rows or self._outputs)
        for plan_step in self._rules.step_planned:
            is_needed |= plan_step(output, is_idle=is_idle and not step.members)
        if not is_needed:
            del self._in_flight[output.step_id]
            return None
        self._next_step_id += 1
        return output

    def _budget(self, step: ScheduledStep) -> int:
        """Number of tokens that may still be added to the step."""
        return self.config.max_num_batched_tokens - step.output.total_num_scheduled_tokens

    def _schedule_running(self, step: ScheduledStep, only: frozenset[str] | None) -> None:
        """Give running requests their tokens, in the order of the policy."""
        running = self._running
        may_batch = only is None and not self._watchers and self.config.max_num_batched_tokens >= len(running.states)
        if not (may_batch and self._schedule_decodes(step)):
            running.uncover()
        if running.num_covered == len(running.states):
            return
        # Preemption takes requests off this list behind the one at hand, never before it.
        for state in running.rest():
            budget = self._budget(step)
            if budget <= 0:
                return
            request = state.request
            num_tokens = state.num_tokens + request.num_in_flight_tokens
            # All output that is allowed is known or on its way; or a rule wants the last result first.
            if num_tokens >= state.limit or any(rule.defers(request) for rule in self._watchers):
                continue
            if only is not None and request.request_id not in only:
                continue
            num_left = num_tokens - request.num_computed_tokens
            num_new, num_offered = self._chunk(request, request.num_computed_tokens, num_left, budget), 0
            samples = num_new == num_left
            if num_left == 1:
                num_offered = self._place_offer(state, min(state.limit - num_tokens, budget) - 1, step.output)
            elif num_new == 0:
                continue
            num_new += num_offered
            if self._grow(state, num_new, samples, step.output):
                step.add(state, num_new, samples=samples)
                request.num_computed_tokens += num_new
                if samples:
                    request.num_in_flight_tokens += 1 + num_offered

    def _schedule_decodes(self, step: ScheduledStep) -> bool:
        """Give one token to each of the running requests that only decode, all at once. False, with nothing scheduled,
        where there are too few blocks for that."""
        running = self._running
        if running.num_covered < len(running.states):
            running.cover_decodes()
        decodes = running.decodes
        idle: list[int] = []
        for entry in decodes.due():
            state, position = decodes.states[entry], decodes.positions[entry]
            if position + 1 >= state.limit:
                idle.append(entry)
                continue
            state.request.num_computed_tokens = position
            if not self._allocate(state, 1, step.output):
                return False
            decodes.decode_until[entry] = state.decode_until
        if idle:
            running.leave_decodes(idle)
        running.plan_decodes(step)
        return True

    def _chunk(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """How many of `num_tokens` uncomputed tokens, from position `start` on, to compute now; 0 when they have to
        wait."""
        if not self.config.enable_chunked_prefill and num_tokens > budget:
            return 0
        most = min(num_tokens, budget)
        threshold = min(most, self.config.long_prefill_token_threshold or most)
        # What cannot be cut may be longer than the threshold.
        return self._rules.num_allowed(request, start, threshold) or (
            self._rules.num_allowed(request, start, most) if threshold < most else 0
        )

    def _place_offer(self, state: RequestState, max_tokens: int, output: SchedulerOutput) -> int:
        """Put into the step what a rule offers for the request beside its last known token, if there are blocks for it.
        Returns the number of these tokens."""
        request = state.request
        for rule in self._watchers:
            num_offered = rule.offer(request, max_tokens)
            if num_offered and self._allocate(state, 1 + num_offered, output):
                rule.placed(request, num_offered, output)
                return num_offered
        return 0

    def _grow(self, state: RequestState, num_new: int, samples: bool, output: SchedulerOutput) -> bool:
        """Get blocks for a running request, preempting from the end of the order; those for lookahead slots only if
        they are free. False: it lost its own row, or is left out of this step."""
        request = state.request
        num_ahead = sum(rule.num_lookahead_slots(request) for rule in self._watchers) if samples else 0
        if num_ahead and self._allocate(state, num_new + num_ahead, output):
            return True
        while not self._allocate(state, num_new, output):
            is_alone = len(self._running) == 1
            if self._blocks_return(is_alone=is_alone):
                self._waits_for_blocks = True
                return False
            if is_alone:
                self._fail(state, RequestFailure("the KV cache has too few blocks for this request alone"))
                return False
            victim = self._victim(state)
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _allocate(self, state: RequestState, num_new: int, output: SchedulerOutput) -> bool:
        """Get the blocks that a running request lacks for `num_new` further tokens, if there are so many."""
        request = state.request
        if request.num_computed_tokens + num_new <= state.num_slots:
            return True
        blocks = self._allocator.allocate(request, num_new)
        if blocks is None:
            return False
        row = request.row
        earlier = output.new_block_ids.get(row)
        output.new_block_ids[row] = (
            blocks if earlier is None else tuple([*old, *new] for old, new in zip(earlier, blocks, strict=True))
        )
        self._note_slots(state)
        return True

    def _note_slots(self, state: RequestState) -> None:
        state.num_slots = self._allocator.num_slots(state.request.request_id)
        state.decode_until = min(state.num_slots, state.limit - 1)

    def _victim(self, state: RequestState) -> RequestState:
        """Whom to preempt for a running request: the latest one of the tenant with the most rows. Never who stands
        before it in the order, and so has tokens in this step already; the first of all is never preempted, so that
        somebody always gets on."""
        states = self._running.states
        last = states[-1]
        if self._waiting.num_running(last.request.options.tenant) == len(states):
            return last
        behind = states[bisect_left(states, state.order, key=order_of) :]
        return max(behind, key=lambda each: (self._waiting.num_running(each.request.options.tenant), each.order))

    def _blocks_return(self, *, is_alone: bool) -> bool:
        """Whether to wait for blocks that a rule holds rather than preempt somebody, or fail who is alone."""
        return any(rule.returns_blocks_soon or (is_alone and rule.holds_blocks) for rule in self._rules)

    def _schedule_waiting(self, step: ScheduledStep, only: frozenset[str] | None) -> None:
        """Admit waiting requests, the tenants in turn, each one's in the order of the policy."""
        for begin_admission in self._rules.admission_begins:
            begin_admission()
        for state in self._waiting.turns():
            if self._is_held(state) or (only is not None and state.request.request_id not in only):
                continue
            rule = self._refusing_rule(state.request)
            if rule is None:
                goes_on = self._admit(state, step) and self._budget(step) > 0
            else:
                goes_on = not rule.holds_queue
            if not goes_on:
                return

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

    def _admit(self, state: RequestState, step: ScheduledStep) -> bool:
        """Move a request that no rule refuses into a row, if there are blocks for it. Returns whether those behind it
        may be looked at."""
        request = state.request
        # With nobody running, and no blocks to come back, nothing is to be waited for.
        may_wait = len(self._running) > 0 or any(rule.holds_blocks for rule in self._rules)
        if may_wait and self._allocator.usage().num_free_blocks < state.num_blocks_wanted:
            self._out_of_blocks = True
            return False
        try:
            cached = self._allocator.find_cached_prefix(request)
        except RequestError as error:  # token ids that cannot be hashed
            self._fail(state, RequestFailure.of(error))
            return False
        self._out_of_blocks = False
        for rule in self._rules:
            reservation = rule.reserve(request, cached)
            if not reservation.is_granted:
                if not reservation.num_blocks_wanted:
                    return not rule.holds_queue
                state.num_blocks_wanted = reservation.num_blocks_wanted
                if may_wait:
                    self._out_of_blocks = True
                    return False
        num_left = state.num_tokens - cached.num_tokens
        num_new = self._chunk(request, cached.num_tokens, num_left, self._budget(step))
        if num_new == 0:
            return False
        samples = num_new == num_left
        num_ahead = sum(rule.num_lookahead_slots(request) for rule in self._rules) if samples else 0
        blocks = self._allocator.allocate(request, num_new + num_ahead, cached) if num_ahead else None
        blocks = blocks or self._allocator.allocate(request, num_new, cached)
        if blocks is None:
            self._out_of_blocks = True
            if not may_wait:
                self._fail(state, RequestFailure("the KV cache has too few blocks for this request alone"))
            return False
        self._enter_row(state, cached)
        step.output.new_rows.append(new_row(request, blocks, cached))
        step.add(state, num_new, samples=samples)
        request.num_computed_tokens += num_new
        request.num_in_flight_tokens = 1 if samples else 0
        return True

    def _enter_row(self, state: RequestState, cached: CachedPrefix) -> None:
        request = state.request
        self._waiting.remove(state)
        if request.status == RequestStatus.WAITING:
            request.num_cached_tokens = cached.num_tokens
            if request.reads_prefix_cache:
                self._counters.prefix_cache_query_tokens_total += state.num_tokens
                self._counters.prefix_cache_hit_tokens_total += cached.num_tokens
        request.status = RequestStatus.RUNNING
        request.row = self._rows.take()
        request.num_computed_tokens = cached.num_tokens
        self._running.add(state)
        self._waiting.admitted(request)
        self._results.entered_row(request)
        self._note_slots(state)
        state.cache_at = state.check_from = 0
        state.admitted_step = self._next_step_id
        state.num_blocks_wanted = 0
        for rule in self._rules:
            rule.admitted(request)

    def _preempt(self, state: RequestState) -> None:
        """Take row and blocks from a running request; it waits at its place in the order to be computed anew."""
        block_ids = self._allocator.block_ids(state.request.request_id)
        num_held = sum(len(ids) - ids.count(NULL_BLOCK_ID) for ids in block_ids)
        state.num_blocks_wanted = num_held + 1
        state.request.num_preemptions += 1
        self._counters.num_preemptions_total += 1
        self._send_back(state)

    def _send_back(self, state: RequestState) -> None:
        self._leave_row(state)
        state.request.status = RequestStatus.PREEMPTED
        state.request.num_computed_tokens = 0
        self._waiting.add(state)

    def _leave_row(self, state: RequestState) -> None:
        request = state.request
        self._running.remove(state)
        self._waiting.left_row(request)
        self._allocator.free(request)
        self._results.left_row(request)
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
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        for rule in self._rules:
            rule.ended(request)
        request.num_in_flight_tokens = 0
        del self._states[request.request_id]
        self._queue_bound.ended()

    def _fail(self, state: RequestState, failure: RequestFailure) -> None:
        self._finish(state, FinishReason.ERROR)
        self._outputs.append(failure_output(state.request.request_id, failure))

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Apply what a step produced. Returns one output for each request with new tokens or an end."""
        step = self._in_flight.pop(output.step_id)
        for end_step in self._rules.step_ended:
            end_step(result)
        # Blocks may be free now, or another request first in the queue: one whose last token was still in flight.
        self._out_of_blocks = False
        outputs, self._outputs = self._outputs, []
        self._results.take(step, result, outputs)
        return outputs

    def discard_step(self, output: SchedulerOutput) -> None:
        """Undo a step that failed as a whole.

        All its requests are sent back to be computed anew, for nobody knows how far the runner came. Later steps that
        are in flight were built on this one: what they say about these requests is ignored.
        """
        for state in self._in_flight.pop(output.step_id).members:
            request = state.request
            if request.is_finished:
                continue
            state.valid_from_step = self._next_step_id
            if request.status == RequestStatus.RUNNING:
                self._send_back(state)
            request.num_in_flight_tokens = 0
        self._rows.tell_again(output.freed_rows)
        for rule in self._rules:
            rule.step_discarded(output)
        self._out_of_blocks = False

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._states)

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now."""
        if self._rows.has_untold or self._outputs:
            return True
        is_idle = not self._in_flight
        if any(rule.has_work(is_idle=is_idle) for rule in self._rules):
            return True
        if self._pause_state == PauseState.ALL_HELD:
            return False
        watchers = [rule for rule in self._rules.may_watch if rule.is_watching]
        if watchers:
            self._running.uncover()
        if self._running.has_decodes():
            return True
        for state in self._running.rest():
            request = state.request
            is_over = state.num_tokens + request.num_in_flight_tokens >= state.limit
            if not is_over and not any(rule.defers(request) for rule in watchers):
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

    def requests(self) -> list[Request]:
        """All that wait or run, in the order in which they came."""
        return [state.request for state in self._states.values()]

    def waiting_reason(self, request_id: str) -> str | None:
        """Why a request waits (see `waiting_reasons`); None for one that does not."""
        state = self._states.get(request_id)
        if state is None or state.request.status == RequestStatus.RUNNING:
            return None
        return self._waiting_reason(state)[0]

    def pause(self, state: PauseState) -> None:
        """Hold new requests, or all, or none. Under NEW_HELD preempted requests go on: they are not new."""
        self._pause_state = PauseState(state)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks, after preempting all running requests if asked. False while blocks are in use."""
        if preempt_running:
            for state in reversed(self._running.states.copy()):
                self._preempt(state)
        return self._allocator.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Gauges of this moment and counters since the start; a copy."""
        usage = self._allocator.usage()
        stats = dataclasses.replace(
            self._counters,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_deferred=sum(self._waiting_reason(state)[1] for state in self._waiting),
            num_preempted=sum(state.request.status == RequestStatus.PREEMPTED for state in self._waiting),
            kv_cache_usage=1 - usage.num_free_blocks / usage.num_total_blocks if usage.num_total_blocks else 0.0,
        )
        for rule in self._rules:
            rule.add_counters(stats)
        return stats

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
