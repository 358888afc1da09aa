"""An engine client whose core runs in a process of its own: ZMQ transport, supervision, restart.

The process that uses this never imports the engine's heavy parts: they are named as "module:function" and imported by
the child. One receive and one decode per engine step serve all streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from quire_engine.child import ChildSpec
from quire_engine.config import EngineConfig
from quire_engine.listener import EngineListener
from quire_engine.messages import (
    AddRequest,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineInfo,
    decode_core_message,
    encode_message,
)
from quire_engine.process import EngineProcess, num_oom_kills, signal_name
from quire_engine.socket_folder import SocketFolder
from quire_engine.streaming_client import EngineOwner, StreamingClient, failure_text, first_line
from quire_engine.streams import OutputStream
from quire_interfaces import (
    EngineCoreOutput,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    RequestError,
    RequestFailure,
)

__all__ = ["ProcessClient"]

_logger = logging.getLogger(__name__)

RECEIVE_BATCH = 64
"""Messages taken per turn of the event loop, so that a flood leaves room for everything else."""
RETRY_SEND_S = 0.01
RETRY_START_S = 1.0
"""When the system has no process or no file descriptor to give, how long until the next try."""
HANG_GRACE_S = 5.0
"""Beyond `step_timeout_s`, how long an engine gets to answer before its process is ended."""
RESTART_WINDOW_S = 3600.0
MAX_DEATHS = 3
"""Deaths of engine processes, without a token between them, at which a request is given up; the third one died while no
other suspect was there."""
MAX_KILLS = 5
"""Such deaths by SIGKILL."""
MAX_OUTSIDE_KILLS = 9
"""Such deaths by SIGKILL where the system has killed nothing for want of memory: somebody else did it. The request is
among the suspects after `MAX_OUTSIDE_KILLS - MAX_DEATHS` of them."""
LAST_WORDS_S = 0.3
"""After the process's end, how long its last message may still be on its way."""


