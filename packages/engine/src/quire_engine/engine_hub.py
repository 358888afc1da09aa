"""`EngineHub`: one `EngineClient` for several API processes, which reach it by `HubClient`.

The process of the hub has the engines, or those that its client has: it starts them again, moves requests between them
and counts, for all API processes alike. API processes do the rest: HTTP, templates, tokens and text. One that ends
loses its own requests and nothing else. Knows messages and sockets; starts no process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import zmq

from quire_engine.client import EngineClient
from quire_engine.hub_messages import (
    EndRequests,
    FrontMessage,
    FrontReady,
    FrontReport,
    HubMessage,
    HubStatus,
    Notice,
    OpenRequests,
    decode_front_message,
    encode,
)
from quire_engine.message_pipe import MessagePipe
from quire_engine.messages import (
    AddRequest,
    EngineFailed,
    EngineReady,
    Outputs,
    RequestRejected,
    UtilityCall,
    UtilityReply,
)
from quire_engine.socket_folder import SocketFolder
from quire_engine.streams import OutputStream
from quire_interfaces import EngineCoreOutput, EngineDeadError, FinishReason, QuireError
from quire_interfaces.engine_watch import WatchCursor, WatchReport

__all__ = ["EngineHub", "FrontAddresses", "HubCall"]

_logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.05
"""How often the hub looks whether its status has changed."""

HubCall = Callable[..., Awaitable[Any]]
"""Answers a call of an API process with plain data."""


class FrontAddresses(NamedTuple):
    """Where an API process reaches the hub."""

    to_hub: str
    from_hub: str

    def remove_folder(self) -> None:
        """Remove the folder of the hub's sockets: for a hub that was killed, which can do it no more."""
        shutil.rmtree(os.path.dirname(self.to_hub.removeprefix("ipc://")), ignore_errors=True)


