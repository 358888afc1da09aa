"""Why a request took as long as it did, and which requests are remembered."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

from quire_interfaces import AdmissionRule, FinishReason
from quire_interfaces.engine_watch import PromptChunk, RequestRecord
from quire_observability import LoggedRequest, RequestLog, explain_request
from quire_observability.request_explanation import _WAITS
from quire_observability.request_log import MAX_FINISHED_PER_TENANT, MAX_TENANTS

TIMES = {
    "request_id": "r", "client_request_id": "c", "tenant": "t", "arrival_time_s": 100.0, "scheduled_time_s": 103.0,
    "first_token_time_s": 104.0, "last_token_time_s": 106.0, "finished_time_s": 106.5, "num_prompt_tokens": 100,
    "num_cached_tokens": 32, "num_generation_tokens": 5, "num_preemptions": 0, "max_tokens": 8, "n": 1,
}  # fmt: skip


def times(**changes: Any) -> Any:
    return SimpleNamespace(**(TIMES | changes))


def record(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "number": 2, "request_id": "r", "client_request_id": "c", "tenant": "t", "num_prompt_tokens": 100,
        "max_tokens": 8, "queued_s": 0.0, "is_complete": True, "scheduled_s": 3.0, "num_cached_tokens": 32,
    }  # fmt: skip
    return RequestRecord(**(fields | changes))


def explained(watched: RequestRecord | None = None, *, hides_salts: bool = False, **changes: Any) -> dict[str, Any]:
    reason = None if changes.get("finished_time_s") == 0.0 else FinishReason.LENGTH
    request = LoggedRequest(times(**changes), watched, reason)
    return explain_request(request, 110.0, hides_salts=hides_salts)


def test_what_is_known_of_every_request() -> None:
    told = explained()
    numbers = told["numbers"]
    assert {name: numbers[name] for name in ("total_s", "queue_s", "prefill_s", "decode_s", "inter_token_s")} == {
        "total_s": 6.5, "queue_s": 3.0, "prefill_s": 1.0, "decode_s": 2.0, "inter_token_s": 0.5,
    }  # fmt: skip
    assert (numbers["num_cached_tokens"], numbers["num_missed_tokens"]) == (32, 68)
    assert [(mark["s"], mark["event"]) for mark in told["timeline"]] == [
        (0.0, "queued"), (3.0, "scheduled"), (4.0, "first token"), (6.5, "finished"),
    ]  # fmt: skip
    assert told["sentences"][0] == (
        "It took 6.50 s and ended by its length; most of the time went into waiting (3.00 s)."
    )
    assert told["sentences"][-1].startswith("Nobody watched the engine")
    assert not told["is_watched"]


def test_what_a_watched_engine_adds() -> None:
    told = explained(
        record(
            chunks=[PromptChunk(3.0, 32, 48), PromptChunk(3.5, 80, 20)],
            num_chunks=2,
            miss_reason="evicted",
            miss_detail="tokens 32 to 47",
            waits_s={"max_num_seqs": 2.5, "grammar": 0.25},
            grammar_s=0.25,
            preempted_s=[4.5],
            resumed_s=[5.5],
            num_draft_tokens=8,
            num_accepted_tokens=2,
            num_forced_tokens=1,
        ),
        num_preemptions=1,
    )
    text = " ".join(told["sentences"])
    for words in (
        "2.50 s for a free row",
        "grammar was ready 250 ms after it came",
        "have been evicted (tokens 32 to 47)",
        "computed in 2 chunks",
        "lost its place 1 time and was computed anew, after waiting 1.00 s",
        "2 of 8 draft tokens were accepted (25%)",
        "no choice about 1 token.",
    ):
        assert words in text
    # The engine's clock is not ours: its times are told from its first step on.
    assert [(mark["s"], mark["event"]) for mark in told["timeline"]] == [
        (0.0, "queued"), (0.25, "grammar ready"), (3.0, "scheduled"), (3.0, "chunk"), (3.5, "chunk"),
        (4.0, "first token"), (4.5, "preempted"), (5.5, "resumed"), (6.5, "finished"),
    ]  # fmt: skip


def test_a_request_that_waits() -> None:
    nothing_yet = dict.fromkeys(("scheduled_time_s", "first_token_time_s", "last_token_time_s", "finished_time_s"), 0.0)
    told = explained(record(scheduled_s=0.0, wait_reason="kv_loading"), **nothing_yet, num_generation_tokens=0)
    assert told["status"] == "waiting"
    assert told["numbers"]["queue_s"] == 10.0
    assert "It waits now for blocks of a KV tier." in told["sentences"]
    assert not any("prompt" in sentence for sentence in told["sentences"])


def test_that_others_sent_the_same_is_told_to_some_alone() -> None:
    watched = record(miss_reason="different_salt", miss_detail="cached under another cache_salt")
    assert "another cache_salt" in str(explained(watched))
    hidden = explained(watched, hides_salts=True)
    assert "salt" not in str(hidden)
    assert hidden["numbers"]["miss_reason"] == "never_stored"


@pytest.mark.parametrize("package", ["quire_scheduler", "quire_structured_output"])
def test_every_rule_has_words(package: str) -> None:
    root = pytest.importorskip(package)
    for each in pkgutil.iter_modules(root.__path__):
        for member in vars(importlib.import_module(f"{package}.{each.name}")).values():
            is_rule = isinstance(member, type) and AdmissionRule in member.__mro__ and member is not AdmissionRule
            if is_rule and member.__module__.startswith(package) and member.name != "drafts":  # which admits all
                assert member.name in _WAITS, member


def test_a_tenants_flood_pushes_out_its_own_alone() -> None:
    log = RequestLog()
    for index in range(MAX_FINISHED_PER_TENANT + 5):
        for tenant in ("a", "b") if index == 0 else ("a",):
            mine = times(request_id=f"{tenant}-{index}", client_request_id=None, tenant=tenant)
            log.added(mine)
            log.finished(mine, FinishReason.STOP)
    running = times(request_id="a-run", client_request_id="name", tenant="a", finished_time_s=0.0)
    log.added(running)
    assert len(list(log.of("a"))) == MAX_FINISHED_PER_TENANT + 1
    assert [each.times.request_id for each in log.of("b")] == ["b-0"]
    assert log.find("a-0", None) == []
    assert [each.is_finished for each in log.find("name", "a")] == [False]
    assert log.find("name", "b") == []
    log.rejected(running)
    assert log.find("name", None) == []
    for index in range(MAX_TENANTS):
        other = times(request_id=f"o-{index}", tenant=f"t{index}")
        log.added(other)
        log.finished(other, FinishReason.STOP)
    assert list(log.of("b")) == []


def test_what_the_engine_told_goes_to_its_request() -> None:
    log = RequestLog()
    mine = times()
    log.added(mine)
    log.note([record(num_chunks=1), record(request_id="unknown")])
    log.finished(mine, FinishReason.STOP)
    log.note([record(num_chunks=2)])
    (found,) = log.find("c", "t")
    assert found.record is not None
    assert found.record.num_chunks == 2
