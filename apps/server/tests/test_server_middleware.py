"""Middleware by import path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import ConfigError
from quire_server.middleware import load_middleware


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def test_layers_see_every_request_and_streams_pass_through(make_live: Any) -> None:
    paths = ("server_middleware.refuse_teapots", "server_middleware.Stamp")
    server = make_live(middleware=paths, api_key=("sk-1",))
    refused = server.client.get("/v1/models", headers={"teapot": "1", "Authorization": "Bearer sk-1"})
    assert (refused.status_code, refused.headers["x-stamp"]) == (418, "seen")
    keyless = server.client.get("/v1/models")
    assert (keyless.status_code, keyless.headers["x-stamp"]) == (401, "seen")
    body = {"prompt": "a b", "max_tokens": 5, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "sk-1"}) as response:
        assert response.headers["x-stamp"] == "seen"
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("server_middleware.Missing", "cannot be imported: AttributeError"),
        ("no_such_module.X", "cannot be imported: ModuleNotFoundError"),
        ("Stamp", "cannot be imported"),
        ("server_middleware.VALUE", "not of type int"),
    ],
)
def test_what_is_no_middleware_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        load_middleware(path)
    assert refusal.value.field == "middleware"
