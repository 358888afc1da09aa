"""`DraftRule`: draft tokens, from the result that proposes them to the step that computes them.

A *guess* comes from a drafter and is verified by the step that computes it; a *forced* token is certain, because the
request's grammar leaves no choice. Both are computed behind the last known token, so that a step may bring several.
Guesses follow the last known token, hence a request waits for its result before its next step, as long as results may
bring some; forced tokens are known also while steps are in flight.
"""

from __future__ import annotations

from quire_interfaces import (
    AdmissionRule,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
)

__all__ = ["DraftRule"]


class DraftRule(AdmissionRule):
    """Keeps proposals until the request's next step, and counts what became of them.

    Args:
        num_speculative_tokens: Most guesses to keep per request; 0 ignores guesses.
        num_lookahead_tokens: KV slots behind the next token that a drafting network writes to.
    """

    name = "drafts"
    holds_queue = False

    def __init__(self, num_speculative_tokens: int, num_lookahead_tokens: int) -> None:
        self._num_speculative = num_speculative_tokens
        self._num_lookahead = num_lookahead_tokens
        self._follow = num_speculative_tokens > 0
        """Whether results may bring guesses: then a request's next step waits for its last result."""
        self._is_forced: dict[str, bool] = {}
        """Id of each running request that has drafts -> whether they are certain."""
        self._offered: list[int] = []
        """The drafts of the request that was asked last, and whether they are certain."""
        self._offered_are_forced = False
        self._counters = SchedulerStats(num_accepted_tokens_per_pos_total=[0] * num_speculative_tokens)

    @property
    def is_watching(self) -> bool:
        """While results may bring guesses, or a request has drafts."""
        return self._follow or bool(self._is_forced)

    def defers(self, request: Request) -> bool:
        """Whether the request's last result, which may bring guesses, is still to come."""
        return self._follow and request.num_in_flight_tokens > 0

    def offer(self, request: Request, max_tokens: int) -> int:
        """As many of the request's drafts as are allowed; the others are dropped."""
        if not request.draft_token_ids:
            return 0
        self._offered = request.draft_token_ids[: max(max_tokens, 0)]
        self._offered_are_forced = self._is_forced.pop(request.request_id, False)
        request.draft_token_ids = []
        return len(self._offered)

    def placed(self, request: Request, num_tokens: int, output: SchedulerOutput) -> None:
        """Name the drafts in the step."""
        output.draft_token_ids[request.row] = self._offered[:num_tokens]
        if request.draft_parents:
            output.draft_parents[request.row] = request.draft_parents[:num_tokens]
        if self._offered_are_forced:
            output.forced_rows.add(request.row)

    def num_lookahead_slots(self, request: Request) -> int:
        """Slots for the drafting network: when the request enters a row, and while guesses are made."""
        return self._num_lookahead if self._follow or request.row < 0 else 0

    def released(self, request: Request) -> None:
        """Drop the drafts: what they followed is to be computed again, or never."""
        request.draft_token_ids = []
        self._is_forced.pop(request.request_id, None)

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Learn whether guesses follow, and what making them took."""
        if self._num_speculative:
            self._follow = result.drafts_follow
            self._counters.draft_seconds_total += result.draft_seconds
            self._counters.draft_saved_seconds += result.draft_saved_seconds

    def keep(self, row: int, request: Request, result: ModelRunnerOutput) -> None:
        """Keep a proposal for the request's next step. A guess follows the last known token, so none may be in flight;
        of forced tokens, those in flight are the first ones.

        Args:
            row: Where the request was in the step.
            result: Of the step; the tokens that it sampled are known already.
        """
        if request.status != RequestStatus.RUNNING:
            return
        if row in result.forced_token_ids:
            request.draft_token_ids = result.forced_token_ids[row][request.num_in_flight_tokens :]
            request.draft_parents = []
            self._is_forced[request.request_id] = True
        elif row in result.draft_token_ids and request.num_in_flight_tokens == 0:
            request.draft_token_ids = result.draft_token_ids[row][: self._num_speculative]
            request.draft_parents = result.draft_parents.get(row, [])
            self._is_forced[request.request_id] = False
        if not request.draft_token_ids:
            self._is_forced.pop(request.request_id, None)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified guesses of one request."""
        counters = self._counters
        counters.num_drafts_total += 1
        counters.num_draft_tokens_total += num_drafts
        counters.num_accepted_tokens_total += num_accepted
        for position in range(num_accepted):
            counters.num_accepted_tokens_per_pos_total[position] += 1

    def add_counters(self, stats: SchedulerStats) -> None:
        """Guesses: how many, how many were right, what they took."""
        counters = self._counters
        stats.num_drafts_total = counters.num_drafts_total
        stats.num_draft_tokens_total = counters.num_draft_tokens_total
        stats.num_accepted_tokens_total = counters.num_accepted_tokens_total
        stats.num_accepted_tokens_per_pos_total = list(counters.num_accepted_tokens_per_pos_total)
        stats.draft_seconds_total = counters.draft_seconds_total
        stats.draft_saved_seconds = counters.draft_saved_seconds
