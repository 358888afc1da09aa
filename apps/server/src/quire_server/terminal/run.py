"""`quire run MODEL`: a server of its own, on a free port of this machine, and a chat with it. Both end together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire import QuireConfig
from quire.setting_fields import Origin
from quire_interfaces import ConfigError, QuireError
from quire_server.config import ServerConfig
from quire_server.model_router.pool import find_models
from quire_server.terminal.api_client import APIClient
from quire_server.terminal.chat import converse, first_model, parsed_parameters, piped_input
from quire_server.terminal.conversation import Conversation, image_part
from quire_server.terminal.served import ServedSpec

__all__ = ["OwnServer", "RunOptions", "question_of", "run", "settings_of_run"]

STOP_TIMEOUT_S = 15.0
"""How long the server has to end before it is killed."""
_ADDRESS = re.compile(r"OpenAI API:\s+(\S+)/v1")


class ServerEndedError(QuireError):
    """The server could not start, or has ended. It has said why."""

    def __init__(self, status: int) -> None:
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        super().__init__(f"the server has ended {how}")
        self.status = status


class OwnServer:
    """A server in a process of its own, which ends when this process does, however that ends.

    Args:
        config: Settings of the engine.
        server: Settings of the HTTP side, with the banner, which tells the address.
        factory: Another engine than the configured one.
    """

    def __init__(
        self, config: QuireConfig, server: ServerConfig, factory: tuple[str, dict[str, Any]] | None = None
    ) -> None:
        spec = ServedSpec(config=config.to_dict(), server=dataclasses.asdict(server), factory=factory)
        blob = msgspec.msgpack.encode(spec)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", "import sys; from quire_server.terminal.served import main; sys.exit(main())"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C stops an answer here, not the server
        )
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `address` says so
            self._popen.stdin.write(len(blob).to_bytes(8, "little") + blob)
            self._popen.stdin.flush()

    def address(self) -> str:
        """Its address, once it answers.

        Raises:
            ServerEndedError: it could not start.
        """
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if found := _ADDRESS.search(line.decode(errors="replace")):
                threading.Thread(target=self._popen.stdout.read, daemon=True).start()  # so that it never blocks
                return found[1]
        raise ServerEndedError(self._popen.wait())

    def check(self) -> None:
        """Raises ServerEndedError where it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise ServerEndedError(self._popen.wait(1.0))

    def stop(self) -> None:
        """End it, and whatever it started."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()


class RunOptions(NamedTuple):
    """What `quire run` was told beside settings."""

    prompt: str | None
    system: str | None
    settings: Sequence[str]
    images: Sequence[str]
    is_plain: bool
    shows_stats: bool


def run(
    config: QuireConfig,
    server: ServerConfig,
    origins: Mapping[str, Origin],
    options: RunOptions,
    factory: tuple[str, dict[str, Any]] | None = None,
) -> int:
    """Serve, chat or answer the prompt, end the server; the exit status.

    Raises:
        QuireError: a setting is wrong, or the server could not start.
    """
    parameters = parsed_parameters(options.settings)
    images = [image_part(place) for place in options.images]
    question = question_of(options.prompt)
    config, server = settings_of_run(config, server, origins)
    child = OwnServer(config, server, factory)
    try:
        try:
            client = APIClient(child.address(), server.api_key[0])
            conversation = Conversation(first_model(client, None), options.system, parameters, images=images)
        except KeyboardInterrupt:
            return 130
        return converse(
            client,
            conversation,
            question,
            is_plain=options.is_plain,
            shows_stats=options.shows_stats,
            check_server=child.check,
        )
    except ServerEndedError as error:
        if error.status > 0:
            return error.status  # its own words are on the screen
        raise
    finally:
        child.stop()


def settings_of_run(
    config: QuireConfig, server: ServerConfig, origins: Mapping[str, Origin]
) -> tuple[QuireConfig, ServerConfig]:
    """The settings of the server: what was asked for; else a free port of this machine, a key that nobody else knows,
    and nothing on the screen that is no answer.

    Raises:
        ConfigError: a setting asks for more than one server that chats.
    """
    refused = {
        "uds": server.uds is not None,
        "headless": config.data_parallel.headless,
        "ssl_certfile": server.ssl_certfile is not None,
        "log_format": server.log_format == "json",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"quire run does not go with --{name.replace('_', '-')}: its server is for this chat alone; start "
                "`quire serve` with it, then `quire chat`",
                field=name,
            )
    model = config.model.model
    models_dir = None if server.models_dir is None else Path(server.models_dir).expanduser()
    found = find_models(models_dir) if models_dir is not None and models_dir.is_dir() else {}
    if model is not None and model in found:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(found[model])))
        server = dataclasses.replace(server, served_model_name=server.served_model_name or (model,))
    quiet = {"port": 0, "host": "127.0.0.1", "access_log": False, "log_level": "warning", "response_store": "none"}
    changed: dict[str, Any] = {name: value for name, value in quiet.items() if origins[name].source == "default"}
    changed |= {"api_key": (secrets.token_urlsafe(32), *server.api_key), "banner": True, "models_dir": None}
    return config, dataclasses.replace(server, **changed)


def question_of(prompt: str | None) -> str | None:
    """The prompt, with what is piped in behind it; None to chat.

    Raises:
        ConfigError: it is empty.
    """
    piped = piped_input() if prompt is None or _is_piped() else None
    parts = [part for part in (prompt, piped) if part is not None and part.strip()]
    if not parts and (prompt is not None or piped is not None):
        raise ConfigError("the prompt is empty", field="prompt")
    return "\n\n".join(parts) if parts else None


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file: a prompt is not made to wait for anything else."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
