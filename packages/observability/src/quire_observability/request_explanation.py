"""Why a request took as long as it did: numbers, a timeline, and sentences. Reads what is known; asks nobody."""

from __future__ import annotations

from typing import Any

from quire_interfaces.engine_watch import RequestRecord
from quire_observability.request_log import LoggedRequest

__all__ = ["explain_request"]

MAX_TOLD_CHUNKS = 64

_WAITS = {
    "adapter_slots": "a free place for its adapter",
    "capacity": "free KV blocks or tokens of the step's budget",
    "encoder": "the encoder, which reads a bounded number of tokens a step",
    "grammar": "its grammar to be compiled",
    "inter_token_latency": "streams of others: steps are to take at most so long (max_inter_token_latency)",
    "kv_connector": "blocks of another engine",
    "kv_loading": "blocks of a KV tier",
    "max_num_seqs": "a free row: all rows (max_num_seqs) were taken",
    "max_running_per_tenant": "its tenant's other requests: each tenant may hold so many rows (max_running_per_tenant)",
    "media": "the towers, which read a bounded number of items a step",
    "pipeline": "a step of its stage",
    "paused": "the engine, which was paused",
    "shared_prompt": "another request that was computing the same prompt",
    "tenant_share": "its tenant's other requests: it may add so much to steps of others (max_tenant_slowdown)",
    "tokens_in_flight": "its last token, which was still being computed",
}
"""Reason for which a request waits -> what it waits for."""

_MISSES = {
    "disabled": "prefix caching is off",
    "evicted": "their blocks were cached once and have been evicted",
    "never_stored": "no request before had the same tokens there",
    "not_readable": "every position of the prompt had to be computed (prompt logprobs, or pooling of all tokens)",
    "partial_block": "the prompt is shorter than a block, and whole blocks alone are shared",
    "different_salt": "the same tokens are cached under another cache_salt",
    "full_hit": "only what stands behind the last whole block",
}
"""Reason of `PrefixCacheMiss` -> words."""

HIDDEN_MISS = "never_stored"
"""What who may not know of others' prompts hears instead of "different_salt"."""


def explain_request(
    request: LoggedRequest, now_s: float, record: RequestRecord | None = None, *, hides_salts: bool = False
) -> dict[str, Any]:
    """An explanation in plain types.

    Args:
        request: As the log has it.
        now_s: The time, of `time.monotonic()`.
        record: What the engine says of it now; None for what it said last.
        hides_salts: Whether that others have cached the same tokens is none of the reader's business.

    Returns:
        "numbers", a flat dict; "timeline", a list of {"s", "event", ...} with seconds since the arrival; "sentences".
    """
    record = record or request.record
    numbers = _numbers(request, now_s, record, hides_salts)
    return {
        "engine_request_id": request.times.request_id,
        "status": _status(request, record),
        "finish_reason": None if request.finish_reason is None else str(request.finish_reason),
        "arrived_at": request.added_at,
        "is_watched": record is not None and record.is_complete,
        "numbers": numbers,
        "timeline": _timeline(request, record),
        "sentences": _sentences(request, numbers, record),
    }


def _status(request: LoggedRequest, record: RequestRecord | None) -> str:
    if request.is_finished:
        return "finished"
    times = request.times
    if not times.scheduled_time_s:
        return "waiting"
    if record is not None and len(record.preempted_s) > len(record.resumed_s):
        return "preempted"
    return "prefill" if not times.first_token_time_s else "decode"


