"""A bound on the time between the tokens of those who decode, while prompts of others are computed.

A prompt's chunk shares a step with the decodes (Agrawal et al., "Sarathi-Serve", OSDI 2024, section 4.2), and all of
them wait for it. A bound in tokens is right for one processor and one network; here the chunk is as large as the
measured times of steps allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire_interfaces import AdmissionRule, ConfigError, ModelRunnerOutput, Request, SchedulerOutput
from quire_scheduler.step_cost import StepTimer

__all__ = ["InterTokenLatencyRule"]

_SMALLEST_CHUNK = 32
"""Prompt tokens that a step may always have, so that prompts get on however slow the steps are; what is left of the
bound and smaller than that is not used, for a few tokens cost a row of their own."""


class InterTokenLatencyRule(AdmissionRule):
    """While requests decode, a step has as many prompt tokens as let it take at most `max_latency_s`, or twice as long
    as the decodes alone, by the time that steps before took: half of the time at least is for prompts. The first in the
    order gets them first. Prompts with media are not cut.

    Args:
        max_latency_s: Seconds, above 0.
        clock: Seconds.

    Raises:
        ConfigError: `max_latency_s` is not above 0.
    """

    name = "inter_token_latency"
    holds_queue = True

    def __init__(self, max_latency_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not max_latency_s > 0:
            raise ConfigError(f"max_latency_s must be above 0, got {max_latency_s!r}", field="max_latency_s")
        self._max_latency_s, self._clock = max_latency_s, clock
        self._timer = StepTimer(is_early=True)
        self.costs = self._timer.costs
        self._decoding: set[str] = set()
        """Requests in rows whose prompt has been computed."""
        self._budget: int | None = None
        """Prompt tokens that the step which is being planned may have; None: any number."""
        self._granted: dict[str, int] = {}
        """Request -> prompt tokens that it may compute in that step; 0 for the last known token, of whom it may be."""
        self._goes_on: set[str] = set()
        """Of these, the requests that have further tokens to come behind the next one."""

    def admits(self, request: Request) -> bool:
        """Whether the step may have any more prompt tokens."""
        return self._budget is None or self._num_left() > 0

    def released(self, request: Request) -> None:
        """It decodes no more."""
        self._decoding.discard(request.request_id)
        if not self._decoding:
            self._budget = None

    def allowed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """As many as the bound leaves room for."""
        request_id = request.request_id
        self._granted.pop(request_id, None)
        num_allowed = num_tokens
        if self._budget is not None and num_tokens > 1 and request.media is None:
            num_left = self._num_left()
            num_allowed = min(num_tokens, num_left) if num_left >= min(num_tokens, _SMALLEST_CHUNK) else 0
        self._granted[request_id] = num_allowed if num_tokens > 1 else 0
        if request.pooling_params is None and len(request.output_token_ids) + 1 < request.max_tokens:
            self._goes_on.add(request_id)
        return num_allowed

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """Note whose prompt ends in the step, and bound the next one by what this one computes beside prompts."""
        self._timer.planned(output, self._clock())
        num_prompts = num_prompt_tokens = 0
        if self._granted:
            entries = zip(output.request_ids, output.num_scheduled_tokens, output.samples, strict=True)
            for request_id, num_tokens, samples in entries:
                if self._granted.get(request_id):
                    num_prompts += 1
                    num_prompt_tokens += num_tokens
                if samples and request_id in self._goes_on:
                    self._decoding.add(request_id)
            self._granted.clear()
            self._goes_on.clear()
        self._budget = None
        cost = self.costs.cost
        if self._decoding and cost is not None and cost.per_prompt_token > 0:
            num_rows = len(output.rows)
            num_drafted = output.total_num_scheduled_tokens - num_prompt_tokens - (num_rows - num_prompts)
            own_s = cost.fixed + cost.per_row * num_rows + cost.per_prompt_token * num_drafted
            prompts_s = max(self._max_latency_s - own_s, own_s)
            self._budget = max(_SMALLEST_CHUNK, int(prompts_s / cost.per_prompt_token))
        return False

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Note how long the step took."""
        self._timer.ended(result, self._clock())

    def step_discarded(self, output: SchedulerOutput) -> None:
        """A step that failed says nothing of time."""
        self._timer.discarded(output)

    def _num_left(self) -> int:
        """Prompt tokens of the step that nobody has been granted."""
        return (self._budget or 0) - sum(self._granted.values())
