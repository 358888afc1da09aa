"""Engines of other hosts in the pool of one server (`--headless` with `--data-parallel-start-rank`).

A host without a server connects to the server's host and says which ranks it has; it is told when to start an engine
and where that finds its client, and says how each has ended. Requests and outputs then go between client and engine
over ZMQ, as on one host, with CurveZMQ where there is a `node_secret`. A host that is gone ends its engines: their
requests go on in the others, and when it comes back, so do its engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from quire.assemble import FACTORY, model_folder
from quire.config import QuireConfig
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.host_ranks import model_digest
from quire.parallel.rank_config import rank_config
from quire_distributed.signed_channel import SignedChannel, accept_channel, connect_channel
from quire_engine import AddRequest, EngineListener, EngineOwner, EnginePool, MakeEngine, ProcessClient
from quire_engine.child import ChildSpec, CurveKeys
from quire_engine.messages import ClientMessage, CoreMessage, Outputs
from quire_engine.process import EngineProcess
from quire_interfaces import ConfigError

__all__ = ["HostsPool", "NodeListener", "RemoteEngineClient", "make_hosts_pool", "serve_engines"]

_logger = logging.getLogger(__name__)

_RETRY_S = 0.5
"""How long until the next try to reach the server's host."""
_NONCE_BYTES = 32
_GONE = 1
"""Exit status of an engine whose host is gone."""


class NodeListener:
    """Where hosts with engines of this server connect. Thread-safe.

    Args:
        host: Address of this host, as the others reach it.
        port: A free port of it; 0 for any.
        secret: What all hosts know; empty on trusted networks.
        silence_s: How long a host may not answer before it counts as gone.
        digest: Tells the model of the server.
    """

    def __init__(self, host: str, port: int, secret: bytes, *, silence_s: float, digest: Callable[[], str]) -> None:
        self.host, self.port, self.secret = host, port, secret
        self._silence_s, self._digest = silence_s, digest
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {}
        """Rank -> host that has it."""
        self._waiting: dict[int, RemoteEngineProcess] = {}
        """Rank -> engine to be started when its host has come."""
        self._listening: socket.socket | None = None

    def open(self) -> None:
        """Listen from now on.

        Raises:
            ConfigError: the address is taken, or not this host's.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            self._listening = socket.create_server((self.host, self.port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(
                f"engines of other hosts cannot be heard at {self.host}:{self.port}: {error.strerror or error}; "
                "data_parallel_address must be an address of this host, and data_parallel_rpc_port free here",
                field="data_parallel_address",
            ) from None
        self.port = self._listening.getsockname()[1]
        if not self.secret:
            _logger.warning("no --node-secret is set: any host that reaches %s:%d may take part", self.host, self.port)
        threading.Thread(target=self._accept, args=(self._listening,), name="quire-nodes", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and let go of all hosts, whose engines end. Idempotent."""
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None
        with self._lock:
            nodes = set(self._nodes.values())
        for node in nodes:
            node.close()

    def ranks(self) -> list[int]:
        """Ranks of the engines whose hosts are there."""
        with self._lock:
            return sorted(self._nodes)

    def start(self, process: RemoteEngineProcess) -> None:
        """Have an engine's host start it, now or when that has come."""
        with self._lock:
            node = self._nodes.get(process.rank)
            if node is None:
                self._waiting[process.rank] = process
        if node is None:
            _logger.info("waiting for the host of engine %d at port %d", process.rank, self.port)
        else:
            node.start(process)

    def forget(self, process: RemoteEngineProcess) -> None:
        """An engine is not to be started any more."""
        with self._lock:
            if self._waiting.get(process.rank) is process:
                del self._waiting[process.rank]

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                end, address = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._welcome, args=(end, address[0]), daemon=True).start()

    def _welcome(self, end: socket.socket, address: str) -> None:
        try:
            channel, purpose = accept_channel(end, self.secret, silence_s=self._silence_s)
        except (OSError, ConfigError) as error:
            _logger.warning("a connection from %s was refused: %s", address, error)
            return
        match purpose:
            case {"engines": [int(first), int(size)], "model": str(digest), "time_s": float(time_s)}:
                node = _Node(self, channel, address, range(first, first + size), time_s - time.monotonic())
            case _:
                channel.close()
                return
        if digest != self._digest():
            node.refuse(
                f"the host at {address} has other files of the model than the server: give it the same --model, of the "
                "same revision"
            )
            return
        with self._lock:
            taken = [rank for rank in node.ranks if rank in self._nodes]
            if not taken:
                self._nodes |= dict.fromkeys(node.ranks, node)
            ready = [self._waiting.pop(rank) for rank in node.ranks if not taken and rank in self._waiting]
        if taken:
            node.refuse(
                f"another host has the engine of rank {taken[0]}: give each host its --data-parallel-start-rank"
            )
            return
        _logger.info("the host at %s has joined, with engines %d to %d", address, node.ranks[0], node.ranks[-1])
        node.watch()
        for process in ready:
            node.start(process)

    def lose(self, node: _Node) -> None:
        """A host is gone."""
        with self._lock:
            for rank in node.ranks:
                if self._nodes.get(rank) is node:
                    del self._nodes[rank]


