"""`--api-server-count`: several API processes in front of the engines; this side starts and watches them.

The process that was started has the engines, counts for `/metrics` and answers no HTTP. Each API process takes
connections from the one listening socket. One that ends is started again; its siblings go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire import AsyncLLM, QuireConfig
from quire.parallel.data_parallel import pool_ranks
from quire_engine import EngineHub, EngineInfo, FrontAddresses
from quire_engine.process import signal_name
from quire_interfaces import ConfigError, EngineDeadError
from quire_observability import EngineMetrics
from quire_server.callers import read_api_keys
from quire_server.config import ServerConfig
from quire_server.elastic import pool_of
from quire_server.engine_view.service import request_explanations, request_list
from quire_server.exit_status import EngineStartError, ExitStatus
from quire_server.live_settings import NOTICE, LiveSettings, engine_values, with_server_values
from quire_server.metric_labels import label_metrics
from quire_server.stopping import Stopping

__all__ = ["APIProcessSpec", "HubProcess", "num_api_processes"]

_logger = logging.getLogger(__name__)

MAX_EARLY_ENDS = 3
"""How often in a row an API process may end by itself before it answers; then the server ends."""
KILL_GRACE_S = 10.0
"""Beyond its drain, how long an API process gets to end."""


def num_api_processes(config: QuireConfig, server: ServerConfig) -> int:
    """How many processes answer HTTP: as many as asked for, else as this server has engines, but one where something
    is set that one process alone can give.

    Raises:
        ConfigError: several are asked for together with such a setting.
    """
    count = server.api_server_count
    reason = _why_one_process(config, server)
    if count is None:
        return 1 if reason is not None else pool_ranks(config.data_parallel).size
    if count > 1 and reason is not None:
        raise ConfigError(f"api_server_count {count} does not go with {reason}", field="api_server_count")
    return count


def _why_one_process(config: QuireConfig, server: ServerConfig) -> str | None:
    if server.pooling_model is not None:
        return "--pooling-model, whose engine one API process has: serve that model on its own"
    if server.response_store == ":memory:":
        return "--response-store :memory:, where other API processes cannot look: give a file"
    if read_api_keys(server).limits:
        return "limits of keys in --api-key-file, which one API process counts"
    if server.grpc_port is not None or server.grpc_uds is not None:
        return "--grpc-port and --grpc-uds, on which one API process listens"
    if server.files_dir is not None:
        return "--files-dir, whose batches one API process runs"
    return None


class APIProcessSpec(msgspec.Struct, kw_only=True):
    """What an API process is told."""

    number: int
    config: dict[str, Any]
    server: dict[str, Any]
    addresses: FrontAddresses
    listening_fd: int
    family: int
    """Of the listening socket."""


class _Prepared(NamedTuple):
    """Media of one modality that API processes have prepared (`quire_observability`'s `PreparedCounts`)."""

    num_queries: int = 0
    num_hits: int = 0
    num_items: int = 0
    num_embeds: int = 0
    num_seconds: float = 0.0

    def plus(self, other: Sequence[Any]) -> _Prepared:
        return _Prepared(*(one + another for one, another in zip(self, other, strict=True)))


class _APIProcess:
    """One of them, over all its restarts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.popen: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.num_early_ends = 0
        """How often in a row it ended before it answered."""
        self.prepared: Mapping[str, Sequence[Any]] = {}
        """What the running process has told of prepared media."""
        self.running: set[str] = set()
        """Ids of responses that run in its background."""


# Many attributes: the engines' client, their hub, the processes in front of it, and how all of them end.
class HubProcess:
    """Engines and API processes of one server.

    Args:
        llm: Its engines, started.
        server: Settings.
        metrics: What all requests are counted in.
        listening: Bound, not listening yet.
        count: Number of API processes.
        stopping: Signals.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        server: ServerConfig,
        metrics: EngineMetrics,
        listening: socket.socket,
        count: int,
        stopping: Stopping,
    ) -> None:
        self._llm, self._server, self._metrics = llm, server, metrics
        self._listening, self._stopping = listening, stopping
        self._processes = [_APIProcess(number) for number in range(count)]
        self._hub: EngineHub | None = None
        self._all_ready: asyncio.Event | None = None
        self._failed: asyncio.Future[None] | None = None
        self._all_gone: asyncio.Event | None = None
        self._is_stopping = False
        self._live = LiveSettings(llm.config, server, {}, self._apply_live, may_limit_keys=False)
        self._gone_prepared: dict[str, _Prepared] = {}
        """What processes that have ended had prepared."""
        metrics.prepared_media = self._prepared_media

    def kill(self) -> None:
        """End all API processes now; for an end of this process that waits for nothing."""
        for process in self._processes:
            if process.popen is not None:
                with contextlib.suppress(OSError):
                    process.popen.kill()

    async def run(
        self,
        ready: Callable[[AsyncLLM], Coroutine[Any, Any, EngineInfo]],
        announce: Callable[[EngineInfo], None],
        watchers: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    ) -> ExitStatus:
        """Serve until a signal, or until the engine is gone for good.

        Args:
            ready: Waits for the engines.
            announce: Called when all API processes answer.
            watchers: Run from then on; one that raises ends the server.

        Raises:
            EngineStartError: API processes end before they answer.
            EngineDeadError: the engines are gone.
        """
        loop = asyncio.get_running_loop()
        self._all_ready, self._all_gone = asyncio.Event(), asyncio.Event()
        self._failed = loop.create_future()
        client = self._llm.client
        self._hub = EngineHub(
            client,
            self._calls(),
            self._on_ready,
            self._on_report,
            max_queued_messages=self._llm.config.engine.max_queued_messages,
        )
        tasks: list[asyncio.Future[Any]] = []
        try:
            for process in self._processes:
                self._start(process)
            info = await ready(self._llm)
            names = self._server.served_model_name or (info.model,)
            label_metrics(self._metrics, names[0], self._llm.config, info)
            self._hub.tell_ready()
            stopped = asyncio.ensure_future(self._stopping.drains().wait())
            all_ready = asyncio.ensure_future(self._all_ready.wait())
            tasks = [stopped, all_ready]
            begins: list[asyncio.Future[Any]] = [stopped, all_ready, self._failed]
            await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
            if all_ready.done():
                announce(info)
            tasks += [asyncio.ensure_future(watcher()) for watcher in watchers]
            ends: list[asyncio.Future[Any]] = [stopped, self._failed, *tasks[2:]]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            for task in tasks[2:]:
                if task.done():
                    self._tell_death(task)
            await self._drain()
            for task in tasks[2:]:
                if task.done():
                    task.result()
            return ExitStatus.OK
        finally:
            self._is_stopping = True
            for task in tasks:
                task.cancel()
            self.kill()
            self._hub.close()
            await self._llm.client.shutdown(0.0)

    def _tell_death(self, watcher: asyncio.Future[None]) -> None:
        assert self._hub is not None
        if not watcher.cancelled() and isinstance(error := watcher.exception(), EngineDeadError):
            self._hub.tell_death(error)

    async def _drain(self) -> None:
        """Have all API processes finish what they have, and wait until they are gone."""
        assert self._all_gone is not None
        self._is_stopping = True
        number = self._stopping.signal or signal.SIGTERM
        self._listening.close()  # theirs are what clients reach
        for process in self._processes:
            if process.popen is not None:
                with contextlib.suppress(OSError):
                    process.popen.send_signal(number)
        self._note_gone()
        delay_s = self._server.drain_delay_s if number == signal.SIGTERM else 0.0
        limit_s = delay_s + self._llm.config.engine.shutdown_timeout_s + KILL_GRACE_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone.wait(), limit_s)
        self.kill()

    # Their processes.

    def _start(self, process: _APIProcess) -> None:
        assert self._hub is not None
        fd = self._listening.fileno()
        spec = APIProcessSpec(
            number=process.number,
            config=self._llm.config.to_dict(),
            server=dataclasses.asdict(self._server),
            addresses=self._hub.attach(process.number),
            listening_fd=fd,
            family=int(self._listening.family),
        )
        blob = msgspec.msgpack.encode(spec)
        process.is_ready = False
        process.popen = subprocess.Popen(
            [sys.executable, "-c", "import sys; from quire_server.api_process import main; sys.exit(main())"],
            stdin=subprocess.PIPE,
            pass_fds=(fd,),
            start_new_session=True,  # Ctrl-C in a terminal reaches this process only, which tells them
        )
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop, process, process.popen), daemon=True).start()
        assert process.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; the watcher says so
            process.popen.stdin.write(len(blob).to_bytes(8, "little") + blob)
            process.popen.stdin.flush()

    def _watch(self, loop: asyncio.AbstractEventLoop, process: _APIProcess, popen: subprocess.Popen[bytes]) -> None:
        returncode = popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
            loop.call_soon_threadsafe(self._on_exit, process, popen, returncode)

    def _on_exit(self, process: _APIProcess, popen: subprocess.Popen[bytes], returncode: int) -> None:
        assert self._hub is not None
        assert self._failed is not None
        if process.popen is not popen:
            return
        if popen.stdin is not None:
            popen.stdin.close()
        process.popen = None
        num_requests = self._hub.num_requests(process.number)
        self._hub.detach(process.number)
        for modality, counts in process.prepared.items():
            self._gone_prepared[modality] = self._gone_prepared.get(modality, _Prepared()).plus(counts)
        process.prepared = {}
        process.running.clear()
        if self._is_stopping:
            self._note_gone()
            return
        how = f"by {signal_name(returncode)}" if returncode < 0 else f"with exit status {returncode}"
        if returncode == ExitStatus.WRONG_SETTING and not self._failed.done():
            self._failed.set_exception(ConfigError(f"API process {process.number} refuses a setting: see above"))
            return
        if process.is_ready:
            process.num_early_ends = 0
        elif returncode != -signal.SIGKILL:  # which mostly comes from outside
            process.num_early_ends += 1
        if process.num_early_ends >= MAX_EARLY_ENDS:
            if not self._failed.done():
                cause = f"API process {process.number} ended {how} before it answered, {MAX_EARLY_ENDS} times in a row"
                self._failed.set_exception(EngineStartError(f"{cause}: its last lines are above"))
            return
        _logger.error(
            "API process %d ended %s, and with it %d requests in flight; it is started again",
            process.number,
            how,
            num_requests,
        )
        try:
            self._start(process)
        except OSError as error:  # no process or no file descriptor is left, just now
            _logger.error("API process %d cannot be started: %s; the next try is in 1 s", process.number, error)
            asyncio.get_running_loop().call_later(1.0, self._retry_start, process)

    def _retry_start(self, process: _APIProcess) -> None:
        if not self._is_stopping and process.popen is None:
            try:
                self._start(process)
            except OSError:
                asyncio.get_running_loop().call_later(1.0, self._retry_start, process)

    def _note_gone(self) -> None:
        assert self._all_gone is not None
        if all(process.popen is None for process in self._processes):
            self._all_gone.set()

    def _on_ready(self, number: int) -> None:
        assert self._all_ready is not None
        self._processes[number].is_ready = True
        if self._live.values and self._hub is not None:
            self._hub.notify(NOTICE, self._live.values, number=number)
        if all(process.is_ready for process in self._processes):
            self._all_ready.set()

    # What they tell and ask for.

    def _on_report(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        if name == "pooled":
            self._metrics.on_pooled(*arguments)
        elif name == "began":
            self._processes[number].running.add(arguments[0])
        elif name == "ended":
            self._processes[number].running.discard(arguments[0])
        elif name == "prepared":
            self._processes[number].prepared = arguments[0]

    def _prepared_media(self) -> dict[str, _Prepared]:
        counts = dict(self._gone_prepared)
        for process in self._processes:
            for modality, own in process.prepared.items():
                counts[modality] = counts.get(modality, _Prepared()).plus(own)
        return counts

    def _calls(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {
            "explain": self._explain,
            "exposition": self._exposition,
            "list_requests": self._list_requests,
            "num_requests": self._num_requests,
            "resize": self._resize,
            "restart": self._restart,
            "is_resizing": self._is_resizing,
            "patch_config": self._live.patch,
            "roll_back_config": self._live.roll_back,
            "show_config": self._show_config,
            "is_running": self._is_running,
        }

    async def _exposition(self, timeout_s: float) -> bytes:
        with contextlib.suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._llm.client.stats()
        return self._metrics.exposition()

    async def _explain(self, request_name: str, tenant: str | None, hides_salts: bool) -> list[dict[str, Any]]:
        return await request_explanations(self._llm.client, self._metrics.requests, request_name, tenant, hides_salts)

    async def _list_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        return request_list(self._metrics.requests, tenant)

    async def _num_requests(self) -> int:
        return self._llm.client.num_requests()

    async def _resize(self, size: int, drain_s: float) -> None:
        await pool_of(self._llm.client).resize(size, drain_s)

    async def _restart(self, drain_s: float) -> int:
        pool = pool_of(self._llm.client)
        await pool.restart(drain_s)
        return len(pool.engines)

    async def _is_running(self, response_id: str) -> bool:
        return any(response_id in process.running for process in self._processes)

    async def _show_config(self) -> dict[str, Any]:
        return self._live.shown()

    async def _apply_live(self, values: Mapping[str, Any]) -> None:
        if engine_values(values) != engine_values(self._live.values):
            await self._llm.client.reconfigure(engine_values(values))
        logging.getLogger().setLevel(with_server_values(self._server, values).log_level.upper())
        assert self._hub is not None
        self._hub.notify(NOTICE, dict(values))

    async def _is_resizing(self) -> bool:
        return pool_of(self._llm.client).is_resizing
