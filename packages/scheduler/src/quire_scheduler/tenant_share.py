"""Shares of tenants: how much of each step a tenant may take while another one is there.

All requests of a step wait for each other, so what a flood adds to a step delays everybody in it. How much that is,
only a clock tells: where the weights have to be read anyway, a further row costs next to nothing, and where a step is
bound by computing, as much as the first. So the time of a step is fitted to what it computes, and a tenant may add as
much as makes the others' steps so many times as long as their own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire_interfaces import (
    AdmissionRule,
    CachedPrefix,
    ConfigError,
    ModelRunnerOutput,
    Request,
    Reservation,
    SchedulerOutput,
)
from quire_scheduler.config import MAX_SLOWDOWN, SchedulerConfig
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.rules import MaxRunningPerTenantRule

__all__ = ["StepCost", "StepCostModel", "TenantShareRule", "tenant_rules"]

_DECAY = 0.998
"""Weight of a step against the next one: what counts are the last 500."""
_ORIGIN_WEIGHT = 0.01
"""Weight of the origin (nothing computed, no time taken) against all steps: while all steps are alike, their time is
taken for that of their rows."""
_STEPS_PER_FIT = 16
_PRESENCE_S = 0.25
"""A tenant whose last request ended counts as present for so long: most clients send the next one soon."""
_PROMPT_CHUNK = 32
"""A tenant whose prompts are bounded saves up so many tokens before it computes some: a few in every step would cost
more for each."""
_BURST = 2.0 * _PROMPT_CHUNK
"""A tenant saves up no more prompt tokens than these, or than one step adds."""
_UNBOUNDED = 1 << 30


def tenant_rules(config: SchedulerConfig, queue: FairQueue) -> list[AdmissionRule]:
    """What bounds tenants, as far as it is set."""
    rules: list[AdmissionRule] = []
    if config.max_running_per_tenant:
        rules.append(MaxRunningPerTenantRule(config.max_running_per_tenant))
    if config.max_tenant_slowdown:
        cuts_prompts = config.enable_chunked_prefill
        rules.append(TenantShareRule(config.max_tenant_slowdown, queue, cuts_prompts=cuts_prompts))
    return rules


class StepCost(NamedTuple):
    """Seconds of a step: of the step itself, of each row in it, and of each further token.

    A row's first token is counted with the row, of a prompt too; all others as prompt tokens, drafts included, which
    are computed like them.
    """

    fixed: float
    per_row: float
    per_prompt_token: float


class StepCostModel:
    """Fits `StepCost` to the steps that were measured, by least squares in which older steps weigh less."""

    def __init__(self) -> None:
        self._moments = [[0.0] * 3 for _ in range(3)]
        """Weighted sums of products of (1, rows, prompt tokens), shape [3, 3]."""
        self._time_moments = [0.0] * 3
        self._num_unfitted = 0
        self.cost: StepCost | None = None
        """None before the first fit."""

    def add(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take in a step. What was held up by something else counts as at most twice as long as the fit says; a fit
        that says nothing of such steps is no measure of them."""
        inputs = (1.0, float(num_rows), float(num_prompt_tokens))
        if self.cost is not None:
            predicted_s = sum(each * count for each, count in zip(self.cost, inputs, strict=True))
            seconds = min(seconds, 2 * predicted_s) if predicted_s > 0 else seconds
        for i, first in enumerate(inputs):
            self._time_moments[i] = self._time_moments[i] * _DECAY + first * seconds
            row = self._moments[i]
            for j, second in enumerate(inputs):
                row[j] = row[j] * _DECAY + first * second
        self._num_unfitted += 1
        if self._num_unfitted >= _STEPS_PER_FIT:
            self._num_unfitted = 0
            self.cost = self._fit()

    def _fit(self) -> StepCost:
        """Solve the normal equations; a coefficient below 0 is taken for 0, and the others are fitted without it."""
        used = [0, 1, 2] if self._moments[2][2] > 0 else [0, 1]
        while True:
            solved = dict(zip(used, self._solve(used), strict=True))
            negative = [index for index in used if solved[index] < 0]
            if not negative:
                return StepCost(*(solved.get(index, 0.0) for index in range(3)))
            used.remove(min(negative, key=lambda index: solved[index] * self._moments[index][index] ** 0.5))

    def _solve(self, used: list[int]) -> list[float]:
        """Gaussian elimination; the matrix is positive definite by what is added to its diagonal."""
        rows = []
        for i in used:
            row = [self._moments[i][j] for j in used]
            origin = _ORIGIN_WEIGHT if i == 0 else 1e-9
            row[used.index(i)] *= 1 + origin
            rows.append([*row, self._time_moments[i]])
        for pivot, pivot_row in enumerate(rows):
            for other in rows[pivot + 1 :]:
                factor = other[pivot] / pivot_row[pivot]
                for column in range(pivot, len(pivot_row)):
                    other[column] -= factor * pivot_row[column]
        solution = [0.0] * len(rows)
        for pivot in reversed(range(len(rows))):
            known = sum(rows[pivot][column] * solution[column] for column in range(pivot + 1, len(rows)))
            solution[pivot] = (rows[pivot][-1] - known) / rows[pivot][pivot]
        return solution