def _numbers(
    request: LoggedRequest, now_s: float, record: RequestRecord | None, hides_salts: bool
) -> dict[str, float | str | dict[str, float] | None]:
    times = request.times
    end_s = times.finished_time_s or now_s
    scheduled_s = times.scheduled_time_s
    first_s = times.first_token_time_s
    num_cached = min(times.num_cached_tokens, times.num_prompt_tokens)
    if record is not None:
        num_cached = max(num_cached, min(record.num_cached_tokens, times.num_prompt_tokens))
    numbers: dict[str, float | str | dict[str, float] | None] = {
        "total_s": end_s - times.arrival_time_s,
        "queue_s": (scheduled_s or end_s) - times.arrival_time_s,
        "prefill_s": (first_s or end_s) - scheduled_s if scheduled_s else 0.0,
        "decode_s": (times.last_token_time_s if request.is_finished else end_s) - first_s if first_s else 0.0,
        "first_token_s": first_s - times.arrival_time_s if first_s else None,
        "num_prompt_tokens": times.num_prompt_tokens,
        "num_cached_tokens": num_cached,
        "num_missed_tokens": times.num_prompt_tokens - num_cached,
        "num_output_tokens": times.num_generation_tokens,
        "num_preemptions": times.num_preemptions,
        "max_tokens": times.max_tokens,
    }
    num_gaps = times.num_generation_tokens - 1
    decode_s = numbers["decode_s"]
    numbers["inter_token_s"] = decode_s / num_gaps if isinstance(decode_s, float) and num_gaps > 0 else None
    if record is None:
        return numbers
    reason = record.miss_reason
    is_secret = hides_salts and reason == "different_salt"
    return numbers | {
        "num_external_tokens": record.num_external_tokens,
        "miss_reason": HIDDEN_MISS if is_secret else reason,
        "miss_detail": "" if is_secret else record.miss_detail,
        "wait_reason": record.wait_reason,
        "waits_s": dict(record.waits_s),
        "grammar_s": record.grammar_s,
        "num_chunks": record.num_chunks,
        "num_draft_tokens": record.num_draft_tokens,
        "num_accepted_tokens": record.num_accepted_tokens,
        "num_forced_tokens": record.num_forced_tokens,
    }


def _timeline(request: LoggedRequest, record: RequestRecord | None) -> list[dict[str, Any]]:
    times = request.times
    start_s = times.arrival_time_s
    marks: list[tuple[float, dict[str, Any]]] = [(start_s, {"event": "queued"})]
    if record is not None:
        # The engine's clock is another one where it runs on another host: its times are read from its own start.
        shift_s = times.scheduled_time_s - record.scheduled_s if record.scheduled_s and times.scheduled_time_s else 0.0
        if record.grammar_s:
            marks.append((start_s + record.grammar_s, {"event": "grammar ready"}))
        for chunk in record.chunks[:MAX_TOLD_CHUNKS]:
            told = {"event": "chunk", "start": chunk.start, "num_tokens": chunk.num_tokens}
            marks.append((chunk.planned_s + shift_s, told))
        marks += [(each + shift_s, {"event": "preempted"}) for each in record.preempted_s]
        marks += [(each + shift_s, {"event": "resumed"}) for each in record.resumed_s]
    for time_s, name in ((times.scheduled_time_s, "scheduled"), (times.first_token_time_s, "first token")):
        if time_s:
            marks.append((time_s, {"event": name}))
    if request.is_finished:
        marks.append((times.finished_time_s, {"event": "finished", "reason": str(request.finish_reason)}))
    order = {"queued": -2, "scheduled": -1, "finished": 1}
    marks.sort(key=lambda mark: (mark[0], order.get(mark[1]["event"], 0)))
    return [{"s": max(0.0, time_s - start_s), **mark} for time_s, mark in marks]


def _sentences(request: LoggedRequest, numbers: dict[str, Any], record: RequestRecord | None) -> list[str]:
    told = [_summary(request, numbers)]
    told += _queue(request, numbers, record)
    if request.times.scheduled_time_s:
        told += _prompt(request, numbers, record)
    if numbers["num_preemptions"]:
        told.append(_preemptions(numbers, record))
    if request.times.first_token_time_s:
        told += _output(numbers)
    if record is None:
        told.append(
            "Nobody watched the engine while it ran: chunks, reasons of cache misses, grammars and drafts are not "
            "known. They are while the Engine tab is open."
        )
    elif not record.is_complete:
        told.append("The engine was watched from a later moment on only: what came before is missing.")
    return told


