"""Shares of tenants: how much of each step a tenant may take while another one is there.

All requests of a step wait for each other, so what a flood adds to a step delays everybody in it. How much that is,
only a clock tells: where the weights have to be read anyway, a further row costs next to nothing, and where a step is
bound by computing, as much as the first. So the time of a step is fitted to what it computes (`step_cost`), and a
tenant may add as much as makes the others' steps so many times as long as their own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from quire_interfaces import (
    AdmissionRule,
    CachedPrefix,
    ConfigError,
    ModelRunnerOutput,
    Request,
    Reservation,
    SchedulerOutput,
)
from quire_scheduler.config import MAX_SLOWDOWN
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.step_cost import StepCost, StepTimer

__all__ = ["TenantShareRule"]

_PRESENCE_S = 0.25
"""A tenant whose last request ended counts as present for so long: most clients send the next one soon."""
_PROMPT_CHUNK = 32
"""A tenant whose prompts are bounded saves up so many tokens before it computes some: a few in every step would cost
more for each."""
_BURST = 2.0 * _PROMPT_CHUNK
"""A tenant saves up no more prompt tokens than these, or than one step adds."""
_UNBOUNDED = 1 << 30


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
        self._timer = StepTimer()
        self.costs = self._timer.costs
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
        self._timer.planned(output, self._clock())
        self._pay(output)
        self._renew()
        for tenant, rate in self._refill_rates.items():
            self._tokens[tenant] = min(self._num_tokens(tenant) + rate, max(rate, _BURST))
        return False

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Note how long the step took: since it was planned, or since the one before it ended."""
        self._timer.ended(result, self._clock())

    def step_discarded(self, output: SchedulerOutput) -> None:
        """A step that failed says nothing of time."""
        self._timer.discarded(output)

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
