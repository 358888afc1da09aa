"""The fake runner refuses plans that break a promise, and its executor keeps the order of steps."""

from __future__ import annotations

import dataclasses

import pytest

from quire_interfaces import ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput
from quire_testkit.fake_runner import FakeExecutor, FakeRunner, PlanError, expected_output

PROMPT = [5, 6, 7, 8, 9]


def first_step(**changes: object) -> SchedulerOutput:
    """Row 1 is filled with a prompt of 5 tokens, all of which are computed."""
    new = NewRow(
        row=1,
        request_id="a",
        token_ids=PROMPT,
        num_prompt_tokens=5,
        num_computed_tokens=0,
        block_ids=([1, 2],),
        sampling_params=SamplingParams(),
        seed=3,
    )
    return dataclasses.replace(step(0, start=0, num=5, new_rows=[new]), **changes)


def step(step_id: int, *, start: int, num: int = 1, **more: object) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=[1],
        request_ids=["a"],
        num_computed_tokens=[start],
        num_scheduled_tokens=[num],
        samples=[True],
        total_num_scheduled_tokens=num,
        **more,
    )


def make_runner(**options: object) -> FakeRunner:
    return FakeRunner(num_rows=2, block_sizes=(4,), num_blocks=8, max_model_len=20, **options)


def run(runner: FakeRunner, *steps: SchedulerOutput) -> list[int]:
    return [token for output in steps for tokens in runner.execute(output).sampled_token_ids for token in tokens]


def test_tokens_are_those_of_the_oracle():
    tokens = run(make_runner(), first_step(), *[step(i, start=4 + i) for i in range(1, 4)])
    assert tokens == expected_output(PROMPT, 4, request_seed=3)
    assert tokens != expected_output(PROMPT, 4, request_seed=4)
    assert tokens != expected_output(PROMPT[:-1], 4, request_seed=3)


def test_chunks_give_the_same_token():
    chunk = first_step(num_scheduled_tokens=[2], total_num_scheduled_tokens=2, samples=[False])
    assert run(make_runner(), chunk, step(1, start=2, num=3)) == expected_output(PROMPT, 1, request_seed=3)


def test_drafts_are_accepted_up_to_the_first_wrong_one():
    right = expected_output(PROMPT, 5, request_seed=3)
    runner = make_runner()
    run(runner, first_step())
    drafts = [right[1], right[2], (right[3] + 1) % 1000]
    assert run(runner, step(1, start=5, num=4, draft_token_ids={1: drafts}, new_block_ids={1: ([3],)})) == right[1:4]
    assert run(runner, step(2, start=8)) == right[4:5]


def test_own_proposals():
    runner = make_runner(num_draft_tokens=3, draft_accuracy=1.0)
    result = runner.execute(first_step())
    right = expected_output(PROMPT, 4, request_seed=3)
    assert [*result.sampled_token_ids[0], *result.draft_token_ids[1]] == right


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": [0]}, "new rows"),
        ({"new_rows": []}, "never filled"),
        ({"num_computed_tokens": [1]}, "goes on at 1"),
        ({"samples": [False]}, "samples is False"),
        ({"num_scheduled_tokens": [4], "total_num_scheduled_tokens": 4}, "samples is True"),
        ({"num_scheduled_tokens": [6], "total_num_scheduled_tokens": 6}, "6 of 5"),
        ({"num_scheduled_tokens": [0], "total_num_scheduled_tokens": 0}, "no tokens"),
        ({"total_num_scheduled_tokens": 4}, "total 4"),
        ({"request_ids": ["b"]}, "called b"),
        ({"request_ids": []}, "request_ids"),
        ({"freed_rows": [0]}, "freed while empty"),
        ({"new_block_ids": {1: ([3],)}}, "new_block_ids too"),
        ({"new_block_ids": {0: ([3],)}}, "without an entry"),
        ({"draft_token_ids": {1: [1]}}, "not computed"),
    ],
)
def test_broken_plans(changes, complaint):
    with pytest.raises(PlanError, match=complaint):
        make_runner().execute(first_step(**changes))


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [([1], "no slot"), ([1, 9], "out of range"), ([1, 0], "null block"), ([1, 1], "another request's KV")],
)
def test_broken_block_tables(blocks, complaint):
    new = dataclasses.replace(first_step().new_rows[0], block_ids=(blocks,))
    with pytest.raises(PlanError, match=complaint):
        make_runner().execute(first_step(new_rows=[new]))


def test_a_prefix_that_was_never_computed():
    new = dataclasses.replace(first_step().new_rows[0], num_computed_tokens=4)
    plan = first_step(new_rows=[new], num_computed_tokens=[4], num_scheduled_tokens=[1], total_num_scheduled_tokens=1)
    with pytest.raises(PlanError, match="another request's KV at position 0"):
        make_runner().execute(plan)


def test_a_block_in_two_rows():
    runner = make_runner()
    run(runner, first_step())
    new = dataclasses.replace(first_step().new_rows[0], row=0, request_id="b")
    plan = dataclasses.replace(first_step(), step_id=1, rows=[0], request_ids=["b"], new_rows=[new])
    with pytest.raises(PlanError, match="in the tables of"):
        runner.execute(plan)


def test_a_raising_request_leaves_no_trace():
    runner = make_runner()
    runner.raise_on.add("a")
    with pytest.raises(RuntimeError, match="request a broke"):
        runner.execute(first_step())
    assert runner.num_filled_rows == 0
    runner.raise_on.clear()
    with pytest.raises(RuntimeError, match="from a step that raised"):
        runner.execute(step(1, start=5))
    again = dataclasses.replace(first_step(), step_id=2, freed_rows=[1])
    assert run(runner, again) == expected_output(PROMPT, 1, request_seed=3)


@pytest.mark.parametrize("step_time_s", [0.0, 0.001])
def test_the_executor_runs_steps_in_order(step_time_s):
    executor = FakeExecutor(make_runner(), step_time_s=step_time_s)
    futures = [executor.execute(output) for output in (first_step(), step(1, start=5), step(2, start=6))]
    results: list[ModelRunnerOutput] = [future.result(timeout=10) for future in futures]
    tokens = [result.sampled_token_ids[0][0] for result in results]
    assert tokens == expected_output(PROMPT, 3, request_seed=3)
    broken = executor.execute(step(3, start=99))
    assert isinstance(broken.exception(timeout=10), PlanError)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute(step(4, start=7))
