"""What a KV tier (`KVConnector` and `KVTransferWorker`) and a scheduler with one must do, as tests to inherit.

class TestMyTier(KVTransferSuite):
    def make_tier(self, memory): return my_connector, my_worker

class TestMyScheduler(TieredSchedulerSuite):
    def make_scheduler(self, connector, **options): return MyScheduler(...)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from quire_interfaces import (
    BlockKey,
    BlockMemory,
    BlockTransfer,
    KVConnector,
    KVTransferJob,
    KVTransferOutput,
    KVTransferPlan,
    KVTransferWorker,
    Scheduler,
)
from quire_testkit.conformance.scheduler import BLOCK, Driver, expected_of, make_request
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, TieredFakeRunner

__all__ = ["KVTransferSuite", "LayeredMemory", "TieredSchedulerSuite"]


class LayeredMemory(BlockMemory):
    """A `BlockMemory` of two groups: two layers of 24 bytes per block, and one of 40."""

    layer_bytes = ((24, 24), (40,))

    def __init__(self, num_blocks: int) -> None:
        self._layers = [[bytearray(num_blocks * size) for size in sizes] for sizes in self.layer_bytes]

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """See `quire_interfaces.BlockMemory`."""
        return [
            memoryview(layer)[block_id * size : (block_id + 1) * size]
            for layer, size in zip(self._layers[group], self.layer_bytes[group], strict=True)
        ]

    def fill(self, group: int, block_id: int, seed: int) -> list[bytes]:
        """Write something that belongs to `seed` alone; returns it."""
        content = []
        for layer, buffer in enumerate(self.buffers(group, block_id)):
            buffer[:] = bytes((seed * 31 + layer * 7 + i * (seed + 3)) % 256 for i in range(len(buffer)))
            content.append(bytes(buffer))
        return content

    def read(self, group: int, block_id: int) -> list[bytes]:
        """The content of a block."""
        return [bytes(buffer) for buffer in self.buffers(group, block_id)]


def _hash(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


class KVTransferSuite:
    """Tests of both halves of a tier. Implement `make_tier`; the tier begins empty."""

    def make_tier(self, memory: BlockMemory, block_bytes: tuple[int, ...]) -> tuple[KVConnector, KVTransferWorker]:
        """A fresh, empty tier.

        Args:
            memory: Where the worker copies from and to.
            block_bytes: Bytes of a block per group, all layers together.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_tier")

    @pytest.fixture
    def memory(self) -> LayeredMemory:
        return LayeredMemory(32)

    @pytest.fixture
    def tier(self, memory: LayeredMemory) -> Any:
        connector, worker = self.make_tier(memory, tuple(map(sum, memory.layer_bytes)))
        yield connector, worker
        worker.close()

    def finish(self, worker: KVTransferWorker, job_id: int) -> list[bool]:
        """Poll until the job has ended."""
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            output = worker.poll(waits=True)
            if output is not None and job_id in output.finished:
                return output.finished[job_id]
        raise AssertionError(f"job {job_id} did not end")

    def store(
        self,
        tier: tuple[KVConnector, KVTransferWorker],
        blocks: Sequence[tuple[BlockKey, int]],
        job_id: int = 0,
        acknowledged: Sequence[int] = (),
    ) -> list[bool]:
        """Offer blocks and store what is wanted of them, as a scheduler does."""
        connector, worker = tier
        for key, _ in blocks:
            connector.offer(key.group, [key.block_hash])
        assert connector.has_stores
        keys = connector.take_stores(10_000)
        where = dict(blocks)
        job = KVTransferJob(job_id, tuple(BlockTransfer(key, where[key]) for key in keys))
        worker.begin(KVTransferPlan(stores=[job], acknowledged=list(acknowledged)))
        arrived = self.finish(worker, job_id)
        connector.stored(keys, arrived)
        return arrived

    def load(self, worker: KVTransferWorker, blocks: Sequence[tuple[BlockKey, int]], job_id: int = 1) -> list[bool]:
        """Load blocks."""
        job = KVTransferJob(job_id, tuple(BlockTransfer(key, block_id) for key, block_id in blocks))
        worker.begin(KVTransferPlan(loads=[job]))
        return self.finish(worker, job_id)

    def test_what_was_stored_comes_back(self, tier: Any, memory: LayeredMemory) -> None:
        connector, worker = tier
        keys = [BlockKey(number % 2, _hash(number)) for number in range(8)]
        contents = [memory.fill(key.group, 1 + number, number) for number, key in enumerate(keys)]
        assert not any(map(connector.contains, keys))
        assert self.store(tier, [(key, 1 + number) for number, key in enumerate(keys)]) == [True] * 8
        assert all(map(connector.contains, keys))
        assert self.load(worker, [(key, 20 + number) for number, key in enumerate(keys)]) == [True] * 8
        for number, key in enumerate(keys):
            assert memory.read(key.group, 20 + number) == contents[number]

    def test_equal_hashes_of_two_groups_are_two_blocks(self, tier: Any, memory: LayeredMemory) -> None:
        connector, _ = tier
        memory.fill(0, 1, 1)
        self.store(tier, [(BlockKey(0, _hash(5)), 1)])
        assert connector.contains(BlockKey(0, _hash(5)))
        assert not connector.contains(BlockKey(1, _hash(5)))

    def test_a_store_is_copied_at_once(self, tier: Any, memory: LayeredMemory) -> None:
        connector, worker = tier
        key = BlockKey(0, _hash(1))
        content = memory.fill(0, 1, 1)
        connector.offer(0, [key.block_hash])
        assert connector.take_stores(10_000) == [key]
        worker.begin(KVTransferPlan(stores=[KVTransferJob(0, (BlockTransfer(key, 1),))]))
        memory.fill(0, 1, 2)
        assert self.finish(worker, 0) == [True]
        connector.stored([key], [True])
        assert self.load(worker, [(key, 2)]) == [True]
        assert memory.read(0, 2) == content

    def test_what_nobody_stored_does_not_arrive(self, tier: Any, memory: LayeredMemory) -> None:
        _, worker = tier
        memory.fill(0, 1, 1)
        key = BlockKey(0, _hash(1))
        self.store(tier, [(key, 1)])
        absent = BlockKey(0, _hash(2))
        assert self.load(worker, [(absent, 2), (key, 3), (absent, 4)]) == [False, True, False]

    def test_a_job_is_reported_until_it_is_acknowledged(self, tier: Any, memory: LayeredMemory) -> None:
        _, worker = tier
        memory.fill(0, 1, 1)
        self.store(tier, [(BlockKey(0, _hash(1)), 1)])
        assert [self.finish(worker, 0) for _ in range(3)] == [[True]] * 3
        worker.begin(KVTransferPlan(acknowledged=[0, 77]))
        output = worker.poll()
        assert output is None or 0 not in output.finished

    def test_nothing_to_say(self, tier: Any) -> None:
        _, worker = tier
        worker.begin(KVTransferPlan())
        output = worker.poll(waits=True)
        assert output is None or output == KVTransferOutput()

    def test_what_the_tier_has_is_not_wanted_again(self, tier: Any, memory: LayeredMemory) -> None:
        connector, _ = tier
        memory.fill(0, 1, 1)
        self.store(tier, [(BlockKey(0, _hash(1)), 1)])
        connector.offer(0, [_hash(1)])
        assert connector.take_stores(10_000) == []
        assert not connector.has_stores

    def test_offers_are_taken_in_pieces(self, tier: Any, memory: LayeredMemory) -> None:
        connector, worker = tier
        connector.offer(0, [_hash(number) for number in range(2000)])
        taken: set[BlockKey] = set()
        job_id = 0
        while connector.has_stores:
            keys = connector.take_stores(7)
            assert 0 < len(keys) <= 7, "with nothing under way there is room"
            assert taken.isdisjoint(keys)
            taken.update(keys)
            assert all(key == BlockKey(0, key.block_hash) for key in keys)
            worker.begin(KVTransferPlan(stores=[KVTransferJob(job_id, tuple(BlockTransfer(key, 3) for key in keys))]))
            connector.stored(keys, self.finish(worker, job_id))
            job_id += 1
        assert 0 < len(taken) <= 2000

    def test_an_evicted_block_makes_room_for_another(self, tier: Any) -> None:
        connector, _ = tier
        for number in range(3000):
            connector.offer(0, [_hash(number)])
            keys = connector.take_stores(10_000)
            assert keys == [BlockKey(0, _hash(number))]
            connector.stored(keys, [False])

    def test_a_stopped_connector_wants_and_has_nothing(self, tier: Any, memory: LayeredMemory) -> None:
        connector, _ = tier
        memory.fill(0, 1, 1)
        self.store(tier, [(BlockKey(0, _hash(1)), 1)])
        connector.offer(0, [_hash(2)])
        connector.stop()
        connector.offer(0, [_hash(3)])
        assert not connector.contains(BlockKey(0, _hash(1)))
        assert not connector.has_stores
        assert connector.take_stores(10_000) == []

    def test_closing_twice(self, tier: Any, memory: LayeredMemory) -> None:
        _, worker = tier
        worker.close()
        worker.close()
        before = memory.read(0, 2)
        worker.begin(KVTransferPlan(loads=[KVTransferJob(9, (BlockTransfer(BlockKey(0, _hash(1)), 2),))]))
        assert memory.read(0, 2) == before


