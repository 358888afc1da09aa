"""Constraints tried in a process apart: the same grammars and refusals, and whatever happens there stays there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

from quire_interfaces import GrammarSpec, RequestError, SchedulerStats
from quire_structured_output import GrammarCompiler, StructuredOutputConfig
from quire_structured_output.allowance import Allowance
from quire_structured_output.trials import TrialProcess, can_fork
from quire_testkit.conformance.grammar_backend import TOKENS, allowed_tokens

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system has no fork")

SLOW = GrammarSpec(
    "json",
    json.dumps({"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(9)}} for i in range(900)]}),
)


@pytest.fixture(scope="module")
def trials(vocabulary):
    made = TrialProcess(vocabulary, Allowance(1, 100))  # none of them starves on a busy machine
    yield made
    made.close()


def children_of(process_id):
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(a|b)+ö?"),
        GrammarSpec("json", '{"type":"object","properties":{"a":{"type":"integer"}}}', "", False),
        GrammarSpec("choice", '["true","false"]'),
        GrammarSpec("grammar", 'start: "a" | "b" start'),
        GrammarSpec("structural_tag", '{"format":{"type":"json_schema","json_schema":{"type":"boolean"}}}'),
    ],
    ids=lambda spec: spec.kind,
)
def test_the_grammar_is_the_same(backend, trials, spec):
    tried = trials.run(spec, 30)
    found, expected = (made.new_matcher() for made in (backend.compile_tried(spec, tried), backend.compile(spec)))
    for _ in range(8):
        allowed = allowed_tokens(found, len(TOKENS))
        assert allowed == allowed_tokens(expected, len(TOKENS))
        if found.is_terminated or not allowed:
            break
        for matcher in (found, expected):
            assert matcher.accept(max(allowed))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(a"),
        GrammarSpec("json", '{"type": 5}'),
        GrammarSpec("json", "no JSON"),
        GrammarSpec("json", '{"items":' * 5000 + "{}" + "}" * 5000),
        GrammarSpec("regex", "\ud800("),
    ],
    ids=str,
)
def test_refusals_are_the_same(backend, trials, spec):
    with pytest.raises(RequestError) as expected:
        backend.compile(spec)
    with pytest.raises(RequestError) as found:
        trials.run(spec, 30)
    assert (str(found.value), found.value.param, found.value.code) == (
        str(expected.value),
        expected.value.param,
        expected.value.code,
    )


def test_the_deadline_names_the_largest_part(backend, monkeypatch):
    monkeypatch.setattr("quire_structured_output.trials.BLAME_TIMEOUT_S", 200)
    compiler = GrammarCompiler(StructuredOutputConfig(timeout_s=0.05), lambda: backend, tries_apart=True)
    with (
        contextlib.closing(compiler),
        pytest.raises(RequestError, match=r"within 0\.05 s; the largest part is \$\.anyOf") as error,
    ):
        compiler.submit(SLOW).result(240)  # the part is looked for when nothing else wants to run
    assert error.value.code == "grammar_timeout"
    assert "(900" in str(error.value)


def test_a_constraint_that_ran_out_of_time_is_tried_again(backend):
    """Its process does not begin before the deadline, as on a machine that is very busy."""
    spec = GrammarSpec("regex", "[a-c]{3}")
    compiler = GrammarCompiler(StructuredOutputConfig(timeout_s=0.2), lambda: backend, tries_apart=True)
    compiler._allowance = Allowance(1, 100)  # it is not starved meanwhile
    deadline_s = time.monotonic() + 200
    while compiler.submit(GrammarSpec("regex", "a")).exception(200) is not None:  # the process starts
        assert time.monotonic() < deadline_s
    process = compiler._trials._process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RequestError, match="try again"):
            compiler.submit(spec).result(200)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    while (late := compiler.submit(spec)).exception(200) is not None:
        assert time.monotonic() < deadline_s
    assert late.result().new_matcher() is not None
    assert compiler.submit(spec) is late
    compiler.close()


def test_the_start_of_the_process_takes_nothing_of_the_first_constraint(backend, tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    with contextlib.closing(TrialProcess(backend.vocabulary, Allowance(0, 100))) as trials:
        assert trials.run(GrammarSpec("regex", "[a-c]{3}"), 0.07, most_s=2.5).source  # at most 2.5 s by the clock


def test_a_process_that_does_not_start_is_said(backend, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        contextlib.closing(TrialProcess(backend.vocabulary)) as trials,
        pytest.raises(RequestError, match="the process for that does not start"),
    ):
        trials.run(GrammarSpec("regex", "a"), 10)


def test_time_by_the_clock_does_not_count_while_others_compute(backend, trials):
    """The constraint's process is stopped for longer than its time."""
    spec = GrammarSpec("json", json.dumps({"properties": {f"k{i}": {"type": "integer"} for i in range(2000)}}))
    before = set(children_of(trials._process.pid)) if trials._process else set()
    done = ThreadPoolExecutor(1).submit(trials.run, spec, 2, most_s=200)
    while not trials._process or not (new := set(children_of(trials._process.pid)) - before):
        pass
    (child,) = new
    while sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13])) < 5:
        pass  # it has begun
    os.kill(child, signal.SIGSTOP)
    time.sleep(2.2)
    assert not done.done()
    os.kill(child, signal.SIGCONT)
    assert done.result(300).source


