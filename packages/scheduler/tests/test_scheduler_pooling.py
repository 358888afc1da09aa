"""Requests that are pooled: their prompts may fill the context, and what comes of them is no text."""

from __future__ import annotations

import dataclasses

import pytest

from quire_interfaces import (
    ContextLengthError,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    PooledOutput,
    PoolingParams,
    Request,
    SchedulerOutput,
)
from quire_kv_cache import NoKVCache
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import make_request

POOLED = PooledOutput(b"1234", (1,))


def pooling_request(request_id: str, length: int) -> Request:
    request = make_request(request_id, [5] * length, max_tokens=1, stop_token_ids=[0])
    return dataclasses.replace(request, pooling_params=PoolingParams(task="embed"), second_segment_start=3)


def result_of(output: SchedulerOutput) -> ModelRunnerOutput:
    """Pools rows with parameters for it, and samples 7 of the others."""
    pooled = {new.row: POOLED for new in output.new_rows if new.pooling_params is not None}
    tokens = [[0] if row in pooled else [7] for row in output.rows]
    return ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=tokens, pooled=pooled)


@pytest.mark.parametrize("depth", [0, 1])
def test_whole_texts_share_steps_and_end_with_what_was_pooled(depth: int) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40, max_model_len=40, enable_chunked_prefill=False)
    scheduler = Scheduler(config, NoKVCache())
    lengths = [40, 1, 17, 22, 2, 30]
    for number, length in enumerate(lengths):
        scheduler.add_request(pooling_request(f"r{number}", length))
    in_flight: list[SchedulerOutput] = []
    steps: list[list[int]] = []
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_requests():
        while len(in_flight) <= depth and (output := scheduler.schedule()) is not None:
            in_flight.append(output)
            if output.rows:
                steps.append(output.num_scheduled_tokens)
                assert all(output.samples)
                assert {new.second_segment_start for new in output.new_rows} == {3}
        output = in_flight.pop(0)
        outputs += scheduler.update(output, result_of(output))
    assert steps == [[40], [1, 17, 22], [2, 30]]
    expected = [EngineCoreOutput(f"r{i}", [], FinishReason.STOP, pooled=POOLED) for i in range(len(lengths))]
    assert outputs == expected
    stats = scheduler.stats()
    assert (stats.num_prompt_tokens_total, stats.num_generation_tokens_total) == (sum(lengths), 0)


def test_a_text_longer_than_the_context_is_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=2, max_model_len=40), NoKVCache())
    scheduler.add_request(pooling_request("fills", 40))
    with pytest.raises(ContextLengthError, match="41 tokens"):
        scheduler.add_request(pooling_request("long", 41))
