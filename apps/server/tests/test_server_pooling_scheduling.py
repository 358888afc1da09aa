"""How pooling requests are scheduled, and what becomes of them when clients leave or the server goes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

TASKS = ["embed", "token_embed"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/pooling": {"input": ["a"], "task": "token_embed"},
    "/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"]},
    "/embed": {"inputs": ["a"]},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/invocations": {"input": "a"},
}


class Recorded:
    """A server whose steps are slow, and what its scheduler was given."""

    def __init__(self, make_live: Any, record: Path, **engine: Any) -> None:
        self._record = record
        record.touch()
        sizes = {"max_num_seqs": 2, "pooling_tasks": TASKS, "runner": "pooling", "policy": "priority"}
        self.live = make_live(
            factory="server_recording_engine:factory", engine={**sizes, "record": str(record), **engine}
        )

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._record.read_text().splitlines()]


@pytest.fixture(scope="module")
def slow(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield Recorded(make_live, tmp_path_factory.mktemp("record") / "requests.jsonl", step_time_s=0.05)


@pytest.mark.parametrize("path", BODIES)
def test_priority_and_salt_reach_the_scheduler(slow: Recorded, path: str) -> None:
    before = len(slow.requests())
    response = slow.live.post(path, {**BODIES[path], "priority": 3, "cache_salt": "mine"})
    assert response.status_code == 200, response.text
    new = slow.requests()[before:]
    assert new
    assert {(each["priority"], each["cache_salt"]) for each in new} == {(3, "mine")}
    assert {each["task"] for each in new} == {"token_embed" if path == "/pooling" else "embed"}


def test_a_priority_without_the_policy_is_refused(make_live: Any) -> None:
    server = make_live(engine={"pooling_tasks": TASKS})
    for path, body in BODIES.items():
        error = server.post(path, {**body, "priority": 3}).json()["error"]
        assert error["param"] == "priority", path


def test_adapters_are_named_as_models_are(slow: Recorded) -> None:
    for path, body in BODIES.items():
        response = slow.live.post(path, {**body, "model": "no-adapter"})
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "model"


def test_what_a_client_that_left_wanted_is_dropped_before_it_is_computed(slow: Recorded) -> None:
    async def leave() -> None:
        host, port = slow.live.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps({"input": [f"text {number}" for number in range(200)]}).encode()
        head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(f"POST /v1/embeddings HTTP/1.1\r\n{head}".encode() + content)
        await writer.drain()
        while len(slow.requests()) == before:
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()

    before = len(slow.requests())
    asyncio.run(leave())
    slow.live.wait_idle()
    assert len(slow.requests()) - before < 100
    assert slow.live.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_a_draining_server_answers_what_it_has_and_takes_nothing_new(slow: Recorded) -> None:
    async def set_draining(value: bool) -> None:
        slow.live.context.state.is_draining = value

    async def during() -> list[int]:
        before = len(slow.requests())
        running = asyncio.create_task(asyncio.to_thread(slow.live.post, "/v1/embeddings", {"input": ["a"] * 20}))
        while len(slow.requests()) == before:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(slow.live.call, set_draining(True))
        refused = [await asyncio.to_thread(slow.live.post, path, body) for path, body in BODIES.items()]
        return [(await running).status_code, *(each.status_code for each in refused)]

    try:
        assert asyncio.run(during()) == [200] + [503] * len(BODIES)
    finally:
        slow.live.call(set_draining(False))


def test_a_sleeping_server_refuses_and_names_the_way_to_wake_it(slow: Recorded) -> None:
    async def set_asleep(value: bool) -> None:
        slow.live.context.state.is_asleep = value

    slow.live.call(set_asleep(True))
    try:
        for path, body in BODIES.items():
            response = slow.live.post(path, body)
            assert response.status_code == 503, path
            assert response.json()["error"]["code"] == "sleeping"
    finally:
        slow.live.call(set_asleep(False))
