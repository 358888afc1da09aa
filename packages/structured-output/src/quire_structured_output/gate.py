"""`GrammarGate`: a request runs when its grammar is ready, and is refused when it cannot be.

An `AdmissionRule` for the scheduler, which sees a request that waits for something of its own, and a `RequestGate` for
the engine's loop, which hears of failures. Knows requests by their ids; all calls come from the loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from quire_interfaces import (
    AdmissionRule,
    CompiledGrammar,
    GrammarSpec,
    QuireError,
    Request,
    RequestError,
    SchedulerStats,
)
from quire_structured_output.compiler import GrammarCompiler

__all__ = ["GrammarGate"]


class _Pending(NamedTuple):
    spec: GrammarSpec
    future: Future[CompiledGrammar]
    deadline_s: float


class GrammarGate(AdmissionRule):
    """Implements `quire_interfaces.AdmissionRule` and `quire_interfaces.RequestGate`.

    Args:
        compiler: Owned from now on: `close` closes it.
        clock: Seconds; for tests.
    """

    name = "grammar"
    holds_queue = False

    def __init__(self, compiler: GrammarCompiler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.compiler = compiler
        self._clock = clock
        self._pending: dict[str, _Pending] = {}

    # As the engine's loop sees it.

    def prepare(self, request: Request) -> None:
        """Start to compile the request's grammar, if it has one that is not compiled."""
        params = request.sampling_params.structured_outputs
        if params is None:
            return
        spec = params.spec()
        was_compiled = request.grammar_was_compiled or bool(request.output_token_ids)
        future = self.compiler.submit(spec, request.options.tenant, was_compiled=was_compiled)
        if future.done() and (error := future.exception()) is not None:
            raise error.with_traceback(None)  # it is remembered, and would grow by a place for each request
        if not future.done():
            deadline_s = self._clock() + self.compiler.config.timeout_s
            self._pending[request.request_id] = _Pending(spec, future, deadline_s)

    def wait(self, request: Request) -> None:
        """Wait until the request's grammar is compiled, at most until its deadline."""
        pending = self._pending.pop(request.request_id, None)
        if pending is None:
            return
        try:
            error = pending.future.exception(timeout=max(0.0, pending.deadline_s - self._clock()))
        except TimeoutError:
            error = self.compiler.late_error(pending.spec)
            self._abandon(pending.spec)
            raise error from None
        if error is not None:
            raise error.with_traceback(None)

    @property
    def is_preparing(self) -> bool:
        """Whether the grammar of any request is still being compiled."""
        return bool(self._pending)

    def take_failed(self) -> list[tuple[str, QuireError]]:
        """Requests whose grammar was refused or took too long, with the reason."""
        failed: list[tuple[str, QuireError]] = []
        now_s = self._clock() if self._pending else 0.0
        for request_id, (spec, future, deadline_s) in list(self._pending.items()):
            if future.done():
                del self._pending[request_id]
                error = future.exception()
                if error is not None:
                    failed.append((request_id, _as_ours(error, spec)))
            elif now_s >= deadline_s:
                del self._pending[request_id]
                failed.append((request_id, self.compiler.late_error(spec)))
                self._abandon(spec)
        return failed

    def forget(self, request_ids: Iterable[str]) -> None:
        """Stop compiling for requests that have ended, unless others want the same grammar."""
        for request_id in request_ids:
            pending = self._pending.pop(request_id, None)
            if pending is not None:
                self._abandon(pending.spec)

    def _abandon(self, spec: GrammarSpec) -> None:
        """A request waits for it no longer; perhaps another one does."""
        if all(pending.spec != spec for pending in self._pending.values()):
            self.compiler.abandon(spec)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Count grammars asked for, found, refused and compiled."""
        self.compiler.add_stats(stats)

    def close(self) -> None:
        """Close the compiler."""
        self.compiler.close()

    # As the scheduler sees it.

    def admits(self, request: Request) -> bool:
        """Whether the request waits for no grammar any more."""
        pending = self._pending.get(request.request_id)
        return pending is None or (pending.future.done() and pending.future.exception() is None)

    def admitted(self, request: Request) -> None:
        """Its grammar was ready."""
        self._pending.pop(request.request_id, None)


def _as_ours(error: BaseException, spec: GrammarSpec) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return RequestError(f"structured_outputs.{spec.kind} could not be compiled: {type(error).__name__}: {error}")
