"""`PipelineRunner`: the runner of one pipeline stage. The last stage samples; the others learn later what it sampled.

Every stage gets every step, in order. A stage before the last computes its layers, hands the residual stream on, and is
done: its rows learn their new tokens by `take_sampled`, before a step that needs them comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from quire_interfaces import RankDeadError
from quire_interfaces.device import Drafter, RequestDrafter
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_models.layers.stage_lm import StageLM
from quire_pooling import Pooler
from quire_runner.compaction import compact_accepted_kv
from quire_runner.general_step import GeneralStep
from quire_runner.inputs import HostPlan, forward_batch, write_drafts
from quire_runner.media import MediaPlaces
from quire_runner.output import Failures, PendingResult, ReadyResult, without_entries
from quire_runner.protocols import RunnableNetwork
from quire_runner.runner import ModelRunner
from quire_runner.stage_link import StageFailedError, StageLink
from quire_runner.states import HeldStates
from quire_runner.step import Step, StepPath
from quire_spec_decode import nodes_of

__all__ = ["PipelineRunner"]


class _Sampled(NamedTuple):
    """Rows whose next tokens are being sampled by the last stage."""

    rows: list[int]
    fills: list[int]
    """`Rows.fills` when the step was started."""
    ends: list[int]
    """Position of each row's first new token."""
    held: HeldStates | None
    """States of rows with drafts, which are stored when it is known which drafts were right."""
    plan: HostPlan | None
    """Of a step with trees of drafts, of which what was right is put into one line then."""
    trees: dict[int, tuple[list[int], list[int]]]
    """Row -> its tree: tokens, and what each of them follows."""


