"""SGLang's native API: generate whole and as events, log probabilities, aborts, what is served, administration."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest


def test_text_is_generated(live: Any) -> None:
    params = {"max_new_tokens": 4, "sampling_seed": 3, "temperature": 0.5}
    answer = live.post("/generate", {"text": "Once", "sampling_params": params, "rid": "mine"}).json()
    asked = {"prompt": "Once", "max_tokens": 4, "seed": 3, "temperature": 0.5, "return_token_ids": True}
    expected = live.post("/v1/completions", asked).json()
    (choice,) = expected["choices"]
    assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    info = answer["meta_info"]
    assert (info["id"], info["finish_reason"]) == ("mine", {"type": "length", "length": 4})
    assert (info["prompt_tokens"], info["completion_tokens"]) == (expected["usage"]["prompt_tokens"], 4)
    assert info["e2e_latency"] > 0


def test_events_hold_all_that_was_made(live: Any) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400, "sampling_seed": 3, "ignore_eos": True}}
    whole, parts = live.post("/generate", body).json(), live.events("/generate", body)
    assert len(parts) > 1
    assert parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
    lengths = [len(part["output_ids"]) for part in parts]
    assert lengths == sorted(lengths)


def test_several_prompts_have_their_own_parameters(live: Any) -> None:
    params = [{"max_new_tokens": count, "sampling_seed": 1} for count in (1, 2)]
    first, second = live.post("/generate", {"text": ["a", "b"], "sampling_params": params, "rid": "r"}).json()
    assert [each["meta_info"]["completion_tokens"] for each in (first, second)] == [1, 2]
    assert [each["meta_info"]["id"] for each in (first, second)] == ["r_0", "r_1"]
    streamed = live.events("/generate", {"text": ["a", "b"], "sampling_params": params})
    last = {each["index"]: each["text"] for each in streamed}
    assert last == {0: first["text"], 1: second["text"]}
    twice = live.post("/generate", {"text": "a", "sampling_params": {"n": 2, "max_new_tokens": 1}}).json()
    assert len(twice) == 2


def test_stops_say_what_matched(scripted: Any) -> None:
    body = {"text": "¤one two three¥", "sampling_params": {"stop": "two", "max_new_tokens": 50}}
    answer = scripted.post("/generate", body).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("one ", {"type": "stop", "matched": "two"})
    kept = scripted.post("/generate", {**body, "sampling_params": {**body["sampling_params"], "no_stop_trim": True}})
    assert kept.json()["text"] == "one two"
    ended = scripted.post("/generate", {"text": "¤one¥", "sampling_params": {"max_new_tokens": 50}}).json()
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": ended["output_ids"][-1]}


def test_log_probabilities(live: Any) -> None:
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    answer = live.post("/generate", {**body, "top_logprobs_num": 2, "logprob_start_len": 0}).json()
    info = answer["meta_info"]
    assert info["input_token_logprobs"][0] == [None, 5, None]
    assert [each[1] for each in info["input_token_logprobs"]] == [5, 6, 7]
    assert [each[1] for each in info["output_token_logprobs"]] == answer["output_ids"]
    assert info["input_top_logprobs"][0] is None
    assert [len(each) for each in info["output_top_logprobs"]] == [2, 2]
    assert info["output_top_logprobs"][0][0] == info["output_token_logprobs"][0]
    from_second = live.post("/generate", {**body, "logprob_start_len": 1, "return_text_in_logprobs": True}).json()
    assert [each[1] for each in from_second["meta_info"]["input_token_logprobs"]] == [6, 7]
    assert isinstance(from_second["meta_info"]["output_token_logprobs"][0][2], str)
    assert "output_top_logprobs" not in from_second["meta_info"]
    named = live.post("/generate", {**body, "token_ids_logprob": [9, 4]}).json()["meta_info"]
    assert named["input_token_logprobs"] == []
    assert [[each[1] for each in place] for place in named["output_token_ids_logprobs"]] == [[9, 4], [9, 4]]
    scored = {**body, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    assert live.post("/generate", scored).json()["meta_info"]["completion_tokens"] == 0


def test_a_request_is_aborted_by_its_name(live: Any) -> None:
    answers: list[Any] = []
    body = {"input_ids": [5], "rid": "long", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    live.post("/abort_request", {"rid": "nobody's"})
    asking = threading.Thread(target=lambda: answers.append(live.post("/generate", body).json()))
    asking.start()
    while ("", "long") not in live.context.generating and asking.is_alive():
        time.sleep(0.001)
    assert live.post("/abort_request", {"abort_all": True}).status_code == 200
    asking.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert live.context.generating == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "input_ids"),
        ({"input_ids": ["x"]}, "input_ids"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"top_k": "y"}}, "sampling_params.top_k"),
        ({"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params"),
        ({"text": "x", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "x", "image_data": "aGk="}, "multi_modal_data"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 9999}, "top_logprobs_num"),
    ],
)
def test_wrong_requests_are_refused_by_name(live: Any, body: Any, param: str) -> None:
    response = live.post("/generate", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_what_is_served(live: Any) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = live.client.get(path).json()
        assert (info["served_model_name"], info["is_generation"]) == ("tiny", True)
    server = live.client.get("/get_server_info").json()
    assert (server["context_length"], server["dp_size"]) == (512, 1)
    assert live.client.get("/get_load").json()[0]["num_reqs"] == 0
    assert live.client.get("/health_generate").status_code == 200
    assert live.post("/v1/tokenize", {"prompt": "a"}).json() == live.post("/tokenize", {"prompt": "a"}).json()
    missing = live.post("/flush_cache", {})
    assert (missing.status_code, "--enable-admin-routes" in missing.json()["error"]["message"]) == (404, True)


def test_administration(make_live: Any) -> None:
    server = make_live(enable_admin_routes=True, enable_sleep_mode=True)
    body = {"input_ids": list(range(5, 105)), "sampling_params": {"max_new_tokens": 1}}
    server.post("/generate", body)
    assert server.post("/generate", body).json()["meta_info"]["cached_tokens"] > 0
    assert server.client.post("/flush_cache").status_code == 200
    assert server.post("/generate", body).json()["meta_info"]["cached_tokens"] == 0
    assert server.client.get("/flush_cache").status_code == 200
    assert server.client.post("/pause_generation").json()["status"] == "ok"
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/pause_generation", {"mode": "later"}).json()["error"]["param"] == "mode"
    assert server.client.post("/continue_generation").json()["status"] == "ok"
    assert server.client.post("/release_memory_occupation").status_code == 400  # this engine has no memory to give back
    assert server.post("/generate", body).status_code == 200
    awake = make_live(enable_admin_routes=True).client.post("/resume_memory_occupation")
    assert (awake.status_code, "--enable-sleep-mode" in awake.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("in_place", "length"), ("retract", "length")])
def test_a_pause_ends_what_runs_or_holds_it(make_live: Any, mode: str, reason: str) -> None:
    server = make_live(enable_admin_routes=True, engine={"step_time_s": 0.02})
    params = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 3}
    answers: list[Any] = []
    body = {"input_ids": [5, 6], "sampling_params": params}
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body).json()))
    thread.start()
    while not server.client.get("/get_load").json()[0]["num_reqs"]:
        time.sleep(0.001)
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    thread.join(60 if mode == "abort" else 0.2)
    assert thread.is_alive() == (mode != "abort")
    assert server.client.post("/continue_generation").status_code == 200
    thread.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == reason


def test_texts_become_vectors(make_live: Any) -> None:
    server = make_live(engine={"pooling_tasks": ["embed"], "runner": "pooling"})
    expected = server.post("/v1/embeddings", {"input": ["a", "b c"]}).json()["data"]
    first, second = server.post("/encode", {"text": ["a", "b c"]}).json()
    assert [first["embedding"], second["embedding"]] == [each["embedding"] for each in expected]
    one = server.post("/encode", {"text": "a", "rid": "mine"}).json()
    assert (one["embedding"], one["meta_info"]["id"]) == (first["embedding"], "mine")
