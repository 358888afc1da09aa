"""Compiling beside the loop: once per content, with a deadline, and failures that say what is wrong."""

from __future__ import annotations

import threading
import time
import traceback

import pytest

from quire_interfaces import (
    ConfigError,
    GrammarSpec,
    OverloadedError,
    RequestError,
    SamplingParams,
    SchedulerStats,
    StructuredOutputsParams,
)
from quire_structured_output import GrammarCompiler, GrammarGate, StructuredOutputConfig, compiler
from quire_testkit.conformance.grammar_backend import TOKENS, allowed_tokens
from quire_testkit.conformance.scheduler import make_request


class SlowBackend:
    """A real backend that begins to work when it is let."""

    def __init__(self, backend):
        self.name, self.kinds = backend.name, backend.kinds
        self.vocab_size, self.eos_token_ids = backend.vocab_size, backend.eos_token_ids
        self.go = threading.Event()
        self.compiled = []
        self._backend = backend

    def compile(self, spec):
        assert self.go.wait(20)
        self.compiled.append(spec.text)
        if spec.text == "crash":
            raise ZeroDivisionError("a library's accident")
        return self._backend.compile(spec)


@pytest.fixture
def slow(backend):
    made = SlowBackend(backend)
    yield made
    made.go.set()


def make_compiler(backend, **config):
    return GrammarCompiler(StructuredOutputConfig(**config), lambda: backend)


def regex(pattern):
    return StructuredOutputsParams(regex=pattern)


def request_for(name, constraint):
    request = make_request(name, [1, 2])
    request.sampling_params = SamplingParams(structured_outputs=constraint)
    return request


def stats_of(gate):
    stats = SchedulerStats()
    gate.add_stats(stats)
    return stats


