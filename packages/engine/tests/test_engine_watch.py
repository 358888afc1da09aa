"""What somebody sees who watches an engine: steps, chunks, rows, requests and blocks, and nothing afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire_engine import EngineCore, EngineParts, InprocClient
from quire_engine.watch import WatchedScheduler
from quire_interfaces import FinishReason, RequestOptions
from quire_interfaces.engine_watch import BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, WatchCursor, WatchReport
from quire_testkit.conformance.engine_client import make_message
from quire_testkit.fake_engine import FakeEngineConfig, build_fake_engine

PROMPT = list(range(40))


class Watched:
    """An engine and all that it told."""

    def __init__(self, **config: Any) -> None:
        self.parts: EngineParts = build_fake_engine(FakeEngineConfig(**config))
        self.core = EngineCore(self.parts)
        self.cursor = WatchCursor()
        self.holders: list[int] = []
        self.look()

    def look(self) -> WatchReport:
        report = self.core.watch().report("me", self.cursor)
        self.cursor = report.cursor
        if report.is_anew:
            self.holders = report.holders
        for block_id, holder in report.changes:
            self.holders[block_id - 1] = holder
        return report

    def add(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 4, **options: Any) -> None:
        message = make_message(name, prompt, max_tokens)
        message.options = RequestOptions(**options)
        self.core.add_request(message.to_request())

    def run(self) -> WatchReport:
        while self.core.has_work():
            self.core.step()
        return self.look()

    def check_holders(self) -> None:
        """The map says what the cache itself says of each block."""
        assert self.parts.kv_cache is not None
        states = self.parts.kv_cache.block_states(range(1, len(self.holders) + 1))
        shown = [{BLOCK_FREE: 0, BLOCK_CACHED: 1}.get(holder, 2) for holder in self.holders]
        assert shown == list(states)


def test_a_request_from_its_arrival_to_its_end() -> None:
    watched = Watched(max_num_batched_tokens=16, num_blocks=32)
    watched.add("a", tenant="t", client_request_id="its name")
    (queued,) = watched.look().requests
    assert (queued.request_id, queued.client_request_id, queued.tenant) == ("a", "its name", "t")
    assert queued.is_complete
    watched.core.step()
    report = watched.look()
    assert [row.phase for row in report.rows] == ["prefill"]
    assert report.rows[0].num_computed_tokens == 32  # two steps are under way
    report = watched.run()
    assert [step.num_prefill_tokens for step in report.steps] == [16, 8, 0, 0, 0]
    assert [step.num_decode_tokens for step in report.steps] == [0, 0, 1, 1, 1]
    assert [step.num_decode_rows for step in report.steps] == [0, 0, 1, 1, 1]
    (record,) = report.requests
    assert [(chunk.start, chunk.num_tokens) for chunk in record.chunks] == [(0, 16), (16, 16), (32, 8)]
    assert 0 < record.queued_s <= record.scheduled_s < record.first_token_s < record.finished_s
    assert (record.finish_reason, record.num_output_tokens, record.num_cached_tokens) == ("length", 4, 0)
    assert record.miss_reason == "never_stored"
    assert report.rows == []


def test_blocks_have_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.watched_blocks.CHECKED_BLOCKS", 0)  # what steps tell is enough for these
    watched = Watched(num_blocks=32, block_size=16)
    watched.add("a", max_tokens=40)
    watched.core.step()
    (row,) = watched.look().rows
    first = row.number
    assert watched.holders == [first] * 3 + [BLOCK_FREE] * 29
    watched.check_holders()
    watched.add("b", max_tokens=40)
    watched.core.step()
    report = watched.look()
    second = report.rows[1].number
    # What "a" has computed is found by "b": two whole blocks are shared, the third one is its own.
    assert watched.holders[:4] == [BLOCK_SHARED, BLOCK_SHARED, first, second]
    assert [each.num_blocks for each in report.rows] == [3, 3]
    watched.check_holders()
    watched.core.abort_requests(["a"])
    watched.core.step()
    watched.look()
    assert watched.holders[:4] == [BLOCK_SHARED, BLOCK_SHARED, BLOCK_FREE, second]
    watched.check_holders()
    watched.run()
    watched.check_holders()
    assert set(watched.holders) == {BLOCK_FREE, BLOCK_CACHED}
    watched.add("c")
    watched.core.step()
    report = watched.look()
    third = report.rows[0].number
    assert watched.holders.count(-third) == 2
    assert report.requests[-1].num_cached_tokens == 32
    watched.run()
    monkeypatch.undo()
    watched.core.reset_prefix_cache()
    watched.look()
    assert set(watched.holders) == {BLOCK_FREE}


def test_blocks_that_are_taken_in_the_step_in_which_they_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.watched_blocks.CHECKED_BLOCKS", 0)
    watched = Watched(num_blocks=32, max_num_seqs=1)
    watched.add("a", max_tokens=1)
    watched.add("b", max_tokens=20)
    while not (report := watched.look()).rows or report.rows[0].phase == "waiting" or len(report.rows) > 1:
        watched.core.step()
    number = report.rows[0].number
    assert watched.holders.count(-number) == 2  # nobody shares them any more
    assert watched.holders.count(number) == 1
    watched.check_holders()


def test_preemptions_and_what_is_computed_anew() -> None:
    watched = Watched(num_blocks=8, block_size=16)
    for name in "ab":
        watched.add(name, [ord(name) + i for i in range(40)], max_tokens=60)
    report = watched.run()
    records = {record.request_id: record for record in report.requests}
    preempted = records["b"]
    assert len(preempted.preempted_s) == len(preempted.resumed_s) > 0
    assert preempted.num_chunks == 1 + len(preempted.resumed_s)
    assert records["a"].preempted_s == []
    assert all(record.num_output_tokens == 60 for record in records.values())
    watched.check_holders()


def test_drafts_and_their_acceptance() -> None:
    watched = Watched(num_draft_tokens=3)
    watched.add("a", max_tokens=40)
    report = watched.run()
    (record,) = report.requests
    stats = watched.core.stats()
    assert record.num_draft_tokens == stats.num_draft_tokens_total > 0
    assert record.num_accepted_tokens == stats.num_accepted_tokens_total
    assert sum(step.num_draft_tokens for step in report.steps) == record.num_draft_tokens
    assert sum(step.num_accepted_tokens for step in report.steps) == record.num_accepted_tokens
    assert sum(step.num_decode_tokens + step.num_accepted_tokens for step in report.steps) >= 39


def test_why_requests_wait() -> None:
    watched = Watched(max_num_seqs=1)
    for name in "ab":
        watched.add(name, max_tokens=8)
    watched.core.step()
    report = watched.look()
    assert report.waiting_reasons == {"max_num_seqs": 1}
    assert [row.phase for row in report.rows] == ["decode", "waiting"]
    assert report.requests[-1].wait_reason == "max_num_seqs"
    told = watched.core.explain_request("b")
    assert told is not None
    assert told.waits_s["max_num_seqs"] > 0
    finished = {record.request_id: record for record in watched.run().requests}
    assert finished["b"].scheduled_s >= finished["a"].first_token_s
    assert finished["b"].wait_reason is None


def test_who_begins_late_sees_what_is_there() -> None:
    watched = Watched(num_blocks=16)
    watched.core.leave_watch("me")
    watched.add("a", max_tokens=30)
    watched.core.step()
    report = watched.look()
    assert report.is_anew
    (record,) = report.requests
    assert not record.is_complete
    assert watched.holders.count(record.number) == 3
    assert [row.phase for row in report.rows] == ["decode"]
    assert [record.finish_reason for record in watched.run().requests] == ["length"]


def test_nothing_is_left_when_nobody_looks() -> None:
    watched = Watched()
    watched.core.watch().report("other", WatchCursor())
    watched.core.leave_watch("me")
    assert isinstance(watched.core._scheduler, WatchedScheduler)
    watched.core.leave_watch("other")
    assert watched.core._scheduler is watched.parts.scheduler
    watched.add("a")
    assert watched.core.explain_request("a") is not None
    assert watched.core.explain_request("b") is None
    while watched.core.has_work():
        watched.core.step()
    assert watched.core._scheduler is watched.parts.scheduler


def test_who_fetches_no_reports_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.watch.LEASE_S", -1.0)
    watched = Watched()
    watched.add("a")
    while watched.core.has_work():
        watched.core.step()
    assert watched.core._scheduler is watched.parts.scheduler
    assert watched.look().is_anew


def test_a_failed_step_is_told_as_a_preemption() -> None:
    watched = Watched()
    watched.add("raise-a", max_tokens=3)
    watched.add("b", [7] * 20, max_tokens=3)
    report = watched.run()
    reasons = {record.request_id: record.finish_reason for record in report.requests}
    assert reasons == {"raise-a": str(FinishReason.ERROR), "b": "length"}
    watched.check_holders()


async def test_by_a_client() -> None:
    client = InprocClient(build_fake_engine(FakeEngineConfig(step_time_s=0.002)))
    await client.ready()
    cursor = (await client.watch(0, "me", WatchCursor())).cursor
    stream = client.open([make_message("a", PROMPT, 5)])
    async for _ in stream:
        pass
    async with asyncio.timeout(10):
        while True:
            report = await client.watch(0, "me", cursor)
            cursor = report.cursor
            if report.requests and report.requests[-1].finished_s:
                break
    assert report.totals["num_generation_tokens_total"] == 5
    assert await client.engine_ranks() == [0]
    await client.leave_watch("me")
    assert await client.explain_request("a") is None
    await client.shutdown()