class _Tenant:
    """The requests of a tenant that run, in the order of their admission, and how many rows it wants."""

    __slots__ = ("peak_s", "running", "wanted")

    def __init__(self) -> None:
        self.running: dict[str, None] = {}
        self.wanted = 0
        """Most requests of late that waited or ran."""
        self.peak_s = 0.0
        """When it had so many."""

    def note(self, wanted: int, now_s: float) -> None:
        """Take in how many there are now; fewer than before count once that has lasted."""
        if wanted >= self.wanted or now_s - self.peak_s > _PRESENCE_S:
            self.wanted, self.peak_s = wanted, now_s


class TenantShareRule(AdmissionRule):
    """While several tenants have requests, each may add so many rows and prompt tokens to a step that it does not make
    the step of another more than `max_slowdown` times as long as that would be alone; as many rows as the other one are
    always allowed. Rows beyond that, of a tenant that was alone before, sit steps out. A tenant alone has all.

    Prompt tokens come from a token bucket for each tenant with a bound, which every step refills. While nobody with
    fewer requests runs, it holds a chunk in every step, so that there is always somebody who gets on.

    Args:
        max_slowdown: Above 1, at most `MAX_SLOWDOWN`.
        queue: Who waits and runs.
        cuts_prompts: Whether a prompt may be computed in parts.
        clock: Seconds.

    Raises:
        ConfigError: `max_slowdown` is out of range.
    """

    name = "tenant_share"
    holds_queue = False

    def __init__(
        self,
        max_slowdown: float,
        queue: FairQueue,
        *,
        cuts_prompts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 < max_slowdown <= MAX_SLOWDOWN:
            raise ConfigError(
                f"max_slowdown must be above 1 and at most {MAX_SLOWDOWN}, got {max_slowdown!r}", field="max_slowdown"
            )
        self.costs = StepCostModel()
        self._max_slowdown, self._queue, self._cuts_prompts, self._clock = max_slowdown, queue, cuts_prompts, clock
        self._tenants: dict[str | None, _Tenant] = {}
        self._shares: dict[str | None, int] = {}
        """Tenant -> rows that it may hold, of those that have a bound now."""
        self._refill_rates: dict[str | None, float] = {}
        """Tenant -> prompt tokens that it may add to a step on average, of those that have a bound now."""
        self._tokens: dict[str | None, float] = {}
        """Of these, tenant -> prompt tokens in its bucket."""
        self._grants: dict[str, tuple[str | None, int]] = {}
        """Request -> its tenant, and the prompt tokens that it may compute in the step that is being planned."""
        self._num_granted: Counter[str | None] = Counter()
        """The sums of these by tenant."""
        self._num_left: dict[str, int] = {}
        """Waiting request that was refused -> tokens that it has to compute, by what was cached then."""
        self._deferred: frozenset[str] = frozenset()
        """Requests that sit the next step out."""
        self._is_stale = False
        """Some request has left its row since the bounds were renewed."""
        self._planned: dict[int, tuple[float, int, int]] = {}
        """Step -> when it was planned, its rows and its prompt tokens."""
        self._last_ended_s = 0.0

    def admits(self, request: Request) -> bool:
        """Whether the tenant holds fewer rows than its share, and may compute prompt tokens; as long as nobody knows
        how many the request needs, it may be looked at."""
        tenant = request.options.tenant
        share = self._shares.get(tenant)
        if share is not None and self._queue.num_running(tenant) >= share:
            return False
        return self._has_tokens(request, self._num_left.get(request.request_id, 1))

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        """Whether the tenant may compute what is not cached."""
        num_left = request.num_tokens - cached.num_tokens
        if self._has_tokens(request, num_left):
            return Reservation(True)
        self._num_left[request.request_id] = num_left
        return Reservation(False)

    def admitted(self, request: Request) -> None:
        """Note the row."""
        self._num_left.pop(request.request_id, None)
        self._tenants.setdefault(request.options.tenant, _Tenant()).running[request.request_id] = None

    def released(self, request: Request) -> None:
        """Forget the row."""
        self._tenants[request.options.tenant].running.pop(request.request_id)
        self._is_stale = True

    def ended(self, request: Request) -> None:
        """Forget what it needs."""
        self._num_left.pop(request.request_id, None)

    def admission_begins(self) -> None:
        """Bound who has come since the last step."""
        self._renew()

    def allowed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """As many prompt tokens as the tenant may still add to the step; what cannot be cut is not bounded, and neither
        is a single token, which costs what its row costs."""
        tenant, num_granted = self._grants.pop(request.request_id, (None, 0))
        self._num_granted[tenant] -= num_granted
        if num_tokens == 1 or not self._bounds_prompt(request):
            return num_tokens
        if not self._has_tokens(request, num_tokens):
            return 0
        tenant = request.options.tenant
        num_allowed = min(num_tokens, int(self._num_tokens(tenant)))
        self._grants[request.request_id] = tenant, num_allowed
        self._num_granted[tenant] += num_allowed
        return num_allowed

    @property
    def is_watching(self) -> bool:
        """Whether any request has to sit out, of those that are there now."""
        if self._is_stale:
            self._renew()
        return bool(self._deferred)

    def defers(self, request: Request) -> bool:
        """Whether the request is beyond its tenant's share."""
        return request.request_id in self._deferred

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """Note when the step began, and what it computes; take that from the buckets, and refill them."""
        num_rows, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        self._planned[output.step_id] = self._clock(), num_rows, num_tokens - num_rows
        self._pay(output)
        self._renew()
        for tenant, rate in self._refill_rates.items():
            self._tokens[tenant] = min(self._num_tokens(tenant) + rate, max(rate, _BURST))
        return False

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Note how long the step took: since it was planned, or since the one before it ended."""
        planned_s, num_rows, num_prompt_tokens = self._planned.pop(result.step_id)
        now_s = self._clock()
        if num_rows:
            self.costs.add(num_rows, num_prompt_tokens, now_s - max(planned_s, self._last_ended_s))
        self._last_ended_s = now_s

    def step_discarded(self, output: SchedulerOutput) -> None:
        """A step that failed says nothing of time."""
        self._planned.pop(output.step_id, None)

    def _bounds_prompt(self, request: Request) -> bool:
        return request.options.tenant in self._refill_rates and self._cuts_prompts and request.media is None

    def _has_tokens(self, request: Request, num_left: int) -> bool:
        """Whether the request may compute some of so many tokens now."""
        if num_left == 1 or not self._bounds_prompt(request):
            return True
        return self._num_tokens(request.options.tenant) >= min(num_left, _PROMPT_CHUNK)

    def _num_tokens(self, tenant: str | None) -> float:
        """Prompt tokens that a tenant with a bound may still add to the step; who has just come begins with a chunk."""
        return self._tokens.get(tenant, _PROMPT_CHUNK) - self._num_granted[tenant]

    def _pay(self, output: SchedulerOutput) -> None:
        """Take from the buckets what the step computes; a request may have found no blocks after it was allowed to."""
        grants, self._grants = self._grants, {}
        self._num_granted.clear()
        if not grants:
            return
        for request_id, num_tokens in zip(output.request_ids, output.num_scheduled_tokens, strict=True):
            if request_id in grants:
                tenant, num_granted = grants[request_id]
                self._tokens[tenant] = self._num_tokens(tenant) - min(num_tokens, num_granted)

    def _renew(self) -> None:
        """Bound the next step by who is there now."""
        self._is_stale = False
        now_s, num_wanted = self._clock(), self._queue.num_requests()
        for tenant, num_requests in num_wanted.items():
            self._tenants.setdefault(tenant, _Tenant()).note(num_requests, now_s)
        for tenant in [each for each in self._tenants if each not in num_wanted]:
            self._tenants[tenant].note(0, now_s)
            if not self._tenants[tenant].wanted:
                del self._tenants[tenant]
        self._shares, self._refill_rates, deferred = {}, {}, list[str]()
        if len(self._tenants) > 1:
            # Who has the least is not bounded by what the others have: it may always hold as many rows as it wants.
            least = min(state.wanted for state in self._tenants.values())
            num_running = sum(bool(state.running) for state in self._tenants.values())
            for tenant, state in self._tenants.items():
                self._bound(tenant, least)
                if num_running > bool(state.running):
                    deferred += list(state.running)[self._shares[tenant] :]
        self._deferred = frozenset(deferred)
        for tenant in self._tokens.keys() - self._refill_rates.keys():
            del self._tokens[tenant]
        least_running = min((state.wanted for state in self._tenants.values() if state.running), default=_UNBOUNDED)
        for tenant in self._tokens:
            if self._tenants[tenant].wanted <= least_running:
                self._tokens[tenant] = max(self._tokens[tenant], _PROMPT_CHUNK)

    def _bound(self, tenant: str | None, least_wanted: int) -> None:
        """Bound what a tenant adds to steps of one that has so many requests. While these seem to take no time, no more
        than that one's is known."""
        cost = self.costs.cost or StepCost(0.0, 0.0, 0.0)
        allowed_s = (self._max_slowdown - 1) * (cost.fixed + cost.per_row * least_wanted)
        if allowed_s <= 0:
            self._shares[tenant] = least_wanted
            return
        self._shares[tenant] = max(least_wanted, _quotient(allowed_s, cost.per_row))
        if least_wanted < self._tenants[tenant].wanted and cost.per_prompt_token > 0:
            self._refill_rates[tenant] = min(max(1.0, allowed_s / cost.per_prompt_token), _UNBOUNDED)


def _quotient(allowed_s: float, unit_s: float) -> int:
    """How many of what takes `unit_s` seconds each fit into `allowed_s`; of what takes none, any number."""
    return int(min(allowed_s / unit_s, _UNBOUNDED)) if unit_s > 0 else _UNBOUNDED
