"""`Allowance`: processor time that work for strangers may take from others; and work that takes none.

A constraint's content decides what compiling it costs, and on a busy machine whoever computes at an ordinary priority
takes cores from the streams of everybody else. So little of it may be had per second, and what goes beyond it runs when
nothing else wants a core. All of it pauses often, because a low priority is not enough: a core that has anything at all
to run takes no waiting thread over from another core before its next tick, milliseconds later. Knows no grammar.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Allowance", "lower_priority", "pauses", "run_apart"]

Result = TypeVar("Result")

SHARE = 0.01
"""Seconds of processor time that come per second: at most one step of a hundred is disturbed by their use."""
MAX_S = 0.3
"""Most that gathers while nobody takes any: a usual constraint takes 0.01, one with 2,000 properties 0.25."""
NICE = 10
"""By so much is a priority lowered that is not lowered to nothing."""
PAUSE_EVERY_NS = 300_000
"""From one pause to the next. A pause takes three fifths of it: `_PAUSE_SIGNAL` microseconds and `LATE_NS`."""
LATE_NS = 120_000
"""By so much the system may wake the thread later than it asks for, and does while nothing else happens."""
_PAUSE_SIGNAL = 64
_SIGEV_THREAD_ID = 4
_SET_TIMER_SLACK = 29


class Allowance:
    """Thread-safe.

    Args:
        share: Seconds of processor time that come per second.
        max_s: Most that gathers; it is there at the beginning.
        clock: Seconds; for tests.
    """

    def __init__(
        self, share: float = SHARE, max_s: float = MAX_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._max_s = max_s
        self._clock = clock
        self._left_s = max_s
        self._last_s = clock()
        self._lock = threading.Lock()

    def take(self, most_s: float | None = None) -> float:
        """Up to `most_s` seconds; what is not used then is to be given back.

        Where it is not known how long the work takes, that is half of what there is: what comes next gets some, too.
        """
        with self._lock:
            now_s = self._clock()
            self._left_s = min(self._max_s, self._left_s + self._share * (now_s - self._last_s))
            self._last_s = now_s
            taken_s = self._left_s / 2 if most_s is None else min(most_s, self._left_s)
            self._left_s -= taken_s
            return taken_s

    def give_back(self, seconds: float) -> None:
        """Return what was taken and not used."""
        with self._lock:
            self._left_s = min(self._max_s, self._left_s + max(0.0, seconds))


def lower_priority(thread_id: int, *, starve: bool) -> None:
    """Let a thread of this process give way to others: for good, unless the process has privileges.

    Args:
        thread_id: The system's number of it; 0 for this one.
        starve: Whether it runs only when nothing else wants to, as far as the system knows such a thing.
    """
    if sys.platform != "linux":  # elsewhere a thread has no priority of its own
        return
    with contextlib.suppress(OSError):
        if starve:
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
        else:
            now = os.getpriority(os.PRIO_PROCESS, thread_id)
            os.setpriority(os.PRIO_PROCESS, thread_id, min(19, now + NICE))


class _TimerEvent(ctypes.Structure):
    """`struct sigevent` of Linux: to which thread a timer sends which signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread_id", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


@contextlib.contextmanager
def pauses(after_s: float = 0.0) -> Iterator[None]:
    """Let this thread sleep for a moment again and again, whatever it does, native code too (Linux; elsewhere nothing
    happens).

    A timer sends the thread signals whose handler is the C library's `usleep`, which takes the signal's number for
    microseconds.

    Args:
        after_s: From when on, in seconds.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(_PAUSE_SIGNAL, ctypes.cast(libc.usleep, ctypes.c_void_p))
    event = _TimerEvent(signal=_PAUSE_SIGNAL, notify=_SIGEV_THREAD_ID, thread_id=threading.get_native_id())
    timer = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:  # too many of them
        yield
        return
    try:
        libc.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(LATE_NS))
        first_ns = max(int(after_s * 1e9), PAUSE_EVERY_NS)
        libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, PAUSE_EVERY_NS, *divmod(first_ns, 10**9)), None)
        yield
    finally:
        libc.timer_delete(timer)
        libc.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(0))  # the default again


def run_apart(work: Callable[[], Result], *, starve: bool) -> Result:
    """Run `work`, which computes without the interpreter lock, in a thread of its own that gives way to others.

    The caller's own priority stays: a thread of low priority that asks for the interpreter lock makes whoever holds it
    wait until it is its turn, so it had better ask once.
    """
    future: Future[Result] = Future()

    def run() -> None:
        lower_priority(0, starve=starve)
        try:
            with pauses():
                result = work()
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="quire-grammar-apart", daemon=True).start()
    return future.result()
