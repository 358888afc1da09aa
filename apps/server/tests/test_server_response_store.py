"""Kept responses: found again, forgotten after a time, bounded in number, private, replaceable."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import sys
import threading
import time
from random import Random
from types import ModuleType

import pytest

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.conversation_store import SQLiteConversationStore
from quire_server.response_store import SQLiteResponseStore, StoredResponse, default_store_path, make_response_store


def entry(name: str, owner: str = "", items: tuple[dict, ...] = ({"type": "message"},), **more):
    return StoredResponse(response={"id": name, "output": [], **more}, input_items=list(items), owner=owner)


def get(store, name: str, owner: str = ""):
    return store.get(name, owner=owner)


@pytest.fixture
def store(tmp_path):
    store = SQLiteResponseStore(tmp_path / "new" / "kept.sqlite", ttl_s=1000, max_responses=10)
    yield store
    store.close()


def test_what_was_put_is_found_replaced_and_deleted(store):
    store.put(entry("a"))
    store.put(entry("a", status="completed", previous_response_id="b"))
    found = get(store, "a")
    assert (found.response["status"], found.previous_id, found.input_items) == ("completed", "b", [{"type": "message"}])
    assert get(store, "b") is None
    assert store.delete("a", owner="")
    assert not store.delete("a", owner="")


def test_another_process_reads_it(store, tmp_path):
    store.put(entry("a", status="é"))
    other = SQLiteResponseStore(tmp_path / "new" / "kept.sqlite", ttl_s=1000, max_responses=10)
    assert get(other, "a").response["status"] == "é"
    other.close()


def test_only_the_owner_can_read_the_file(store, tmp_path):
    assert stat.S_IMODE((tmp_path / "new" / "kept.sqlite").stat().st_mode) == 0o600


def test_old_ones_are_forgotten(tmp_path):
    path = tmp_path / "kept.sqlite"
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=10)
    store.put(entry("old"))
    store.put(entry("new"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE owned_responses SET written_s = written_s - 2000 WHERE id = 'old'")
    db.close()
    assert get(store, "old") is None
    assert not store.delete("old", owner="")
    assert get(store, "new") is not None
    store.close()
    SQLiteResponseStore(path, ttl_s=1000, max_responses=10).close()
    with sqlite3.connect(path) as db:
        assert [row[0] for row in db.execute("SELECT id FROM owned_responses")] == ["new"]
    db.close()


def test_the_number_is_bounded_exactly_and_the_oldest_go(store):
    for number in range(25):
        store.put(entry(f"r{number}", owner="ann" if number % 2 else "ben"))
        kept = [each for each in range(25) if get(store, f"r{each}", "ann" if each % 2 else "ben") is not None]
        assert kept == list(range(max(0, number - 9), number + 1))
    store.put(entry("r15", "ann", status="completed"))  # what is there already pushes nothing out
    assert get(store, "r16", "ben") is not None


def test_whoever_stores_the_most_pushes_out_nobody_else(store, tmp_path):
    for number in range(3):
        store.put(entry(f"ben{number}", "ben"))
    for number in range(40):
        store.put(entry(f"ann{number}", "ann"))
    assert all(get(store, f"ben{number}", "ben") is not None for number in range(3))
    assert [each for each in range(40) if get(store, f"ann{each}", "ann") is not None] == list(range(33, 40))
    store.close()
    smaller = SQLiteResponseStore(tmp_path / "new" / "kept.sqlite", ttl_s=1000, max_responses=4)
    assert [get(smaller, f"ben{each}", "ben") is not None for each in range(3)].count(True) == 2
    assert [each for each in range(40) if get(smaller, f"ann{each}", "ann") is not None] == [38, 39]
    smaller.close()


def test_each_owner_has_its_own(store):
    mine, yours = ({"id": "msg_1", "text": text} for text in ("mine", "yours"))
    store.put(entry("a", "ann", (mine,)))
    store.put(entry("b", "ben", (yours,)))
    assert get(store, "a", "ann").owner == "ann"
    for stranger in ("ben", "", "ANN"):
        assert get(store, "a", stranger) is None
        assert not store.delete("a", owner=stranger)
    assert store.find_item("msg_1", owner="ann") == mine
    assert store.find_item("msg_1", owner="ben") == yours
    assert store.find_item("msg_1", owner="") is None
    assert store.delete("a", owner="ann")
    assert store.find_item("msg_1", owner="ann") is None
    assert store.find_item("msg_1", owner="ben") == yours


def test_an_item_is_found_as_long_as_a_response_has_it(store):
    first, second = ({"id": "msg_1", "text": text} for text in ("first", "second"))
    store.put(entry("a", "ann", (first,)))
    store.put(entry("b", "ann", (second,)))
    assert store.find_item("msg_1", owner="ann") == first, "a later one does not take its place"
    store.delete("a", owner="ann")
    assert store.find_item("msg_1", owner="ann") == second


def test_files_of_the_version_without_owners_are_taken_over(tmp_path):
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(
            """
            PRAGMA journal_mode=WAL;
            PRAGMA secure_delete=OFF;
            CREATE TABLE responses (id TEXT PRIMARY KEY, written_s REAL, response BLOB, input BLOB);
            CREATE TABLE response_items (id TEXT PRIMARY KEY, response TEXT);
            CREATE TABLE conversations (id TEXT PRIMARY KEY, written_s REAL, object BLOB);
            CREATE TABLE conversation_items (place INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT, id TEXT,
                item BLOB);
            """
        )
        now = time.time()
        for name, num_texts in (("kept", 100), ("deleted", 5000)):
            response = json.dumps({"id": f"resp_{name}", "output": [{"id": f"msg_{name}"}]}).encode()
            items = json.dumps([{"id": f"in_{name}", "content": f"text that was {name} " * num_texts}]).encode()
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?)", (f"resp_{name}", now, response, items))
            db.execute("INSERT INTO response_items VALUES (?, ?)", (f"in_{name}", f"resp_{name}"))
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("DELETE FROM responses WHERE id = 'resp_deleted'")
        db.execute("INSERT INTO conversations VALUES ('conv_1', ?, '{\"id\": \"conv_1\"}')", (now,))
        for name in ("one", "two"):
            item = json.dumps({"id": name}).encode()
            db.execute("INSERT INTO conversation_items (conversation, id, item) VALUES ('conv_1', ?, ?)", (name, item))
    db.close()
    assert b"text that was deleted" in raw(path)
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=10)
    assert b"text that was deleted" not in raw(path), "what the older version deleted is gone, too"
    conversations = SQLiteConversationStore(path, ttl_s=1000)
    assert get(store, "resp_kept").response["output"] == [{"id": "msg_kept"}]
    assert store.find_item("in_kept", owner="")["content"].startswith("text that was kept")
    assert store.find_item("msg_kept", owner="") == {"id": "msg_kept"}
    assert get(store, "resp_kept", "ann") is None
    assert conversations.get("conv_1", owner="") == {"id": "conv_1"}
    assert conversations.items("conv_1", owner="") == [{"id": "one"}, {"id": "two"}]
    assert conversations.items("conv_1", owner="ann") == []
    store.close()
    conversations.close()


def raw(path) -> bytes:
    """All bytes of the files of a database."""
    return b"".join(each.read_bytes() for each in path.parent.iterdir())


def test_what_was_deleted_is_gone_from_the_file(tmp_path):
    random = Random(0)
    path = tmp_path / "kept.sqlite"
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=10_000)
    conversations = SQLiteConversationStore(path, ttl_s=1000)
    kept = set()
    for number in range(60):
        text = f"secret-{number:03d} " * random.choice([1, 4, 10, 25])
        item = {"id": f"item-{number:03d}", "text": text}
        store.put(entry(f"resp_{number}", "ann", (item,)))
        conversations.put({"id": f"conv_{number}", "metadata": {"about": f"metadata-{number:03d}"}}, owner="ann")
        more = [{"id": f"item-{number:03d}-{each}", "text": text} for each in range(3)]
        conversations.append(f"conv_{number}", [item, *more], owner="ann")
        kept.add(number)
        if number % 3:
            gone = random.choice(sorted(kept))
            kept.remove(gone)
            assert store.delete(f"resp_{gone}", owner="ann")
            assert conversations.delete(f"conv_{gone}", owner="ann")
    found = set(map(int, re.findall(rb"(?:secret|item|metadata)-(\d{3})", raw(path))))
    assert found == kept
    last = max(kept)
    assert b"metadata-%03d" % last in raw(path)
    conversations.put({"id": f"conv_{last}", "metadata": {}}, owner="ann")
    assert b"metadata-%03d" % last not in raw(path)
    assert conversations.delete_item(f"conv_{last}", f"item-{last:03d}", owner="ann")
    assert b"secret-%03d" % last in raw(path)
    store.close()
    conversations.close()


def test_no_text_is_where_rows_move_between_pages(tmp_path):
    """Of rows that moved SQLite leaves copies, which nobody finds to delete them."""
    path = tmp_path / "kept.sqlite"
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=10_000)
    conversations = SQLiteConversationStore(path, ttl_s=1000)
    for number in range(40):
        item = {"id": f"secret-id-{number}", "text": "secret-text " * number}
        store.put(entry(f"resp_{number}", "ann", (item,), status="secret-status"))
        conversations.put({"id": f"conv_{number}", "metadata": {"about": "secret-metadata"}}, owner="ann")
        conversations.append(f"conv_{number}", [item], owner="ann")
    store.close()
    conversations.close()
    data, num_bytes = path.read_bytes(), 1024
    pages = [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]
    assert int.from_bytes(data[16:18], "big") == num_bytes
    trees = [page for page in pages if page[0] in (2, 5, 10, 13)]
    assert sum(b"resp_" in page for page in trees) > 10
    assert sum(b"secret" in page for page in pages) > 40
    assert not any(b"secret" in page for page in trees)


@pytest.mark.parametrize("why", ["age", "number"])
def test_what_was_forgotten_is_gone_from_the_file(tmp_path, why):
    path = tmp_path / "kept.sqlite"
    store = SQLiteResponseStore(path, ttl_s=1000, max_responses=2)
    conversations = SQLiteConversationStore(path, ttl_s=1000)
    store.put(entry("old", "ann", ({"id": "item-old", "text": "secret-old " * 1000},)))
    conversations.put({"id": "conv_old"}, owner="ann")
    conversations.append("conv_old", [{"id": "item-old", "text": "spoken-old " * 1000}], owner="ann")
    assert b"secret-old" in raw(path)
    if why == "age":
        with sqlite3.connect(path) as db:
            for table in ("owned_responses", "owned_conversations"):
                db.execute(f"UPDATE {table} SET written_s = written_s - 2000")
        db.close()
        assert conversations.find_item("item-old", owner="ann") is None
        conversations.put({"id": "conv_new"}, owner="ann")
        assert b"spoken-old" not in raw(path)
    for name in ("new", "newer"):
        store.put(entry(name, "ann"))
    assert b"secret-old" not in raw(path)
    store.close()
    conversations.close()


def test_many_threads_at_once(store):
    def work(name: str) -> None:
        for _ in range(20):
            store.put(entry(name))
            assert get(store, name) is not None

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
