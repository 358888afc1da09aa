"""Turns what the sampler chose into a `ModelRunnerOutput`: drafts are verified, failures are named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from quire_interfaces.step import ModelRunnerOutput, RequestFailure, SchedulerOutput
from quire_runner.inputs import HostPlan
from quire_runner.rows import Rows
from quire_sampling import NOTHING_LEFT, SamplerOutput
from quire_spec_decode import accept_drafts, accept_tree

__all__ = ["Failures", "PendingResult", "ReadyResult", "plain_output", "verified_output", "without_entries"]

PendingResult = Callable[[], ModelRunnerOutput]
"""Waits for the results of a step."""


Failures = dict[int, RequestFailure]
"""Row -> why its request cannot go on."""


class ReadyResult:
    """Results that nobody has to wait for."""

    def __init__(self, result: ModelRunnerOutput) -> None:
        self._result = result

    def __call__(self) -> ModelRunnerOutput:
        return self._result


def plain_output(
    output: SchedulerOutput,
    rows: Rows,
    fills: list[int],
    sampled: SamplerOutput,
    result: ModelRunnerOutput,
    grammar_failures: Mapping[int, RequestFailure],
) -> None:
    """Fill `result` with one token for each sampling entry. Later steps may have been started already: of the rows,
    only failures are noted.

    Args:
        output: What was asked, without drafts.
        rows: Told of failures.
        fills: Per entry, `Rows.fills` when the step was started.
        sampled: One token per sampling entry.
        result: Gets `sampled_token_ids`, `logprobs` and `failed_rows`.
        grammar_failures: Row -> why its grammar gave no mask.
    """
    token_ids: list[int] = sampled.token_ids.tolist()
    failed = {row: _failure(why) for row, why in sampled.failed_rows().items()}
    failed.update(grammar_failures)
    logprobs = sampled.logprobs()
    if not failed and not logprobs and len(token_ids) == len(output.rows):
        result.sampled_token_ids = [[token_id] for token_id in token_ids]
        return
    sampling = [entry for entry, samples in enumerate(output.samples) if samples]
    for place, (entry, token_id) in enumerate(zip(sampling, token_ids, strict=True)):
        row = output.rows[entry]
        if row in failed:
            result.failed_rows[row] = failed[row]
            rows.fail_late(row, fills[entry], failed[row])
            continue
        result.sampled_token_ids[entry] = [token_id]
        if place in logprobs:
            result.logprobs[row] = [logprobs[place]]


def verified_output(
    output: SchedulerOutput,
    plan: HostPlan,
    rows: Rows,
    sampled: SamplerOutput,
    result: ModelRunnerOutput,
    grammar_failures: Mapping[int, RequestFailure],
) -> None:
    """Fill `result` with the tokens of every sampling entry of a step with drafts, and count them as known.

    Args:
        output: What was asked.
        plan: The step's layout; gets `kept`.
        rows: Their `num_tokens` move on, `failed` grows, and tokens of trees are put in their order.
        sampled: One token per logit row.
        result: Gets `sampled_token_ids`, `logprobs` and `failed_rows`.
        grammar_failures: Row -> why its grammar gave no mask.
    """
    token_ids: list[int] = sampled.token_ids.tolist()
    failed = {row: _failure(why) for row, why in sampled.failed_rows().items()}
    failed.update(grammar_failures)
    logprobs = sampled.logprobs()
    begin = 0
    for entry, end in enumerate(plan.logits.entry_ends):
        if end == begin:
            continue
        row = output.rows[entry]
        tokens = token_ids[begin:end]
        right = list(range(len(tokens)))
        if entry in plan.trees:
            nodes = accept_tree(tokens, output.draft_token_ids[row], plan.trees[entry])
            right = plan.kept[row] = [0, *(node + 1 for node in nodes)]
            tokens = [tokens[i] for i in right]
            rows.write(row, int(plan.logits.positions[begin]) + 1, tokens)
        elif end - begin > 1:
            tokens = accept_drafts(tokens, output.draft_token_ids[row])
            right = right[: len(tokens)]
        right = [begin + i for i in right]
        if row in failed and (row in grammar_failures or not _failed_at_rejected(sampled, row, right)):
            result.failed_rows[row] = rows.failed[row] = failed[row]
        else:
            rows.num_tokens[row] = int(plan.logits.positions[begin]) + 1 + len(tokens)
            if end - begin == 1 and row in output.forced_rows:
                tokens = output.draft_token_ids[row] + tokens
            result.sampled_token_ids[entry] = tokens
            if begin in logprobs:
                result.logprobs[row] = [logprobs[i] for i in right]
        begin = end


def _failed_at_rejected(sampled: SamplerOutput, row: int, right: list[int]) -> bool:
    """Whether the row's logits were bad only behind a rejected draft, where the request never goes."""
    return row not in sampled.processor_errors and bool(sampled.max_logits[right].isfinite().all())


def without_entries(output: SchedulerOutput, dropped: Collection[int]) -> SchedulerOutput:
    """The same step without the entries of some rows."""
    keep = [i for i, row in enumerate(output.rows) if row not in dropped]
    num_scheduled = [output.num_scheduled_tokens[i] for i in keep]
    return replace(
        output,
        rows=[output.rows[i] for i in keep],
        request_ids=[output.request_ids[i] for i in keep],
        num_computed_tokens=[output.num_computed_tokens[i] for i in keep],
        num_scheduled_tokens=num_scheduled,
        samples=[output.samples[i] for i in keep],
        total_num_scheduled_tokens=sum(num_scheduled),
        draft_token_ids={row: ids for row, ids in output.draft_token_ids.items() if row not in dropped},
        draft_parents={row: parents for row, parents in output.draft_parents.items() if row not in dropped},
    )


def _failure(why: str) -> RequestFailure:
    return RequestFailure(why, code="no_token_left" if why == NOTHING_LEFT else None)
