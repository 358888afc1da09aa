"""`GrammarCompiler`: constraints compiled beside the engine's loop, each content once.

Knows the backend, its threads, the cache and the deadline; knows no request and no scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import NamedTuple

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
from quire_structured_output.cost import MAX_COST, expected_cost
from quire_structured_output.matcher import OutputMatcher
from quire_structured_output.trials import SupportsTrials, TrialProcess, TriedGrammar, can_fork
from quire_structured_output.workers import WorkerPool

__all__ = ["GrammarCompiler", "timeout_error"]

_logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Contents that may wait for a thread. Of one tenant with a name as many as it leaves places free."""

QUICK_S = 0.25
"""A constraint that is tried apart for longer begins anew among the slow ones: a usual one takes 0.01."""
SHORTEST_QUICK_S = 0.05
"""So short the first try becomes when many wait for theirs."""
LONGER = 4
"""Each further try may take so many times as long as the one before."""
MAX_USUAL_COST = 1e5
"""What is expected to cost more is tried on processor time that nobody else wants, from the beginning on."""

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
    """A constraint was not compiled within the time of its try."""

    def __init__(self, tried: TriedGrammar | None) -> None:
        """Args:
        tried: What a trial found, where that was quick and compiling is not.
        """
        super().__init__("takes longer")
        self.tried = tried


class _Order(NamedTuple):
    """What is to be compiled, and for whom."""

    spec: GrammarSpec
    tenant: str | None
    cost: float
    """How much work compiling is expected to be (`cost.py`), for the order of turns."""
    was_compiled: bool
    """Whether another engine had it compiled, and used it."""


