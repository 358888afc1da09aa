"""Decode steps in one call of op `decode_step`, which a network was joined with its rows for (`Network.bind_decode`).

Knows rows and their grammars; knows no network. What is out of the ordinary is left to the paths behind these.
"""

from __future__ import annotations

from quire_interfaces.step import ModelRunnerOutput
from quire_ops import RunDecode
from quire_runner.output import PendingResult
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling

__all__ = ["FusedDecode", "FusedLogits"]


class FusedDecode:
    """A `StepPath`: from the rows' last tokens to their next ones, sampling included, under masks of grammars or free.

    Args:
        run: The network joined with its rows.
        sampling: Knows which rows want nothing but a token.
    """

    def __init__(self, run: RunDecode, sampling: StepSampling) -> None:
        self._run = run
        self._sampling = sampling

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if every row of it wants one token and nothing else; None also where the call declines, and no
        row has changed then."""
        output, grammars = step.output, self._sampling.grammars
        if step.needs_features or not step.is_single or not self._sampling.is_plain(output.rows):
            return None
        if step.drafter is not None:
            _ = step.plan  # of the rows as they are before the step
        masks = None
        if grammars.is_used:
            token_masks, failures = grammars.masks(output, range(1, len(output.rows) + 1))
            if failures:
                return None
            masks = token_masks and (token_masks.mask_of(len(output.rows)), token_masks.bitmask)
        token_ids = self._run(output.rows, output.num_computed_tokens, masks)
        if token_ids is None:
            return None
        result = ModelRunnerOutput(
            step_id=output.step_id,
            sampled_token_ids=[[token_id] for token_id in token_ids],
            drafts_follow=step.drafter is not None,
        )
        return self._sampling.without_strays(result, grammars.accept(output, result))


class FusedLogits:
    """A `StepPath`: from the rows' last tokens to their logits; the sampler, which has more to do with them, goes on.

    Args:
        run: The network joined with its rows.
        sampling: From logits to tokens.
    """

    def __init__(self, run: RunDecode, sampling: StepSampling) -> None:
        self._run = run
        self._sampling = sampling

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if every row has one token to compute, and somebody looks at logits or changes them."""
        output = step.output
        if step.needs_features or not step.is_single or self._sampling.is_plain(output.rows):
            return None
        _ = step.plan  # raises before the network runs
        logits = self._run.logits(output.rows, output.num_computed_tokens)
        return None if logits is None else self._sampling.sample(step, logits, step.empty_result())
