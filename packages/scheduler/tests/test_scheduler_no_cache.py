"""A network without keys and values: the scheduler plans its requests, and none ever waits for blocks."""

from __future__ import annotations

from quire_interfaces import ModelRunnerOutput
from quire_kv_cache import NoKVCache
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import make_request


def test_requests_run_in_chunks_and_end() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100), NoKVCache())
    for number in range(6):
        scheduler.add_request(make_request(f"r{number}", [5] * (20 + 10 * number), max_tokens=2))
    ended = set()
    for _ in range(60):
        output = scheduler.schedule()
        if output is None:
            break
        assert output.total_num_scheduled_tokens <= 16
        assert all(new.block_ids == () for new in output.new_rows)
        tokens = [[7] if samples else [] for samples in output.samples]
        outputs = scheduler.update(output, ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=tokens))
        ended |= {each.request_id for each in outputs if each.finish_reason is not None}
    assert ended == {f"r{number}" for number in range(6)}
    assert scheduler.stats().kv_cache_usage == 0
    assert scheduler.reset_prefix_cache()
