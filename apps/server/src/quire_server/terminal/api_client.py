"""A client of any OpenAI-compatible server, on the standard library: JSON, and answers as they stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError, QuireError

__all__ = ["APIClient", "NoServerError"]

MAX_ERROR_BYTES = 1 << 16


class NoServerError(QuireError):
    """Nobody answers at the address, or the connection broke off."""


class APIClient:
    """One server.

    Args:
        url: Its address, with or without a closing /v1.
        api_key: None takes OPENAI_API_KEY of the environment, if it is there.
        timeout_s: How long it may say nothing.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000, got {url!r}", field="url")
        if not timeout_s > 0:
            raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}", field="timeout")
        self.base_url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._answer_fd: int | None = None
        """Of the connection whose answer is being read."""
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json", "User-Agent": "quire"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """Names of what is served.

        Raises:
            QuireError: as of `events`, or the answer is not a list of models.
        """
        with self._open("/v1/models", None) as response:
            try:
                return [str(card["id"]) for card in json.load(response)["data"]]
            except (ValueError, LookupError, TypeError):
                raise QuireError(
                    f"{self.base_url}/v1/models does not list models as OpenAI's API does; is it such a server?"
                ) from None

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Whoever stops reading closes the generator, which ends the request.

        Args:
            path: Of the route, e.g. "/v1/chat/completions".
            body: Of the request; `stream` is set.

        Raises:
            NoServerError: nobody answers, or the stream broke off.
            QuireError: the server refuses; the message is its own.
        """
        yield from self._streamed(self._open(path, {**body, "stream": True}))

    def upload_events(self, path: str, fields: Mapping[str, str], file: Path) -> Generator[dict[str, Any], None, None]:
        """As `events`, of an answer to a form with a file, which is read while it is sent.

        Args:
            path: Of the route.
            fields: Of the form, beside `file`.
            file: What is sent.

        Raises:
            NoServerError, QuireError: as of `events`.
            OSError: the file cannot be read.
        """
        boundary = secrets.token_hex(16)
        parts = [f'name="{name}"\r\n\r\n{value}\r\n' for name, value in {**fields, "stream": "true"}.items()]
        parts.append('name="file"; filename="recording"\r\n\r\n')
        begin = f"--{boundary}\r\nContent-Disposition: form-data; "
        head, tail = "".join(begin + part for part in parts).encode(), f"\r\n--{boundary}--\r\n".encode()
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size

            def body() -> Generator[bytes, None, None]:
                yield head
                while piece := opened.read(1 << 18):
                    yield piece
                yield tail

            headers = {**self._headers, "Content-Type": f"multipart/form-data; boundary={boundary}"}
            headers["Content-Length"] = str(len(head) + size + len(tail))
            request = urllib.request.Request(self.base_url + path, body(), headers, method="POST")
            yield from self._streamed(self._answer_to(request))

    def _streamed(self, response: Any) -> Generator[dict[str, Any], None, None]:
        with response:
            self._answer_fd = response.fileno()
            try:
                yield from _events(response)
            except (OSError, http.client.HTTPException) as error:
                raise NoServerError(f"the answer broke off ({_reason(error)}); the server may have ended") from None
            finally:
                self._answer_fd = None

    def stop(self) -> bool:
        """Break off the answer that is being read, whose reader gets NoServerError; whether there is one. A signal
        handler may call it."""
        if self._answer_fd is None:
            return False
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._answer_fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        return True

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return self._answer_to(urllib.request.Request(self.base_url + path, data, self._headers))

    def _answer_to(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise NoServerError(
                f"no server answers at {self.base_url} ({_reason(error)}); start one with `quire serve`, or name "
                "another with --url"
            ) from None

    def _refused(self, error: urllib.error.HTTPError) -> QuireError:
        text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = text[:300].strip() or str(error.reason)
        if error.code == 401:
            message += "; give --api-key, or set OPENAI_API_KEY"
        return QuireError(f"{message} (HTTP {error.code} from {self.base_url})")


def _events(response: Any) -> Generator[dict[str, Any], None, None]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise QuireError(
                f"the stream holds something else than JSON objects: {data[:100].decode(errors='replace')}"
            )
        if event.get("error"):
            failure = event["error"]
            raise QuireError(str(failure.get("message") if isinstance(failure, dict) else failure))
        yield event
    raise NoServerError("the answer broke off before its end; the server may have ended")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, (TimeoutError, socket.timeout)):
        return "it says nothing within --timeout"
    return str(reason) or type(reason).__name__
