"""Encoder inputs: read whole in a request's first step, within a budget of their own, again when it re-enters."""

from __future__ import annotations

import pytest

from quire_interfaces import (
    ConfigError,
    ContextLengthError,
    CrossAttentionSpec,
    FullAttentionSpec,
    ModelRunnerOutput,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_scheduler import EncoderRule, Scheduler, SchedulerConfig

BLOCK, LONGEST = 4, 20


def make_scheduler(*, num_blocks: int = 60, prefix_caching: bool = True) -> Scheduler:
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 1, "dtype": "bfloat16"}
    specs = {"own": FullAttentionSpec(**common), "cross": CrossAttentionSpec(**common, max_encoder_tokens=LONGEST)}
    plan = plan_kv_cache(specs, num_blocks=num_blocks + 1)
    cache = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=LONGEST)
    return Scheduler(config, cache, rules=[EncoderRule(LONGEST, LONGEST)])


def request(name: str, encoder: list[int], max_tokens: int = 30) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[0],
        encoder_token_ids=encoder,
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=max_tokens,
    )


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    tokens = [[5] if samples else [] for samples in output.samples]
    scheduler.update(output, ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=tokens))
    return output


def test_the_whole_input_is_read_in_the_first_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", list(range(9))))
    first = step(scheduler)
    (new,) = first.new_rows
    assert (new.token_ids, new.encoder_token_ids, new.num_encoder_tokens) == ([0], list(range(9)), 9)
    assert [len(blocks) for blocks in new.block_ids] == [1, 3]
    assert first.total_num_scheduled_tokens == 1, "the encoder's tokens are not the decoder's"
    assert not step(scheduler).new_rows


def test_encoders_share_a_budget_that_decodes_do_not_take_from() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for name, length in (("a", 9), ("b", 11), ("c", 20), ("d", 1)):
        scheduler.add_request(request(name, list(range(length))))
    entered = [[new.request_id for new in step(scheduler).new_rows] for _ in range(4)]
    # c fills a step by itself although a and b run; d keeps its place behind it.
    assert entered == [["a", "b"], ["c"], ["d"], []]


def test_an_input_that_the_cache_has_is_not_read_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", list(range(20))))
    step(scheduler)
    scheduler.add_request(request("same", list(range(20))))
    scheduler.add_request(request("other", list(range(1, 20))))
    same, other = step(scheduler).new_rows
    assert (same.encoder_token_ids, same.num_encoder_tokens) == ([], 20)
    assert other.encoder_token_ids == list(range(1, 20))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_who_was_preempted_reads_it_again_unless_it_is_still_there(prefix_caching: bool) -> None:
    """8 blocks hold the first request alone, or the beginnings of both."""
    scheduler = make_scheduler(num_blocks=8, prefix_caching=prefix_caching)
    scheduler.add_request(request("first", [1] * 8, max_tokens=24))
    scheduler.add_request(request("second", [2] * 8, max_tokens=11))
    readers: list[tuple[str, bool]] = []
    while scheduler.has_requests():
        readers += [(new.request_id, bool(new.encoder_token_ids)) for new in step(scheduler).new_rows]
    assert readers[:2] == [("first", True), ("second", True)]
    assert set(readers[2:]) == {("second", not prefix_caching)}
    assert scheduler.stats().num_preemptions_total > 0
    assert scheduler.stats().kv_cache_usage == 0


def test_what_can_never_be_read_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ContextLengthError, match="has 21 tokens, and the encoder reads at most 20, all at once"):
        scheduler.add_request(request("long", [1] * 21))
    with pytest.raises(RequestError, match="the encoder's prompt has no tokens"):
        scheduler.add_request(request("none", []))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(20\) must be at least that"):
        EncoderRule(21, 20)
    without = Scheduler(scheduler.config, scheduler._allocator, rules=[EncoderRule(0, 20)])
    with pytest.raises(RequestError, match="this model has no encoder"):
        without.add_request(request("a", [1]))
