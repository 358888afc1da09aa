"""Publishes KV cache events over ZMQ, numbered and replayable, so that routers know which engine has which prefix.

Messages have three frames: topic, sequence number (8 bytes, big-endian), batch (`kv_event_wire`). Who misses a number
sends the first one missed to the replay address, and gets the batches from there on as (number, batch), then -1 with
an empty batch. An engine that starts anew begins at 0, with a batch that says that nothing is cached.

One thread owns both sockets; the step loop hands it encoded batches and never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from quire_engine.kv_event_wire import WireBatch, wire_events
from quire_engine.kv_events_config import KVEventsConfig
from quire_interfaces import AllBlocksCleared, ConfigError, KVCacheEvent, KVCacheGroup

__all__ = ["END_OF_REPLAY", "KVEventPublisher", "rank_endpoint"]

_logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 1000
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]")


class KVEventPublisher:
    """Publishes what a KV cache records.

    Args:
        config: Addresses and bounds.
        groups: KV cache groups of the plan.
        take_events: Gives the events since its last call (`BlockAllocator.take_events`).
        data_parallel_rank: Rank of the engine; it is added to the ports, so that each engine has its own.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        groups: Sequence[KVCacheGroup],
        take_events: Callable[[], list[KVCacheEvent]],
        data_parallel_rank: int = 0,
    ) -> None:
        self._groups = groups
        self._take_events = take_events
        self._rank = data_parallel_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._context = zmq.Context(io_threads=1)
        self._queue = self._context.socket(zmq.PUSH)
        self._queue.set(zmq.SNDHWM, config.max_queue_size)
        batches = self._context.socket(zmq.PULL)
        batches.set(zmq.RCVHWM, 1)
        try:
            publisher = _publisher_socket(self._context, rank_endpoint(config.endpoint, data_parallel_rank), config)
            replay = _replay_socket(self._context, config, data_parallel_rank)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        batches.bind("inproc://batches")
        self._queue.connect("inproc://batches")
        self._thread = threading.Thread(
            target=_serve,
            args=(batches, publisher, replay, config.topic.encode(), config.buffer_steps),
            name="quire-kv-events",
            daemon=True,
        )
        self._thread.start()
        self._send([AllBlocksCleared(sequence_number=0)])

    def publish(self) -> None:
        """Publish the events since the last call as one batch; nothing when there are none. Never waits."""
        if events := self._take_events():
            self._send(events)

    def _send(self, events: Sequence[KVCacheEvent]) -> None:
        batch = WireBatch(time.time(), wire_events(events, self._groups), self._rank)
        number = self._next_number.to_bytes(8, "big")
        self._next_number += 1
        try:
            self._queue.send_multipart((number, self._encoder.encode(batch)), zmq.NOBLOCK)
        except zmq.Again:
            _logger.debug("the queue of KV cache events is full: batch %d is lost", self._next_number - 1)

    def close(self) -> None:
        """Send what waits, within a second, and end the thread. Idempotent."""
        if self._queue.closed:
            return
        self._queue.send_multipart((b"", b""))
        self._thread.join(LINGER_MS / 1000)
        self._queue.close(linger=0)
        self._context.destroy(linger=LINGER_MS)


def rank_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """Address of one of several engines: tcp ports count up with the rank, other addresses get a suffix.

    Raises:
        ConfigError: a tcp address without a port.
    """
    if data_parallel_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(
            f"{endpoint!r} has no port to count ranks from; use tcp://HOST:PORT", field="kv_events_config"
        )
    return f"{host}:{int(port) + data_parallel_rank}"


def _publisher_socket(context: zmq.Context[Any], endpoint: str, config: KVEventsConfig) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
    socket.set(zmq.SNDHWM, config.hwm)
    is_bound = (
        "*" in endpoint or "::" in endpoint or endpoint.startswith(_LOOPBACK) or not endpoint.startswith("tcp://")
    )
    _open(socket.bind if is_bound else socket.connect, endpoint, "endpoint")
    return socket


def _replay_socket(context: zmq.Context[Any], config: KVEventsConfig, rank: int) -> zmq.Socket[bytes] | None:
    if config.replay_endpoint is None:
        return None
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, config.buffer_steps + 1)
    _open(socket.bind, rank_endpoint(config.replay_endpoint, rank), "replay_endpoint")
    return socket


def _open(attach: Callable[[str], object], endpoint: str, name: str) -> None:
    try:
        attach(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{name} of kv_events_config is {endpoint!r}, which cannot be used ({error}); give an address that is free "
            "on this machine, such as tcp://*:5557 or ipc:///tmp/kv-events, or one of another machine that subscribes",
            field="kv_events_config",
        ) from None


def _serve(
    batches: zmq.Socket[bytes],
    publisher: zmq.Socket[bytes],
    replay: zmq.Socket[bytes] | None,
    topic: bytes,
    buffer_steps: int,
) -> None:
    """Body of the thread: send batches, keep the latest, replay them."""
    sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
    poller = zmq.Poller()
    poller.register(batches, zmq.POLLIN)
    if replay is not None:
        poller.register(replay, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if batches in ready:
            number, payload = batches.recv_multipart()
            if not payload:
                break
            publisher.send_multipart((topic, number, payload))
            sent.append((int.from_bytes(number, "big"), payload))
        if replay is not None and replay in ready:
            _replay(replay, sent)
    for socket in (batches, publisher, replay):
        if socket is not None:
            socket.close(linger=LINGER_MS)


def _replay(socket: zmq.Socket[bytes], sent: deque[tuple[int, bytes]]) -> None:
    """Answer one request for what was missed."""
    frames = socket.recv_multipart()
    if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
        _logger.debug("a request for KV cache events must be an empty frame and a number of 8 bytes; it is ignored")
        return
    client, start = frames[0], int.from_bytes(frames[2], "big")
    for number, payload in sent:
        if number >= start:
            socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
    socket.send_multipart((client, b"", END_OF_REPLAY, b""))
