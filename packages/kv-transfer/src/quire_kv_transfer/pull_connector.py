"""The scheduler's half of a connector that pulls: whose blocks are where, in vLLM's `kv_transfer_params`.

A router sends a prompt to the prefill engine with `{"do_remote_decode": true}`. That engine holds the blocks it
computed and says in its answer where they are; the router hands this on to a decode engine, which reads the blocks.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import secrets
import socket
import uuid
from collections.abc import Callable
from typing import Any

from quire_interfaces import (
    BlockMemory,
    ConfigError,
    KVTransferJob,
    Request,
    RequestError,
    kv_transfer_params_of,
)
from quire_kv_transfer.connector_config import ConnectorContext
from quire_kv_transfer.held_blocks import HeldBlocks
from quire_kv_transfer.peer_transports import NixlTransport, PeerTransport, SocketTransport
from quire_kv_transfer.pull_worker import PullWorker

__all__ = ["PullConnector", "nixl_connector", "socket_connector"]

_logger = logging.getLogger(__name__)

BACKLOG = 128
EXTRA = {"abort_request_timeout", "handshake_timeout", "late_after", "min_bandwidth", "checksums", "peers"}
NIXL_EXTRA = EXTRA | {"backends", "num_threads"}

_FIELDS = {"remote_host": str, "remote_port": int, "remote_request_id": str, "remote_engine_id": str}


class PullConnector:
    """Implements `RequestConnector`.

    Args:
        context: What the engine is.
        make_transport: Makes what moves bytes, beside the memory of the KV cache.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
    """

    def __init__(self, context: ConnectorContext, make_transport: Callable[[BlockMemory], PeerTransport]) -> None:
        self._context = context
        config = context.config
        self._reads = config.kv_role != "kv_producer"
        self._engine_id = config.engine_id or str(uuid.uuid4())
        self._make_transport = make_transport
        self._options: dict[str, Any] = {
            "peers": _peers(config.kv_connector_extra_config.get("peers", ())),
            "has_checksums": config.extra("checksums", True),
            "handshake_timeout_s": config.extra("handshake_timeout", 1.0),
            "late_after_s": config.extra("late_after", 1.5),
            "min_bandwidth": config.extra("min_bandwidth", 10e6),
        }
        self._listener = None if config.kv_role == "kv_consumer" else self._listen()
        self._ports = [] if self._listener is None else context.gather(self._listener.getsockname()[1])
        """Where each rank serves its parts of held blocks."""
        patience_s = config.extra("handshake_timeout", 1.0) / 2 if context.rank else 0.0
        self._held = HeldBlocks(config.extra("abort_request_timeout", 480.0), patience_s)
        """Shared with the worker: an engine may run no further step after the one whose blocks it holds."""
        self.on_hold: Callable[[str, KVTransferJob], None] = lambda name, job: None
        """Called with what is held from now on: other ranks are to `hold` their parts."""
        self._answered: set[str] = set()
        """Requests whose blocks are read, or were asked for in vain: whoever holds them knows that already."""
        self._loads: dict[str, dict[str, Any]] = {}
        self._releases: list[dict[str, Any]] = []

    def _listen(self) -> socket.socket:
        config = self._context.config
        context = self._context
        place = context.data_parallel_rank * context.num_ranks + context.rank
        port = config.kv_port + place if config.kv_port else 0
        try:
            family = socket.getaddrinfo(config.kv_ip, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((config.kv_ip, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: other engines cannot be served at {config.kv_ip}:{port} ({error}); set kv_ip to "
                "an address of this machine, and kv_port to a port that is free, or to 0",
                field="kv_transfer_config",
            ) from None

    @property
    def address(self) -> tuple[str, int] | None:
        """Where held blocks are served; None for an engine that only reads."""
        return None if self._listener is None else (self._context.config.kv_ip, self._listener.getsockname()[1])

    def check(self, request: Request) -> None:
        """Raise RequestError for parameters of the wrong type."""
        params = kv_transfer_params_of(request)
        for name in ("do_remote_decode", "do_remote_prefill"):
            if not isinstance(params.get(name), bool | None):
                raise _wrong(name, "true or false", params[name])
        for name, kind in _FIELDS.items():
            value = params.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise _wrong(name, "a number" if kind is int else "text", value)
        if not 0 <= (params.get("remote_port") or 0) < 1 << 16:
            raise _wrong("remote_port", "a port", params["remote_port"])
        ports = params.get("remote_ports")
        if ports is not None and not (isinstance(ports, list) and all(map(_is_port, ports))):
            raise _wrong("remote_ports", "a list of ports", ports)

    def _source(self, request: Request) -> dict[str, Any] | None:
        """Where the request's blocks are; None where it does not say."""
        params = kv_transfer_params_of(request)
        if not (self._reads and params.get("do_remote_prefill")):
            return None
        names = {"host": "remote_host", "port": "remote_port", "request": "remote_request_id"}
        source = {name: params.get(field) for name, field in names.items()}
        if ports := params.get("remote_ports"):
            source["ports"] = ports
        return source if all(source.values()) else None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Whole blocks that the other engine has, as far as it said."""
        source = self._source(request)
        if source is None or request.request_id in self._answered:
            return 0
        params = kv_transfer_params_of(request)
        num_remote = params.get("remote_num_tokens")
        if type(num_remote) is not int:
            groups = params.get("remote_block_ids") or [[]]
            first = groups[0] if isinstance(groups[0], list) else groups
            num_remote = len(first) * self._context.block_size
        num_tokens = min(num_remote, len(request.block_hashes) * self._context.block_size)
        return max(0, num_tokens - num_computed_tokens) // self._context.block_size * self._context.block_size

    def update_state_after_alloc(self, request: Request, job: KVTransferJob) -> None:
        """Have the blocks read."""
        source = self._source(request)
        assert source is not None, f"{request.request_id} names no engine"
        self._answered.add(request.request_id)
        self._loads[str(job.job_id)] = source

    def request_finished(self, request: Request, job: KVTransferJob | None) -> tuple[bool, dict[str, Any] | None]:
        """Hold what another engine is to read; tell the other one what will not be read."""
        source = self._source(request)
        if source is not None and request.request_id not in self._answered:
            self._releases.append(source)
        self._answered.discard(request.request_id)
        if job is None or self.address is None or not kv_transfer_params_of(request).get("do_remote_decode"):
            return False, None
        name = f"{request.request_id}-{secrets.token_hex(8)}"
        self.hold(name, job)
        self.on_hold(name, job)
        host, port = self.address
        num_groups = len(self._context.block_bytes)
        block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        for block in job.blocks:
            block_ids[block.key.group].append(block.block_id)
        others = {"remote_ports": self._ports} if self._context.num_ranks > 1 else {}
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": name,
            "remote_block_ids": block_ids,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": len(request.block_hashes) * self._context.block_size,
            "tp_size": self._context.num_ranks,
            **others,
        }

    def hold(self, name: str, job: KVTransferJob) -> None:
        """Let others read this rank's parts of blocks, under a name."""
        self._held.hold(name, job)

    def build_connector_meta(self) -> bytes | None:
        """What was noted since the last step."""
        if not (self._loads or self._releases):
            return None
        metadata = json.dumps({"loads": self._loads, "releases": self._releases}).encode()
        self._loads, self._releases = {}, []
        return metadata

    def make_worker(self, memory: BlockMemory) -> PullWorker:
        """The other half. It has threads: close it."""
        try:
            transport = self._make_transport(memory)
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise
        context = self._context
        identity = {"fingerprint": context.fingerprint.hex(), "tensor_parallel_size": context.num_ranks}
        return PullWorker(memory, transport, identity, self._held, self._listener, rank=context.rank, **self._options)