# Many attributes: one process, its sockets, its restarts, and what it is to be when it is there again.
class ProcessClient(StreamingClient):
    """Starts and speaks to an engine process. Use it like any `EngineClient`.

    `start` returns at once, so that the caller can import its own libraries while the engine loads; then `await
    ready()`.

    Args:
        factory: `EngineFactory` as "module:function", imported and called in the child.
        factory_config: Plain data handed to it.
        config: The engine's settings.
        listener: Hears of steps and requests.
        sys_path: Further places from which the child may import.
        owner: Who moves requests between this engine and others; None where it is the only one.
    """

    def __init__(
        self,
        factory: str,
        factory_config: dict[str, Any],
        config: EngineConfig | None = None,
        listener: EngineListener | None = None,
        *,
        sys_path: Iterable[str] = (),
        owner: EngineOwner | None = None,
    ) -> None:
        super().__init__(config, listener, owner)
        self._factory = factory
        self._factory_config = factory_config
        self._sys_path = list(sys_path)
        self._context: zmq.Context[Any] | None = None
        self._sender: zmq.Socket[bytes] | None = None
        self._receiver: zmq.Socket[bytes] | None = None
        self._folder: SocketFolder | None = None
        self._process: EngineProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exited: asyncio.Event | None = None
        self._reader_fd = -1
        self._unsent: deque[bytes] = deque()
        self._resume_ids: list[str] = []
        self._restart_times_s: list[float] = []
        self._is_starting = True
        self._followed: ProcessClient | None = None
        """Engine whose adapters and rest are taken over when this one is ready."""
        self._ping_time_s = 0.0
        """When an engine that seems to hang was asked for an answer; 0.0 is "not asked"."""
        self._last_failure: str | None = None
        """What a core said of its own failure, while its process is on its way out."""
        self._failure_signal: str | None = None
        """The signal of that failure, if one was its cause."""
        self._num_oom_kills = num_oom_kills()
        """`num_oom_kills` when the process was started."""

    @property
    def is_remote(self) -> bool:
        """Whether the engine is on another host."""
        return False

    def follow(self, former: ProcessClient) -> None:
        """Begin with the adapters of another engine, and rest if it rests. To be called before `start`."""
        self._followed = former

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; does not wait for it.

        Raises:
            ConfigError: `factory_config` is no plain data.
        """
        self._context = zmq.Context(io_threads=1)
        self._sender = self._context.socket(zmq.PUSH)
        self._receiver = self._context.socket(zmq.PULL)
        for socket in (self._sender, self._receiver):
            socket.set_hwm(self.config.max_queued_messages)
            socket.setsockopt(zmq.LINGER, 0)
        to_core, from_core = self._bind()
        spec = ChildSpec(
            factory=self._factory,
            factory_config=self._factory_config,
            config=self.config,
            to_core=to_core,
            from_core=from_core,
            socket_folder=None if self._folder is None else self._folder.path,
            sys_path=self._sys_path,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        self._is_starting = True
        self._num_oom_kills = num_oom_kills()
        self._process = self._make_process(spec)
        self._process.start()

    def _make_process(self, spec: ChildSpec) -> EngineProcess:
        return EngineProcess(spec, forward_output=self.config.forward_output, on_exit=self._on_exit_in_thread)

    def _bind(self) -> tuple[str, str]:
        assert self._sender is not None
        assert self._receiver is not None
        if not zmq.has("ipc"):
            to_core = f"tcp://127.0.0.1:{self._sender.bind_to_random_port('tcp://127.0.0.1')}"
            from_core = f"tcp://127.0.0.1:{self._receiver.bind_to_random_port('tcp://127.0.0.1')}"
            return to_core, from_core
        self._folder = SocketFolder(longest_name=len("out"))
        to_core, from_core = f"ipc://{self._folder.path}/in", f"ipc://{self._folder.path}/out"
        self._sender.bind(to_core)
        self._receiver.bind(from_core)
        return to_core, from_core

    @property
    def is_loading(self) -> bool:
        return self._is_starting and self._dead is None

    async def ready(self) -> EngineInfo:
        self.check_health()
        if self._process is None:
            self.start()
        self._attach()
        return await super().ready()

    def _attach(self) -> None:
        """Listen on the running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._exited = asyncio.Event()
        if self._reader_fd < 0 and self._receiver is not None:
            self._reader_fd = int(self._receiver.getsockopt(zmq.FD))
            self._loop.add_reader(self._reader_fd, self._on_readable)
            self._loop.call_soon(self._on_readable)
            assert self._process is not None
            if self._process.returncode is not None:
                self._loop.call_soon(self._on_exit, self._process)

    def _on_readable(self) -> None:
        # The descriptor is edge-triggered: read until there is nothing left, or come back.
        for _ in range(RECEIVE_BATCH):
            if self._receiver is None:
                return
            try:
                data = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(decode_core_message(data))
            except msgspec.MsgspecError as error:
                self._die(EngineDeadError(f"the engine process sent something unreadable: {error}"))
        assert self._loop is not None
        self._loop.call_soon(self._on_readable)

    def _on_message(self, message: CoreMessage) -> None:
        self._ping_time_s = 0.0
        super()._on_message(message)

    def _on_ready(self) -> None:
        self._is_starting = False
        # Both sides are connected, so the sockets need their names no longer: whoever is killed leaves none behind.
        self._remove_folder()
        if self._followed is not None:
            self.adapters, self._rest = dict(self._followed.adapters), self._followed._rest
            self._live_values = self._followed._live_values
            self._followed = None
            self._restore_state()
        resume_ids, self._resume_ids = self._resume_ids, []
        for request_id in resume_ids:
            entry = self._book.get(request_id)
            if entry is not None:
                self._resume(entry)
        super()._on_ready()

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        stream = self._new_stream(requests)
        try:
            for request in requests:
                self._send(self._compiled_grammars.marked(request))
                self._note_sent(request, stream, n)
        except (TypeError, msgspec.MsgspecError) as error:
            stream.close()
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        except Exception:
            stream.close()
            raise
        return stream

    def _send(self, message: ClientMessage) -> None:
        if self._process is None:
            raise EngineDeadError("the engine was not started: await ready() first")
        data = encode_message(message)
        if not self._unsent and self._try_send(data):
            return
        # The engine is behind, or is just being restarted: what waits here goes out later, in order.
        if len(self._unsent) >= self.config.max_queued_messages and isinstance(message, AddRequest):
            raise OverloadedError(
                f"{len(self._unsent)} messages (max_queued_messages) wait for the engine",
                retry_after_s=self._book.retry_after_s(),
            )
        self._unsent.append(data)
        if len(self._unsent) == 1 and self._loop is not None:
            self._loop.call_later(RETRY_SEND_S, self._send_waiting)

    def _try_send(self, data: bytes) -> bool:
        if self._sender is None:
            return False
        try:
            self._sender.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_waiting(self) -> None:
        while self._unsent:
            if not self._try_send(self._unsent[0]):
                if self._dead is None and self._loop is not None:
                    self._loop.call_later(RETRY_SEND_S, self._send_waiting)
                return
            self._unsent.popleft()

    # The process's end.

    def _on_exit_in_thread(self, process: EngineProcess) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
                self._loop.call_soon_threadsafe(self._on_exit, process)

    def _on_exit(self, process: EngineProcess) -> None:
        if process is not self._process:
            return
        self._on_readable()
        assert self._loop is not None
        if self._dead is not None:
            self._gone(process)
        else:  # during a shutdown, too: that it stopped in good order may be its last message
            self._loop.call_later(LAST_WORDS_S, self._gone, process)

    def _gone(self, process: EngineProcess) -> None:
        if process is not self._process or self._exited is None or self._exited.is_set():
            return
        self._on_readable()
        assert process.returncode is not None
        signal = signal_name(process.returncode) if self._last_failure is None else self._failure_signal
        self._failure_signal = None
        reason = "failure" if self._last_failure is not None else signal or "exit"
        if self._is_stopping and process.returncode == 0:
            cause = "the engine was shut down"
        elif self._last_failure is not None:
            cause, self._last_failure = self._last_failure, None
        else:
            cause = process.explain()
        may_restart = self.info is not None and self._dead is None and not self._is_stopping
        if may_restart and self._has_restarts_left():
            self._restart(cause, reason, signal)
            return
        self._exited.set()
        self._remove_folder()
        if self._owner is not None and not self._is_stopping:
            self._give_up_repeaters(cause, signal)
        self._die(EngineDeadError(cause))
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _on_failed(self, message: EngineFailed) -> None:
        # A core that failed while it ran ends its process next; if a restart is left, that is what counts.
        if self.info is not None and self._has_restarts_left() and not self._is_stopping:
            self._last_failure, self._failure_signal = failure_text(message), message.signal
            return
        super()._on_failed(message)

    def _has_restarts_left(self) -> bool:
        horizon = time.monotonic() - RESTART_WINDOW_S
        self._restart_times_s = [when for when in self._restart_times_s if when >= horizon]
        return len(self._restart_times_s) < self.config.max_restarts

    def _restart(self, cause: str, reason: str, signal: str | None) -> None:
        """Start a new process; requests in flight go on in it after the tokens they already have."""
        self.num_restarts += 1
        self._restart_times_s.append(time.monotonic())
        self.listener.on_restart(reason)
        _logger.error(
            "the engine is started again (%d of max_restarts=%d within an hour, %d requests in flight): %s",
            len(self._restart_times_s),
            self.config.max_restarts,
            len(self._book),
            first_line(cause),
        )
        self._calls.fail_all(lambda: EngineDeadError(f"the engine is being restarted: {cause}"))
        self._close_sockets()
        if self._process is not None:
            self._process.close()
        self._give_up_repeaters(cause, signal)
        self._is_starting = True
        if self._owner is not None:
            self._owner.on_engine_failed(self)
        self._no_engine_stats(len(self._book))
        self._start_again()

    def _start_again(self) -> None:
        assert self._loop is not None
        if self._dead is not None or self._is_stopping:
            return
        self._unsent.clear()  # requests among them are started again with the others
        self._forget_suspects()
        self._resume_ids = [entry.request.request_id for entry in self._book]
        try:
            self.start()
        except (OSError, zmq.ZMQError) as error:  # no process or no file descriptor is left, just now
            self._close_sockets()
            self._retry_start(error)
            return
        self._attach()
        self._loop.call_later(self.config.startup_timeout_s, self._end_hanging_start, self._process)
        self._restore_state()

    def _restore_state(self) -> None:
        """Offer the adapters that requests may choose, and rest if the engine shall."""
        self._restore_adapters()
        if self._live_values:
            self._calls.send("reconfigure", values=self._live_values)
        if self._rest is not None:
            method, arguments = self._rest
            self._calls.send(method, **arguments)

    def _retry_start(self, error: Exception) -> None:
        assert self._loop is not None
        cause = f"the engine process cannot be started: {getattr(error, 'strerror', None) or error}"
        if not self._has_restarts_left():
            self._die(EngineDeadError(cause))
            return
        self._restart_times_s.append(time.monotonic())
        _logger.error("%s; the next try is in %g s", cause, RETRY_START_S)
        self._loop.call_later(RETRY_START_S, self._start_again)

    def _end_hanging_start(self, process: EngineProcess | None) -> None:
        if process is not None and process is self._process and self._is_starting and self._dead is None:
            self._last_failure = (
                f"the engine was not ready within startup_timeout_s={self.config.startup_timeout_s:g} when it was "
                "started again"
            )
            process.kill()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._watch(loop)
        if self.stalled_s < self.config.step_timeout_s or self._process is None:
            return
        # A core that plans ahead notices itself that a step takes too long; one that does not is inside of it. It does
        # not hang if it answers: what it has may wait for something else.
        now = time.monotonic()
        if self._ping_time_s == 0.0:
            self._ping_time_s = now
            self._calls.send("ping")
        elif now - self._ping_time_s >= HANG_GRACE_S:
            self._last_failure = (
                f"a step took longer than step_timeout_s={self.config.step_timeout_s:g}: the device hangs, or the "
                "limit is too small for this machine"
            )
            self._process.kill()

    def _restore_adapters(self) -> None:
        """Offer what the last process offered, before any other message: the new one begins as that one began."""
        assert self.info is not None
        initial = self.info.adapters
        unloads = [name for name, path in initial.items() if self.adapters.get(name) != path]
        loads = {name: path for name, path in self.adapters.items() if initial.get(name) != path}

        def forget_failed(failed: dict[str, str]) -> None:
            for name in failed:
                self.adapters.pop(name, None)

        if unloads or loads:
            self._calls.send_then(forget_failed, "restore_adapters", unloads=unloads, loads=loads)

    def _give_up_repeaters(self, cause: str, signal: str | None) -> None:
        """A request that gets no further from one death to the next may be what kills the process. Alone, it is failed;
        where several are suspected, each is tried apart from the others. SIGKILL comes from outside, mostly for
        somebody else's sake, and counts less, still less where memory has not run out, and says that suspects which
        were not sent yet are none; a process that was still starting had read none of them."""
        if self._is_starting:
            return
        was_killed = signal == "SIGKILL"  # its own process, or one of its ranks
        num_restarts = self.config.max_restarts
        most_deaths = max(MAX_DEATHS, min(MAX_KILLS, num_restarts)) if was_killed else MAX_DEATHS
        if was_killed and self._num_oom_kills is not None and num_oom_kills() == self._num_oom_kills:
            most_deaths = max(most_deaths, min(MAX_OUTSIDE_KILLS, num_restarts - 1))
        num_trusted = max(2, most_deaths - MAX_DEATHS)
        unsent, is_trial = set(self._suspects), self._is_trial()
        self._suspects.clear()
        for entry in self._book:
            if entry.request.request_id not in unsent:
                entry.count_death(was_killed=was_killed, num_trusted=num_trusted)
            elif was_killed and not is_trial:
                entry.num_deaths = 0
        suspects = [entry for entry in self._book if entry.is_suspect]
        if not was_killed and len(suspects) == 1:
            most_deaths = 2
        for entry in suspects:
            if entry.num_deaths >= most_deaths:
                request_id = entry.request.request_id
                self._book.finish(request_id, FinishReason.ERROR)
                failure = RequestFailure(cause, signal=signal)
                entry.reader.push(EngineCoreOutput(request_id, [], FinishReason.ERROR, failure=failure))

    # The end.

    def kill(self) -> None:
        """End the process now; for an end of this process that waits for nothing."""
        if self._process is not None:
            self._process.kill()

    async def _close_transport(self, timeout_s: float) -> None:
        process = self._process
        if process is not None:
            loop = asyncio.get_running_loop()
            if timeout_s == 0 or not await loop.run_in_executor(None, process.wait, timeout_s):
                process.kill()
                await loop.run_in_executor(None, process.wait, 10.0)
            process.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._reader_fd >= 0 and self._loop is not None:
            self._loop.remove_reader(self._reader_fd)
            self._reader_fd = -1
        for socket in (self._sender, self._receiver):
            if socket is not None:
                socket.close(linger=0)
        self._sender = self._receiver = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
