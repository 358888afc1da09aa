"""Drafts behind each step, as many as pay: the controller chooses, the drafter proposes, and what both cost is told.

Knows when a step is measured and which rows may have drafts; does not know where drafts come from
(`quire_spec_decode`), nor how a step is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_runner.config import RunnerConfig
from quire_runner.draft_costs import measure_draft_costs
from quire_runner.output import PendingResult, ReadyResult
from quire_runner.rows import Rows
from quire_runner.step import Step
from quire_spec_decode import Draft, DraftController, depths
from quire_spec_decode.row_drafter import DraftStep, RowDrafter

__all__ = ["PacedDrafting", "ask"]

_logger = logging.getLogger(__name__)


class PacedDrafting:
    """A drafter, and how far it goes ahead.

    Args:
        drafter: Proposes.
        controller: Says how much to draft, from what steps cost and bring; None drafts as much as configured.
        rows: The rows of the runner.
        config: Lengths.
        vocab_size: Drafts of tokens outside of it are dropped.
    """

    def __init__(
        self,
        drafter: RowDrafter,
        controller: DraftController | None,
        rows: Rows,
        config: RunnerConfig,
        vocab_size: int,
    ) -> None:
        self.drafter = drafter
        self._controller = controller
        self._rows = rows
        self._config = config
        self._vocab_size = vocab_size
        # The thread's own time where it computes the steps: what else runs on the machine says nothing about drafts.
        self._clock = time.thread_time if rows.token_ids.device.type == "cpu" else time.perf_counter
        self._length = config.draft_depth or config.num_speculative_tokens
        """Most tokens to draft behind the present step; 0 does without whatever drafting needs."""

    @property
    def present(self) -> RowDrafter | None:
        """The drafter, if it is asked behind the present step."""
        return self.drafter if self._length else None

    def learn_costs(self, plan: KVCachePlan, launch: Callable[[SchedulerOutput], PendingResult]) -> None:
        """Measure what drafts cost, if a controller wants to know. Before the first step."""
        controller, length = self._controller, self._length
        if controller is None:
            return

        def run(output: SchedulerOutput, length: int) -> ModelRunnerOutput:
            self._length = length
            return launch(output)()

        self._controller = None  # nothing is to be chosen
        try:
            for num_rows, costs in measure_draft_costs(run, plan, self._config, controller.lengths, self._clock):
                if not controller.learn_costs(num_rows, costs):
                    break
        finally:
            self._controller, self._length = controller, length

    def run(self, output: SchedulerOutput, compute: Callable[[SchedulerOutput], PendingResult]) -> PendingResult:
        """Compute a step with as many drafts behind it as pay, and learn from it."""
        controller = self._controller
        if controller is None:
            return compute(output)
        num_rows = len(output.rows)
        if output.new_rows or not all(output.samples):  # prompts are in the step
            for new in output.new_rows:
                controller.forget(new.row)
            self._length = controller.with_prompts(num_rows) if output.new_rows else controller.present(num_rows)
            read = compute(output)
            if self._length:
                controller.charge(num_rows, read().draft_seconds)
            return read
        self._length = controller.choose(num_rows)
        if controller.rests(num_rows):
            return compute(output)
        start = self._clock()
        result = compute(output)()
        seconds = self._clock() - start
        num_tokens = sum(map(len, result.sampled_token_ids))
        result.draft_saved_seconds = controller.observe(num_rows, num_tokens, seconds)
        if output.draft_token_ids:
            for row, tokens in zip(output.rows, result.sampled_token_ids, strict=True):
                if tokens and row not in output.forced_rows:
                    parents = output.draft_parents.get(row)
                    depth = max(depths(parents)) if parents else len(output.draft_token_ids.get(row, ()))
                    controller.verified(row, depth, len(tokens) - 1)
        return ReadyResult(result)

    def with_drafts(self, step: Step, pending: PendingResult) -> PendingResult:
        """The results of a step, which are waited for, with proposals for the next one: `draft_token_ids`,
        `draft_parents` and `draft_seconds`."""
        result, output = pending(), step.output
        start = self._clock()
        rows = self._rows
        limits: dict[int, int] = {}
        for row, tokens in zip(output.rows, result.sampled_token_ids, strict=True):
            # An error of a custom processor at a rejected draft could not be told from a real one, so requests that
            # have any get no drafts.
            if not tokens or rows.sampling.has_processors(row) or row in result.forced_token_ids:
                continue
            # A draft at the last position of the context would leave no place for the token after it.
            room = self._config.max_model_len - int(rows.num_tokens[row]) - 1
            if room >= 1:
                length = self._length
                limits[row] = min(room, length if self._controller is None else self._controller.limit(row, length))
        # Sampling that looks at the tokens before finds them in the row, where only one branch of a tree has a place.
        chains = frozenset(row for row in limits if rows.sampling.reads_history(row) or rows.grammars.has(row))
        draft_step = DraftStep(plan=step.plan, limits=limits, chains=chains, features=step.features)
        for row, draft in ask(self.drafter, draft_step, rows, self._vocab_size).items():
            result.draft_token_ids[row] = draft.token_ids
            if draft.parents is not None:
                result.draft_parents[row] = draft.parents
        result.draft_seconds = self._clock() - start
        return ReadyResult(result)


def ask(drafter: RowDrafter, step: DraftStep, rows: Rows, vocab_size: int) -> dict[int, Draft]:
    """What `drafter` proposes, as far as it can be sampled; nothing where it fails."""
    try:
        proposals = drafter.propose(step)
    except Exception:
        _logger.exception("the drafter failed; this step's requests go on without drafts")
        return {}
    drafts: dict[int, Draft] = {}
    for row, draft in proposals.items():
        if draft.token_ids and max(draft.token_ids) >= vocab_size:  # a drafter's padding
            draft = draft.first(next(i for i, token in enumerate(draft.token_ids) if token >= vocab_size))
        if draft.parents is None and rows.grammars.is_used:
            draft = Draft(rows.grammars.follow(row, draft.token_ids))
        if draft.token_ids:
            drafts[row] = draft
    return drafts
