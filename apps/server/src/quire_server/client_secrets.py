"""Keys for a few minutes, by which a browser opens realtime sessions without knowing the key of whoever it does so for.

A secret holds who made it, until when it holds, and what its sessions begin with, sealed with the server's own keys:
all of its processes read it, and nobody else. It opens `/v1/realtime` and nothing beside. Knows no route.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire_interfaces import RequestError
from quire_server.callers import APIKeys, Caller
from quire_server.sealing import Sealer

__all__ = ["PREFIX", "ClientSecret", "make_client_secret", "read_client_secret"]

PREFIX = "ek_"
MAX_CHARS = 4096
"""A header of a websocket holds it."""
_MARK = b"quire-client-secret-1:"


class ClientSecret(NamedTuple):
    """What a secret says."""

    owner: str
    """`Caller.owner` of who made it."""
    update: dict[str, Any]
    """The event that a session begins with."""


def make_client_secret(keys: APIKeys, caller: Caller, update: Mapping[str, Any], expires_at: int) -> str:
    """A secret.

    Args:
        keys: Of the server.
        caller: Whose sessions it opens.
        update: The event that they begin with.
        expires_at: Seconds of the epoch.

    Raises:
        RequestError: the session's settings are too long for a header.
    """
    content = json.dumps({"owner": caller.owner, "until": expires_at, "update": update}, separators=(",", ":"))
    sealed = base64.b64decode(Sealer(keys.sealing_key).seal(content, _MARK))
    value = PREFIX + base64.urlsafe_b64encode(sealed).decode().rstrip("=")
    if len(value) > MAX_CHARS:
        raise RequestError(
            f"the session's settings take {len(value)} characters in the secret, {MAX_CHARS} are possible; shorten the "
            "prompt, or send it with session.update",
            param="session",
        )
    return value


def read_client_secret(keys: APIKeys, value: bytes) -> ClientSecret | None:
    """What a secret says; None for one that is not this server's, or has expired."""
    try:
        data = base64.urlsafe_b64decode(value[len(PREFIX) :] + b"=" * (-(len(value) - len(PREFIX)) % 4))
    except (binascii.Error, ValueError):
        return None
    text = Sealer(keys.sealing_key).open(base64.b64encode(data).decode(), _MARK)
    if text is None:
        return None
    content = json.loads(text)
    return ClientSecret(content["owner"], content["update"]) if time.time() < content["until"] else None
