"""Client secrets: whose sessions they open, with what settings, until when, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from quire_interfaces import RequestError
from quire_server.callers import KEYLESS, APIKeys, read_api_keys
from quire_server.client_secrets import make_client_secret, read_client_secret
from quire_server.config import ServerConfig
from quire_server.guard import Guard

UPDATE = {"type": "session.update", "session": {"type": "transcription"}}


def keys_of(*keys: str) -> APIKeys:
    return read_api_keys(ServerConfig(api_key=keys))


KEYS = keys_of("key-of-ada", "key-of-grace")
ADA, GRACE = KEYS.callers
OPEN = APIKeys([])


def in_a_minute() -> int:
    return int(time.time()) + 60


def test_what_a_secret_says() -> None:
    value = make_client_secret(KEYS, GRACE, UPDATE, in_a_minute())
    assert value.startswith("ek_")
    assert value.replace("_", "").replace("-", "").isalnum()  # it may stand in a subprotocol
    assert "grace" not in value
    found = read_client_secret(KEYS, value.encode())
    assert found == (GRACE.owner, UPDATE)


def test_nobody_else_reads_or_changes_one() -> None:
    value = make_client_secret(KEYS, GRACE, UPDATE, in_a_minute())
    assert read_client_secret(keys_of("key-of-ada", "another"), value.encode()) is None
    for place in range(3, len(value), 7):
        changed = value[:place] + ("A" if value[place] != "A" else "B") + value[place + 1 :]
        assert read_client_secret(KEYS, changed.encode()) is None
    for wrong in ("ek_", "ek_x", "ek_éé", "ek_" + "A" * 64):
        assert read_client_secret(KEYS, wrong.encode()) is None


def test_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    expires_at = in_a_minute()
    value = make_client_secret(KEYS, ADA, UPDATE, expires_at).encode()
    monkeypatch.setattr(time, "time", lambda: expires_at - 1.0)
    assert read_client_secret(KEYS, value) is not None
    monkeypatch.setattr(time, "time", lambda: float(expires_at))
    assert read_client_secret(KEYS, value) is None


def test_settings_fit_into_a_header() -> None:
    with pytest.raises(RequestError, match="shorten the prompt") as refused:
        make_client_secret(KEYS, ADA, {"prompt": "word " * 2000}, in_a_minute())
    assert refused.value.param == "session"


def called(keys: APIKeys, path: str, kind: str = "websocket", **headers: str) -> dict[str, Any] | int | str:
    """The state that a call reaches the routes with, or how it is refused."""
    reached: list[Any] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["state"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind, "path": path, "query_string": b"", "method": "GET", "http_version": "1.1",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(Guard(app, keys)(scope, receive, send))
    if reached:
        return dict(reached[0])
    return int(sent[0]["status"]) if kind == "http" else str(sent[0]["reason"])


def test_it_opens_realtime_sessions_of_its_tenant_and_nothing_else() -> None:
    value = make_client_secret(KEYS, GRACE, UPDATE, in_a_minute())
    for headers in (
        {"authorization": f"Bearer {value}"},
        {"sec_websocket_protocol": f"realtime, openai-insecure-api-key.{value}"},
    ):
        state = called(KEYS, "/v1/realtime", **headers)
        assert isinstance(state, dict)
        assert (state["caller"], state["realtime_update"]) == (GRACE, UPDATE)
    assert "expired" in str(called(KEYS, "/v1/responses", authorization=f"Bearer {value}"))
    assert called(KEYS, "/v1/models", "http", authorization=f"Bearer {value}") == 401
    own = called(KEYS, "/v1/realtime", sec_websocket_protocol="realtime, openai-insecure-api-key.key-of-ada")
    assert isinstance(own, dict)
    assert own["caller"] == ADA


def test_a_key_that_is_gone_takes_its_secrets_along() -> None:
    value = make_client_secret(KEYS, GRACE, UPDATE, in_a_minute())
    assert "expired" in str(called(keys_of("key-of-ada"), "/v1/realtime", authorization=f"Bearer {value}"))


def test_open_servers_take_settings_and_refuse_what_has_expired() -> None:
    value = make_client_secret(OPEN, KEYLESS, UPDATE, in_a_minute())
    state = called(OPEN, "/v1/realtime", authorization=f"Bearer {value}")
    assert isinstance(state, dict)
    assert (state["caller"], state["realtime_update"]) == (KEYLESS, UPDATE)
    late = make_client_secret(OPEN, KEYLESS, UPDATE, int(time.time()) - 1)
    assert "expired" in str(called(OPEN, "/v1/realtime", authorization=f"Bearer {late}"))
    assert isinstance(called(OPEN, "/v1/realtime", authorization="Bearer anything"), dict)
