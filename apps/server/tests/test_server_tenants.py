"""Whose request it is, all the way to the engine's scheduler, and what one caller learns of another's prompts."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from quire import QuireConfig
from quire_server.callers import read_api_keys
from quire_server.config import ServerConfig
from quire_server.scheduler_defaults import with_scheduler_defaults

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
ROUTES = {
    "/v1/completions": {"prompt": ["a b c", "d e f"], "n": 2, "max_tokens": 4},
    "/v1/chat/completions": MESSAGES,
    "/v1/chat/completions/batch": {**MESSAGES, "messages": [MESSAGES["messages"], MESSAGES["messages"]]},
    "/v1/messages": {**MESSAGES, "model": "tiny"},
    "/invocations": MESSAGES,
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/responses/compact": {"input": "hello", "model": "tiny"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
    "/api/chat": {"model": "tiny", "messages": MESSAGES["messages"], "options": {"num_predict": 4}},
    "/api/generate": {"model": "tiny", "prompt": "hello", "options": {"num_predict": 4}},
    "/cohere/v2/chat": {"model": "tiny", "messages": MESSAGES["messages"], "max_tokens": 4},
    "/v2/chat": {"model": "tiny", "messages": MESSAGES["messages"], "max_tokens": 4},
    "/generative_scoring": {"query": "hello", "items": ["you"], "label_token_ids": [1, 2]},
    "/completion": {"prompt": "hello", "n_predict": 4},
    "/completions": {"prompt": "hello", "n_predict": 4},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def start(make_live, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

        def make(**settings: Any) -> Recorded:
            record = tmp_path_factory.mktemp("record") / "requests.jsonl"
            record.touch()
            engine = {"record": str(record)}
            return Recorded(make_live(factory="server_recording_engine:factory", engine=engine, **settings), record)

        yield make


@pytest.fixture(scope="module")
def recorded(start, key_file):
    return start(api_key_file=key_file)


class Recorded:
    """A server, and what its engine was given."""

    def __init__(self, live: Any, record: Path) -> None:
        self.live, self._record = live, record
        self._num_taken = 0

    def post(self, path: str, body: Any, name: str = "alice") -> Any:
        response = self.live.post(path, body, headers={"authorization": f"Bearer {KEYS[name]}"})
        assert response.status_code == 200, response.text
        return response

    def take(self) -> list[dict[str, Any]]:
        """What came since the last time."""
        lines = self._record.read_text().splitlines()
        new, self._num_taken = lines[self._num_taken :], len(lines)
        return [json.loads(line) for line in new]


def test_every_route_that_there_is_is_tried(recorded):
    paths = recorded.live.client.get("/openapi.json", headers={"x-api-key": "sk-bob"}).json()["paths"]
    without_engine = (
        "render", "tokenize", "load_lora", "conversations", "cancel", "abort", "tokens", "ping", "decode",
        "apply-template", "/api/blobs", "/api/copy", "/api/create", "/api/pull", "/api/push", "/api/show",
        "/lora-adapters", "/props", "/slots", "/v1/files", "/v1/batches", "/v1/realtime/",
    )  # fmt: skip
    # Not by this engine: it pools and hears nothing, and its tokenizer has no tokens for what is in the middle.
    pools = ("audio", "embed", "rerank", "score", "classify", "pooling", "predict", "similarity", "/encode", "/infill")
    posted = {path for path, methods in paths.items() if "post" in methods and path != "/"}
    assert {path for path in posted if not any(word in path for word in (*without_engine, *pools))} == ROUTES.keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_each_route_tells_the_engine_whose_request_it_is(recorded, path, stream):
    recorded.take()
    for name in KEYS:
        if stream and path in ("/v1/chat/completions/batch", "/v1/responses/compact", "/generative_scoring"):
            continue
        recorded.post(path, {**ROUTES[path], "stream": stream}, name)
        requests = recorded.take()
        assert requests
        assert {request["tenant"] for request in requests} == {name}


def test_a_background_response_and_the_one_after_it(recorded):
    recorded.take()
    first = recorded.post("/v1/responses", {"input": "hello", "max_output_tokens": 4, "background": True}).json()["id"]
    headers = {"authorization": "Bearer sk-alice"}
    while recorded.live.client.get(f"/v1/responses/{first}", headers=headers).json()["status"] in (
        "queued",
        "in_progress",
    ):
        pass
    recorded.post("/v1/responses", {"input": "go on", "max_output_tokens": 4, "previous_response_id": first})
    assert [request["tenant"] for request in recorded.take()] == ["alice", "alice"]


def test_a_websocket(recorded):
    recorded.take()
    address = recorded.live.url.replace("http", "ws") + "/v1/responses"
    with connect(address, additional_headers={"authorization": "Bearer sk-bob"}) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "hello", "max_output_tokens": 4}))
        while json.loads(socket.recv())["type"] not in ("response.completed", "response.incomplete"):
            pass
    assert [request["tenant"] for request in recorded.take()] == ["bob"]


def test_beams(recorded):
    recorded.take()
    recorded.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2}, "bob")
    assert {request["tenant"] for request in recorded.take()} == {"bob"}


def test_a_server_without_keys_has_one_tenant(start):
    recorded = start()
    recorded.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "cache_salt": "mine"})
    assert [(each["tenant"], each["cache_salt"]) for each in recorded.take()] == [("", "mine")]


PROMPT = list(range(100))


def cached_tokens(server: Recorded, name: str, **fields: Any) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    usage = server.post("/v1/completions", body, name).json()["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def test_cached_prompts_are_each_callers_own(start, key_file):
    server = start(api_key_file=key_file)
    assert cached_tokens(server, "alice") == 0
    assert cached_tokens(server, "alice") == 96
    assert cached_tokens(server, "bob") == 0  # which is as if alice had never asked
    assert cached_tokens(server, "bob") == 96
    # The request's own salt divides further, and opens no other caller's.
    salt = next(request["cache_salt"] for request in server.take() if request["tenant"] == "alice")
    for asked in ("mine", salt):
        assert cached_tokens(server, "bob", cache_salt=asked) == 0
        assert cached_tokens(server, "bob", cache_salt=asked) == 96
    assert cached_tokens(server, "alice", cache_salt="mine") == 0


def test_callers_share_cached_prompts_where_that_is_asked_for(start, key_file):
    server = start(api_key_file=key_file, share_prefix_cache=True)
    assert cached_tokens(server, "alice") == 0
    assert cached_tokens(server, "bob") == 96
    assert cached_tokens(server, "bob", cache_salt="mine") == 0
    assert cached_tokens(server, "alice", cache_salt="mine") == 96


def test_one_key_has_nobody_to_hide_from(make_live):
    live = make_live(api_key=("sk-one",))
    assert live.context.of_caller(live.context.api_keys.caller_of(b"sk-one")).caller_salt(None) is None


def test_states_of_the_server_are_shared_by_its_callers(recorded):
    context = recorded.live.context
    one, other = (context.of_caller(context.api_keys.caller_of(key.encode())) for key in KEYS.values())
    assert one.caller != other.caller
    one.state.is_asleep = True
    assert other.state.is_asleep
    assert context.state.is_asleep
    context.state.is_asleep = False
    assert not one.state.is_asleep


def test_a_flood_is_refused_and_nobody_else(make_live, key_file):
    live = make_live(
        api_key_file=key_file, engine={"max_num_seqs": 1, "max_queued_requests": 8, "step_time_s": 0.005}
    )  # fmt: skip
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}

    def post(name: str) -> Any:
        return live.post("/v1/completions", body, headers={"x-api-key": KEYS[name]})

    with ThreadPoolExecutor(16) as pool:
        flood = [pool.submit(post, "alice") for _ in range(16)]
        refused = next(done.result() for done in as_completed(flood) if done.result().status_code == 429)
        other = post("bob")
    assert refused.headers["retry-after"]
    assert "of your requests wait already" in refused.json()["error"]["message"]
    assert other.status_code == 200
    assert sum(done.result().status_code == 200 for done in flood) >= 4


@pytest.mark.parametrize(
    ("keys", "given", "bound"), [((), None, None), (("a",), None, None), (("a", "b"), None, 1.7), (("a", "b"), 0, 0)]
)
def test_several_keys_bound_how_far_tenants_slow_each_other_down(keys, given, bound):
    config = QuireConfig.of(max_tenant_slowdown=given)
    server = ServerConfig(api_key=keys, response_store="none")
    assert with_scheduler_defaults(read_api_keys(server), config).scheduler.max_tenant_slowdown == bound


@pytest.mark.parametrize(("given", "bound"), [(None, 0.15), (0, 0), (2.5, 2.5)])
def test_a_server_bounds_the_time_between_tokens(given, bound):
    config = QuireConfig.of(max_inter_token_latency=given)
    server = ServerConfig(response_store="none")
    assert with_scheduler_defaults(read_api_keys(server), config).scheduler.max_inter_token_latency == bound
