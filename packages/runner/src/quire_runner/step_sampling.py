"""`StepSampling`: from a step's logits to its result, the same for every path that computes logits.

Knows rows, sampler and grammars; does not know where logits come from.
"""

from __future__ import annotations

from torch import Tensor

from quire_interfaces.step import ModelRunnerOutput
from quire_ops import to_device
from quire_runner.compaction import compact_accepted_kv
from quire_runner.grammars import RowGrammars
from quire_runner.inputs import Layers
from quire_runner.output import Failures, PendingResult, ReadyResult, plain_output, verified_output
from quire_runner.protocols import LogitsTap
from quire_runner.rows import Rows
from quire_runner.step import Step
from quire_sampling import SampleMode, Sampler, SamplerOutput

__all__ = ["StepSampling"]


class StepSampling:
    """Samples, writes tokens to their rows, and reads them back.

    Args:
        rows: The rows of the runner.
        sampler: Chooses tokens.
        grammars: Matchers of rows whose output has a form.
        layers: The KV caches, in which accepted drafts of trees are moved.
        on_logits: Sees the logits of every step; None where nobody does.
    """

    def __init__(
        self, rows: Rows, sampler: Sampler, grammars: RowGrammars, layers: Layers, on_logits: LogitsTap | None
    ) -> None:
        self.rows = rows
        self.sampler = sampler
        self.grammars = grammars
        self.on_logits = on_logits
        self.layers = layers

    def is_plain(self, rows: list[int]) -> bool:
        """Whether nothing of the logits of these rows is wanted but the tokens that they say."""
        return self.on_logits is None and self.sampler.state.mode_of(rows) <= SampleMode.SAMPLED

    def is_argmax(self, rows: list[int]) -> bool:
        """Whether the token of each of these rows is the one with its largest logit, so that no logits are needed."""
        is_free = self.on_logits is None and not self.grammars.is_used
        return is_free and self.sampler.state.mode_of(rows) is SampleMode.ARGMAX

    def mode(self, rows: list[int]) -> SampleMode:
        """The sample mode of a step with these rows; HOST where somebody looks at the logits."""
        if self.on_logits is not None:
            return SampleMode.HOST
        mode = self.sampler.state.mode_of(rows)
        return max(mode, SampleMode.EDITED) if self.grammars.has_any(rows) else mode

    def sample(self, step: Step, logits: Tensor, result: ModelRunnerOutput) -> PendingResult:
        """Sample from logits [N, vocab_size] float32 of the step's N logit rows, write the tokens to their rows, and
        begin to read them into `result`."""
        plan = step.plan
        rows = plan.logits.rows.tolist()
        if self.on_logits is not None:
            self.on_logits(rows, plan.logits.positions.tolist(), logits)
        masks, failures = self.grammars.masks(step.output, plan.logits.entry_ends)
        positions = to_device(plan.logits.positions, logits.device)
        sampled = self.sampler.sample(logits, rows, positions, self.rows.token_ids, masks)
        return self.write(step, sampled, failures, result)

    def write(self, step: Step, sampled: SamplerOutput, failures: Failures, result: ModelRunnerOutput) -> PendingResult:
        """Write what was sampled to its rows, and begin to read it into `result`."""
        wanted = step.plan.logits
        self.rows.write_next(wanted.rows, wanted.positions, sampled.token_ids)
        return self.read(step, sampled, failures, result)

    def read(self, step: Step, sampled: SamplerOutput, failures: Failures, result: ModelRunnerOutput) -> PendingResult:
        """Begin to read tokens that are in their rows already into `result`; where the next step depends on them, they
        are read now.

        Args:
            step: The step.
            sampled: What was chosen for its logit rows.
            failures: Rows whose grammar gave no mask -> why.
            result: Gets tokens, log probabilities and failed rows.
        """
        output, plan, rows = step.output, step.plan, self.rows
        if plan.num_drafts is None:
            # However the step ends, these rows have one token more: the next step can be planned.
            rows.num_tokens[plan.logits.rows] = plan.logits.positions + 2
        fills, copied = rows.fills(output.rows), sampled.begin_read()

        def finish() -> ModelRunnerOutput:
            if plan.num_drafts is None:
                plain_output(output, rows, fills, copied(), result, failures)
            else:
                verified_output(output, plan, rows, copied(), result, failures)
                if plan.held is not None:
                    plan.held.store(rows.num_tokens - 1)
                if plan.kept:
                    compact_accepted_kv(plan, rows, self.layers)
            return result

        if plan.num_drafts is None and not self.grammars.has_any(output.rows):
            return finish
        return self.without_strays(result, self.grammars.accept(output, finish()))

    def without_strays(self, result: ModelRunnerOutput, strays: Failures) -> PendingResult:
        """The result, in which rows that left their grammars (`RowGrammars.accept`) have failed."""
        self.rows.failed |= strays
        result.failed_rows |= strays
        return ReadyResult(result)