def nixl_connector(context: ConnectorContext) -> PullConnector:
    """`NixlConnector`: blocks are read by NIXL. Raises ConfigError."""
    config = context.config
    config.check_extra(NIXL_EXTRA)
    backends = config.kv_connector_extra_config.get("backends", ["UCX"])
    if not (isinstance(backends, list) and backends and all(isinstance(each, str) for each in backends)):
        raise ConfigError(
            f"kv_transfer_config: kv_connector_extra_config.backends must be a list of names, got {backends!r}",
            field="kv_transfer_config",
        )
    num_threads = int(config.extra("num_threads", 0))
    return PullConnector(
        context,
        lambda memory: NixlTransport(
            memory, context.num_blocks, len(context.block_bytes), backends=backends, num_threads=num_threads
        ),
    )


def socket_connector(context: ConnectorContext) -> PullConnector:
    """`SocketConnector`: blocks are sent over TCP, without any package. Raises ConfigError."""
    context.config.check_extra(EXTRA)
    stall_s = context.config.extra("late_after", 1.5)
    return PullConnector(context, lambda memory: SocketTransport(memory, stall_s=stall_s))


def _peers(value: Any) -> tuple[str, ...]:
    try:
        if not isinstance(value, list | tuple):
            raise ValueError("not a list")
        return tuple(str(ipaddress.ip_network(each, strict=False)) for each in value)
    except ValueError as error:
        raise ConfigError(
            f"kv_transfer_config: kv_connector_extra_config.peers must be a list of networks such as 10.0.0.0/8, got "
            f"{value!r}: {error}",
            field="kv_transfer_config",
        ) from None


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 16


def _wrong(name: str, kind: str, value: Any) -> RequestError:
    return RequestError(
        f"kv_transfer_params.{name} must be {kind}, got {value!r}; hand on what the prefill engine answered",
        param="kv_transfer_params",
    )
