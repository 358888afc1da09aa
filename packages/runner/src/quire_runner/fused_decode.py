"""A decode step by one call of op `decode_step`, with the masks of the rows that have a grammar.

Knows rows and their grammars; knows no network. What is out of the ordinary is left to the step in parts.
"""

from __future__ import annotations

from quire_interfaces.step import ModelRunnerOutput, RequestFailure, SchedulerOutput
from quire_ops import RunDecode
from quire_runner.grammars import RowGrammars

__all__ = ["fused_decode"]


def fused_decode(
    run: RunDecode, output: SchedulerOutput, grammars: RowGrammars, *, drafts_follow: bool
) -> tuple[ModelRunnerOutput, dict[int, RequestFailure]] | None:
    """Compute the step.

    Args:
        run: The network joined with its rows.
        output: One token for each of its rows, of which nothing but the next token is wanted.
        grammars: Move on by the tokens that came.
        drafts_follow: Whether drafts are proposed in later steps.

    Returns:
        The result, and per row that left its grammar what happened; None when no row has changed, and the step is to
        be computed in parts.
    """
    masks = None
    if grammars.is_used:
        found, failed = grammars.masks(output, range(1, len(output.rows) + 1))
        if failed:
            return None
        masks = found and (found.mask_of(len(output.rows)), found.bitmask)
    token_ids = run(output.rows, output.num_computed_tokens, masks)
    if token_ids is None:
        return None
    sampled = [[token_id] for token_id in token_ids]
    result = ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=sampled, drafts_follow=drafts_follow)
    return result, grammars.accept(output, result)
