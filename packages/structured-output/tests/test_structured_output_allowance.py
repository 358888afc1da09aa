"""What work for strangers may take from others, and that it takes no more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from quire_interfaces import GrammarSpec, RequestError
from quire_structured_output.allowance import Allowance, pauses, run_apart
from quire_structured_output.trials import TrialProcess, can_fork

ONLY_LINUX = pytest.mark.skipif(
    sys.platform != "linux" or not can_fork(), reason="threads with priorities of their own"
)
SLOW = GrammarSpec("json", '{"const":"' + "x" * 60_000 + '"}')


def test_it_comes_back_slowly():
    now_s = 100.0
    allowance = Allowance(0.01, 0.3, clock=lambda: now_s)
    assert allowance.take(0.1) == 0.1
    assert allowance.take(1) == pytest.approx(0.2)
    assert allowance.take() == allowance.take(1) == 0
    now_s += 5
    assert allowance.take(0.01) == pytest.approx(0.01)
    assert allowance.take(1) == pytest.approx(0.04)
    allowance.give_back(0.02)
    assert allowance.take() == pytest.approx(0.01)
    assert allowance.take() == pytest.approx(0.005)  # so much is there for the one that comes third
    now_s += 1000
    assert allowance.take(1) == 0.3
    allowance.give_back(-1)  # more was used than was taken
    assert allowance.take(1) == 0


@ONLY_LINUX
def test_only_the_work_has_a_low_priority():
    def policy():
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = policy()
    assert run_apart(policy, starve=True)[0] == os.SCHED_IDLE
    assert run_apart(policy, starve=False) == (mine[0], min(mine[1] + 10, 19))
    assert policy() == mine
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0, starve=False)


@ONLY_LINUX
def test_native_work_that_gives_way_pauses_often():
    import resource

    def sleeps_per_ms(during):
        """How often the thread gave its core back by itself, per millisecond of its work without the lock."""
        before, start_s = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
        with during:
            digest = hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 200_000)
        used_ms = (time.thread_time() - start_s) * 1e3
        return (resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before) / used_ms, digest

    slack_ns = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
    usual_ns = slack_ns.read_text()
    alone, digest = sleeps_per_ms(contextlib.nullcontext())
    with pauses():
        assert slack_ns.read_text() != usual_ns
    assert slack_ns.read_text() == usual_ns
    paused = sleeps_per_ms(pauses())
    assert paused[1] == digest
    assert alone < 0.2
    assert paused[0] > 1
    assert sleeps_per_ms(pauses(after_s=60))[0] < 0.2
    assert sleeps_per_ms(contextlib.nullcontext())[0] < 0.2  # they end with the work
    assert run_apart(lambda: sleeps_per_ms(contextlib.nullcontext()), starve=False)[0] > 1


@ONLY_LINUX
def test_a_trial_starves_when_it_has_used_the_allowance(vocabulary):
    trials = TrialProcess(vocabulary, Allowance(0, 0.1))
    tried = trials.run(GrammarSpec("regex", "a"), 30)
    assert tried.compile_s < 0.05
    children = Path(f"/proc/{trials._process.pid}/task/{trials._process.pid}/children")
    is_over = threading.Event()

    def end_what_starves():
        while not is_over.wait(0.0005):
            for child in map(int, children.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    # The first trial's may starve, too, while it ends: that is not the one waited for.
                    if os.sched_getscheduler(child) == os.SCHED_IDLE:
                        os.kill(child, signal.SIGKILL)

    thread = threading.Thread(target=end_what_starves)
    thread.start()
    try:
        with pytest.raises(RequestError, match="too much memory"):  # it died
            trials.run(SLOW, 60)
    finally:
        is_over.set()
        thread.join()
        trials.close()


@ONLY_LINUX
def test_what_is_not_used_is_given_back(vocabulary):
    allowance = Allowance(0, 0.3)
    trials = TrialProcess(vocabulary, allowance)
    tried = trials.run(GrammarSpec("regex", "[a-z]{1,50}"), 30)
    trials.close()
    assert 0 < tried.compile_s < 0.3 - allowance.take(0.3) < 0.2
