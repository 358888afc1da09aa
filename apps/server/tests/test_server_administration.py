"""Routes that change the server for everybody, and the adapters that requests may name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import quire_demo_model
from quire_interfaces import RequestError
from quire_server.adapter_sources import allowed_adapter
from quire_server.config import ServerConfig

ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
]
SLEEP = [("POST", "/sleep?level=0"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]


def ask(server: Any, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"lora_name": "none", "lora_path": "/none"} if "load" in path else None
    status: int = server.client.request(method, path, headers=headers, json=body).status_code
    return status


def test_they_are_not_there_unless_the_operator_says_so(live: Any) -> None:
    for method, path in ROUTES:
        response = live.client.request(method, path, json={"lora_name": "x", "lora_path": "/"})
        assert response.status_code == 404
        assert "--enable-admin-routes" in response.json()["error"]["message"]
        assert path not in live.client.get("/openapi.json").json()["paths"]


def test_an_administrators_key_opens_them_and_no_other(make_live: Any) -> None:
    server = make_live(api_key=("user",), admin_api_key=("admin",), enable_sleep_mode=True)
    for method, path in [*ROUTES, *SLEEP]:
        assert ask(server, method, path, "user") == 403
        assert ask(server, method, path, None) == 401
        is_adapter = path.startswith("/v1/")  # of which there is none
        assert ask(server, method, path, "admin") in ((400, 404) if is_adapter else (200,)), path
    assert server.client.get("/v1/models", headers={"authorization": "Bearer user"}).status_code == 200


def test_other_keys_may_load_adapters_of_their_own_where_the_operator_says_so(make_live: Any) -> None:
    server = make_live(api_key=("user",), admin_api_key=("admin",), enable_admin_routes=True)
    for method, path in ROUTES:
        assert (ask(server, method, path, "user") == 403) != path.startswith("/v1/")


def test_an_administrators_key_alone_leaves_the_rest_open(make_live: Any) -> None:
    server = make_live(admin_api_key=("admin",))
    assert ask(server, "GET", "/v1/models", None) == 200
    assert ask(server, "POST", "/reset_prefix_cache", None) == 403
    assert ask(server, "POST", "/reset_prefix_cache", "admin") == 200


# Adapters


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """allowed/good, and around it what must not be read."""
    source = quire_demo_model.adapter_paths()["demo-json"]
    allowed = tmp_path / "allowed"
    for place in (allowed / "good", tmp_path / "outside", allowed / "links"):
        shutil.copytree(source, place)
    (allowed / "out").symlink_to(tmp_path / "outside")
    (allowed / "in").symlink_to(allowed / "good")
    (allowed / "circle").symlink_to(allowed / "circle")
    (allowed / "links" / "adapter_model.safetensors").unlink()
    (allowed / "links" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    (allowed / "empty").mkdir()
    (allowed / "file").write_text("x")
    return tmp_path


def test_adapters_below_the_allowed_folder_are_found(folders: Path) -> None:
    config = ServerConfig(allowed_local_lora_path=str(folders / "allowed"))
    good = str(folders / "allowed" / "good")
    for place in (good, "good", "./good/", "in", f"{good}/../good", "empty/../good"):
        assert allowed_adapter(place, config) == good


def test_whatever_cannot_be_had_gets_one_answer(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    places = ["/etc", "/etc/passwd", "/nonexistent", "/home/x", str(folders / "outside"), "../outside", "out", "circle"]
    places += ["links", "empty", "file", ".", "", "\0", "x" * 5000, "~", "owner/name", "allowed/good", "good\0"]
    for settings in ({}, {"allowed_local_lora_path": str(folders / "allowed")}, {"allowed_local_lora_path": "/none"}):
        for place in places:
            with pytest.raises(RequestError) as refusal:
                allowed_adapter(place, ServerConfig(**settings))
            assert (refusal.value.param, refusal.value.code) == ("lora_path", "adapter_not_found")
            assert str(refusal.value).startswith("there is no adapter '"), place
            shown = str(refusal.value).split(" that requests may load")[1]
            assert shown.endswith("--allow-lora-from-hub")


def test_hub_names_are_taken_where_the_operator_says_so(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    config = ServerConfig(allow_lora_from_hub=True)
    assert allowed_adapter("owner/name-1.0", config) == "owner/name-1.0"
    for place in ("allowed/good", "../outside", "./good", "/etc/passwd", "name", "a/b/c", "https://a/b", "owner/.."):
        with pytest.raises(RequestError, match="there is no adapter"):
            allowed_adapter(place, config)
