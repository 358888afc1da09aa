"""All batches of a server: which ones run, when they end early, and that one server runs them where several share a
folder.

A lock on a file says who runs them; the system takes it from a process that is killed, and another server goes on.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_server.batches.batch_run import BatchCounts, BatchLimits, BatchRun
from quire_server.batches.batch_store import StoredBatch
from quire_server.batches.line_answers import Handler, LineAnswerer
from quire_server.batches.load import LineSlots
from quire_server.context import ServerContext
from quire_server.files.folder import KeptFiles
from quire_server.store_access import StoreAccess

__all__ = ["BatchRunner"]

_logger = logging.getLogger(__name__)

MAX_RUNNING = 8
"""Batches that run beside each other."""
LOOK_S = 0.1
"""How often to look whether the server leaves."""
POLL_S = 1.0
"""How often to look for what other servers changed."""
SWEEP_S = 60.0
RETRY_S = 5.0
"""When to go on with a batch whose results could not be written."""


# Many attributes: what the runs share, and the runs.
class BatchRunner:
    """Runs batches until the server leaves.

    Args:
        context: Of the server.
        handlers: Path -> handler, of the routes that lines may name.
        access: Files and batches.
        slots: Bound the lines that run.
        limits: Of an input.
    """

    def __init__(
        self,
        context: ServerContext,
        handlers: Mapping[str, Handler],
        access: StoreAccess[KeptFiles],
        slots: LineSlots,
        limits: BatchLimits,
    ) -> None:
        self._context, self._handlers, self._access = context, handlers, access
        self.slots, self._limits = slots, limits
        self.counts = BatchCounts()
        self.num_by_status: dict[str, int] = {}
        """Batches, as of the last look."""
        self.num_files = (0, 0)
        """Files and their bytes, as of the last look."""
        self._runs: dict[str, tuple[BatchRun, asyncio.Future[None]]] = {}
        self._retry_s: dict[str, float] = {}
        """Batch -> when to go on with it."""
        self._woken = asyncio.Event()
        self._sweep_s = time.monotonic() + SWEEP_S

    def wake(self) -> None:
        """Something has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Run until it is cancelled. What goes wrong is logged, and tried again."""
        lock: int | None = None
        try:
            while not self._context.state.is_leaving:
                try:
                    lock = await self._locked() if lock is None else lock
                    await self._look(runs=lock is not None)
                except Exception as error:
                    _logger.error("batches cannot go on: %s", error)
                await self._wait()
        finally:
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if lock is not None:
                os.close(lock)

    async def _wait(self) -> None:
        end_s = time.monotonic() + POLL_S
        while not (self._context.state.is_leaving or self._woken.is_set()) and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
        self._woken.clear()

    async def _locked(self) -> int | None:
        """The lock, None while another server has it."""
        folder = await self._access.ask(lambda kept: kept.folder)
        return await asyncio.to_thread(_lock, folder / "batches.lock")

    async def _look(self, *, runs: bool) -> None:
        self.num_by_status, self.num_files = await self._access.ask(
            lambda kept: (kept.batches.num_by_status(), kept.files.num_bytes())
        )
        if time.monotonic() >= self._sweep_s:
            self._sweep_s = time.monotonic() + SWEEP_S
            await self._access.ask(lambda kept: kept.files.sweep())
        if not runs:
            return
        unfinished = await self._access.ask(lambda kept: kept.batches.unfinished())
        for batch in unfinished:
            run = self._runs.get(batch.id)
            if run is not None and (end := _early_end(batch)) is not None:
                run[0].stop(end)
        for batch in self._next(unfinished):
            await self._start(batch)

    def _next(self, unfinished: list[StoredBatch]) -> list[StoredBatch]:
        """Those that begin now: of the owner with the fewest first."""
        now_s = time.monotonic()
        num_of = Counter(run.batch.owner for run, _ in self._runs.values())
        waiting = [
            batch for batch in unfinished if batch.id not in self._runs and self._retry_s.get(batch.id, 0.0) <= now_s
        ]
        chosen: list[StoredBatch] = []
        while waiting and len(self._runs) + len(chosen) < MAX_RUNNING:
            batch = min(waiting, key=lambda each: num_of[each.owner])
            waiting.remove(batch)
            num_of[batch.owner] += 1
            chosen.append(batch)
        return chosen

    async def _start(self, batch: StoredBatch) -> None:
        caller = self._context.api_keys.caller_of_owner(batch.owner)
        if caller is None:
            await self._access.ask(lambda kept: kept.batches.change(batch.id, _fail_without_key))
            return
        answerer = LineAnswerer(self._context, self._handlers, caller)
        run = BatchRun(batch, self._access, answerer, self.slots, self._limits, self.counts)
        if (end := _early_end(batch)) is not None:
            run.stop(end)
        task = asyncio.ensure_future(self._run(batch, run))
        self._runs[batch.id] = run, task
        task.add_done_callback(lambda _: self._runs.pop(batch.id, None))

    async def _run(self, batch: StoredBatch, run: BatchRun) -> None:
        try:
            await run.run()
            self._retry_s.pop(batch.id, None)
        except Exception as error:
            _logger.error("%s stops, and goes on in %g s: %s", batch.id, RETRY_S, error, exc_info=error)
            self._retry_s[batch.id] = time.monotonic() + RETRY_S
        finally:
            self.wake()


def _early_end(batch: StoredBatch) -> str | None:
    """How a batch ends though not all lines are done; None where it does not."""
    if batch.status == "cancelling":
        return "cancelled"
    is_late = batch.status in ("validating", "in_progress") and time.time() >= batch.object["expires_at"]
    return "expired" if is_late else None


def _fail_without_key(batch: dict[str, Any]) -> None:
    message = "the API key that made the batch is none of this server's any more"
    data = [{"code": "unknown_api_key", "line": None, "message": message, "param": None}]
    batch |= {"status": "failed", "failed_at": int(time.time()), "errors": {"object": "list", "data": data}}


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
