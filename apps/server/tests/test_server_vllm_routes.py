"""Routes of vLLM's that look into a server: calls of its ranks, profiles, settings, sources of KV events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY

ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer user"}


@pytest.fixture(scope="module")
def server(make_live: Any) -> Any:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}
    return make_live(
        api_key=("user",), admin_api_key=("admin",), config={"data_parallel_size": 2, "kv_events_config": events}
    )


def test_a_call_is_answered_by_every_rank_of_every_engine(server: Any) -> None:
    body = {"method": "add", "args": [1], "kwargs": {"by": 2}}
    response = server.post("/collective_rpc", body, headers=ADMIN)
    assert response.status_code == 200, response.text
    told = {"method": "add", "args": [1], "kwargs": {"by": 2}}
    assert response.json() == {"results": [{"rank": rank, **told} for rank in (0, 1, 0, 1)]}
    refused = server.post("/collective_rpc", {"method": "refuse"}, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "method")
    assert server.post("/collective_rpc", {"method": "x", "args": 3}, headers=ADMIN).status_code == 400


def test_profiles_start_and_stop_on_all_engines(server: Any) -> None:
    assert server.post("/start_profile?prefix=warm", None, headers=ADMIN).status_code == 200
    response = server.post("/stop_profile", None, headers=ADMIN)
    assert len(response.json()["files"]) == 4 * len(("rank", "method", "args", "kwargs"))


def test_settings_are_shown_and_keys_are_not(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SOMETHING", "shown")
    monkeypatch.setenv("QUIRE_OTHER_API_KEY", "secret-of-a-variable")
    response = server.client.get("/server_info?config_format=json", headers=ADMIN)
    info = response.json()
    assert info["vllm_config"]["data_parallel"]["data_parallel_size"] == 2
    assert info["vllm_config"]["server"]["admin_api_key"] == "(not shown)"
    assert info["vllm_config"]["server"]["port"] == 8000
    assert info["vllm_env"]["QUIRE_SOMETHING"] == "shown"
    assert "secret-of-a-variable" not in response.text
    assert info["system_env"]["package_versions"]["torch"]
    text = server.client.get("/server_info", headers=ADMIN).json()["vllm_config"]
    assert "data_parallel.data_parallel_size=2" in text
    assert "'admin'" not in text
    wrong = server.client.get("/server_info?config_format=yaml", headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")


def test_sources_of_events_count_ports_by_rank(server: Any, live: Any) -> None:
    source = {"replay_endpoint": None, "topic": "kv"}
    assert server.client.get("/kv_event_sources", headers=USER).json() == {
        "sources": [
            {"data_parallel_rank": 0, "endpoint": "tcp://127.0.0.1:5557", **source},
            {"data_parallel_rank": 1, "endpoint": "tcp://127.0.0.1:5558", **source},
        ]
    }
    assert live.client.get("/kv_event_sources").json() == {"sources": []}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/collective_rpc"), ("POST", "/start_profile"), ("POST", "/stop_profile"), ("GET", "/server_info")],
)
def test_they_are_for_administrators(server: Any, live: Any, method: str, path: str) -> None:
    body = {"method": "x"} if path == "/collective_rpc" else None
    assert server.client.request(method, path, headers=USER, json=body).status_code == 403
    missing = live.client.request(method, path, json=body)
    assert missing.status_code == 404
    assert "--enable-admin-routes" in missing.json()["error"]["message"]


@pytest.fixture(scope="module")
def real(make_live: Any, tiny_folder: Path) -> Any:
    """A server of the tiny model, whose tokens are its own."""
    own = {"max_model_len": 128, "max_logprobs": -1}
    config = QuireConfig.of(model=str(tiny_folder), num_gpu_blocks_override=64, num_threads=1, **own)
    return make_live(
        factory=REAL_FACTORY,
        engine=config.to_dict(),
        config=own,
        enable_per_request_metrics=True,
        return_tokens_as_token_ids=True,
    )


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_probabilities_of_the_labels_behind_query_and_item(real: Any, item_first: bool) -> None:
    items, labels = [[9, 8, 7], [5], [11, 12]], [3, 40, 77]
    body = {"query": [1, 2, 3, 4], "items": items, "label_token_ids": labels, "item_first": item_first}
    among, of_all = (real.post("/generative_scoring", {**body, "apply_softmax": each}).json() for each in (True, False))
    assert (among["object"], [each["index"] for each in among["data"]]) == ("list", [0, 1, 2])
    assert among["usage"]["prompt_tokens"] == among["usage"]["total_tokens"] == 3 * 4 + 6
    for item, one, other in zip(items, among["data"], of_all["data"], strict=True):
        ids = [*item, 1, 2, 3, 4] if item_first else [1, 2, 3, 4, *item]
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": -1}  # of the whole vocabulary
        (choice,) = real.post("/v1/completions", asked).json()["choices"]
        (top,) = choice["logprobs"]["top_logprobs"]
        assert sum(map(math.exp, top.values())) == pytest.approx(1.0, rel=1e-4)
        probs = [math.exp(top[f"token_id:{label}"]) for label in labels]
        assert other["score"] == pytest.approx(probs[0], rel=1e-5)
        assert other["token_probs"] == pytest.approx(dict(zip(map(str, labels), probs, strict=True)), rel=1e-5)
        assert one["score"] == pytest.approx(probs[0] / sum(probs), rel=1e-5)


def test_texts_are_tokenized_each_for_itself(real: Any) -> None:
    labels = {"label_token_ids": [3, 4]}

    def tokens(text: str, special: bool) -> list[int]:
        found: list[int] = real.post("/tokenize", {"prompt": text, "add_special_tokens": special}).json()["tokens"]
        return found

    texts = real.post("/generative_scoring", {"query": "Is it hot? ", "items": ["Fire", "Ice"], **labels}).json()
    ids = {"query": tokens("Is it hot? ", True), "items": [tokens("Fire", False), tokens("Ice", False)]}
    assert [each["score"] for each in real.post("/generative_scoring", {**ids, **labels}).json()["data"]] == [
        each["score"] for each in texts["data"]
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [""], "query": ""}, "items"),
        ({"items": [[1] * 200]}, "items"),
        ({"stream": True}, "stream"),
        ({"items": ["x", [1]]}, "items.list[str].1"),
    ],
)
def test_what_cannot_be_scored_is_refused(real: Any, fields: dict[str, Any], param: str) -> None:
    response = real.post("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1], **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param.split(".")[0])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_tell_the_times_of_their_request(real: Any, live: Any, path: str) -> None:
    asked = {"prompt": [1, 2, 3]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**asked, "max_tokens": 4, "ignore_eos": True, "stream_options": None}
    times = real.post(path, {**asked, "max_tokens": 4, "ignore_eos": True}).json()["metrics"]
    assert all(value >= 0 for value in times.values())
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3)
    inside_s = (times["time_to_first_token_ms"] + times["generation_time_ms"]) / 1e3
    assert times["tokens_per_second"] == pytest.approx(4 / inside_s)
    usage = {"stream_options": {"include_usage": True}}
    *others, last = real.events(path, {**body, **usage})
    assert set(last["metrics"]) == set(times)
    assert not any("metrics" in each for each in others)
    assert real.post(path, {**asked, "max_tokens": 2, "n": 2}).json()["metrics"] is None
    assert "metrics" not in live.post(path, {**asked, "max_tokens": 2}).json()


def test_tokens_are_named_by_their_ids_where_the_server_says_so(real: Any) -> None:
    (choice,) = real.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "logprobs": 1}).json()["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_tokens": 1, "logprobs": True}
    (choice,) = real.post("/v1/chat/completions", asked).json()["choices"]
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_a_server_of_tokens_only_has_no_other_routes(make_live: Any) -> None:
    server = make_live(tokens_only=True)
    generated = server.post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}})
    assert generated.status_code == 200, generated.text
    assert server.client.get("/health").status_code == 200
    refused = server.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 404
    assert "--tokens-only" in refused.json()["error"]["message"]
    paths = server.client.get("/openapi.json").json()["paths"]
    assert not {"/tokenize", "/v1/chat/completions", "/", "/v1/responses"} & set(paths)


def test_a_server_sleeps_in_modes_and_wakes_by_tags(make_live: Any) -> None:
    server = make_live(enable_sleep_mode=True, engine={"step_time_s": 0.01})
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.client.post("/sleep?level=0&mode=abort").json()["level"] == 0
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines if line.startswith("data: {")]
    assert reasons[-1] == "abort"
    assert server.client.post("/wake_up?tags=weights").status_code == 200
    assert server.client.get("/is_sleeping").json()["is_sleeping"] is True
    wrong = server.client.post("/wake_up?tags=all")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tags")
    assert server.client.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert server.client.get("/is_sleeping").json()["is_sleeping"] is False
    for query, param in (("level=0&mode=later", "mode"), ("level=1&mode=wait", "level")):  # no memory to give back
        refused = server.client.post(f"/sleep?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).status_code == 200
