"""`GrammarCompiler`: constraints compiled beside the engine's loop, each content once.

Knows the backend, its threads, the cache and the deadline; knows no request and no scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from quire_interfaces import (
    GRAMMAR_COMPILE_BOUNDS_S,
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarSpec,
    OverloadedError,
    QuireError,
    RequestError,
    SchedulerStats,
    StructuredOutputsParams,
)
from quire_structured_output.allowance import Allowance
from quire_structured_output.blame import largest_part
from quire_structured_output.config import StructuredOutputConfig
from quire_structured_output.matcher import OutputMatcher
from quire_structured_output.trials import SupportsTrials, TrialProcess, TriedGrammar, can_fork
from quire_structured_output.workers import WorkerPool

__all__ = ["GrammarCompiler", "timeout_error"]

_logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Contents that may wait for a thread."""


QUICK_S = 0.25
"""A constraint that is tried apart for longer begins anew among the slow ones: a usual one takes 0.01."""

MAX_QUICK_BLAME = 1 << 14
"""Characters in which the largest part is looked for where others wait for it."""


def timeout_error(spec: GrammarSpec, timeout_s: float, part: str | None = None) -> RequestError:
    """What a request hears whose constraint took too long.

    Args:
        spec: The constraint.
        timeout_s: The deadline.
        part: Its largest part, if it is known already.
    """
    if part is None:
        small = len(spec.text) <= MAX_QUICK_BLAME
        part = largest_part(spec) if small else f"one of its {len(spec.text)} characters"
    return RequestError(
        f"structured_outputs.{spec.kind} was not compiled within {timeout_s:g} s; the largest part is "
        f"{part}: make it smaller, or try again when the machine is less busy",
        param=f"structured_outputs.{spec.kind}",
        code="grammar_timeout",
    )


class _TakesLongerError(Exception):
    """A constraint was not compiled within `QUICK_S`."""

    def __init__(self, tried: TriedGrammar | None) -> None:
        """Args:
        tried: What a trial found, where that was quick and compiling is not.
        """
        super().__init__("takes longer")
        self.tried = tried


