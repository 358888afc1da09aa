"""What steps with drafts cost, measured before the first request: requests of nobody go through steps of their own.

So that a controller need not try, at the expense of requests, what cannot pay. Knows how to ask for steps; does not
know who drafts, nor what follows from the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quire_interfaces import SamplingParams
from quire_interfaces.kv_cache import CrossAttentionSpec, KVCachePlan
from quire_interfaces.step import ModelRunnerOutput, NewRow, SchedulerOutput
from quire_runner.config import RunnerConfig

__all__ = ["measure_draft_costs"]

BUDGET_S = 0.5
"""Seconds by the clock that measuring takes at most, or nearly so: no larger batch is begun that would take longer."""
PROMPT_TOKENS = 4
REPEATS = 2
"""Steps of each kind, of which the quickest one counts: the first one also makes what it is the first to use."""

Run = Callable[[SchedulerOutput, int], ModelRunnerOutput]
"""Runs a step with drafts of such a length for the next one."""


class _Nobody:
    """Requests in the first rows, as a scheduler would have them.

    Args:
        run: Runs steps.
        num_rows: How many requests.
        block_ids: Row -> its blocks of each group.
    """

    def __init__(self, run: Run, num_rows: int, block_ids: Sequence[tuple[list[int], ...]]) -> None:
        self._run = run
        self._rows = list(range(num_rows))
        self._num_known = [PROMPT_TOKENS] * num_rows
        self._block_ids = block_ids
        self._drafts: dict[int, list[int]] = {}
        self._parents: dict[int, list[int]] = {}

    def begin(self, length: int) -> None:
        """Prompts."""
        new_rows = [
            NewRow(
                row=row, request_id=f"nobody-{row}", token_ids=[0] * PROMPT_TOKENS, num_prompt_tokens=PROMPT_TOKENS,
                num_computed_tokens=0, block_ids=self._block_ids[row], seed=0, cache_salt="nobody",
                sampling_params=SamplingParams(temperature=0.0),
            )
            for row in self._rows
        ]  # fmt: skip
        self._step([0] * len(self._rows), new_rows, length)

    def go_on(self, length: int) -> None:
        """One step. What nobody drafted for gets drafts that are wrong or right by chance."""
        if length:
            for row in self._rows:
                self._drafts.setdefault(row, [0] * length)
        self._step([known - 1 for known in self._num_known], [], length)

    def end(self) -> None:
        """Leave the rows."""
        self._run(_plan([], [], [], freed_rows=self._rows), 0)

    def _step(self, starts: list[int], new_rows: list[NewRow], length: int) -> None:
        drafts, parents = self._drafts, self._parents
        counts = [
            known - start + len(drafts.get(row, ()))
            for row, start, known in zip(self._rows, starts, self._num_known, strict=True)
        ]
        output = _plan(self._rows, starts, counts, new_rows=new_rows, draft_token_ids=drafts, draft_parents=parents)
        result = self._run(output, length)
        self._num_known = [
            known + len(tokens) for known, tokens in zip(self._num_known, result.sampled_token_ids, strict=True)
        ]
        self._drafts, self._parents = dict(result.draft_token_ids), dict(result.draft_parents)


def measure_draft_costs(
    run: Run, plan: KVCachePlan, config: RunnerConfig, lengths: Sequence[int], clock: Callable[[], float]
) -> Iterator[tuple[int, dict[int, float]]]:
    """Costs of steps of 1, 2, 4 and so on requests with short texts, as long as they are asked for and rows, blocks and
    time allow. No request may be in any row meanwhile; what is in the KV cache is overwritten.

    Args:
        run: Runs a step, drafting included.
        plan: The KV cache.
        config: Rows, lengths.
        lengths: Of drafts, 0 among them.
        clock: Seconds of what runs the steps.

    Yields:
        Number of requests, and length -> seconds of a step that verifies drafts of that length and makes the next.
    """
    longest = max(lengths)
    num_nodes = max(config.num_speculative_tokens, longest)
    num_slots = PROMPT_TOKENS + (1 + REPEATS) * len(lengths) * (1 + longest) + config.draft_topk * longest + num_nodes
    specs = [group.spec for group in plan.groups]
    if num_slots > config.max_model_len or any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        return
    widths = [-(-num_slots // spec.block_size) for spec in specs]
    began, num_rows, took_s = clock(), 1, 0.0
    most_tokens = max(PROMPT_TOKENS, 1 + num_nodes)
    while (
        num_rows <= config.max_num_seqs
        and num_rows * most_tokens <= config.max_num_batched_tokens
        and num_rows * sum(widths) < plan.num_blocks
        and clock() - began + 2 * took_s <= BUDGET_S
    ):
        start = clock()
        ids = iter(range(1, plan.num_blocks))  # block 0 is nobody's for good
        nobody = _Nobody(run, num_rows, [tuple([next(ids) for _ in range(w)] for w in widths) for _ in range(num_rows)])
        try:
            nobody.begin(longest)
            if clock() - start > BUDGET_S / 8:
                return
            costs = {length: _quickest(nobody, length, clock) for length in sorted(lengths, reverse=True)}
        finally:
            nobody.end()
        yield num_rows, costs
        num_rows, took_s = 2 * num_rows, clock() - start


def _quickest(nobody: _Nobody, length: int, clock: Callable[[], float]) -> float:
    nobody.go_on(length)  # it still verifies drafts of the length before
    found: list[float] = []
    for _ in range(REPEATS):
        begin = clock()
        nobody.go_on(length)
        found.append(clock() - begin)
    return min(found)


def _plan(
    rows: list[int],
    starts: list[int],
    counts: list[int],
    *,
    new_rows: Sequence[NewRow] = (),
    freed_rows: Sequence[int] = (),
    draft_token_ids: dict[int, list[int]] | None = None,
    draft_parents: dict[int, list[int]] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0, rows=rows, request_ids=[f"nobody-{row}" for row in rows], num_computed_tokens=starts,
        num_scheduled_tokens=counts, samples=[True] * len(rows), total_num_scheduled_tokens=sum(counts),
        new_rows=list(new_rows), freed_rows=list(freed_rows), draft_token_ids=draft_token_ids or {},
        draft_parents=draft_parents or {},
    )  # fmt: skip
