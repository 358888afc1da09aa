"""One model of a router: a `quire serve` process on a unix socket, from its start to its end. Knows no HTTP."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from quire_server.errors import HTTPError

__all__ = ["ROUTER_SETTINGS", "ModelProcess", "Status"]

Status = Literal["unloaded", "loading", "loaded", "stopping"]

_logger = logging.getLogger(__name__)

ROUTER_SETTINGS = frozenset(
    {
        "access_log", "allow_credentials", "allow_pull", "allowed_headers", "allowed_hosts", "allowed_methods",
        "allowed_origins", "banner", "grpc_port", "grpc_uds", "host", "model", "models_autoload", "models_dir",
        "models_max", "models_ttl_s", "port", "root_path", "served_model_name", "ssl_ca_certs", "ssl_cert_reqs",
        "ssl_certfile", "ssl_keyfile", "uds",
    }
)  # fmt: skip
"""Settings that are the router's own; all others are those of each model's server, too."""
NOTICE_S = 5.0
"""How long the system may take to say that a process has ended."""
STOP_GRACE_S = 10.0
"""Beyond the time that running requests have; then the process is killed."""
LOOK_S = 0.05
_KEPT_LINES = 20
"""Of what a process says, for those who ask why it ended."""


class ModelProcess:
    """A model that can be served.

    Args:
        name: What requests call it.
        path: Its folder or file.
        settings: Of its server, by name.
        folder: For its socket and its settings file; nobody else may read it.
        stop_timeout_s: How long running requests have when it is stopped.
    """

    def __init__(
        self, name: str, path: Path, settings: Mapping[str, Any], folder: Path, *, stop_timeout_s: float
    ) -> None:
        self.name, self.path = name, path
        self.status: Status = "unloaded"
        self.num_requests = 0
        """Requests that are being answered, or wait for it to load."""
        self.last_used_s = 0.0
        self.ttl_s: float | None = None
        """How long it stays without requests, where one of them said so; None for the router's own time."""
        self.failure = ""
        """What it said when it could not start, or when it died."""
        self.exit_code: int | None = None
        self.load_s = 0.0
        self._settings, self._folder, self._stop_timeout_s = dict(settings), folder, stop_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._reader: asyncio.Future[None] | None = None

    @property
    def socket_path(self) -> Path:
        """Where it listens."""
        return self._folder / "socket"

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Load it unless it is loaded, anew if its process has died.

        Raises:
            HTTPError: 503, it could not be started; the message says why.
        """
        async with self._lock:
            if self.is_alive and self.status == "loaded":
                return
            begin_s = time.monotonic()
            self.status, self.failure, self.exit_code = "loading", "", None
            try:
                await self._spawn()
                await self._until_ready()
            except BaseException:
                await self._end()
                raise
            self.status, self.load_s = "loaded", time.monotonic() - begin_s
            _logger.info("loaded %s after %.1f s", self.name, self.load_s)

    async def notice_end(self) -> None:
        """Wait until the end of its process is known, whose connections have ended: they may be the first to tell."""
        process = self._process
        if process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), NOTICE_S)

    async def stop(self) -> None:
        """Let running requests finish, then end its process."""
        async with self._lock:
            if self._process is not None:
                self.status = "stopping"
                await self._end()
                _logger.info("unloaded %s", self.name)

    async def _spawn(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = self._folder / "settings.yaml"
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()
        settings = {**self._settings, "model": str(self.path), "served_model_name": [self.name]}
        settings |= {"uds": str(self.socket_path), "banner": False, "access_log": False}
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            yaml.safe_dump(settings, file)
        names = {f"QUIRE_{name.upper()}" for name in (*settings, *ROUTER_SETTINGS)}
        environment = {name: value for name, value in os.environ.items() if name not in names}
        self._said.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire_server.cli", "serve", "--config", str(config),
            env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._reader = asyncio.ensure_future(self._listen(self._process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what it says, and keep the last of it."""
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            print(f"[{self.name}] {text}", file=sys.stderr, flush=True)
        self.exit_code = await process.wait()

    async def _until_ready(self) -> None:
        while self.is_alive:
            if self.socket_path.exists():
                with contextlib.suppress(OSError):  # it binds first, and listens when it is loaded
                    _, writer = await asyncio.open_unix_connection(str(self.socket_path))
                    writer.close()
                    return
            await asyncio.sleep(LOOK_S)
        if self._reader is not None:
            await self._reader
        self.failure = "; ".join(list(self._said)[-3:]) or "it said nothing"
        raise HTTPError(503, f"the model {self.name!r} cannot be loaded: {self.failure}", code="model_not_loaded")

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._stop_timeout_s + STOP_GRACE_S)
            except TimeoutError:
                self.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        self._process, self.status = None, "unloaded"

    def kill(self) -> None:
        """End its process and those that it started, at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
