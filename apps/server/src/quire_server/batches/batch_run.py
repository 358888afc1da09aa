"""One batch while it runs: its input checked, its lines answered beside each other, its results written down.

Goes on where a killed server stopped. Knows no row of a database but through `BatchStore`, and no route.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire_server.batches.batch_lines import InputLine, LineProblem, check_input, read_lines
from quire_server.batches.batch_store import StoredBatch
from quire_server.batches.line_answers import LineAnswerer, TryAgainError
from quire_server.batches.load import LineSlots
from quire_server.batches.result_files import LineResult, ResultFiles, line_id, result_line
from quire_server.files.file_store import StoredFile
from quire_server.files.folder import KeptFiles
from quire_server.store_access import StoreAccess

__all__ = ["BatchCounts", "BatchLimits", "BatchRun", "problem_line"]

Result = TypeVar("Result")

READ_AT_ONCE = 64
"""Lines that are read in one go."""
MAX_BEGUN = 128
"""Lines of one batch that may wait for a place, run, or wait to be written."""
TELL_S = 0.5
"""How often the counts in the database follow."""

_ENDS = {
    "expired": LineProblem(
        "batch_expired", "the request was not executed before the completion window of the batch ended"
    ),
    "cancelled": LineProblem("batch_cancelled", "the batch was cancelled before the request was executed"),
}
"""How a batch may end early -> what its other lines are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one input."""

    max_lines: int
    max_line_bytes: int


@dataclass(slots=True)
class BatchCounts:
    """What was done since the server started, for its metrics."""

    num_lines: Counter[str] = field(default_factory=lambda: Counter(completed=0, failed=0))
    """Result -> lines."""
    num_retries: int = 0
    """Times that a line was tried again."""


# Many attributes: what one batch is, and how far it is.
class BatchRun:
    """Runs one batch to its end.

    Args:
        batch: As it is in the store.
        access: The store.
        answerer: Answers lines for its owner.
        slots: Bound what runs.
        limits: Of the input.
        counts: Of the server.
    """

    def __init__(
        self,
        batch: StoredBatch,
        access: StoreAccess[KeptFiles],
        answerer: LineAnswerer,
        slots: LineSlots,
        limits: BatchLimits,
        counts: BatchCounts,
    ) -> None:
        self.batch = batch
        self._object = batch.object
        self._access, self._answerer, self._slots = access, answerer, slots
        self._limits, self._counts = limits, counts
        self._end: str | None = None
        """How it ends early; None while nothing says so."""
        self._stopping = asyncio.Event()
        self._unwritten: list[LineResult] = []
        self._has_unwritten = asyncio.Event()
        self._room = asyncio.Semaphore(MAX_BEGUN + slots.num_slots)
        self._is_over = False
        """No further results come."""
        self._failure: BaseException | None = None
        """Of a line, which then has no result: nothing may be finished."""
        self._told_s = 0.0

    def stop(self, end: str) -> None:
        """Answer no further line: those that are not done are told so. Idempotent.

        Args:
            end: "cancelled" or "expired".
        """
        if self._end is None:
            self._end = end
            self._stopping.set()

    async def run(self) -> None:
        """Run to the end. Cancelling it leaves everything such that another run goes on.

        Raises:
            HTTPError: the store failed.
            OSError: results cannot be written.
        """
        paths = await self._access.ask(
            lambda kept: [
                kept.files.path_of(name)
                for name in (self.batch.input_file, self.batch.output_file, self.batch.error_file)
            ]
        )
        if self._object["status"] == "validating" and not await self._validate(paths[0]):
            return
        files = await asyncio.to_thread(ResultFiles, paths[1], paths[2])
        try:
            await self._answer_lines(paths[0], files)
            await self._finish(files, paths[0])
        finally:
            await asyncio.to_thread(files.close)

    async def _change(self, change: Callable[[dict[str, Any]], None], *, files: Iterable[StoredFile] = ()) -> None:
        added = list(files)
        self._object = await self._access.ask(lambda kept: kept.batches.change(self.batch.id, change, files=added))

    # The input

    async def _validate(self, path: Path) -> bool:
        """Whether there is something to run. The state says so afterwards."""
        limits = self._limits
        check = await asyncio.to_thread(
            check_input,
            path,
            self._object["endpoint"],
            max_lines=limits.max_lines,
            max_line_bytes=limits.max_line_bytes,
        )

        def note(batch: dict[str, Any]) -> None:
            now_s = int(time.time())
            batch["request_counts"]["total"] = check.num_lines
            if check.problems:
                data = [problem.object() for problem in check.problems]
                batch |= {"status": "failed", "failed_at": now_s, "errors": {"object": "list", "data": data}}
            elif batch["status"] == "validating":
                batch |= {"status": "in_progress", "in_progress_at": now_s}

        await self._change(note)
        return not check.problems

    def _left(self, path: Path, done: set[int]) -> Iterator[InputLine]:
        lines = read_lines(path, max_line_bytes=self._limits.max_line_bytes)
        return (line for line in lines if line.number not in done)

    # The lines

    async def _answer_lines(self, path: Path, files: ResultFiles) -> None:
        writing = asyncio.ensure_future(self._write(files))
        running: set[asyncio.Future[None]] = set()
        starting = asyncio.ensure_future(self._start_lines(path, set(files.done), running))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        if self._object["status"] != "in_progress":
            self._stopping.set()  # it was cancelled, or all was done
        try:
            await asyncio.wait((starting, stopping, writing), return_when=asyncio.FIRST_COMPLETED)
            while starting.done() and running and not (stopping.done() or writing.done()):
                await asyncio.wait({*running, stopping, writing}, return_when=asyncio.FIRST_COMPLETED)
            await _cancelled(*running)
            if starting.done():
                starting.result()
            await _cancelled(starting)
            self._is_over = True
            self._has_unwritten.set()
            await writing
        finally:
            await _cancelled(starting, stopping, writing, *running)
        if self._failure is not None:
            raise self._failure

    async def _start_lines(self, path: Path, done: set[int], running: set[asyncio.Future[None]]) -> None:
        """Begin one line after the other, as there are places."""
        lines = self._left(path, done)
        while batch := await asyncio.to_thread(lambda: list(islice(lines, READ_AT_ONCE))):
            for line in batch:
                await self._room.acquire()
                if line.problem is not None:
                    self._add(line.number, problem_line(self.batch.id, line, line.problem), is_error=True)
                    continue
                task = asyncio.ensure_future(self._run_line(line))
                running.add(task)
                task.add_done_callback(running.discard)

    async def _run_line(self, line: InputLine) -> None:
        """Ends with a result, unless it is cancelled; then another run has one."""
        try:
            text, is_error = await self._slots.run(lambda: self._answered(line))
            self._add(line.number, text, is_error=is_error)
        except Exception as error:
            self._failure = error
            self._stopping.set()

    async def _answered(self, line: InputLine) -> tuple[bytes, bool]:
        request_id = line_id(self.batch.id, line.number)
        while True:
            try:
                answer = await self._answerer.answer(line.url, request_id, line.body)
            except TryAgainError as error:
                self._counts.num_retries += 1
                await asyncio.sleep(error.delay_s)
                continue
            response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body)}
            is_error = answer.status != 200
            where = {"line": line.number} if is_error else {}
            return result_line(request_id, line.custom_id, response=response, error=None, **where), is_error

    # The results

    def _add(self, number: int, text: bytes, *, is_error: bool) -> None:
        self._unwritten.append(LineResult(number, is_error, text))
        self._has_unwritten.set()

    async def _write(self, files: ResultFiles) -> None:
        """Write down what there is, again and again: results that come meanwhile share one sync."""
        while not self._is_over or self._unwritten:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            results, self._unwritten = self._unwritten, []
            await asyncio.to_thread(files.append, results)
            for result in results:
                self._counts.num_lines["failed" if result.is_error else "completed"] += 1
                self._room.release()
            await self._tell(files)

    async def _tell(self, files: ResultFiles) -> None:
        """Let the counts in the database follow, not with every line."""
        if time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        await self._change(lambda batch: _count(batch, files))

    # The end

    async def _finish(self, files: ResultFiles, path: Path) -> None:
        """Answer the lines that did not run, and let the results be files of the owner's."""
        end = self._end or ("cancelled" if self._object["status"] == "cancelling" else None)
        total = self._object["request_counts"]["total"]
        if end is None and len(files.done) != total:
            raise RuntimeError(f"{self.batch.id} has {len(files.done)} results of {total}")

        def finalize(batch: dict[str, Any]) -> None:
            _count(batch, files)
            if end is None and batch["status"] == "in_progress":
                batch |= {"status": "finalizing", "finalizing_at": int(time.time())}

        await self._change(finalize)
        if end is not None:
            left = self._left(path, files.done)
            while lines := await asyncio.to_thread(lambda: list(islice(left, READ_AT_ONCE))):
                results = [
                    LineResult(line.number, True, problem_line(self.batch.id, line, line.problem or _ENDS[end]))
                    for line in lines
                ]
                await asyncio.to_thread(files.append, results)
                self._counts.num_lines["failed"] += len(results)
        added = self._result_files(files)

        def complete(batch: dict[str, Any]) -> None:
            _count(batch, files)
            status = end or ("cancelled" if batch["status"] == "cancelling" else "completed")
            batch |= {"status": status, f"{status}_at": int(time.time())}
            for file in added:
                batch["output_file_id" if file.id == self.batch.output_file else "error_file_id"] = file.id

        await self._change(complete, files=added)
        await asyncio.to_thread(files.remove_empty)

    def _result_files(self, files: ResultFiles) -> list[StoredFile]:
        expires_after = self._object.get("output_expires_after")
        created_s = int(time.time())
        names = (self.batch.output_file, "output"), (self.batch.error_file, "error")
        return [
            StoredFile(
                id=file_id,
                owner=self.batch.owner,
                purpose="batch_output",
                num_bytes=size,
                created_s=created_s,
                expires_s=None if expires_after is None else created_s + expires_after["seconds"],
                filename=f"{self.batch.id}_{kind}.jsonl",
            )
            for (file_id, kind), size in zip(names, files.sizes, strict=True)
            if size
        ]


def problem_line(batch_id: str, line: InputLine, problem: LineProblem) -> bytes:
    """The result of a line that did not run."""
    error = {"code": problem.code, "message": problem.message, "param": problem.param}
    request_id = line_id(batch_id, line.number)
    return result_line(request_id, line.custom_id, response=None, error=error, line=line.number)


def _count(batch: dict[str, Any], files: ResultFiles) -> None:
    batch["request_counts"] |= {"completed": files.num_completed, "failed": files.num_failed}


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
