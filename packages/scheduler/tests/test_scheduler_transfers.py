"""The scheduler with a tier behind its KV cache keeps the contract, and says why requests wait."""

from __future__ import annotations

from quire_interfaces import FullAttentionSpec, KVConnector, PauseState
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_scheduler import KVTransfers, Scheduler, SchedulerConfig
from quire_testkit.conformance.kv_transfer import TieredSchedulerSuite
from quire_testkit.conformance.scheduler import BLOCK, expected_of, make_request
from quire_testkit.memory_tier import MemoryTier


class TestScheduler(TieredSchedulerSuite):
    def make_scheduler(self, connector: KVConnector, *, num_blocks: int, **options: int) -> Scheduler:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="bfloat16")
        plan = plan_kv_cache({"layer": spec}, num_blocks=num_blocks + 1)
        cache = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK), on_computed=connector.offer)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        return Scheduler(SchedulerConfig(**options), cache, rules=[KVTransfers(cache, connector)])

    def test_the_reason_for_waiting(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        driver.add(make_request("r", range(22)))
        self.start_loading(driver, tier)
        scheduler = driver.scheduler
        assert isinstance(scheduler, Scheduler)
        assert scheduler.waiting_reasons() == {"kv_loading": 1}
        assert scheduler.stats().num_waiting_deferred == 1

    def test_who_comes_after_a_late_load_does_not_wait_for_it_either(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        driver.add(make_request("r", range(22)))
        self.start_loading(driver, tier)
        driver.scheduler.abort_requests(["r"])  # else it computes what the other one needs
        tier.late.append(tier.unfinished[0].job_id)
        for _ in range(3):
            driver.step()
        second = make_request("second", range(22))
        driver.add(second)
        for _ in range(20):
            driver.step()
        assert driver.transcripts["second"].token_ids == expected_of(second)
        tier.finishes_alone = True
        driver.run()

    def test_only_an_idle_step_waits(self) -> None:
        """A step that computes, or one planned while another is under way, must not be held up by a load."""
        tier = self.held(range(22))
        driver = self.driver(tier, depth=1)
        driver.add(make_request("busy", [1, 2], max_tokens=12), make_request("r", range(22)))
        self.start_loading(driver, tier)
        while driver.transcripts["busy"].finish_reason is None:
            driver.step()
        assert [step for step in driver.steps if step.rows]
        assert not any(step.kv_transfer.waits for step in driver.steps if step.rows and step.kv_transfer)
        for _ in range(3):
            driver.step()
        assert driver.steps[-1].kv_transfer is not None
        assert driver.steps[-1].kv_transfer.waits

    def test_pausing_holds_a_request_that_has_loaded(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        request = make_request("r", range(22))
        driver.add(request)
        self.start_loading(driver, tier)
        driver.scheduler.pause(PauseState.ALL_HELD)
        tier.finish_loads()
        driver.run()
        assert driver.transcripts["r"].token_ids == []
        driver.scheduler.pause(PauseState.RUNNING)
        driver.run()
        assert driver.transcripts["r"].token_ids == expected_of(request)
        assert driver.transcripts["r"].num_cached_tokens == 20

    def test_a_step_stores_little_beside_what_it_computes(self) -> None:
        tier = MemoryTier()
        driver = self.driver(tier)
        driver.add(make_request("r", range(120), max_tokens=12))
        driver.run()
        num_stored = [
            (step.total_num_scheduled_tokens, sum(len(job.blocks) for job in step.kv_transfer.stores))
            for step in driver.steps
            if step.kv_transfer
        ]
        assert [count for tokens, count in num_stored if tokens > 1] == [7], "the second chunk, of 56 tokens"
        assert {count for tokens, count in num_stored if tokens == 1} <= {0, 1, 2, 3, 4}
        assert sum(count for _, count in num_stored) == len(tier.blocks) == 131 // BLOCK

    def test_nobody_takes_the_blocks_that_a_running_request_waits_for(self) -> None:
        tier = self.held(range(100, 117), range(200, 205))
        driver = self.driver(tier, num_blocks=9, long_prefill_token_threshold=8)
        running = make_request("running", range(32), max_tokens=1)
        others = [make_request("four", range(100, 117)), make_request("one", range(200, 205))]
        driver.add(running, others[0])
        driver.step()
        driver.step()
        driver.add(others[1])
        for _ in range(5):
            driver.step()
        assert len(tier.unfinished) == 1, "the running request wants two blocks; the free one is not for another's load"
        tier.finish_loads()
        for _ in range(4):
            driver.step()
        assert driver.transcripts["running"].token_ids == expected_of(running)
        tier.finishes_alone = True
        driver.run()
        for request in others:
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
        self.check_all_free(driver)

    def test_a_load_waits_for_room_while_somebody_runs(self) -> None:
        tier = self.filled(range(22))
        driver = self.driver(tier, num_blocks=8)
        running = make_request("running", range(50, 66), max_tokens=6)
        request = make_request("r", range(22), max_tokens=2)
        driver.add(running)
        driver.step()
        driver.add(request)
        driver.run()
        assert driver.transcripts["r"].num_cached_tokens == 20
        for each in (running, request):
            assert driver.transcripts[each.request_id].token_ids == expected_of(each)
        assert driver.scheduler.stats().num_preemptions_total == 0
