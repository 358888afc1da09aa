"""The engine process, started by `EngineProcess`, spoken to over ZMQ.

It reads its `ChildSpec` from standard input, builds the engine with the factory named there, says `EngineReady` or
`EngineFailed`, and serves. Standard input stays open as a lifeline: when the parent dies, it ends, and so does this
process. Interrupts and SIGTERM are the parent's business and are ignored here.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import zmq

from quire_engine.config import EngineConfig
from quire_engine.core import EngineCore, EngineParts
from quire_engine.core_loop import CoreLoop
from quire_engine.lifeline import read_spec
from quire_engine.log_relay import send_logs
from quire_engine.messages import (
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineProgress,
    EngineReady,
    decode_client_message,
    encode_message,
)
from quire_interfaces import ConfigError, NotEnoughMemoryError, QuireError

__all__ = ["ChildSpec", "CurveKeys", "EngineFactory", "describe_failure", "load_factory", "main"]

LINGER_MS = 5000

_logger = logging.getLogger(__name__)

EngineFactory = Callable[[dict[str, Any], Callable[[str, float], None]], EngineParts]
"""Builds an engine from plain data; reports its progress as (stage, fraction)."""


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys of CurveZMQ, as it writes them, of the end that connects."""

    server_public: str
    public: str
    secret: str


class ChildSpec(msgspec.Struct, kw_only=True):
    """What the parent tells the child."""

    factory: str
    """An `EngineFactory` as "module:function"."""
    factory_config: dict[str, Any]
    config: EngineConfig
    to_core: str
    """Address the child pulls client messages from."""
    from_core: str
    """Address the child pushes core messages to."""
    socket_folder: str | None = None
    """Holds the sockets of these addresses until both are connected; to be removed by who outlives the other."""
    sys_path: list[str] = []
    """Further places to import the factory from."""
    curve_keys: CurveKeys | None = None
    """Of this end of the connections; None on one host, and on trusted networks."""
    log_level: int = logging.WARNING
    """What is logged less urgently is not sent to the parent."""


class ZmqInbox:
    """An `Inbox` over a ZMQ pull socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, timeout_s: float) -> Iterator[ClientMessage]:
        if timeout_s > 0 and not self._socket.poll(int(timeout_s * 1000)):
            return
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_client_message(data)


def load_factory(path: str) -> EngineFactory:
    """The function named "module:function".

    Raises:
        ConfigError: there is no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ValueError, AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in (module_name, *_parents(module_name)):
            raise  # the module is there, but something it needs is not
        raise ConfigError(
            f"the engine factory {path!r} cannot be found ({error}); it must be 'module:function', importable",
            field="factory",
        ) from None
    return cast(EngineFactory, factory)


def _parents(module_name: str) -> list[str]:
    parts = module_name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def describe_failure(error: BaseException) -> tuple[str, str]:
    """(cause, remedy) of an engine that could not start."""
    if isinstance(error, QuireError):
        return str(error), ""  # these say themselves what was wrong and what to do
    cause = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return cause, "Install the missing package into the environment of this Python, or check its version."
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return cause, "Give the engine less to hold (smaller KV cache, fewer sequences, smaller dtype) or more memory."
    if isinstance(error, OSError):
        return cause, "Check that the path exists and may be read."
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" (in {frame[0].name}, {os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    return cause + where, "Start again with the log level debug to see the traceback, and please report it."


def main() -> int:
    """Serve until told to stop; the exit status."""
    start_s = time.monotonic()
    gc.disable()  # what is imported and loaded stays: walking it again and again is a sixth of the time to import torch
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec = read_spec(ChildSpec, _end)
    send_logs(spec.log_level)
    sys.path.extend(path for path in spec.sys_path if path not in sys.path)
    context = zmq.Context(io_threads=1)
    inbox_socket = _connect(context, zmq.PULL, spec.to_core, spec)
    send_socket = _connect(context, zmq.PUSH, spec.from_core, spec)

    def send(message: CoreMessage) -> None:
        send_socket.send(encode_message(message))

    try:
        core = _build(spec, send, start_s)
        if core is None:
            return 1
        CoreLoop(core, ZmqInbox(inbox_socket), send).run()
    except Exception as error:
        if not isinstance(error, QuireError) or error.__cause__ is not None:  # else the client is told all there is
            _logger.exception("the engine failed")
        send_socket.close(linger=LINGER_MS)
        inbox_socket.close(linger=0)
        context.term()
        os._exit(1)  # a hanging device would keep a normal exit waiting
    finally:
        inbox_socket.close(linger=0)
        send_socket.close(linger=LINGER_MS)
        context.term()
    return 0


def _build(spec: ChildSpec, send: Callable[[CoreMessage], None], start_s: float) -> EngineCore | None:
    def report(stage: str, fraction: float) -> None:
        send(EngineProgress(stage=stage, fraction=min(1.0, max(0.0, float(fraction)))))

    try:
        parts = load_factory(spec.factory)(spec.factory_config, report)
        core = EngineCore(parts, spec.config)
    except (Exception, SystemExit) as error:
        _logger.debug("the engine could not start", exc_info=True)
        cause, remedy = describe_failure(error)
        is_wrong_setting = isinstance(error, ConfigError) and not isinstance(error, NotEnoughMemoryError)
        send(EngineFailed(cause=cause, remedy=remedy, is_wrong_setting=is_wrong_setting))
        return None
    parts.info.timings_s.setdefault("engine_process", time.monotonic() - start_s)
    send(EngineReady(info=parts.info))
    # While the parent makes ready: what loading has left goes, what it has made stays for good and is walked no more.
    gc.collect()
    gc.freeze()
    gc.enable()
    return core


def _end(spec: ChildSpec) -> None:
    """The parent is gone."""
    if spec.socket_folder is not None:  # the parent can do it no more, and did not if the engine was not ready yet
        shutil.rmtree(spec.socket_folder, ignore_errors=True)
    os._exit(1)


def _connect(context: zmq.Context[Any], kind: int, address: str, spec: ChildSpec) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(spec.config.max_queued_messages)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    if spec.curve_keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, spec.curve_keys.server_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, spec.curve_keys.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, spec.curve_keys.secret)
    socket.connect(address)
    return socket
