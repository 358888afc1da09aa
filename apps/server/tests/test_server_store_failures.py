"""Stores that fail: what was generated is answered all the same, and says that it is not kept; what needs a store is
refused as the server's failure, not the client's; and the log tells it once."""

from __future__ import annotations

import json
import resource
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire_server import store_access
from quire_server.response_store import SQLiteResponseStore, StoredResponse
from quire_server.store_access import StoreAccess, StoreFailedError

TEXT = "¤A finished text.¥"


class Broken(SQLiteResponseStore):
    """A store of somebody's own, in which methods break that are named here."""

    fails: ClassVar[set[str]] = set()

    def __init__(self, config: Any) -> None:
        super().__init__(":memory:", ttl_s=config.response_store_ttl_s, max_responses=10)

    def __getattribute__(self, name: str) -> Any:
        if name in Broken.fails:
            raise RuntimeError(f"secret detail of {name}")
        return super().__getattribute__(name)

    def put(self, stored: StoredResponse) -> None:
        if "finish" in Broken.fails and stored.response["status"] != "queued":
            raise RuntimeError("secret detail of the end")
        super().put(stored)


@pytest.fixture(scope="module")
def server(make_scripted: Any) -> Iterator[Any]:
    module = ModuleType("broken_store")
    module.make = Broken  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "broken_store", module)
        yield make_scripted(response_store="broken_store:make")


@contextmanager
def failing(*methods: str) -> Iterator[None]:
    Broken.fails = set(methods)
    try:
        yield
    finally:
        Broken.fails = set()


def last_event(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    with server.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return dict(json.loads(lines[-1]))


def check_not_kept(response: dict[str, Any], param: str = "store") -> None:
    assert response["status"] == "completed"
    assert response["output"][-1]["content"][0]["text"] == "A finished text."
    (warning,) = response["warnings"]
    assert (warning["code"], warning["param"]) == ("not_stored", param)
    assert response.get("store") is (False if param == "store" else None)
    assert "secret" not in json.dumps(response)


def check_refused(reply: Any) -> None:
    assert reply.status_code == 503, reply.text
    assert reply.json()["error"]["code"] == "store_failed"
    assert "secret" not in reply.text


def test_a_finished_text_is_answered_though_it_cannot_be_kept(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with failing("put"):
        whole = server.post("/v1/responses", {"input": TEXT}).json()
        check_not_kept(whole)
        event = last_event(server, {"input": TEXT})
        assert event["type"] == "response.completed"
        check_not_kept(event["response"])
    records = [record for record in caplog.records if record.name == store_access.__name__]
    assert [record.levelname for record in records] == ["ERROR"], "once, not with each request"
    assert "secret detail of put" in records[0].getMessage()
    assert server.client.get(f"/v1/responses/{whole['id']}").status_code == 404
    kept = server.post("/v1/responses", {"input": TEXT}).json()
    assert "warnings" not in kept
    assert "store" not in kept
    assert caplog.records[-1].getMessage() == "the store of responses works again"


def test_what_needs_the_store_is_refused(server: Any) -> None:
    kept = server.post("/v1/responses", {"input": TEXT}).json()["id"]
    with failing("put"):
        check_refused(server.post("/v1/responses", {"input": TEXT, "background": True}))
        with server.client.stream(
            "POST", "/v1/responses", json={"input": TEXT, "background": True, "stream": True}
        ) as reply:
            reply.read()
            check_refused(reply)
    server.wait_idle()
    with failing("get", "find_item", "delete"):
        for path in ("", "/input_items", "?stream=true"):
            check_refused(server.client.get(f"/v1/responses/{kept}{path}"))
        check_refused(server.client.delete(f"/v1/responses/{kept}"))
        check_refused(server.post(f"/v1/responses/{kept}/cancel", {}))
        check_refused(server.post("/v1/responses", {"input": TEXT, "previous_response_id": kept}))
        check_refused(server.post("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}))
        check_refused(server.post("/v1/responses/compact", {"input": TEXT, "previous_response_id": kept}))
        assert server.post("/v1/responses", {"input": TEXT, "store": False}).json()["status"] == "completed"
    assert server.client.get(f"/v1/responses/{kept}").status_code == 200


def test_a_background_response_is_read_though_its_end_cannot_be_kept(server: Any) -> None:
    with failing("finish"):
        started = server.post("/v1/responses", {"input": TEXT, "background": True}).json()["id"]
        while (response := server.client.get(f"/v1/responses/{started}").json())["status"] in ("queued", "in_progress"):
            pass
        assert response["status"] == "completed"
        assert [each["code"] for each in response["warnings"]] == ["not_stored"]
        with server.client.stream("GET", f"/v1/responses/{started}?stream=true") as reply:
            assert "response.completed" in reply.read().decode()
    assert server.client.delete(f"/v1/responses/{started}").status_code == 200
    assert server.client.get(f"/v1/responses/{started}").status_code == 404


def test_a_store_that_cannot_be_opened_costs_no_answer(make_scripted: Any, tmp_path: Path) -> None:
    """The state folder of the user, where nobody chose it, may be anything."""
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "file").write_text("")
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        server = make_scripted(response_store=None)
        check_not_kept(server.post("/v1/responses", {"input": TEXT}).json())
        check_refused(server.client.get("/v1/responses/resp_1"))
        check_refused(server.post("/v1/conversations", {}))
        (tmp_path / "file").unlink()
        assert "warnings" not in server.post("/v1/responses", {"input": TEXT}).json(), "it is opened once it can be"


@contextmanager
def damaged(path: Path, how: str) -> Iterator[None]:
    """A file that a running server has open, while something is wrong with it."""
    if how == "locked":
        with sqlite3.connect(path, isolation_level=None) as db:
            db.execute("BEGIN IMMEDIATE")
            yield
            db.execute("ROLLBACK")
        db.close()
    elif how == "full":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    else:
        kept = {each: each.read_bytes() for each in path.parent.glob(f"{path.name}*")}
        for each in kept:
            with each.open("r+b") as file:
                file.write(b"nonsense" * (each.stat().st_size // 8))
        yield


@pytest.mark.parametrize("how", ["locked", "full", "nonsense"])
def test_a_file_that_goes_wrong_while_it_is_used(
    make_scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("quire_server.sqlite_file.BUSY_TIMEOUT_S", 0.2)
    path = tmp_path / "kept.sqlite"
    server = make_scripted(response_store=str(path))
    conversation = server.post("/v1/conversations", {}).json()["id"]
    first = server.post("/v1/responses", {"input": TEXT}).json()
    with damaged(path, how):
        if how != "nonsense":  # of which nothing can be read
            body = {"input": TEXT, "conversation": conversation, "store": False}
            check_not_kept(last_event(server, body)["response"], "conversation")
        event = last_event(server, {"input": TEXT})
        assert event["type"] == "response.completed"
        check_not_kept(event["response"])
        check_refused(server.post("/v1/responses", {"input": TEXT, "background": True}))
        check_refused(server.client.delete(f"/v1/responses/{first['id']}"))
    if how != "nonsense":
        assert "warnings" not in server.post("/v1/responses", {"input": TEXT}).json()
        assert server.client.get(f"/v1/responses/{first['id']}").status_code == 200


async def test_a_store_that_never_answers_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_access, "TIMEOUT_S", 0.2)
    go_on = threading.Event()
    access: StoreAccess[Any] = StoreAccess("things", lambda: Broken.__new__(Broken))
    try:
        with pytest.raises(StoreFailedError):
            await access.ask(lambda store: go_on.wait(60))
    finally:
        go_on.set()
    assert await access.ask(lambda store: 5) == 5