class EngineHub:
    """To be made and used on a running event loop.

    Args:
        client: The engine, or engines.
        calls: What API processes may ask for beside the control calls of an `EngineClient`, by name.
        on_ready: Called with the number of an API process that answers HTTP from now on.
        on_report: Called with the number of an API process, and name and arguments of what it reports.
        max_queued_messages: On the way to an API process, and back.
    """

    def __init__(
        self,
        client: EngineClient,
        calls: Mapping[str, HubCall],
        on_ready: Callable[[int], None],
        on_report: Callable[[int, str, Sequence[Any]], None],
        *,
        max_queued_messages: int = 65536,
    ) -> None:
        self._client = client
        self._calls: dict[str, HubCall] = {
            **{name: partial(_control, client, name) for name in CONTROL_CALLS},
            "watch": partial(_watch, client),
            **calls,
        }
        self._on_ready, self._on_report = on_ready, on_report
        self._max_queued_messages = max_queued_messages
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._folder = SocketFolder(longest_name=len("1234-1234567.out"))
        self._generations = itertools.count()
        self._fronts: dict[int, _Front] = {}
        self._is_asleep = False
        self._status: HubStatus | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._watch)

    def attach(self, number: int) -> FrontAddresses:
        """Make room for an API process; a former one of this number is gone, and its requests end."""
        self.detach(number)
        name = f"{number}-{next(self._generations)}"
        addresses = FrontAddresses(f"ipc://{self._folder.path}/{name}.in", f"ipc://{self._folder.path}/{name}.out")
        front = _Front(name, self._client)
        front.pipe = MessagePipe(
            self._context,
            addresses.from_hub,
            addresses.to_hub,
            partial(self._on_data, number, front),
            binds=True,
            max_queued_messages=self._max_queued_messages,
        )
        self._fronts[number] = front
        if self._client.info is not None:
            front.send(EngineReady(info=self._client.info))
            front.send(self._current_status())
        return addresses

    def detach(self, number: int) -> None:
        """An API process is gone: its requests end, for nobody reads them."""
        front = self._fronts.pop(number, None)
        if front is not None:
            front.close()

    def tell_ready(self) -> None:
        """Tell all API processes that the engine takes requests."""
        assert self._client.info is not None
        self._status = self._current_status()
        for front in self._fronts.values():
            front.send(EngineReady(info=self._client.info))
            front.send(self._status)

    def notify(self, name: str, *arguments: Any, number: int | None = None) -> None:
        """Tell all API processes something (`HubClient.on_notice`), or the one of a number."""
        for each, front in self._fronts.items():
            if number in (None, each):
                front.send(Notice(name=name, arguments=list(arguments)))

    def tell_death(self, error: EngineDeadError) -> None:
        """Tell all API processes that the engine is gone for good."""
        for front in self._fronts.values():
            front.send(EngineFailed(cause=str(error), is_wrong_setting=error.is_wrong_setting))

    def num_requests(self, number: int) -> int:
        """Number of requests in flight of an API process."""
        front = self._fronts.get(number)
        return 0 if front is None else len(front.streams)

    def close(self) -> None:
        """End all requests of API processes, and close all connections. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for number in list(self._fronts):
                self.detach(number)
            self._context.destroy(linger=0)
            self._folder.close()

    # What API processes say.

    def _on_data(self, number: int, front: _Front, data: bytes) -> None:
        try:
            message = decode_front_message(data)
        except msgspec.MsgspecError as error:
            _logger.error("API process %d sent something unreadable: %s", number, error)
            return
        self._on_message(number, front, message)

    def _on_message(self, number: int, front: _Front, message: FrontMessage) -> None:
        match message:
            case OpenRequests():
                front.open(message)
            case EndRequests():
                front.end(message)
            case UtilityCall():
                task = asyncio.ensure_future(self._answer(front, message))
                front.tasks.add(task)
                task.add_done_callback(front.tasks.discard)
            case FrontReady():
                self._on_ready(number)
            case FrontReport():
                self._on_report(number, message.name, message.arguments)
            case Notice():
                for other in self._fronts.values():
                    if other is not front:
                        other.send(message)

    async def _answer(self, front: _Front, message: UtilityCall) -> None:
        call = self._calls.get(message.method)
        try:
            if call is None:
                raise QuireError(f"the hub knows no call {message.method!r}")
            result = await call(**message.arguments)
            if message.method == "sleep":
                self._is_asleep = message.arguments.get("level", 1) > 0
            elif message.method == "wake_up":
                self._is_asleep = bool(result)
            reply = UtilityReply(call_id=message.call_id, result=msgspec.to_builtins(result, builtin_types=(bytes,)))
        except Exception as error:
            if not isinstance(error, QuireError):
                _logger.exception("the call %s failed", message.method)
            reply = UtilityReply.from_error(message.call_id, error)
        self._tell_status()  # before the answer: whoever has that may ask another API process next
        front.send(reply)

    # What they answer from without asking.

    def _watch(self) -> None:
        if not self._is_closed:
            self._tell_status()
            self._loop.call_later(STATUS_INTERVAL_S, self._watch)

    def _tell_status(self) -> None:
        if self._client.info is not None and (status := self._current_status()) != self._status:
            self._status = status
            for front in self._fronts.values():
                front.send(status)

    def _current_status(self) -> HubStatus:
        client = self._client
        return HubStatus(
            is_loading=client.is_loading,
            is_resting=client.is_resting,
            is_asleep=self._is_asleep,
            stalled_s=float(int(client.stalled_s)) if client.is_stalled else 0.0,
            adapters=dict(client.adapters),
        )


class _Front:
    """An API process as the hub sees it.

    Args:
        name: Stands before the ids of its requests, which other API processes may have, too.
        client: Runs them.
    """

    pipe: MessagePipe

    def __init__(self, name: str, client: EngineClient) -> None:
        self._prefix = f"{name}/"
        self._client = client
        self._loop = asyncio.get_running_loop()
        self.streams: dict[str, OutputStream] = {}
        """Id in the engine -> stream of each request in flight."""
        self.tasks: set[asyncio.Future[None]] = set()
        self._outputs: list[EngineCoreOutput] = []
        self._started: list[str] = []
        self._started_time_s = 0.0
        self._rejected: list[RequestRejected] = []

    def send(self, message: HubMessage) -> None:
        self.pipe.send(encode(message))

    def open(self, message: OpenRequests) -> None:
        requests = [self._renamed(request) for request in message.requests]
        request_ids = [request.request_id for request in requests]
        try:
            stream = self._client.open(requests, n=message.n)
        except QuireError as error:
            self._reject(request_ids, error)
            return
        for request_id in request_ids:
            self.streams[request_id] = stream
        unseen = dict(zip(request_ids, stream.metrics, strict=True))

        def take(output: EngineCoreOutput) -> None:
            if output.request_id not in self.streams:  # it was ended from there
                return
            metrics = unseen.pop(output.request_id, None)
            if metrics is not None and metrics.scheduled_time_s:
                self._started.append(self._own_id(output.request_id))
                self._started_time_s = metrics.scheduled_time_s
            if output.finish_reason is not None:
                self.streams.pop(output.request_id, None)
            self._outputs.append(output._replace(request_id=self._own_id(output.request_id)))
            self._flush_soon()

        def fail(error: Exception) -> None:
            self._reject([request_id for request_id in stream.alive if request_id in self.streams], error)

        stream.redirect(take, fail)

    def _renamed(self, request: AddRequest) -> AddRequest:
        group = request.prompt_group
        return msgspec.structs.replace(
            request,
            request_id=self._prefix + request.request_id,
            prompt_group=None if group is None else self._prefix + group,
        )

    def _own_id(self, request_id: str) -> str:
        return request_id.removeprefix(self._prefix)

    def _reject(self, request_ids: Sequence[str], error: Exception) -> None:
        if isinstance(error, EngineDeadError):  # of which all are told (`tell_death`)
            error = QuireError(str(error))
        known = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
        for request_id in request_ids:
            self.streams.pop(request_id, None)
            self._rejected.append(RequestRejected.from_error(self._own_id(request_id), known))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if len(self._outputs) + len(self._rejected) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._outputs or self._rejected:
            self.send(
                Outputs(
                    outputs=self._outputs,
                    started=self._started,
                    started_time_s=self._started_time_s,
                    rejected=self._rejected,
                )
            )
        self._outputs, self._started, self._rejected = [], [], []

    def end(self, message: EndRequests) -> None:
        self._end([self._prefix + request_id for request_id in message.request_ids], message.reason)

    def _end(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        for request_id in request_ids:
            self.streams.pop(request_id, None)
        self._client.abort(request_ids, reason)

    def close(self) -> None:
        self._end(list(self.streams), FinishReason.ABORT)
        for task in self.tasks:
            task.cancel()
        self.pipe.close()


CONTROL_CALLS = (
    "check_integrity", "collective_rpc", "engine_ranks", "is_paused", "leave_watch", "load_adapter", "pause",
    "ping", "reconfigure", "reset_encoder_cache", "reset_prefix_cache", "resume", "sleep", "sleep_level", "stats",
    "unload_adapter", "wake_up",
)  # fmt: skip
"""Methods of an `EngineClient` that API processes call."""


async def _watch(client: EngineClient, rank: int, watcher: str, cursor: list[int]) -> WatchReport:
    return await client.watch(rank, watcher, WatchCursor(*cursor))


async def _control(client: EngineClient, name: str, /, **arguments: Any) -> Any:
    return await getattr(client, name)(**arguments)