# Many attributes: one lock guards the cache, the queue, the two pools and their counts, which change together.
class GrammarCompiler:
    """Compiles and remembers. Thread-safe. A `GrammarSource` for runners.

    Constraints that are tried apart have three sets of threads: what takes longer than `QUICK_S` (less when many wait)
    goes to the second, and is tried there for longer and longer, the last time in the third. Tenants take turns, and of
    one tenant's constraints those go first that look as if they cost little and have been tried for the shortest time.
    So however many costly ones there are, an ordinary constraint waits for none to end, and none of a stranger's waits
    behind a tenant's flood.

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
        # Last tries take seconds each; they hold no thread in which shorter ones are made.
        self._last_pool = WorkerPool(max(1, config.num_workers // 2), "quire-grammar-last")
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._owners: dict[GrammarSpec, str | None] = {}
        """Who had each content of the cache compiled."""
        self._waiting: Counter[str | None] = Counter()
        """Tenant -> contents that wait or are being compiled."""
        self._compiling: set[GrammarSpec] = set()
        self._unwanted: set[GrammarSpec] = set()
        """Contents in the cache that nobody waits for any more."""
        self._is_closed = False

    def warm_up(self) -> None:
        """Make the backend now, in a worker thread, so that the first constraint does not wait for it."""
        self._pool.submit(self._get_backend)

    def submit(
        self, spec: GrammarSpec, tenant: str | None = None, *, was_compiled: bool = False
    ) -> Future[CompiledGrammar]:
        """Compile, or take what is there. Failures are remembered like grammars: the same content fails at once, unless
        it was the time that ended, which the load of a moment may have taken.

        Args:
            spec: The content.
            tenant: Whose request needs it.
            was_compiled: Whether another engine has compiled it, or this one before it was started again: a usual one
                is then compiled at once, without a trial.

        Returns:
            A future that raises RequestError when the content cannot be used.

        Raises:
            RequestError: it is larger than `max_bytes`.
            OverloadedError: too many contents wait for a thread.
        """
        check_size(spec, self.config.max_bytes)
        with self._lock:
            self._num_queries += 1
            self._unwanted.discard(spec)
            future = self._cache.get(spec)
            if future is not None:
                self._num_hits += 1
                self._cache.move_to_end(spec)
                return future
            num_waiting = self._waiting.total()
            if MAX_WAITING - num_waiting <= (self._waiting[tenant] if tenant else 0):
                raise self._overloaded(f"{self._waiting[tenant] if tenant else num_waiting} of them wait already")
            self._waiting[tenant] += 1
            self._make_room()
            future = self._cache[spec] = Future()
            self._owners[spec] = tenant
        # Not within the lock, which it takes if the work is over at once.
        self._begin(_Order(spec, tenant, expected_cost(spec), was_compiled), future)
        return future

    def _overloaded(self, what: str) -> OverloadedError:
        retry_after_s = min(60.0, max(1.0, self._waiting.total() * QUICK_S / self.config.num_workers))
        return OverloadedError(
            f"too many schemas, patterns and grammars are being compiled ({what}); try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def _make_room(self) -> None:
        """Forget finished contents until there is room for one more: the oldest of the tenant that has the most, those
        that failed first. What still waits is bounded by `MAX_WAITING`, and pushes nothing out."""
        done = {spec: future for spec, future in self._cache.items() if future.done()}
        while len(done) >= self.config.cache_size:
            counts = Counter(self._owners[spec] for spec in done)
            most = max(counts.values())
            owned = [spec for spec in done if counts[self._owners[spec]] == most]
            failed = (spec for spec in owned if done[spec].cancelled() or done[spec].exception() is not None)
            self._forget(oldest := next(failed, owned[0]))
            del done[oldest]

    def _forget(self, spec: GrammarSpec) -> None:
        self._cache.pop(spec, None)
        self._owners.pop(spec, None)
        self._unwanted.discard(spec)

    def abandon(self, spec: GrammarSpec) -> None:
        """Nobody waits for it any more: it is not begun, and what is under way is the last try. Somebody may come."""
        with self._lock:
            future = self._cache.get(spec)
            if future is not None and not future.done():
                self._unwanted.add(spec)

    def is_compiling(self, spec: GrammarSpec) -> bool:
        """Whether it is being worked on at this moment."""
        with self._lock:
            return spec in self._compiling

    def late_error(self, spec: GrammarSpec) -> QuireError:
        """What a request hears that has waited for `timeout_s`: its constraint is slow, or it had too little of that
        time. So it is for one that waits for its turn, and for one that looks usual and has shared the processor with a
        crowd."""
        with self._lock:
            is_crowded = self._waiting.total() > 2 * self.config.num_workers
            if spec in self._compiling and not (is_crowded and expected_cost(spec) <= MAX_USUAL_COST):
                return timeout_error(spec, self.config.timeout_s)
            return self._overloaded(f"there was not enough time for this one within {self.config.timeout_s:g} s")

    def new_matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at the beginning of the output. Waits only if the grammar is not there, a rare accident: it was
        there when its request was admitted."""
        spec = params.spec()
        with self._lock:
            future = self._cache.get(spec)
        if future is None:
            future = self.submit(spec)
        try:
            grammar = future.result(timeout=self.config.timeout_s)
        except FutureTimeoutError:
            raise self.late_error(spec) from None
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
        self._last_pool.close()
        if self._trials is not None:
            self._trials.close()

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
                if self._tries_apart and isinstance(self._backend, SupportsTrials):
                    self._trials = TrialProcess(self._backend.vocabulary, self._allowance)
            return self._backend

    def _begin(self, order: _Order, future: Future[CompiledGrammar]) -> None:
        """Compile for `future`: try for a moment, and as long as that is not enough, for longer."""

        def attempt(slice_s: float, cost: float, tried: TriedGrammar | None = None) -> None:
            def work() -> CompiledGrammar:
                if not future.running():
                    future.set_running_or_notify_cancel()
                return self._compile(order, slice_s, tried)

            done: Future[CompiledGrammar] = Future()
            with self._lock:
                if self._is_closed:
                    done.cancel()
                else:
                    done = self._pool_of(slice_s).submit(work, tenant=order.tenant, cost=cost)
            done.add_done_callback(partial(hear, slice_s))

        def hear(slice_s: float, done: Future[CompiledGrammar]) -> None:
            longer = None if done.cancelled() else done.exception()
            if isinstance(longer, _TakesLongerError):
                # What has been tried for longer has turned out to cost more than all that has not.
                next_s = self._longer_s(slice_s, order.cost)
                attempt(next_s, order.cost + MAX_COST * next_s, longer.tried)
            else:
                _pass_on(future, done)

        attempt(self._quick_s(), order.cost)

    def _pool_of(self, slice_s: float) -> WorkerPool:
        if slice_s <= QUICK_S:
            return self._pool
        return self._slow_pool if slice_s < self.config.timeout_s else self._last_pool

    def _quick_s(self) -> float:
        """How long the first try may take: the less, the more wait for theirs."""
        return max(min(SHORTEST_QUICK_S, QUICK_S), QUICK_S / (1 + self._waiting.total() / 8))

    def _longer_s(self, slice_s: float, cost: float) -> float:
        """How long the next try may take. What looks usual gets the whole of the first one, if that was made short;
        what would leave little for the last try is the last one."""
        if slice_s < QUICK_S and cost <= MAX_USUAL_COST:
            return QUICK_S
        longer_s = max(slice_s, QUICK_S) * LONGER
        return longer_s if longer_s * 2 < self.config.timeout_s else self.config.timeout_s

    def _compile(self, order: _Order, slice_s: float, tried: TriedGrammar | None) -> CompiledGrammar:
        """
        Args:
            order: What to compile.
            slice_s: How long it may be tried now.
            tried: What was found before, if only the compiling took too long.

        Raises:
            _TakesLongerError: it takes longer than that, and has not had all its time.
        """
        spec, tenant = order.spec, order.tenant
        failed, is_over = True, True
        start_s = self._clock()
        with self._lock:
            if spec in self._unwanted:
                self._forget(spec)
                self._done_waiting(tenant)
                raise CancelledError
            self._compiling.add(spec)
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
            grammar = self._compiled(backend, order, slice_s, tried)
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
                self._forget(spec)
            raise timeout_error(spec, self.config.timeout_s, self._trials.largest_part(spec)) from None
        except Exception as error:  # a library's accident with this content is this content's failure
            _logger.exception("a grammar of kind %s could not be compiled", spec.kind)
            raise RequestError(
                f"structured_outputs.{spec.kind} cannot be used: {type(error).__name__}: {error}",
                param=f"structured_outputs.{spec.kind}",
                code="invalid_grammar",
            ) from error
        finally:
            with self._lock:
                self._compiling.discard(spec)
            if is_over:
                self._count(tenant, self._clock() - start_s, failed)

    def _done_waiting(self, tenant: str | None) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _count(self, tenant: str | None, seconds: float, failed: bool) -> None:
        with self._lock:
            self._done_waiting(tenant)
            self._num_failures += failed
            self._compile_counts[bisect_left(GRAMMAR_COMPILE_BOUNDS_S, seconds)] += 1
            self._compile_seconds += seconds

    def _compiled(
        self, backend: GrammarBackend, order: _Order, slice_s: float, tried: TriedGrammar | None
    ) -> CompiledGrammar:
        """
        Raises:
            _TakesLongerError: it takes longer than `slice_s`, and has not had all its time.
            TimeoutError: the deadline is over.
        """
        spec = order.spec
        is_known = order.was_compiled and order.cost <= MAX_USUAL_COST
        if self._trials is None or not isinstance(backend, SupportsTrials) or is_known:
            return backend.compile(spec)
        timeout_s = self.config.timeout_s
        is_last = slice_s >= timeout_s
        if tried is None:
            try:
                may_disturb = order.cost <= MAX_USUAL_COST
                tried = self._trials.run(spec, min(slice_s, timeout_s), most_s=timeout_s, may_disturb=may_disturb)
            except TimeoutError:
                if not is_last:
                    raise _TakesLongerError(None) from None
                raise
            if tried.compile_s > QUICK_S and slice_s <= QUICK_S and not is_last:
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
