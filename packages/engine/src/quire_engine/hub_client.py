"""`HubClient`: the `EngineClient` of one of several API processes; what it is asked for, the hub's process has.

Keeps who reads which request here. Faults, restarts, choice of an engine and statistics are the hub's (`EngineHub`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from quire_engine.client import PauseMode
from quire_engine.config import EngineConfig
from quire_engine.control_calls import ControlCalls
from quire_engine.engine_hub import FrontAddresses
from quire_engine.hub_messages import (
    EndRequests,
    FrontMessage,
    HubStatus,
    Notice,
    OpenRequests,
    decode_hub_message,
    encode,
)
from quire_engine.listener import EngineListener
from quire_engine.message_pipe import MessagePipe
from quire_engine.messages import AddRequest, ClientMessage, EngineInfo, UtilityCall
from quire_engine.request_book import RequestBook
from quire_engine.streaming_client import StreamingClient
from quire_engine.streams import OutputStream
from quire_interfaces import (
    AdapterInfo,
    EngineCoreOutput,
    EngineDeadError,
    FinishReason,
    RequestError,
    SchedulerStats,
)
from quire_interfaces.engine_watch import WatchCursor, WatchReport

__all__ = ["HubClient"]

_logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 90_000.0
"""The hub answers in its own time (`EngineConfig.call_timeout_s`, and the longest drain)."""


class HubClient(StreamingClient):
    """Use it like any `EngineClient`.

    Args:
        addresses: Where the hub is.
        config: The engine's settings.
        listener: Hears of the requests of this process.
    """

    def __init__(
        self,
        addresses: FrontAddresses,
        config: EngineConfig | None = None,
        listener: EngineListener | None = None,
    ) -> None:
        super().__init__(config, listener)
        self._addresses = addresses
        self._book: RequestBook[OutputStream] = RequestBook(self.listener)
        self._calls = ControlCalls(self._send, CALL_TIMEOUT_S)
        self._context: zmq.Context[Any] | None = None
        self._pipe: MessagePipe | None = None
        self._status = HubStatus(is_loading=True, is_resting=False, is_asleep=False, stalled_s=0.0)
        self.on_status: Callable[[HubStatus], None] = lambda status: None
        """Called when something has changed of what is known without asking."""
        self.on_notice: Callable[[str, Sequence[Any]], None] = lambda name, arguments: None
        """Called with what other API processes tell (`tell_others`)."""

    def start(self) -> None:
        """Nothing: the hub was there first."""

    def kill(self) -> None:
        """Nothing: the engine is the hub's."""

    async def ready(self) -> EngineInfo:
        if self._pipe is None:
            self._context = zmq.Context(io_threads=1)
            self._pipe = MessagePipe(
                self._context,
                self._addresses.to_hub,
                self._addresses.from_hub,
                self._on_data,
                binds=False,
                max_queued_messages=self.config.max_queued_messages,
            )
        return await super().ready()

    def _begin_watch(self) -> None:
        """The hub watches the engine."""

    def _on_data(self, data: bytes) -> None:
        try:
            message = decode_hub_message(data)
        except msgspec.MsgspecError as error:
            self._die(EngineDeadError(f"the hub sent something unreadable: {error}"))
            return
        if isinstance(message, HubStatus):
            self._status = message
            self.adapters = dict(message.adapters)
            self.on_status(message)
        elif isinstance(message, Notice):
            self.on_notice(message.name, message.arguments)
        else:
            self._on_message(message)

    # Requests.

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        self.check_health()
        self._check_room(requests)
        stream = OutputStream([each.request_id for each in requests], self.abort)
        try:
            self.tell(OpenRequests(requests=list(requests), n=n))
        except (TypeError, msgspec.MsgspecError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        for request in requests:
            self._note_sent(request, stream, n)
        return stream

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        aborted_ids = []
        for request_id in request_ids:
            entry = self._book.finish(request_id, reason)
            if entry is not None:
                aborted_ids.append(request_id)
                entry.reader.push(EngineCoreOutput(request_id, [], finish_reason=reason))
        if aborted_ids and self._dead is None:
            self.tell(EndRequests(request_ids=aborted_ids, reason=reason))

    def tell(self, message: FrontMessage) -> None:
        """Send a message to the hub.

        Raises:
            EngineDeadError: it is not there (any more).
        """
        if self._pipe is None:
            raise EngineDeadError("the engine's process is not reached yet: await ready() first")
        self._pipe.send(encode(message))

    def tell_others(self, name: str, *arguments: Any) -> None:
        """Tell all other API processes something (`on_notice`)."""
        self.tell(Notice(name=name, arguments=list(arguments)))

    def _send(self, message: ClientMessage) -> None:
        assert isinstance(message, UtilityCall), "requests are opened and ended above"
        self.tell(message)

    # Control calls: the hub makes them, of all engines.

    async def call(self, name: str, **arguments: Any) -> Any:
        """The hub's answer to one of its calls. Raises as the call does, and EngineDeadError."""
        return await self._call(name, **arguments)

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        await self._call("pause", mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: int = 1) -> int:
        return int(await self._call("sleep", level=level))

    async def wake_up(self, tags: Sequence[str] = ()) -> int | None:
        level: int | None = await self._call("wake_up", tags=list(tags))
        return level

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        return AdapterInfo(**await self._call("load_adapter", name=name, path=path, replace=replace))

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name=name)

    async def engine_ranks(self) -> list[int]:
        return [int(rank) for rank in await self._call("engine_ranks")]

    async def watch(self, rank: int, watcher: str, cursor: WatchCursor) -> WatchReport:
        return msgspec.convert(await self._call("watch", rank=rank, watcher=watcher, cursor=list(cursor)), WatchReport)

    async def collective_rpc(
        self, method: str, arguments: Sequence[Any] = (), named: Mapping[str, Any] = {}
    ) -> list[list[Any]]:
        answers: list[list[Any]] = await self._call(
            "collective_rpc", method=method, arguments=list(arguments), named=dict(named)
        )
        return answers

    async def reconfigure(self, values: Mapping[str, Any]) -> None:
        await self._call("reconfigure", values=dict(values))

    async def stats(self) -> SchedulerStats:
        self.last_stats = msgspec.convert(await self._call("stats"), SchedulerStats)
        return self.last_stats

    # Health, as the hub told it last.

    @property
    def is_loading(self) -> bool:
        return self._dead is None and (self.info is None or self._status.is_loading)

    @property
    def is_resting(self) -> bool:
        return self._status.is_resting

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps without its KV cache."""
        return self._status.is_asleep

    @property
    def stalled_s(self) -> float:
        return self._status.stalled_s

    @property
    def is_stalled(self) -> bool:
        return self._status.stalled_s > 0.0

    # The end.

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Let go of the hub, whose engine serves on. Requests that are still there end."""
        if self._dead is None:
            self.abort_all()
            await asyncio.sleep(0)
        self._is_stopping = True
        self._die(EngineDeadError("the connection to the engine was closed"))
        await self._close_transport(0.0)

    async def _close_transport(self, timeout_s: float) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._context is not None:
            self._context.term()
            self._context = None