def wait_for(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_each_content_is_compiled_once(slow):
    made = make_compiler(slow)
    futures = [made.submit(regex("a+").spec()) for _ in range(5)]
    slow.go.set()
    assert len({id(future.result(10)) for future in futures}) == 1
    assert slow.compiled == ["a+"]
    matchers = [made.new_matcher(regex("a+")) for _ in range(2)]
    assert matchers[0].accept(TOKENS.index(b"a"))
    assert allowed_tokens(matchers[1], len(TOKENS)) != allowed_tokens(matchers[0], len(TOKENS))


def test_the_cache_is_bounded_and_forgets_the_oldest(slow):
    slow.go.set()
    made = make_compiler(slow, cache_size=2)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        made.submit(regex(pattern).spec()).result(10)
    assert slow.compiled == ["a", "b", "c", "b"]
    made.new_matcher(regex("c"))  # was forgotten: compiled on the spot
    assert slow.compiled[-1] == "c"


def test_failures_are_remembered(slow):
    gate = GrammarGate(make_compiler(slow))
    gate.prepare(request_for("r0", regex("(a")))
    slow.go.set()  # not before: what is known already is refused at once
    wait_for(lambda: not gate.is_preparing or gate.take_failed())
    for name in ("r1", "r2"):
        with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
            gate.prepare(request_for(name, regex("(a")))
    assert slow.compiled == ["(a"]
    assert stats_of(gate).num_grammar_failures_total == 1


def test_a_library_s_accident_is_the_request_s_failure(slow, caplog):
    slow.go.set()
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        make_compiler(slow).submit(regex("crash").spec()).result(10)
    assert "could not be compiled" in caplog.text


def test_a_request_waits_for_its_grammar_alone(slow):
    gate = GrammarGate(make_compiler(slow))
    plain, waiting = make_request("plain", [1]), request_for("waiting", regex("a+"))
    for request in (plain, waiting):
        gate.prepare(request)
    assert gate.admits(plain)
    assert not gate.admits(waiting)
    assert gate.is_preparing
    assert not gate.holds_queue
    slow.go.set()
    wait_for(lambda: gate.admits(waiting))
    gate.admitted(waiting)
    assert not gate.is_preparing
    assert gate.take_failed() == []
    later = request_for("later", regex("a+"))
    gate.prepare(later)
    assert gate.admits(later)
    stats = stats_of(gate)
    assert (stats.num_grammar_queries_total, stats.num_grammar_hits_total) == (2, 1)
    assert sum(stats.grammar_compile_counts_total) == 1
    assert stats.grammar_compile_seconds_total > 0


def test_the_deadline_names_the_largest_part(slow):
    now_s = [0.0]
    made = make_compiler(slow, timeout_s=5.0)
    gate = GrammarGate(made, clock=lambda: now_s[0])
    schema = {"type": "object", "properties": {"small": {}, "large": {"enum": [f"value {i}" for i in range(500)]}}}
    gate.prepare(request_for("r", StructuredOutputsParams(json=schema)))
    wait_for(lambda: made.is_compiling(StructuredOutputsParams(json=schema).spec()))
    now_s[0] = 4.9
    assert gate.take_failed() == []
    now_s[0] = 5.0
    [(request_id, error)] = gate.take_failed()
    assert request_id == "r"
    assert error.code == "grammar_timeout"
    assert "within 5 s" in str(error)
    assert "$.properties.large.enum (500 elements" in str(error)
    assert not gate.is_preparing


def test_waiting_has_the_same_deadline(slow):
    now_s = [0.0]
    made = make_compiler(slow, timeout_s=0.05)
    gate = GrammarGate(made, clock=lambda: now_s[0])
    request = request_for("r", regex("a+"))
    gate.prepare(request)
    wait_for(lambda: made.is_compiling(regex("a+").spec()))
    now_s[0] = 1.0
    with pytest.raises(RequestError, match=r"within 0\.05 s"):
        gate.wait(request)


def test_a_remembered_refusal_does_not_grow(slow):
    gate = GrammarGate(make_compiler(slow))

    def length_of_traceback(call):
        with pytest.raises(RequestError) as error:
            call()
        return len(traceback.extract_tb(error.value.__traceback__))

    request = request_for("r", regex("("))
    gate.prepare(request)
    slow.go.set()  # not before: what is known already is refused at once
    lengths = [length_of_traceback(lambda: gate.wait(request))]
    lengths += [length_of_traceback(lambda: gate.prepare(request)) for _ in range(20)]
    assert max(lengths) < 6


def test_a_request_that_left_is_forgotten(slow):
    gate = GrammarGate(make_compiler(slow))
    gate.prepare(request_for("r", regex("a+")))
    gate.forget(["r", "unknown"])
    assert not gate.is_preparing
    slow.go.set()
    assert gate.take_failed() == []


def test_too_large_is_refused_at_once(slow):
    gate = GrammarGate(make_compiler(slow, max_bytes=1000))
    with pytest.raises(RequestError, match="1000") as error:
        gate.prepare(request_for("r", StructuredOutputsParams(choice=("a" * 600, "b" * 600))))
    assert error.value.code == "grammar_too_large"
    assert "2 texts, 1200 characters" in str(error.value)
    assert slow.compiled == []


def test_the_queue_is_bounded(slow, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_WAITING", 3)
    made = make_compiler(slow)
    for pattern in "abc":
        made.submit(regex(pattern).spec())
    with pytest.raises(OverloadedError):
        made.submit(regex("d").spec())


def test_kinds_that_a_backend_lacks_are_named(vocabulary):
    from quire_structured_output import make_backend

    made = GrammarCompiler(StructuredOutputConfig(), lambda: make_backend("outlines", vocabulary))
    with pytest.raises(RequestError, match="'outlines', which takes choice, json, regex"):
        made.submit(GrammarSpec("grammar", 'start: "a"')).result(10)


def test_a_vocabulary_without_end_refuses_every_request():
    from quire_structured_output import Vocabulary

    def make():
        return Vocabulary(tokens=(b"a",), special_ids=frozenset(), eos_token_ids=(), encode=lambda text: [0])

    made = GrammarCompiler(StructuredOutputConfig(), make)
    with pytest.raises(ConfigError, match="end tokens"):
        made.submit(regex("a").spec()).result(10)


def test_closing_lets_waiting_work_go(slow):
    made = make_compiler(slow, num_workers=1)
    first, second = made.submit(regex("a").spec()), made.submit(regex("b").spec())
    wait_for(first.running)
    made.close()
    assert second.cancelled()
    slow.go.set()
    assert first.result(10) is not None
