"""`Step`: one step as the ways to run it see it, and `StepPath`, what each of them is.

A runner asks its paths in order, the quickest first; each says whether the step is one of its own. Knows what is asked
of a step; does not know how any path computes it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_runner.inputs import HostPlan, plan_step
from quire_runner.output import PendingResult
from quire_runner.protocols import StepAdapters
from quire_runner.rows import Rows
from quire_spec_decode.row_drafter import RowDrafter

__all__ = ["Step", "StepPath"]


class Step:
    """A step with at least one entry. Questions about it are answered once, when they are first asked.

    Args:
        output: What the scheduler asks for.
        rows: Its rows, which have been applied.
        adapters: The network's; None without any.
        drafter: Proposes drafts behind this step; None where nothing does.
    """

    __slots__ = ("_adapters", "_is_single", "_plan", "_rows", "drafter", "features", "output")

    def __init__(
        self, output: SchedulerOutput, rows: Rows, adapters: StepAdapters | None, drafter: RowDrafter | None
    ) -> None:
        self.output = output
        self.drafter = drafter
        self.features: Tensor | None = None
        """[T, width] what the drafter reads of the network at the step's tokens; set by the path that ran the step."""
        self._rows = rows
        self._adapters = adapters
        self._plan: HostPlan | None = None
        self._is_single: bool | None = None

    @property
    def plan(self) -> HostPlan:
        """The step's layout in host numbers. Raises as `plan_step`."""
        if self._plan is None:
            self._plan = plan_step(self.output, self._rows)
        return self._plan

    @property
    def needs_features(self) -> bool:
        """Whether the drafter reads something of the network besides tokens."""
        return self.drafter is not None and self.drafter.wants_features

    @property
    def is_single(self) -> bool:
        """Whether every entry computes one token, and nothing of it is wanted but its logits."""
        if self._is_single is None:
            output = self.output
            self._is_single = sum(output.num_scheduled_tokens) == len(output.rows) and self._wants_logits_only()
        return self._is_single

    @property
    def is_verifying(self) -> bool:
        """Whether every entry computes its last known token and a chain of drafts behind it, the logits of all of them
        are needed, and nothing else is wanted."""
        output, drafts = self.output, self.output.draft_token_ids
        return (
            bool(drafts)
            and sum(output.num_scheduled_tokens)
            == len(output.rows) + sum(len(drafts.get(row, ())) for row in output.rows)
            and not output.draft_parents
            and not output.forced_rows
            and self._wants_logits_only()
        )

    def _wants_logits_only(self) -> bool:
        """Whether logits behind every entry are all that is wanted of the step."""
        rows, adapters = self._rows, self._adapters
        return (
            all(self.output.samples)
            and not rows.prompt_logprobs
            and not (rows.media and any(map(rows.has_media_from, self.output.rows, self.output.num_computed_tokens)))
            and not (adapters is not None and adapters.changes_vocabulary(rows.lora_slots[self.output.rows]))
        )

    def empty_result(self) -> ModelRunnerOutput:
        """The result before anything was sampled."""
        return ModelRunnerOutput(
            step_id=self.output.step_id,
            sampled_token_ids=[[] for _ in self.output.rows],
            drafts_follow=self.drafter is not None,
        )


class StepPath(Protocol):
    """One way to run a step."""

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step, and set its features where it needs any.

        Returns:
            What waits for the results; None where this path does not run such a step, of which nothing has been
            changed then.

        Raises:
            RuntimeError: the step is impossible (a step before it failed), or the network raised it.
            Exception: whatever the network raises.
        """
