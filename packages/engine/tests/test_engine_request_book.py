"""What a book tells of requests in flight: times, counts, ends; and who is told of them."""

from __future__ import annotations

import pytest

from quire_engine import NullListener, RequestMetrics
from quire_engine.request_book import RequestBook
from quire_interfaces import EngineCoreOutput, FinishReason
from quire_testkit.conformance.engine_client import make_message


class Recorder(NullListener):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_added(self, metrics: RequestMetrics) -> None:
        self.events.append(("added", metrics.num_prompt_tokens, metrics.n))

    def on_first_token(self, time_to_first_token_s: float) -> None:
        self.events.append(("first", round(time_to_first_token_s, 3)))

    def on_tokens(self, interval_s: float, num_tokens: int) -> None:
        self.events.append(("tokens", round(interval_s, 3), num_tokens))

    def on_finished(self, metrics: RequestMetrics, reason: FinishReason) -> None:
        self.events.append(("finished", metrics.num_generation_tokens, reason))

    def on_rejected(self, metrics: RequestMetrics) -> None:
        self.events.append(("rejected", metrics.request_id))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_request_from_its_arrival_to_its_end(recorder: Recorder) -> None:
    book: RequestBook[str] = RequestBook(recorder, keeps_tokens=True)
    message = make_message("a", [1, 2])
    message.arrival_time_s = 10.0
    entry = book.add(message, "reader of a", n=3, num_prompt_tokens=2)
    assert ("a" in book, len(book), [each.reader for each in book]) == (True, 1, ["reader of a"])
    book.start(["a", "unknown"], 10.5)
    assert book.record(EngineCoreOutput("a", [], num_cached_tokens=1), 11.0) is entry
    book.record(EngineCoreOutput("a", [7]), 12.0)
    book.start(["a"], 12.5)  # after a preemption
    book.record(EngineCoreOutput("a", [8, 9], finish_reason=FinishReason.STOP), 13.0)
    metrics = entry.metrics
    assert (metrics.scheduled_time_s, metrics.num_preemptions, metrics.num_cached_tokens) == (10.5, 1, 1)
    assert (metrics.first_token_time_s, metrics.last_token_time_s, metrics.finished_time_s) == (12.0, 13.0, 13.0)
    assert entry.token_ids == [7, 8, 9]
    assert ("a" in book, len(book)) == (False, 0)
    assert recorder.events == [
        ("added", 2, 3), ("first", 2.0), ("tokens", 1.0, 2), ("finished", 3, FinishReason.STOP),
    ]  # fmt: skip


def test_what_is_not_in_flight_is_nobodys(recorder: Recorder) -> None:
    book: RequestBook[None] = RequestBook(recorder)
    book.add(make_message("a", [1]), None, n=1, num_prompt_tokens=1)
    assert book.finish("a", FinishReason.ABORT) is not None
    assert book.finish("a", FinishReason.ABORT) is None
    assert book.record(EngineCoreOutput("a", [5]), 1.0) is None
    assert book.reject("a") is None
    assert [event[0] for event in recorder.events] == ["added", "finished"]


def test_a_rejected_request_has_not_finished(recorder: Recorder) -> None:
    book: RequestBook[None] = RequestBook(recorder)
    book.add(make_message("a", [1]), None, n=1, num_prompt_tokens=1)
    assert book.reject("a") is not None
    assert recorder.events[1:] == [("rejected", "a")]
    assert len(book) == 0


def test_tokens_are_kept_only_for_who_resumes_requests(recorder: Recorder) -> None:
    book: RequestBook[None] = RequestBook(recorder)
    entry = book.add(make_message("a", [1]), None, n=1, num_prompt_tokens=1)
    book.record(EngineCoreOutput("a", [5]), 1.0)
    assert entry.token_ids == []


def test_entries_may_be_removed_while_they_are_walked(recorder: Recorder) -> None:
    book: RequestBook[None] = RequestBook(recorder)
    for name in "abc":
        book.add(make_message(name, [1]), None, n=1, num_prompt_tokens=1)
    for entry in book:
        book.finish(entry.request.request_id, FinishReason.ERROR)
    assert len(book) == 0


def test_the_next_place_is_free_after_the_mean_time_between_ends(recorder: Recorder) -> None:
    book: RequestBook[None] = RequestBook(recorder)
    assert book.retry_after_s() == 1.0
    for number in range(5):
        book.add(make_message(str(number), [1]), None, n=1, num_prompt_tokens=1)
        book.finish(str(number), FinishReason.LENGTH, 100.0 + 2.0 * number)
    assert book.retry_after_s() == 2.0
    for number in range(100):
        book.add(make_message(f"fast {number}", [1]), None, n=1, num_prompt_tokens=1)
        book.finish(f"fast {number}", FinishReason.LENGTH, 200.0)
    assert book.retry_after_s() == 0.1
