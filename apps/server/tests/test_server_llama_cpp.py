"""llama.cpp's API: completions whole and as events, infilling, properties, slots, templates, tokens, embeddings."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

USER = [{"role": "user", "content": "Hello"}]


def events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
    *parts, end = text.split("\n\n")
    assert end == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_completion_says_how_it_was_made(live: Any) -> None:
    body = {"prompt": "Once", "n_predict": 4, "seed": 7, "temperature": 0.5, "top_k": 20.0, "stop": ["never"]}
    answer = live.post("/completion", body).json()
    asked = {"prompt": "Once", "max_tokens": 4, "seed": 7, "temperature": 0.5, "top_k": 20}
    expected = live.post("/v1/completions", asked).json()
    assert answer["content"] == expected["choices"][0]["text"]
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"], answer["tokens"]) == (True, "limit", "", [])
    assert answer["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert (answer["tokens_predicted"], answer["model"], answer["truncated"]) == (4, "tiny", False)
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["top_k"], settings["n_predict"], settings["stop"]) == (7, 20, 4, ["never"])
    timings = answer["timings"]
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert timings["predicted_ms"] > 0


def test_events_end_with_the_facts(live: Any) -> None:
    body = {"prompt": "Once", "n_predict": 4, "seed": 7}
    *parts, last = events(live, "/completion", body)
    whole = live.post("/completions", {**body, "return_tokens": True}).json()
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert all(part["stop"] is False and "timings" not in part for part in parts)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 4)
    assert last["generation_settings"]["stream"] is True
    assert all("timings" in part for part in events(live, "/completion", {**body, "timings_per_token": True}))


def test_a_stop_word_ends_it(scripted: Any) -> None:
    answer = scripted.post("/completion", {"prompt": "¤one two three¥", "stop": ["two"], "n_predict": 50}).json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("one ", "word", "two")
    ended = scripted.post("/completion", {"prompt": "¤one\ntwo¥", "n_predict": 50}).json()
    assert (ended["content"], ended["stop_type"], ended["has_new_line"]) == ("one\ntwo", "eos", True)


def test_several_prompts_are_answered_in_a_list(live: Any) -> None:
    body = {"n_predict": 2, "seed": 1}
    prompts = ["Once", [5, 6], {"prompt_string": "Once"}]
    first, second, third = live.post("/completion", {**body, "prompt": prompts}).json()
    assert [each["index"] for each in (first, second, third)] == [0, 1, 2]
    assert first["content"] == third["content"]
    assert second["tokens_evaluated"] == 2
    twice = live.post("/completion", {**body, "prompt": "Once", "n_cmpl": 2}).json()
    assert [each["index"] for each in twice] == [0, 1]
    mixed = live.post("/completion", {**body, "prompt": [5, "Once", 6]}).json()
    alone = live.post("/tokenize", {"content": "Once"}).json()["tokens"]
    assert mixed["tokens_evaluated"] == len(alone) + 2


def test_log_probabilities_and_chosen_fields(live: Any) -> None:
    body = {"prompt": "Once", "n_predict": 2, "n_probs": 3, "temperature": -1, "seed": 1}
    answer = live.post("/completion", body).json()
    for each in answer["completion_probabilities"]:
        assert len(each["top_logprobs"]) == 3
        assert each["id"] == each["top_logprobs"][0]["id"]  # a temperature below 0 is greedy
        assert set(each) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    chosen = live.post("/completion", {**body, "response_fields": ["content", "generation_settings/n_predict", "no"]})
    assert chosen.json() == {"content": answer["content"], "n_predict": 2}


def test_nothing_is_predicted_for_zero(live: Any) -> None:
    answer = live.post("/completion", {"prompt": "Once", "n_predict": 0}).json()
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)


def test_fields_are_those_of_the_openai_routes() -> None:
    from quire_server.llama_cpp.protocol import LlamaCompletionRequest

    def fields(**body: Any) -> dict[str, Any]:
        return LlamaCompletionRequest.model_validate({"prompt": "x", **body}).completion_fields(None)

    assert fields(mirostat=2, repeat_penalty=1.1, dry_penalty_last_n=64)["mirostat_mode"] == 2
    assert fields(repeat_penalty=1.1, repeat_last_n=0)["repetition_penalty"] == 1.0
    assert fields(dry_multiplier=0.8, dry_penalty_last_n=0)["dry_multiplier"] == 0.0
    only = fields(samplers=["top_k", "temperature"], top_k=5, top_p=0.5, min_p=0.1, temperature=0.7)
    assert (only["top_k"], only["top_p"], only["min_p"], only["temperature"]) == (5, 1.0, 0.0, 0.7)
    assert fields(samplers="kt", top_p=0.5)["top_p"] == 1.0
    assert "seed" not in fields(seed=-1)
    assert fields(grammar='root ::= "a"')["structured_outputs"] == {"grammar": 'root ::= "a"'}
    assert fields(json_schema={})["structured_outputs"] == {"json": {}}
    assert fields(cache_prompt=False)["cache_salt"] != fields(cache_prompt=False)["cache_salt"]


def test_prompts_that_are_not_to_be_cached_are_not(live: Any) -> None:
    body = {"prompt": list(range(5, 105)), "n_predict": 1}
    live.post("/completion", body)
    answer = live.post("/completion", body).json()
    assert answer["tokens_cached"] == answer["timings"]["cache_n"] > 0
    assert answer["timings"]["prompt_n"] == 100 - answer["tokens_cached"]
    assert live.post("/completion", {**body, "cache_prompt": False}).json()["tokens_cached"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": ["x", 2.5]}, "prompt[1]"),
        ("/completion", {"prompt": "x", "temperature": 200}, "temperature"),
        ("/completion", {"prompt": "x", "samplers": ["tfs"]}, "samplers"),
        ("/completion", {"prompt": "x", "logit_bias": [[1]]}, "logit_bias"),
        ("/completion", {"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ("/completion", {"prompt": "x", "grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ("/completion", {"prompt": "x", "lora": [{"id": 3, "scale": 1}]}, "lora"),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "prompt.multimodal_data"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/slots/0?action=erase", {}, "action"),
        ("/lora-adapters", [{"id": 0, "scale": 1}], "scale"),
        ("/tokenize", {"content": "x", "prompt": "y"}, "content"),
    ],
)
def test_wrong_requests_are_refused_by_name(live: Any, path: str, body: Any, param: str) -> None:
    response = live.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_biases_name_tokens_or_texts(live: Any) -> None:
    first = live.post("/completion", {"prompt": "Once", "n_predict": 1, "temperature": 0, "return_tokens": True})
    (token,) = first.json()["tokens"]
    for bias in ([[token, False]], {str(token): -100}):
        other = {"prompt": "Once", "n_predict": 1, "temperature": 0, "return_tokens": True, "logit_bias": bias}
        assert live.post("/completion", other).json()["tokens"] != [token]


def test_properties_and_slots(live: Any) -> None:
    props = live.client.get("/props").json()
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("tiny", 512)
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["modalities"] == {"vision": False, "audio": False}
    slots = live.client.get("/slots?fail_on_no_slot=1").json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    assert live.client.get("/lora-adapters").json() == []
    assert live.client.get("/v1/health").json() == {"status": "ok"}


def test_templates_and_tokens(live: Any) -> None:
    prompt = live.post("/apply-template", {"messages": USER}).json()["prompt"]
    assert "Hello" in prompt
    body = {"content": "Hello é", "add_special": False, "with_pieces": True}
    tokens = live.post("/tokenize", body).json()["tokens"]
    data = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in tokens
    )
    assert data.decode().strip() == "Hello é"
    ids = live.post("/tokenize", {"content": "Hello é"}).json()["tokens"]
    assert ids == [each["id"] for each in tokens]
    assert live.post("/detokenize", {"tokens": ids}).json()["content"].strip() == "Hello é"


def test_embeddings_are_lists_of_vectors(make_live: Any) -> None:
    server = make_live(engine={"pooling_tasks": ["embed"], "runner": "pooling"})
    expected = server.post("/v1/embeddings", {"input": ["a", "b c"]}).json()["data"]
    answer = server.post("/embedding", {"content": ["a", "b c"]}).json()
    assert answer == [{"index": place, "embedding": [each["embedding"]]} for place, each in enumerate(expected)]
    for norm, size in ((1, sum), (3, lambda numbers: sum(number**3 for number in numbers))):
        ((vector,),) = [
            each["embedding"] for each in server.post("/embeddings", {"input": "a", "embd_normalize": norm}).json()
        ]
        assert math.isclose(size(map(abs, vector)), 1.0, rel_tol=1e-5)