class GrammarCompiler:
    """Compiles and remembers. Thread-safe. A `GrammarSource` for runners.

    Constraints that are tried apart have two sets of threads: what takes longer than `QUICK_S` goes to the second, so
    that however many of those there are, an ordinary constraint waits for none to end.

    Args:
        config: Bounds.
        make_backend: Makes the backend, in the first worker thread that needs it.
        tries_apart: Whether constraints are tried in a process of their own first, where the backend and the system
            can: for those of strangers.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        make_backend: Callable[[], GrammarBackend],
        *,
        tries_apart: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._tries_apart = tries_apart and can_fork()
        self._trials: TrialProcess | None = None
        self._allowance = Allowance()
        self._num_queries = self._num_hits = self._num_failures = 0
        self._compile_counts = [0] * (len(GRAMMAR_COMPILE_BOUNDS_S) + 1)
        self._compile_seconds = 0.0
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._clock = clock
        self._pool = WorkerPool(config.num_workers, "quire-grammar")
        self._slow_pool = WorkerPool(config.num_workers, "quire-grammar-slow")
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._num_waiting = 0
        self._is_closed = False

    def warm_up(self) -> None:
        """Make the backend now, in a worker thread, so that the first constraint does not wait for it."""
        self._pool.submit(self._get_backend)

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Compile, or take what is there. Failures are remembered like grammars: the same content fails at once, unless
        it was the time that ended, which the load of a moment may have taken.

        Returns:
            A future that raises RequestError when the content cannot be used.

        Raises:
            RequestError: it is larger than `max_bytes`.
            OverloadedError: too many contents wait for a thread.
        """
        check_size(spec, self.config.max_bytes)
        with self._lock:
            self._num_queries += 1
            future = self._cache.get(spec)
            if future is not None:
                self._num_hits += 1
                self._cache.move_to_end(spec)
                return future
            if self._num_waiting >= MAX_WAITING:
                raise OverloadedError(f"{self._num_waiting} schemas, patterns and grammars wait to be compiled already")
            self._num_waiting += 1
            future = self._cache[spec] = Future()
            while len(self._cache) > self.config.cache_size:
                self._cache.popitem(last=False)
        self._begin(spec, future)  # not within the lock, which it takes if the work is over at once
        return future

    def new_matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """See `quire_interfaces.GrammarSource`. Waits only if the grammar is not there, which is a rare accident: it
        was there when its request was admitted."""
        spec = params.spec()
        with self._lock:
            future = self._cache.get(spec)
        if future is None:
            future = self.submit(spec)
        try:
            grammar = future.result(timeout=self.config.timeout_s)
        except FutureTimeoutError:
            raise timeout_error(spec, self.config.timeout_s) from None
        return OutputMatcher(
            grammar.new_matcher(), self._get_backend().eos_token_ids, params.reasoning, self.config.max_jump_tokens
        )

    def add_stats(self, stats: SchedulerStats) -> None:
        """Write the counters of cache and compiles into their fields."""
        with self._lock:
            stats.num_grammar_queries_total = self._num_queries
            stats.num_grammar_hits_total = self._num_hits
            stats.num_grammar_failures_total = self._num_failures
            stats.grammar_compile_counts_total = list(self._compile_counts)
            stats.grammar_compile_seconds_total = self._compile_seconds

    def close(self) -> None:
        """Take no more work. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._pool.close()
        self._slow_pool.close()
        if self._trials is not None:
            self._trials.close()

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
                if self._tries_apart and isinstance(self._backend, SupportsTrials):
                    self._trials = TrialProcess(self._backend.vocabulary, self._allowance)
            return self._backend

    def _begin(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        """Compile for `future`: among the quick ones, and if it is none, among the slow ones."""

        def compile_quickly() -> CompiledGrammar:
            future.set_running_or_notify_cancel()
            return self._compile(spec, quick=True)

        def hear(done: Future[CompiledGrammar]) -> None:
            longer = None if done.cancelled() else done.exception()
            if not isinstance(longer, _TakesLongerError):
                _pass_on(future, done)
                return
            slowly: Future[CompiledGrammar] = Future()
            with self._lock:
                if self._is_closed:
                    slowly.cancel()
                else:
                    slowly = self._slow_pool.submit(partial(self._compile, spec, tried=longer.tried))
            slowly.add_done_callback(partial(_pass_on, future))

        self._pool.submit(compile_quickly).add_done_callback(hear)

    def _compile(self, spec: GrammarSpec, *, quick: bool = False, tried: TriedGrammar | None = None) -> CompiledGrammar:
        failed, is_over = True, True
        start_s = self._clock()
        try:
            backend = self._get_backend()
            start_s = self._clock()
            if spec.kind not in backend.kinds:
                raise RequestError(
                    f"structured_outputs.{spec.kind} is not supported by the backend {backend.name!r}, which takes "
                    f"{', '.join(sorted(backend.kinds))}",
                    param=f"structured_outputs.{spec.kind}",
                    code="unsupported_constraint",
                )
            grammar = self._compiled(backend, spec, quick, tried)
            failed = False
            return grammar
        except _TakesLongerError:
            failed = is_over = False
            raise
        except QuireError:
            raise
        except TimeoutError:
            assert self._trials is not None
            with self._lock:
                self._cache.pop(spec, None)
            raise timeout_error(spec, self.config.timeout_s, self._trials.largest_part(spec)) from None
        except Exception as error:  # a library's accident with this content is this content's failure
            _logger.exception("a grammar of kind %s could not be compiled", spec.kind)
            raise RequestError(
                f"structured_outputs.{spec.kind} cannot be used: {type(error).__name__}: {error}",
                param=f"structured_outputs.{spec.kind}",
                code="invalid_grammar",
            ) from error
        finally:
            if is_over:
                self._count(self._clock() - start_s, failed)

    def _count(self, seconds: float, failed: bool) -> None:
        with self._lock:
            self._num_waiting -= 1
            self._num_failures += failed
            self._compile_counts[bisect_left(GRAMMAR_COMPILE_BOUNDS_S, seconds)] += 1
            self._compile_seconds += seconds

    def _compiled(
        self, backend: GrammarBackend, spec: GrammarSpec, quick: bool, tried: TriedGrammar | None
    ) -> CompiledGrammar:
        """
        Raises:
            _TakesLongerError: `quick` was asked for, and it is not.
            TimeoutError: the deadline is over.
        """
        if self._trials is None or not isinstance(backend, SupportsTrials):
            return backend.compile(spec)
        quick = quick and self.config.timeout_s > QUICK_S
        if tried is None:
            try:
                tried = self._trials.run(spec, QUICK_S if quick else self.config.timeout_s)
            except TimeoutError:
                if quick:
                    raise _TakesLongerError(None) from None
                raise
        if quick and tried.compile_s > QUICK_S:
            raise _TakesLongerError(tried)
        quick_s = self._allowance.take(tried.compile_s)
        if starve := quick_s < tried.compile_s:
            self._allowance.give_back(quick_s)
        return backend.compile_tried(spec, tried, starve=starve)


def _pass_on(future: Future[CompiledGrammar], done: Future[CompiledGrammar]) -> None:
    """Give `future` what came of its work; a future that nobody works on any more is cancelled."""
    if done.cancelled():
        if not future.cancel():  # it was begun among the quick ones
            future.set_exception(CancelledError())
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def check_size(spec: GrammarSpec, max_bytes: int) -> None:
    """Let a content pass, or not.

    Raises:
        RequestError: it is too large; the message names its largest part.
    """
    size = len(spec.text) if spec.text.isascii() else len(spec.text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise RequestError(
            f"structured_outputs.{spec.kind} has {size} bytes, at most {max_bytes} are taken "
            f"(--structured-output-max-bytes); the largest part is {largest_part(spec)}",
            param=f"structured_outputs.{spec.kind}",
            code="grammar_too_large",
        )
