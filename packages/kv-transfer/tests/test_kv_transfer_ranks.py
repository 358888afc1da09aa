"""Reports of several ranks as one: a block is there when each rank has its part."""

from __future__ import annotations

from quire_interfaces import BlockKey, BlockTransfer, KVTransferJob, KVTransferOutput, KVTransferPlan
from quire_kv_transfer import RankReports

KEYS = [BlockKey(0, bytes([number]) * 32) for number in range(3)]
LOAD = KVTransferJob(4, tuple(BlockTransfer(key, block_id) for block_id, key in enumerate(KEYS)))


def report(*, late: list[int] | None = None, stopped: bool = False, **finished: list[bool]) -> KVTransferOutput:
    jobs = {int(name.removeprefix("job").replace("_", "-")): arrived for name, arrived in finished.items()}
    return KVTransferOutput(finished=jobs, late=late or [], stopped=stopped)


def test_a_job_ends_when_it_has_on_every_rank_and_a_block_arrives_when_all_parts_do() -> None:
    discarded: list[BlockKey] = []
    reports = RankReports(discarded.append)
    assert reports.merged(KVTransferPlan(loads=[LOAD]), [None, None]) is None
    assert reports.merged(None, [report(job4=[True, True, False]), None]) is None
    assert reports.merged(None, [None, report(job4=[True, True, False])]) is None
    merged = reports.merged(None, [report(job4=[True, True, False], job9=[True]), report(job4=[True, False, True])])
    assert merged == KVTransferOutput(finished={4: [True, False, False]})
    assert discarded == KEYS[1:2], "the first rank is to store it anew, and what it has lost itself it knows"


def test_reports_may_come_again() -> None:
    discarded: list[BlockKey] = []
    reports = RankReports(discarded.append)
    each: list[KVTransferOutput | None] = [report(job4=[True] * 3), report(job4=[False] * 3)]
    first = reports.merged(KVTransferPlan(loads=[LOAD]), each)
    assert reports.merged(KVTransferPlan(acknowledged=[4]), each) == first
    assert discarded == KEYS


def test_one_rank_is_enough_to_be_late_or_switched_off() -> None:
    reports = RankReports(lambda key: None)
    assert reports.merged(None, [None, report(late=[4])]) == KVTransferOutput(late=[4])
    assert reports.merged(None, [report(job4=[True]), report(late=[4])]) == KVTransferOutput(late=[4])
    assert reports.merged(None, [report(stopped=True), None]) == KVTransferOutput(stopped=True)


def test_blocks_that_are_held_are_let_go_when_every_rank_has_been_read() -> None:
    reports = RankReports(lambda key: None)
    assert reports.merged(None, [report(job_2=[]), report()]) is None
    assert reports.merged(None, [report(job_2=[]), report(job_2=[])]) == KVTransferOutput(finished={-2: []})