class TieredSchedulerSuite:
    """Tests of a scheduler with a tier. Implement `make_scheduler`."""

    def make_scheduler(
        self,
        connector: KVConnector,
        *,
        num_blocks: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_speculative_tokens: int = 0,
    ) -> Scheduler:
        """A fresh scheduler over a fresh KV cache with prefix caching and one group of full attention.

        Args:
            connector: The tier; computed blocks are offered to it.
            num_blocks: Blocks of `quire_testkit.conformance.scheduler.BLOCK` tokens, without the null block.
            max_num_seqs: Rows.
            max_num_batched_tokens: Token budget of a step.
            num_speculative_tokens: Most drafts verified per request and step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_scheduler")

    def driver(self, tier: MemoryTier, *, num_blocks: int = 64, depth: int = 0, **options: int) -> Driver:
        """A scheduler with an empty memory over `tier`, and a runner for it."""
        scheduler = self.make_scheduler(MemoryConnector(tier), num_blocks=num_blocks, **options)
        runner = TieredFakeRunner(
            tier,
            num_rows=options.get("max_num_seqs", 8),
            block_sizes=(BLOCK,),
            num_blocks=num_blocks + 1,
            num_draft_tokens=options.get("num_speculative_tokens", 0),
        )
        return Driver(scheduler, runner, depth)

    def filled(self, *prompts: Sequence[int]) -> MemoryTier:
        """A tier that has the KV of these prompts, whose scheduler is gone."""
        tier = MemoryTier()
        driver = self.driver(tier)
        driver.add(*[make_request(f"p{i}", prompt, max_tokens=1) for i, prompt in enumerate(prompts)])
        driver.run()
        assert len(tier.blocks) >= max(len(prompt) // BLOCK for prompt in prompts)
        return tier

    def held(self, *prompts: Sequence[int]) -> MemoryTier:
        """As `filled`; its loads end when the test says so."""
        tier = self.filled(*prompts)
        tier.finishes_alone = False
        return tier

    def start_loading(self, driver: Driver, tier: MemoryTier) -> None:
        """Step until a load is under way."""
        for _ in range(10):
            driver.step()
            if tier.unfinished:
                return
        raise AssertionError("no load was begun")

    def check_all_free(self, driver: Driver) -> None:
        """Nothing is left over."""
        assert driver.scheduler.stats().kv_cache_usage == 0
        assert not driver.scheduler.has_requests()
        assert not driver.scheduler.has_work()
        assert driver.runner.num_filled_rows == 0

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("num_drafts", [0, 3])
    def test_what_the_tier_has_is_not_computed(self, depth: int, num_drafts: int) -> None:
        tier = self.filled(range(22))
        driver = self.driver(tier, depth=depth, num_speculative_tokens=num_drafts)
        request = make_request("r", range(22), max_tokens=9)
        driver.add(request)
        driver.run()
        transcript = driver.transcripts["r"]
        assert transcript.token_ids == expected_of(request)
        assert transcript.num_cached_tokens == 20
        stats = driver.scheduler.stats()
        assert stats.external_prefix_cache_query_tokens_total == 22
        assert stats.external_prefix_cache_hit_tokens_total == 20
        assert (stats.prefix_cache_query_tokens_total, stats.prefix_cache_hit_tokens_total) == (22, 0)
        assert (stats.num_cached_prompt_tokens_total, stats.num_external_prompt_tokens_total) == (20, 20)
        assert next(step for step in driver.steps if step.rows).num_scheduled_tokens == [2]
        self.check_all_free(driver)

    def test_memory_comes_first_and_the_tier_continues(self) -> None:
        tier = self.filled(range(30))
        driver = self.driver(tier)
        driver.add(make_request("short", [*range(13)], max_tokens=1))
        driver.run()
        driver.add(make_request("long", range(30), max_tokens=1))
        driver.run()
        assert driver.transcripts["long"].num_cached_tokens == 28
        stats = driver.scheduler.stats()
        assert stats.prefix_cache_hit_tokens_total == 12, "what was loaded for the first request is in memory now"
        assert stats.external_prefix_cache_hit_tokens_total == 12 + 16
        assert stats.external_prefix_cache_query_tokens_total == 13 + 18

    def test_others_go_on_while_a_request_loads(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        waiting, other = make_request("waiting", range(22)), make_request("other", [7, 8, 9])
        driver.add(waiting)
        self.start_loading(driver, tier)
        driver.add(other)
        for _ in range(20):
            driver.step()
        assert driver.transcripts["other"].token_ids == expected_of(other)
        assert driver.transcripts["waiting"].token_ids == []
        assert driver.scheduler.num_requests() == (0, 1)
        tier.finishes_alone = True
        driver.run()
        assert driver.transcripts["waiting"].token_ids == expected_of(waiting)
        assert driver.transcripts["waiting"].num_cached_tokens == 20
        self.check_all_free(driver)

    def test_blocks_that_do_not_arrive_are_computed(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        request = make_request("r", range(22))
        driver.add(request)
        self.start_loading(driver, tier)
        third = tier.unfinished[0].blocks[2].key
        tier.finish_loads(lost=frozenset({third}))
        tier.finishes_alone = True
        driver.run()
        assert driver.transcripts["r"].token_ids == expected_of(request)
        assert driver.transcripts["r"].num_cached_tokens == 8
        assert driver.scheduler.stats().external_prefix_cache_hit_tokens_total == 8
        self.check_all_free(driver)

    def test_abort_while_loading(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        driver.add(make_request("gone", range(22)))
        self.start_loading(driver, tier)
        assert driver.scheduler.abort_requests(["gone"]) == ["gone"]
        assert not driver.scheduler.has_requests()
        again = make_request("gone", range(22))
        driver.add(again)
        driver.step()
        assert len(tier.unfinished) == 1, "the load is under way already"
        tier.finishes_alone = True
        driver.run()
        assert driver.transcripts["gone"].token_ids == expected_of(again)
        assert driver.transcripts["gone"].num_cached_tokens == 20
        self.check_all_free(driver)

    def test_an_id_that_is_used_again_waits_for_nothing_of_the_past(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        driver.add(make_request("r", range(22)))
        self.start_loading(driver, tier)
        driver.scheduler.abort_requests(["r"])
        again = make_request("r", [7, 8, 9])
        driver.add(again)
        for _ in range(20):
            driver.step()
        assert tier.unfinished
        assert driver.transcripts["r"].token_ids == expected_of(again)
        tier.finishes_alone = True
        driver.run()
        self.check_all_free(driver)

    def test_what_was_taken_in_is_acknowledged(self) -> None:
        tier = self.filled(range(22))
        driver = self.driver(tier)
        driver.add(make_request("r", range(22), max_tokens=30))
        driver.run()
        plans = [step.kv_transfer for step in driver.steps if step.kv_transfer]
        jobs = [job.job_id for plan in plans[:-2] for job in (*plan.loads, *plan.stores)]
        assert len(jobs) > 5
        assert set(jobs) <= {job_id for plan in plans for job_id in plan.acknowledged}

    def test_equal_prompts_are_loaded_once(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        requests = [make_request(f"r{i}", [*range(22), i], seed=i) for i in range(4)]
        driver.add(*requests)
        self.start_loading(driver, tier)
        assert len(tier.unfinished) == 1
        tier.finishes_alone = True
        driver.run()
        loads = [job for step in driver.steps if step.kv_transfer for job in step.kv_transfer.loads]
        assert len(loads) == 1
        for request in requests:
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
            assert driver.transcripts[request.request_id].num_cached_tokens == 20
        self.check_all_free(driver)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_full_cache_waits_for_loads_and_preempts_nobody(self, depth: int) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier, num_blocks=8, depth=depth)
        running = make_request("running", [50, 51], max_tokens=20)
        loading = make_request("loading", range(22), max_tokens=4)
        driver.add(running, loading)
        self.start_loading(driver, tier)
        for _ in range(30):
            driver.step()
        assert len(driver.transcripts["running"].token_ids) < 20, "the load holds the blocks that it needs"
        tier.finishes_alone = True
        driver.run()
        for request in (running, loading):
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
        self.check_all_free(driver)

    def test_preemption_while_another_loads_is_computed_right(self) -> None:
        tier = self.held(range(22), range(100, 122))
        driver = self.driver(tier, num_blocks=14)
        requests = [
            make_request("a", range(200, 210), max_tokens=20),
            make_request("b", range(22), max_tokens=8),
            make_request("c", range(100, 122), max_tokens=8),
            make_request("d", range(300, 310), max_tokens=20),
        ]
        driver.add(*requests)
        for number in range(400):
            driver.step()
            if number % 7 == 6 and tier.unfinished:
                tier.finish_loads(1)
        tier.finishes_alone = True
        driver.run()
        for request in requests:
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
        self.check_all_free(driver)

    def test_a_preempted_request_may_load_what_it_had(self) -> None:
        tier = MemoryTier()
        driver = self.driver(tier)
        request = make_request("r", range(21), max_tokens=20)
        driver.add(request)
        for _ in range(6):
            driver.step()
        assert driver.scheduler.reset_prefix_cache(preempt_running=True)
        num_steps = len(driver.steps)
        driver.run()
        assert driver.transcripts["r"].token_ids == expected_of(request)
        recomputed = next(step for step in driver.steps[num_steps:] if step.rows)
        assert recomputed.num_computed_tokens == [24]
        self.check_all_free(driver)

    def test_reset_prefix_cache_while_loading(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        request, other = make_request("r", range(22)), make_request("other", [1, 2])
        driver.add(request, other)
        self.start_loading(driver, tier)
        assert driver.scheduler.reset_prefix_cache(preempt_running=True)
        tier.finishes_alone = True
        driver.run()
        for each in (request, other):
            assert driver.transcripts[each.request_id].token_ids == expected_of(each)
        self.check_all_free(driver)

    def test_a_report_that_is_lost_is_made_again(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        request, bad = make_request("r", range(22)), make_request("bad", [1, 2])
        driver.add(request)
        self.start_loading(driver, tier)
        tier.finish_loads()
        driver.add(bad)
        output = driver.scheduler.schedule()
        assert output is not None
        driver.runner.execute(output)  # its result is dropped, as when an earlier step failed
        driver.scheduler.discard_step(output)
        tier.finishes_alone = True
        driver.run()
        for each in (request, bad):
            assert driver.transcripts[each.request_id].token_ids == expected_of(each)
        assert driver.transcripts["r"].num_cached_tokens == 20
        self.check_all_free(driver)

    def test_a_late_load_is_not_waited_for(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        request = make_request("r", range(22))
        driver.add(request)
        self.start_loading(driver, tier)
        tier.late.append(tier.unfinished[0].job_id)
        for _ in range(20):
            driver.step()
        assert driver.transcripts["r"].token_ids == expected_of(request)
        assert driver.transcripts["r"].num_cached_tokens == 0
        assert driver.scheduler.stats().kv_cache_usage > 0, "the blocks are not to be touched yet"
        tier.finishes_alone = True
        driver.run()
        self.check_all_free(driver)

    def test_a_late_load_leaves_others_their_turn(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier, num_blocks=8)
        driver.add(make_request("r", range(22), max_tokens=1))
        self.start_loading(driver, tier)
        tier.late.append(tier.unfinished[0].job_id)
        other = make_request("other", [50, 51], max_tokens=25)
        driver.add(other)
        for _ in range(60):
            driver.step()
        assert driver.transcripts["other"].finish_reason is None, "7 blocks are too many while the load holds 5"
        tier.finishes_alone = True
        driver.run()
        assert driver.transcripts["other"].token_ids == expected_of(other)
        self.check_all_free(driver)

    def test_a_tier_that_breaks_is_done_without(self) -> None:
        tier = self.held(range(22))
        driver = self.driver(tier)
        first, second = make_request("first", range(22)), make_request("second", range(100, 122))
        driver.add(first)
        self.start_loading(driver, tier)
        tier.is_stopped = True
        tier.finishes_alone = True
        driver.run()
        driver.add(second)
        driver.run()
        for request in (first, second):
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
            assert driver.transcripts[request.request_id].num_cached_tokens == 0
        assert not any(step.kv_transfer and step.kv_transfer.stores for step in driver.steps[-10:])
        self.check_all_free(driver)

    def test_stores_go_on_until_the_tier_has_all(self) -> None:
        tier = MemoryTier(max_stores=1)
        driver = self.driver(tier)
        request = make_request("r", range(30), max_tokens=11)
        driver.add(request)
        driver.run()
        assert len(tier.blocks) == 40 // BLOCK
        self.check_all_free(driver)

    def test_prompt_logprobs_need_every_position(self) -> None:
        tier = self.filled(range(22))
        driver = self.driver(tier)
        request = make_request("r", range(22), prompt_logprobs=0)
        driver.add(request)
        driver.run()
        assert driver.transcripts["r"].num_cached_tokens == 0
        assert len(driver.transcripts["r"].prompt_logprobs) == 21
        assert driver.scheduler.stats().external_prefix_cache_query_tokens_total == 0
