"""Kept responses: found again, forgotten after a time, bounded in number, private, replaceable."""

from __future__ import annotations

import sqlite3
import stat
import sys
import threading
from types import ModuleType

import pytest

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.response_store import SQLiteResponseStore, StoredResponse, default_store_path, make_response_store


def entry(name: str, **more):
    return StoredResponse(response={"id": name, "output": ["é"], **more}, input_items=[{"type": "message"}])


@pytest.fixture
def store(tmp_path):
    store = SQLiteResponseStore(tmp_path / "new" / "kept.sqlite", ttl_s=1000, max_responses=10)
    yield store
    store.close()


def test_what_was_put_is_found_replaced_and_deleted(store):
    store.put(entry("a"))
    store.put(entry("a", status="completed", previous_response_id="b"))
    found = store.get("a")
    assert (found.response["status"], found.previous_id, found.input_items) == ("completed", "b", [{"type": "message"}])
    assert store.get("b") is None
    assert store.delete("a")
    assert not store.delete("a")


def test_another_process_reads_it(store, tmp_path):
    store.put(entry("a"))
    other = SQLiteResponseStore(tmp_path / "new" / "kept.sqlite", ttl_s=1000, max_responses=10)
    assert other.get("a").response["output"] == ["é"]
    other.close()


def test_only_the_owner_can_read_the_file(store, tmp_path):
    assert stat.S_IMODE((tmp_path / "new" / "kept.sqlite").stat().st_mode) == 0o600


def test_old_ones_are_forgotten(tmp_path):
    path = tmp_path / "kept.sqlite"
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=10)
    store.put(entry("old"))
    store.put(entry("new"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE responses SET written_s = written_s - 2000 WHERE id = 'old'")
    assert store.get("old") is None
    assert store.get("new") is not None
    store.close()
    SQLiteResponseStore(path, ttl_s=1000, max_responses=10).close()
    with sqlite3.connect(path) as db:
        assert [row[0] for row in db.execute("SELECT id FROM responses")] == ["new"]
    db.close()


def test_the_number_is_bounded(store):
    for number in range(250):
        store.put(entry(f"r{number}"))
    kept = [number for number in range(250) if store.get(f"r{number}") is not None]
    assert 10 <= len(kept) <= 110
    assert kept[-1] == 249


def test_many_threads_at_once(store):
    def work(name: str) -> None:
        for _ in range(20):
            store.put(entry(name))
            assert store.get(name) is not None

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "text").write_text("this is no database, whatever its name says" * 50)
    for path in (tmp_path / "text", tmp_path / "text" / "below"):
        with pytest.raises(ConfigError, match="--response-store"):
            make_response_store(ServerConfig(response_store=str(path)))


def test_other_stores_are_found_by_name(monkeypatch):
    module = ModuleType("my_store")
    module.make = lambda config: ("mine", config.response_store_ttl_s)
    monkeypatch.setitem(sys.modules, "my_store", module)
    assert make_response_store(ServerConfig(response_store="my_store:make", response_store_ttl_s=5)) == ("mine", 5)
    assert make_response_store(ServerConfig(response_store="none")) is None
    with pytest.raises(ConfigError, match="no response store 'my_store:other'"):
        make_response_store(ServerConfig(response_store="my_store:other"))


def test_the_default_is_in_the_user_s_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_store_path() == tmp_path / "quire" / "responses.sqlite"
    store = make_response_store(ServerConfig())
    store.put(entry("a"))
    assert default_store_path().is_file()
    store.close()