class _Node:
    """A host that has joined."""

    def __init__(
        self, listener: NodeListener, channel: SignedChannel, address: str, ranks: range, clock_offset_s: float
    ) -> None:
        self._listener, self._channel = listener, channel
        self.address, self.ranks = address, ranks
        self.clock_offset_s = clock_offset_s
        """What its monotonic clock is ahead of this host's."""
        self._lock = threading.Lock()
        self._processes: dict[int, RemoteEngineProcess] = {}
        self._is_gone = False

    def watch(self) -> None:
        """Hear how engines end, in a thread."""
        threading.Thread(target=self._watch, name="quire-node", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                match self._channel.receive():
                    case ("ended", int(rank), int(returncode), str(lines)):
                        with self._lock:
                            process = self._processes.pop(rank, None)
                        if process is not None:
                            process.ended(returncode, lines)
        self._channel.close()
        self._listener.lose(self)
        with self._lock:
            self._is_gone = True
            processes, self._processes = list(self._processes.values()), {}
        if processes:
            _logger.error("the host at %s is gone, and its engines with it", self.address)
        for process in processes:
            process.lost(f"the engine's host, {self.address}, is gone")

    def start(self, process: RemoteEngineProcess) -> None:
        process.clock_offset_s = self.clock_offset_s
        process.node = self
        with self._lock:
            if not self._is_gone:
                self._processes[process.rank] = process
        if not self._send("start", process.rank, msgspec.msgpack.encode(process.spec), process.nonce):
            process.lost(f"the engine's host, {self.address}, is gone")

    def kill(self, process: RemoteEngineProcess) -> None:
        self._send("kill", process.rank)

    def _send(self, *message: Any) -> bool:
        with self._lock, contextlib.suppress(OSError):
            if not self._is_gone:
                self._channel.send(message)
                return True
        return False

    def refuse(self, cause: str) -> None:
        _logger.warning("%s", cause)
        with contextlib.suppress(OSError):
            self._channel.send(("refused", cause))
        self._channel.close()

    def close(self) -> None:
        self._channel.close()


class RemoteEngineProcess(EngineProcess):
    """An engine's process on another host, as its client sees it.

    Args:
        rank: Of the engine.
        spec: What it is, without what its host knows better.
        nonce: Of the keys of its connections.
        listener: Where its host connects.
        on_exit: Called once, from another thread, when it has ended, or its host is gone.
    """

    def __init__(
        self,
        rank: int,
        spec: ChildSpec,
        nonce: bytes,
        listener: NodeListener,
        *,
        on_exit: Callable[[EngineProcess], None],
    ) -> None:
        super().__init__(spec, forward_output=False, on_exit=on_exit)
        self.rank, self.spec, self.nonce, self._listener = rank, spec, nonce, listener
        self.node: _Node | None = None
        """The host that was told to start it; None while it has not come."""
        self.clock_offset_s = 0.0
        self._lines = self._cause = ""

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        self._listener.start(self)

    def kill(self) -> None:
        self._listener.forget(self)
        if self.node is None:
            self.lost("the engine's host has not come")
        else:
            self.node.kill(self)

    def wait(self, timeout_s: float) -> bool:
        return self._has_exited.wait(timeout_s)

    def last_lines(self) -> str:
        return self._lines

    def close(self) -> None:
        self._listener.forget(self)

    def explain(self) -> str:
        return self._cause or super().explain()

    def lost(self, cause: str) -> None:
        """Nothing more will be heard of it, and why."""
        self._cause = cause
        self.ended(_GONE, "")

    def ended(self, returncode: int, lines: str) -> None:
        """It has ended."""
        if self.returncode is None:
            self.returncode, self._lines = returncode, lines
            self._has_exited.set()
            self._on_exit(self)


class RemoteEngineClient(ProcessClient):
    """The client of an engine on another host.

    Args:
        rank: Of the engine.
        nodes: Where its host connects.
        config: Settings of the server.
        listener: Hears of steps and requests.
        owner: Moves requests between engines.
    """

    def __init__(
        self,
        rank: int,
        nodes: NodeListener,
        config: QuireConfig,
        listener: EngineListener | None,
        owner: EngineOwner,
    ) -> None:
        super().__init__(FACTORY, {}, config.engine, listener, owner=owner)
        self._rank, self._nodes = rank, nodes
        self._nonce = b""
        """Of which, with the secret, both hosts make the keys of the connections."""

    @property
    def is_remote(self) -> bool:
        return True

    def _bind(self) -> tuple[str, str]:
        assert self._sender is not None
        assert self._receiver is not None
        host = self._nodes.host
        self._nonce = os.urandom(_NONCE_BYTES)
        own_secret = _curve_pair(self._nodes.secret, b"server" + self._nonce)[1]
        addresses = []
        for each in (self._sender, self._receiver):
            if ":" in host:
                each.setsockopt(zmq.IPV6, 1)
            if self._nodes.secret:
                each.setsockopt(zmq.CURVE_SERVER, 1)
                each.setsockopt_string(zmq.CURVE_SECRETKEY, own_secret)
            place = f"[{host}]" if ":" in host else host
            addresses.append(f"tcp://{place}:{each.bind_to_random_port(f'tcp://{place}')}")
        return addresses[0], addresses[1]

    def _make_process(self, spec: ChildSpec) -> EngineProcess:
        spec = msgspec.structs.replace(spec, factory="", factory_config={}, sys_path=[])
        return RemoteEngineProcess(self._rank, spec, self._nonce, self._nodes, on_exit=self._on_exit_in_thread)

    def _end_hanging_start(self, process: EngineProcess | None) -> None:
        """One whose host has not come back does not hang: it waits."""
        if isinstance(process, RemoteEngineProcess) and process.node is None and process is self._process:
            if self._loop is not None and not self._is_stopping:
                self._loop.call_later(self.config.startup_timeout_s, self._end_hanging_start, process)
            return
        super()._end_hanging_start(process)

    # Times are of the other host's clock there, and of this one's here.

    def _send(self, message: ClientMessage) -> None:
        if isinstance(message, AddRequest) and message.arrival_time_s:
            message = msgspec.structs.replace(message, arrival_time_s=message.arrival_time_s + self._clock_offset_s)
        super()._send(message)

    def _on_message(self, message: CoreMessage) -> None:
        if isinstance(message, Outputs) and message.started_time_s:
            message.started_time_s -= self._clock_offset_s
        super()._on_message(message)

    @property
    def _clock_offset_s(self) -> float:
        return self._process.clock_offset_s if isinstance(self._process, RemoteEngineProcess) else 0.0


class HostsPool(EnginePool):
    """An `EnginePool` some of whose engines are on other hosts.

    Args:
        make_engine: Makes the client of the engine of a rank.
        size: Number of engines, of all hosts.
        config: Settings of the server.
        nodes: Where other hosts connect.
    """

    def __init__(self, make_engine: MakeEngine, size: int, config: QuireConfig, nodes: NodeListener) -> None:
        super().__init__(make_engine, size, config.engine)
        self._nodes = nodes

    def start(self) -> None:
        self._nodes.open()
        super().start()

    def kill(self) -> None:
        super().kill()
        self._nodes.close()

    async def shutdown(self, drain_s: float | None = None) -> None:
        await super().shutdown(drain_s)
        await asyncio.to_thread(self._nodes.close)


def make_hosts_pool(
    config: QuireConfig, make_local: MakeEngine, listener_of: Callable[[int], EngineListener | None]
) -> HostsPool:
    """The engines of a server that has some on other hosts.

    Args:
        config: Settings of the server.
        make_local: Makes the client of an engine of this host.
        listener_of: The listener of the engine of a rank.
    """
    parallel, hosts = config.data_parallel, config.hosts
    local = engine_ranks(parallel)
    nodes = NodeListener(
        parallel.data_parallel_address,
        parallel.data_parallel_rpc_port,
        hosts.secret,
        silence_s=hosts.distributed_timeout_seconds,
        digest=functools.cache(lambda: model_digest(model_folder(config))),
    )

    def make_engine(rank: int, owner: EngineOwner) -> ProcessClient:
        if local.size <= rank < parallel.data_parallel_size:
            return RemoteEngineClient(rank, nodes, config, listener_of(rank), owner)
        return make_local(rank, owner)

    return HostsPool(make_engine, parallel.data_parallel_size, config, nodes)


def serve_engines(
    config: QuireConfig,
    digest: str,
    is_stopping: threading.Event,
    *,
    factory: tuple[str, dict[str, Any]] | None = None,
) -> None:
    """Run this host's engines whenever the server asks for them, until `is_stopping` is set.

    Args:
        config: Settings of this host.
        digest: Tells the model here (`model_digest`).
        is_stopping: Set to end.
        factory: Another engine than the configured one; see `AsyncLLM`.

    Raises:
        ConfigError: the server refused this host, or knows another secret.
    """
    parallel, hosts = config.data_parallel, config.hosts
    address, ranks = (parallel.data_parallel_address, parallel.data_parallel_rpc_port), engine_ranks(parallel)
    is_told = False
    while not is_stopping.is_set():
        hello = {"engines": list(ranks), "model": digest, "time_s": time.monotonic()}
        try:
            channel = connect_channel(address, hello, hosts.secret, silence_s=hosts.distributed_timeout_seconds)
        except OSError as error:
            if not is_told:
                _logger.info("engines %d to %d wait for a server at %s:%d (%s)", ranks.first,
                             ranks.first + ranks.size - 1, *address, error)  # fmt: skip
                is_told = True
            is_stopping.wait(_RETRY_S)
            continue
        is_told = False
        _logger.info("this host has joined the server at %s:%d", *address)
        _NodeSession(config, channel, is_stopping, factory).run()


class _NodeSession:
    """The engines that one server's process has on this host."""

    def __init__(
        self,
        config: QuireConfig,
        channel: SignedChannel,
        is_stopping: threading.Event,
        factory: tuple[str, dict[str, Any]] | None,
    ) -> None:
        self._config, self._channel, self._is_stopping, self._factory = config, channel, is_stopping, factory
        self._processes: dict[int, EngineProcess] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until the server is gone. Raises ConfigError where it refuses this host."""
        threading.Thread(target=self._end_when_stopping, name="quire-node-end", daemon=True).start()
        try:
            while True:
                match self._channel.receive():
                    case ("start", int(rank), bytes(blob), bytes(nonce)):
                        self._start(rank, msgspec.msgpack.decode(blob, type=ChildSpec), nonce)
                    case ("kill", int(rank)):
                        if rank in self._processes:
                            self._processes[rank].kill()
                    case ("refused", str(cause)):
                        raise ConfigError(cause, field="data_parallel_start_rank")
        except EOFError:
            _logger.info("the server is gone, or this host is to end: its engines here end")
        finally:
            self._is_over.set()
            self._channel.close()
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                process.wait(10.0)
                process.close()

    def _end_when_stopping(self) -> None:
        while not self._is_over.wait(0.1):
            if self._is_stopping.is_set():
                self._channel.close()
                return

    def _start(self, rank: int, spec: ChildSpec, nonce: bytes) -> None:
        name, data = self._factory or (FACTORY, rank_config(self._config, rank).to_dict())
        keys = _engine_keys(self._config.hosts.secret, nonce)
        spec = msgspec.structs.replace(
            spec, factory=name, factory_config=data, socket_folder=None, sys_path=list(sys.path), curve_keys=keys
        )
        former = self._processes.get(rank)
        if former is not None:
            former.kill()
            former.wait(10.0)
            former.close()

        def tell_end(process: EngineProcess) -> None:
            assert process.returncode is not None
            with self._lock, contextlib.suppress(OSError):
                if self._processes.get(rank) is process:
                    self._channel.send(("ended", rank, process.returncode, process.last_lines()))

        process = self._processes[rank] = EngineProcess(spec, forward_output=True, on_exit=tell_end)
        try:
            process.start()
        except OSError as error:
            with self._lock, contextlib.suppress(OSError):
                self._channel.send(("ended", rank, _GONE, f"it cannot be started: {error.strerror}"))


def _curve_pair(secret: bytes, label: bytes) -> tuple[str, str]:
    """A pair of keys (public, secret) that all who know the secret can make.

    Raises:
        ConfigError: there is a secret, and ZMQ was built without encryption.
    """
    if not secret:
        return "", ""
    if not zmq.has("curve"):
        raise ConfigError("node_secret wants a libzmq with CURVE, which this one has not", field="node_secret")
    key = z85.encode(hmac.new(secret, label, hashlib.sha256).digest())
    return zmq.curve_public(key).decode(), key.decode()


def _engine_keys(secret: bytes, nonce: bytes) -> CurveKeys | None:
    """Keys of the connections of an engine's process; None without a secret."""
    if not secret:
        return None
    public, own = _curve_pair(secret, b"engine" + nonce)
    return CurveKeys(server_public=_curve_pair(secret, b"server" + nonce)[0], public=public, secret=own)
