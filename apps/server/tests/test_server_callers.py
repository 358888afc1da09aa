"""Who calls: API keys from settings and the key file, and what requests are told to belong to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import ConfigError
from quire_server.callers import KEYLESS, APIKeys, Caller, read_api_keys
from quire_server.config import ServerConfig
from quire_server.guard import Guard


def keys_of(**settings: Any) -> APIKeys:
    return read_api_keys(ServerConfig(**{"response_store": "none", **settings}))


def caller(keys: APIKeys, key: str) -> Caller:
    found = keys.caller_of(key.encode())
    assert found is not None
    return found


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_without_keys_everybody_is_one_caller():
    keys = keys_of()
    assert keys.is_open
    assert keys.caller_of(b"") == keys.caller_of(b"none") == KEYLESS == Caller("", "", is_admin=False)


def test_each_key_is_a_caller_of_its_own():
    keys = keys_of(api_key=("sk-one", "sk-two"))
    one, two = caller(keys, "sk-one"), caller(keys, "sk-two")
    assert one.owner != two.owner
    assert one.tenant != two.tenant
    assert not one.is_admin
    assert "sk-one" not in repr(one)
    for wrong in (b"", b"sk-", b"sk-three", b"sk-one,sk-two"):
        assert keys.caller_of(wrong) is None


def test_an_owner_is_the_same_after_a_restart_with_the_same_store(tmp_path):
    def owner(store: str, *keys: str) -> str:
        return caller(keys_of(api_key=keys, response_store=store), "sk-one").owner

    here, there = str(tmp_path / "here.sqlite"), str(tmp_path / "there.sqlite")
    assert owner(here, "sk-one") == owner(here, "sk-two", "sk-one")
    assert owner(here, "sk-one") != owner(there, "sk-one")  # hashes of one store tell nothing about another
    assert owner("some.module:store", "sk-one") == owner("some.module:store", "sk-zero", "sk-one")


def test_keys_of_administrators():
    alone = keys_of(admin_api_key=("sk-root",))
    assert alone.is_open
    assert caller(alone, "sk-root").is_admin
    assert alone.caller_of(b"none") == KEYLESS
    both = keys_of(api_key=("sk-one",), admin_api_key=("sk-root",))
    assert not both.is_open
    assert caller(both, "sk-root").is_admin
    assert not caller(both, "sk-one").is_admin
    assert both.caller_of(b"") is None


def test_the_key_file_names_callers(tmp_path):
    text = "# ours\nalice: sk-alice\n42: 0123\n'bob b.': {key: sk-bob, admin: true}\n"
    keys = keys_of(api_key_file=write(tmp_path / "keys.yaml", text), api_key=("sk-more",))
    assert caller(keys, "sk-alice").tenant == "alice"
    assert caller(keys, "0123").tenant == "42"  # as it stands there, not as a number
    assert caller(keys, "sk-bob") == Caller("bob b.", caller(keys, "sk-bob").owner, is_admin=True)
    assert caller(keys, "sk-more").tenant not in ("alice", "42", "bob b.")
    assert keys.caller_of(b"") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no keys"),
        ("alice:", "the key of 'alice' is empty or blank"),
        ("alice: ''", "the key of 'alice' is empty or blank"),
        ("alice: ~", "the key of 'alice' is empty or blank"),
        ("alice: '  '", "the key of 'alice' is empty or blank"),
        ("alice: ' sk-secret'", "begins or ends with a space"),
        ('alice: "sk-secret\\n"', "begins or ends with a space"),
        ('alice: "sk-\\u0007secret"', "a control character"),
        ("alice: 'sk-secret,b'", "a comma"),
        ("alice: [sk-secret]", "the key of 'alice' is empty or blank"),
        ("alice: {key: sk-secret, root: true}", "may have key, admin, .*, not 'root'"),
        ("alice: {admin: true}", "the key of 'alice' is empty or blank"),
        ("alice: {key: sk-secret, admin: 7}", "must be true or false"),
        ("alice: sk-secret\nalice: sk-secret2", "the name 'alice' stands there twice"),
        ("alice: sk-secret\nbob: sk-secret", "given twice \\(at 'bob'"),
        ("'': sk-secret", "printable"),
        ("- sk-secret", "one `name: key` on each line"),
        ("sk-secret", "one `name: key` on each line"),
        ("alice: [sk-secret\nbob: {", "not YAML \\(line"),
    ],
)
def test_a_bad_key_file_is_refused_and_not_shown(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        keys_of(api_key_file=write(tmp_path / "keys.yaml", text))
    assert "secret" not in str(caught.value)


def test_who_may_use_the_key_file(tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=r"No such file"):
        keys_of(api_key_file=str(path))
    with pytest.raises(ConfigError, match=r"others may write to it \(mode 620\)"):
        keys_of(api_key_file=write(path, "a: b", 0o620))
    with caplog.at_level(logging.WARNING, "quire"):
        keys_of(api_key_file=write(path, "a: b", 0o600))
        assert not caplog.records
        keys_of(api_key_file=write(path, "a: b", 0o644))
    assert "others may read the key file" in caplog.text


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize(
    "key", ["", " ", "\t", "sk-secret ", " sk-secret", "sk-\nsecret", "sk-\x7fsecret", "sk-secret,"]
)
def test_keys_that_no_header_carries_are_refused_and_not_shown(name, key):
    with pytest.raises(ConfigError, match=f"{name} must hold API keys only, but number 2 ") as caught:
        ServerConfig(**{name: ("fine", key)})
    assert "secret" not in str(caught.value)


def test_a_key_given_twice_is_refused():
    for twice in ({"api_key": ("sk-one", "sk-one")}, {"api_key": ("sk-one",), "admin_api_key": ("sk-one",)}):
        with pytest.raises(ConfigError, match="given twice") as caught:
            keys_of(**twice)
        assert "sk-one" not in str(caught.value)


def test_settings_do_not_show_keys():
    assert "sk-" not in repr(ServerConfig(api_key=("sk-one",), admin_api_key=("sk-two",)))


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_requests_carry_their_caller(kind):
    keys = keys_of(api_key=("sk-one",))
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["state"]["caller"])

    async def nothing(*message):
        return {"type": "websocket.connect"}

    headers = [(b"x-api-key", b"sk-one")]
    await Guard(app, keys)({"type": kind, "path": "/v1/responses", "headers": headers}, nothing, nothing)
    await Guard(app, keys)({"type": kind, "path": "/health", "headers": [], "query_string": b""}, nothing, nothing)
    await Guard(app, keys)({"type": kind, "path": "/v1/responses", "headers": []}, nothing, nothing)
    assert seen == [caller(keys, "sk-one"), KEYLESS]
