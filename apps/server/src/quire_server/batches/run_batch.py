"""`quire run-batch`: the lines of a file, answered by an engine of its own, without a server.

Results are those of /v1/batches, in the order of the input, refusals among them. They are written to a file beside the
output, which takes the output's place when all of them are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire import AsyncLLM, QuireConfig
from quire.demo import seeing_demo
from quire_interfaces import ConfigError
from quire_multimodal import MediaError, fetch_media
from quire_observability import EngineMetrics
from quire_server.app import post_handlers
from quire_server.batches.batch_lines import InputLine, check_input, read_lines
from quire_server.batches.batch_run import problem_line
from quire_server.batches.line_answers import LineAnswerer, TryAgainError
from quire_server.batches.result_files import line_id, result_line
from quire_server.callers import KEYLESS
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.log_settings import begin_logging
from quire_server.serve import read_template, ready_engine, start_progress

__all__ = ["run_batch"]

_BATCH = f"batch_{'0' * 32}"
"""Stands in the ids of requests."""


def run_batch(
    config: QuireConfig,
    server: ServerConfig,
    input_file: str,
    output_file: str,
    *,
    factory: tuple[str, dict[str, Any]] | None = None,
) -> int:
    """Answer all lines; the exit status.

    Args:
        config: Settings of the engine.
        server: Settings of the HTTP side that concern answers, as bounds of bodies and chat templates.
        input_file: A path, or an http(s) URL from which media may be fetched, too.
        output_file: A path.
        factory: Another engine than the configured one; see `AsyncLLM`.

    Raises:
        ConfigError: a file cannot be used, or the input holds no lines that can be told apart.
    """
    config = seeing_demo(config)
    begin_logging(server)
    if "://" in output_file:
        raise ConfigError(
            f"the output must be a file here, got {output_file!r}; send it on yourself", field="output_file"
        )
    output = Path(output_file).expanduser()
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {str(output.parent)!r} for the output", field="output_file")
    run: Callable[[Coroutine[Any, Any, int]], int] = asyncio.run
    with contextlib.suppress(ImportError):  # not there on every platform
        import uvloop

        run = uvloop.run
    with _input(input_file, config) as path:
        check = check_input(path, None, max_lines=sys.maxsize, max_line_bytes=server.max_body_bytes)
        if check.problems:
            first = check.problems[0]
            where = "" if first.line is None else f" (line {first.line})"
            raise ConfigError(f"cannot run {input_file!r}: {first.message}{where}", field="input_file")
        metrics = EngineMetrics(prefix=server.metrics_prefix)
        llm = AsyncLLM(
            config, listener_of=metrics.of_engine, chat_template=read_template(server.chat_template), factory=factory
        )
        llm.client.start()
        num_refused = run(_run(llm, server, metrics, path, output, check.num_lines))
    print(f"{check.num_lines - num_refused} answered, {num_refused} refused, in {output}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _input(name: str, config: QuireConfig) -> Iterator[Path]:
    """The input as a file here."""
    if not name.startswith(("http://", "https://")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {name!r}", field="input_file")
        yield path
        return
    try:
        content = fetch_media(name, config.media)
    except MediaError as error:
        raise ConfigError(f"cannot read {name!r}: {error}", field="input_file") from None
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


async def _run(
    llm: AsyncLLM, server: ServerConfig, metrics: EngineMetrics, path: Path, output: Path, num_lines: int
) -> int:
    """Answer all lines; the number of those that were refused."""
    try:
        with start_progress(llm):
            info = await ready_engine(llm)
        names = server.served_model_name or (info.model,)
        context = ServerContext(llm=llm, config=server, metrics=metrics, model_names=names)
        answerer = LineAnswerer(context, post_handlers(context), KEYLESS)
        partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                num_refused = await _answer_all(answerer, path, server, file, 2 * info.max_num_seqs, num_lines)
                os.fsync(file.fileno())
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
        return num_refused
    except OSError as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error.strerror}", field="output_file") from None
    finally:
        await llm.shutdown()


async def _answer_all(
    answerer: LineAnswerer, path: Path, server: ServerConfig, file: BinaryIO, num_at_once: int, num_lines: int
) -> int:
    running: deque[asyncio.Future[tuple[bytes, bool]]] = deque()
    num_done = num_refused = 0

    async def write_first() -> None:
        nonlocal num_done, num_refused
        text, is_refused = await running[0]
        running.popleft()
        file.write(text)
        num_done, num_refused = num_done + 1, num_refused + is_refused
        if sys.stderr.isatty():
            print(
                f"\r{num_done} of {num_lines}", end="\n" if num_done == num_lines else "", file=sys.stderr, flush=True
            )

    try:
        for line in read_lines(path, max_line_bytes=server.max_body_bytes):
            if len(running) >= num_at_once:
                await write_first()
            running.append(asyncio.ensure_future(_answered(answerer, line)))
        while running:
            await write_first()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return num_refused


async def _answered(answerer: LineAnswerer, line: InputLine) -> tuple[bytes, bool]:
    """The result of one line, and whether it was refused."""
    if line.problem is not None:
        return problem_line(_BATCH, line, line.problem), True
    request_id = line_id(_BATCH, line.number)
    while True:
        try:
            answer = await answerer.answer(line.url, request_id, line.body)
        except TryAgainError as error:
            answerer.check_alive()
            await asyncio.sleep(error.delay_s)
            continue
        response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body)}
        is_refused = answer.status != 200
        where = {"line": line.number} if is_refused else {}
        return result_line(request_id, line.custom_id, response=response, error=None, **where), is_refused