def _summary(request: LoggedRequest, numbers: dict[str, Any]) -> str:
    total = _seconds(numbers["total_s"])
    parts = {"waiting": numbers["queue_s"], "reading the prompt": numbers["prefill_s"], "writing": numbers["decode_s"]}
    longest = max(parts, key=lambda name: parts[name])
    if not request.is_finished:
        return f"It has been here for {total}, most of it {longest} ({_seconds(parts[longest])})."
    end = {"stop": "a stop", "length": "its length", "abort": "an abort", "error": "an error"}
    ended = end.get(str(request.finish_reason), str(request.finish_reason))
    return f"It took {total} and ended by {ended}; most of the time went into {longest} ({_seconds(parts[longest])})."


def _queue(request: LoggedRequest, numbers: dict[str, Any], record: RequestRecord | None) -> list[str]:
    verb = "It waited" if request.times.scheduled_time_s or request.is_finished else "It has been waiting"
    told = [f"{verb} {_seconds(numbers['queue_s'])} for its first step."]
    if record is None:
        return told
    if record.grammar_s >= 0.001:
        told.append(f"Its grammar was ready {_seconds(record.grammar_s)} after it came.")
    waits = sorted(record.waits_s.items(), key=lambda each: -each[1])
    named = [f"{_seconds(seconds)} for {_wait(reason)}" for reason, seconds in waits if seconds >= 0.001]
    if named:
        told.append(f"As far as it was seen, it waited {'; '.join(named[:4])}.")
    if record.wait_reason is not None and not request.is_finished:
        told.append(f"It waits now for {_wait(record.wait_reason)}.")
    return told


def _wait(reason: str) -> str:
    return _WAITS.get(reason, f"what the rule {reason!r} gives out")


def _prompt(request: LoggedRequest, numbers: dict[str, Any], record: RequestRecord | None) -> list[str]:
    num_cached, num_missed = numbers["num_cached_tokens"], numbers["num_missed_tokens"]
    verb = "was read in" if request.times.first_token_time_s or request.is_finished else "has been read for"
    told = [
        f"Its prompt of {_count(numbers['num_prompt_tokens'], 'token')} {verb} {_seconds(numbers['prefill_s'])}: "
        f"{num_cached} were cached, {num_missed} had to be computed."
    ]
    if record is None:
        return told
    if record.num_external_tokens:
        told.append(f"{_count(record.num_external_tokens, 'cached token')} came from a KV tier.")
    reason = numbers["miss_reason"]
    if reason is not None and num_missed:
        detail = f" ({numbers['miss_detail']})" if numbers["miss_detail"] else ""
        told.append(f"Why not more was cached: {_MISSES.get(reason, reason)}{detail}.")
    if record.num_chunks > 1:
        told.append(
            f"It was computed in {record.num_chunks} chunks, as each step takes a bounded number of tokens and others "
            "took their share."
        )
    return told


def _preemptions(numbers: dict[str, Any], record: RequestRecord | None) -> str:
    told = f"It lost its place {_count(numbers['num_preemptions'], 'time')} and was computed anew"
    pairs = [] if record is None else list(zip(record.preempted_s, record.resumed_s, strict=False))
    if pairs:
        told += f", after waiting {_seconds(sum(resumed - lost for lost, resumed in pairs))}"
    return told + ": the KV cache was full, or the engine was started again."


def _output(numbers: dict[str, Any]) -> list[str]:
    told = f"It wrote {_count(numbers['num_output_tokens'], 'token')} in {_seconds(numbers['decode_s'])}"
    if numbers["inter_token_s"]:
        told += f", one every {_seconds(numbers['inter_token_s'])} on average"
    sentences = [told + "."]
    if numbers.get("num_draft_tokens"):
        share = numbers["num_accepted_tokens"] / numbers["num_draft_tokens"]
        sentences.append(
            f"{numbers['num_accepted_tokens']} of {numbers['num_draft_tokens']} draft tokens were accepted "
            f"({share:.0%}), which saved as many steps."
        )
    if numbers.get("num_forced_tokens"):
        sentences.append(f"Its grammar left no choice about {_count(numbers['num_forced_tokens'], 'token')}.")
    return sentences


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _seconds(seconds: float) -> str:
    """1234 -> "1,234 s", 1.234 -> "1.23 s", 0.0123 -> "12.3 ms"."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.3g} ms"