def test_an_ordinary_constraint_does_not_wait_for_slow_ones(backend, monkeypatch):
    """More of them than there are threads; their processes are stopped, so that none ends before it is let go."""
    monkeypatch.setattr("quire_structured_output.compiler.QUICK_S", 1.0)  # a busy machine may need more than 0.25
    monkeypatch.setattr("quire_structured_output.trials.PATIENCE", 1)  # nor does a stopped process use any of it
    compiler = GrammarCompiler(StructuredOutputConfig(timeout_s=60), lambda: backend, tries_apart=True)
    compiler._allowance = Allowance(0, 100)  # nor does it let anything starve
    compiler.submit(GrammarSpec("regex", "a")).result(200)  # starts the process
    process_id = compiler._trials._process.pid
    hostile = [compiler.submit(SLOW._replace(text=SLOW.text.replace("k", name))) for name in "lmno"]
    stopped: set[int] = set()
    while len(stopped) < 4 + compiler.config.num_workers:  # each among the quick ones, and as many as go of the slow
        for child in set(children_of(process_id)) - stopped:
            os.kill(child, signal.SIGSTOP)
            stopped.add(child)
    assert [compiler.submit(GrammarSpec("regex", f"b{i}")).result(200) for i in range(3)]
    assert not any(future.done() for future in hostile)
    while not all(future.done() for future in hostile):
        for child in children_of(process_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert all(isinstance(future.exception(), RequestError) for future in hostile)
    compiler.close()
    compiler.close()


def test_closing_lets_slow_ones_go(backend):
    compiler = GrammarCompiler(StructuredOutputConfig(timeout_s=30, num_workers=1), lambda: backend, tries_apart=True)
    compiler.submit(GrammarSpec("regex", "a")).result(200)
    hostile = [compiler.submit(SLOW._replace(text=SLOW.text.replace("k", name))) for name in "lm"]
    while not hostile[1].running():  # the first is slow by now
        time.sleep(0.01)
    compiler.close()
    for future in hostile:
        with pytest.raises((CancelledError, RequestError)):
            future.result(60)


def test_what_takes_longer_is_compiled_and_counted_once(backend, monkeypatch):
    monkeypatch.setattr("quire_structured_output.compiler.QUICK_S", 0.002)
    compiler = GrammarCompiler(StructuredOutputConfig(timeout_s=60), lambda: backend, tries_apart=True)
    spec = GrammarSpec("json", json.dumps({"properties": {f"k{i}": {"type": "integer"} for i in range(50)}}))
    future = compiler.submit(spec)
    assert compiler.submit(spec) is future
    found, expected = (made.new_matcher() for made in (future.result(60), backend.compile(spec)))
    assert allowed_tokens(found, len(TOKENS)) == allowed_tokens(expected, len(TOKENS))
    with pytest.raises(RequestError, match="type"):
        compiler.submit(GrammarSpec("json", '{"type": 5}')).result(60)
    stats = SchedulerStats()
    compiler.add_stats(stats)
    assert (stats.num_grammar_queries_total, stats.num_grammar_hits_total, stats.num_grammar_failures_total) == (
        3,
        1,
        1,
    )
    assert sum(stats.grammar_compile_counts_total) == 2
    compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_death_is_one_request_s(trials):
    trials.run(GrammarSpec("regex", "a"), 30)
    process = trials._process
    is_over = threading.Event()

    def kill():
        while not is_over.wait(0.001):
            for child in children_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RequestError, match="too much memory or too deep a recursion"):
        trials.run(SLOW, 60)
    is_over.set()
    thread.join()
    assert trials.run(GrammarSpec("regex", "b"), 30).walk
    process.kill()
    process.wait()
    assert trials.run(GrammarSpec("regex", "c"), 30).walk  # another process was started
    assert trials._process is not process


def test_it_ends_when_it_is_closed(vocabulary):
    trials = TrialProcess(vocabulary)
    trials.run(GrammarSpec("regex", "a"), 30)
    process = trials._process
    trials.close()
    trials.close()
    assert process.returncode == 0
    with pytest.raises(RequestError, match="the engine is closed"):  # as a thread that was late may ask
        trials.run(GrammarSpec("regex", "b"), 30)
    assert trials._process is None


def test_what_another_engine_had_compiled_waits_for_no_trial(backend):
    with contextlib.closing(GrammarCompiler(StructuredOutputConfig(), lambda: backend, tries_apart=True)) as compiler:
        before = children_of(os.getpid())
        spec = GrammarSpec("regex", "[a-z]{3}")
        grammar = compiler.submit(spec, was_compiled=True).result(60)
        assert children_of(os.getpid()) == before, "no trial process was started for it"
        expected = backend.compile(spec)
        assert allowed_tokens(grammar.new_matcher(), len(TOKENS)) == allowed_tokens(expected.new_matcher(), len(TOKENS))
        compiler.submit(GrammarSpec("regex", "[a-z]{4}")).result(60)
        assert children_of(os.getpid()) != before