class PipelineRunner(ModelRunner):
    """Runs the steps of one stage. Arguments as those of `ModelRunner`; `network` is a `StageLM`."""

    def __init__(
        self,
        network: RunnableNetwork,
        *args: Any,
        drafter: Drafter | RequestDrafter | None = None,
        pooler: Pooler | None = None,
        **more: Any,
    ) -> None:
        stage = cast(StageLM, network)
        self._link = stage.neighbours = StageLink(stage.stage_group)
        self._is_first = stage.config.network.is_first
        self._part: SchedulerOutput
        """The step that runs, without what stages before have left out."""
        self._like = torch.empty(0, stage.received_width, dtype=stage.dtype, device=stage.device)
        self._sampling_steps: dict[int, _Sampled] = {}
        """Steps whose tokens are not known here yet."""
        is_last = self._link.is_last
        drafter, pooler = drafter if is_last else None, pooler if is_last else None
        super().__init__(network, *args, drafter=drafter, pooler=pooler, **more)

    def _make_paths(self, network: RunnableNetwork) -> list[StepPath]:
        """The last stage runs steps as any network does; the others compute their layers."""
        if not self._is_first:
            self._media = MediaPlaces(network.encode_media, self._rows.media, self._device)
        if self._link.is_last:
            return super()._make_paths(network)
        chunk = self._config.logits_chunk_tokens
        return [
            _LayersOnly(
                network,
                self._sampling,
                self._layers,
                self._step_inputs,
                self._adapters,
                self._media,
                self._pooling,
                chunk,
            )
        ]

    def launch(self, output: SchedulerOutput) -> PendingResult:
        """Start one step, as `ModelRunner.launch` does.

        Returns:
            What waits for the step's results; without tokens on a stage before the last.

        Raises:
            StageFailedError: A stage before raised; of this one nothing has changed but the step's rows.
        """
        link = self._link
        try:
            earlier = self._begin(output)
            self._part = without_entries(output, earlier) if earlier else output
            read = super().launch(self._part)
            if not link.is_last:
                self._note_sampled(self._part)
            if not link.is_sent:  # no row of it is computed
                self._drop_failed(kept=())
            link.end(self._like)
        except RankDeadError:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, StageFailedError) else f"{type(error).__name__}: {error}"
            link.fail(why, self._like)
            raise
        return partial(self._with_earlier, output, self._part, earlier, read) if earlier else read

    def _begin(self, output: SchedulerOutput) -> Failures:
        """Rows that stages before have left out of the step; where it failed there, its rows are changed all the
        same."""
        try:
            return self._link.begin(output)
        except StageFailedError:
            if output.kv_transfer is not None and self._transfers is not None:  # jobs are begun even so
                self._transfers.begin(output.kv_transfer)
            with torch.inference_mode():
                self._rows.take_late_failures()
                self._rows.apply(output)
            raise

    @staticmethod
    def _with_earlier(
        output: SchedulerOutput, part: SchedulerOutput, earlier: Failures, read: PendingResult
    ) -> ModelRunnerOutput:
        """The result of a part of a step as that of the step, of which the other rows have failed."""
        result = read()
        by_row = dict(zip(part.rows, result.sampled_token_ids, strict=True))
        result.sampled_token_ids = [by_row.get(row, []) for row in output.rows]
        result.failed_rows = earlier | result.failed_rows
        return result

    def _begin_pooling(self, output: SchedulerOutput) -> None:
        """The last stage pools."""
        if self._link.is_last:
            super()._begin_pooling(output)

    def _run(self, output: SchedulerOutput) -> PendingResult:
        """Start a step, whose rows that failed here have been left out."""
        self._drop_failed(output.rows)
        return super()._run(output)

    def _drop_failed(self, kept: Collection[int]) -> None:
        """Tell the link which rows of the step have failed here."""
        failed = self._rows.failed
        if failed:
            self._link.drop({row: failed[row] for row in self._part.rows if row in failed and row not in kept})

    def _note_sampled(self, output: SchedulerOutput) -> None:
        """Remember what the tokens of a step are to be written to."""
        entries = zip(output.rows, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        drafts = output.draft_token_ids
        ends = [start + count - len(drafts.get(row, ())) for row, start, count in entries]
        (path,) = self._paths
        assert isinstance(path, _LayersOnly)
        trees = {row: (drafts[row], parents) for row, parents in output.draft_parents.items() if row in drafts}
        plan, held = path.plan if trees else None, path.held
        path.held = path.plan = None
        sampled = _Sampled(output.rows, self._rows.fills(output.rows), ends, held, plan, trees)
        self._sampling_steps[output.step_id] = sampled

    def take_sampled(self, step_id: int, rows: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """Write what the last stage sampled in a step behind the known tokens of its rows, on a stage before.

        Args:
            step_id: The step.
            rows: Its rows, entry by entry.
            token_ids: Entry -> tokens; none where nothing was sampled.
        """
        if self._link.is_last:
            return
        sampled = self._sampling_steps.pop(step_id, None)
        for old in [each for each in self._sampling_steps if each < step_id]:  # steps that failed
            del self._sampling_steps[old]
        if sampled is None:
            return
        by_row, own = dict(zip(rows, token_ids, strict=True)), self._rows
        num_computed = np.zeros_like(own.num_tokens)
        for row, fill, now, end in zip(sampled.rows, sampled.fills, own.fills(sampled.rows), sampled.ends, strict=True):
            tokens = by_row.get(row)
            if tokens and fill == now:  # else another request is in the row by now
                own.write(row, end, tokens)
                own.num_tokens[row] = end + len(tokens)
                num_computed[row] = end + len(tokens) - 1
                if row in sampled.trees and sampled.plan is not None:
                    sampled.plan.kept[row] = [0, *(node + 1 for node in nodes_of(tokens, *sampled.trees[row]))]
        with torch.inference_mode():
            if sampled.held is not None:
                sampled.held.store(num_computed)
            if sampled.plan is not None and sampled.plan.kept:
                compact_accepted_kv(sampled.plan, own, self._layers)


class _LayersOnly(GeneralStep):
    """A `StepPath` of a stage before the last: layers, and nothing behind them."""

    held: HeldStates | None = None
    """Of the step that ran last."""
    plan: HostPlan | None = None
    """Of the step that ran last."""

    def try_run(self, step: Step) -> PendingResult:
        """Start the step."""
        output, plan = step.output, step.plan
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        batch = forward_batch(plan, self._rows, self._step_inputs, self._layers, output.new_rows)
        self._add_adapters(step, batch)
        if self._rows.media:
            self._media.add_to(batch, plan)
        self.held, self.plan = plan.held, plan
        self._network.forward(batch)
        return ReadyResult(step.empty_result())
