"""Routes, status lines and headers: what a proxy, a probe or a curious person sees."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import pytest

import quire_server


def error_of(response: httpx.Response) -> dict:
    """The error object, whose form is always the same."""
    assert response.headers["content-type"] == "application/json"
    (name,) = response.json()
    assert name == "error"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_health_version_models_metrics_and_page(live):
    assert (live.client.get("/health").status_code, live.client.get("/health").content) == (200, b"")
    for method in ("GET", "POST"):
        assert live.client.request(method, "/ping").status_code == 200
    assert live.client.get("/version").json()["version"]
    (card,) = live.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    metrics = live.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "quire:num_requests_running" in metrics.text
    page = live.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>Quire</title>" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_files_of_the_page_have_types_and_are_small(live):
    folder = Path(quire_server.__file__).parent / "page"
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(sizes.values()) < 400_000
    for name, size in sizes.items():
        response = live.client.get(f"/page/{name}")
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[
            name.split(".")[1]
        ]
        assert response.headers["content-type"].startswith(kind)
        assert (len(response.content), response.headers["x-content-type-options"]) == (size, "nosniff")
        assert "script-src 'self'" in response.headers["content-security-policy"]
        same = live.client.get(f"/page/{name}", headers={"if-none-match": response.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        text = response.text.replace("http://www.w3.org/", "")  # names of SVG and MathML
        assert not re.search(r"(?:src|href|import|fetch|url)\W{1,3}https?://", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
    for name in ("nothing.js", "..%2Fchat_page.py", "%2e%2e/app.py"):
        assert live.client.get(f"/page/{name}").status_code == 404


def test_what_the_page_offers(live):
    offered = live.client.get("/chat_settings").json()
    numbers = {each["name"]: each for each in offered["sampling"]}
    assert numbers["top_p"] == {"name": "top_p", "whole": False, "default": 1.0, "low": 0, "high": 1, "above": True}
    assert numbers["top_n_sigma"]["low"] == -1
    assert {"temperature", "seed", "dry_base", "mirostat_tau"} <= set(numbers)
    assert (offered["mcp_servers"], offered["defaults"]) == ([], {})
    assert offered["max_logprobs"] > 0


def test_metrics_count_what_was_served(live):
    def generated() -> float:
        lines = live.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("quire:generation_tokens_total"))

    before = generated()
    live.post("/v1/completions", {"prompt": "x", "max_tokens": 7, "ignore_eos": True})
    assert generated() == before + 7


def test_metrics_tell_what_a_prompt_of_several_completions_took(live):
    def figure(name: str) -> float:
        text = live.client.get("/metrics").text
        return sum(float(each) for each in re.findall(rf"^quire:{name}(?:\{{.*\}})? (.*)$", text, re.MULTILINE))

    names = ("request_max_num_generation_tokens_sum", "request_max_num_generation_tokens_count")
    names += ("request_prefill_kv_computed_tokens_sum", "request_prompt_tokens_sum", "prompt_tokens_cached_total")
    before = {name: figure(name) for name in names}
    sent = {"prompt": [5] * 40, "max_tokens": 6, "ignore_eos": True, "n": 3}
    live.post("/v1/completions", sent)
    live.post("/v1/completions", {**sent, "n": 1})
    longest, count, computed, prompts, cached = (figure(name) - before[name] for name in names)
    assert (longest, count) == (12, 2)
    assert prompts == 160
    assert cached > 0
    assert computed == prompts - cached


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/metrics", "/"])
def test_head_is_get_without_a_body(live, path):
    response = live.client.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_unknown_routes_and_methods(live):
    response = live.client.get("/v2/models")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    response = live.client.get("/v1/chat/completions")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert live.client.request("OPTIONS", "/v1/models").status_code == 405
    assert live.client.request("BREW", "/v1/models").status_code in (400, 405)
    assert live.client.delete("/v1/models/tiny").status_code == 405


def test_schema_lists_routes_and_bodies(live):
    schema = live.client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(schema["paths"])
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(schema["components"]["schemas"])


def test_request_ids_come_back(live):
    assert live.client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert live.client.get("/nowhere", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    first, second = (live.client.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert len(live.client.get("/health", headers={"x-request-id": "x" * 3000}).headers["x-request-id"]) == 256


@pytest.mark.parametrize(
    ("path", "prefix", "asked"),
    [
        ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions/batch", "chatcmpl-", {"messages": [[{"role": "user", "content": "x"}]] * 2}),
        ("/v1/completions", "cmpl-", {"prompt": [5, 6]}),
        ("/v1/messages", "msg_", {"messages": [{"role": "user", "content": "x"}], "model": "tiny"}),
    ],
)
def test_answers_have_the_id_of_their_request(live, path, prefix, asked):
    body = {**asked, "max_tokens": 2}
    mine = {"x-request-id": "mine 1/ü".encode("latin-1")}
    answer = live.post(path, {**body, "request_id": "other"}, headers=mine)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == (f"{prefix}mine 1/ü", "mine 1/ü")
    assert live.post(path, {**body, "request_id": "other"}).json()["id"] == f"{prefix}other"
    answer = live.post(path, body)
    assert answer.json()["id"] == prefix + answer.headers["x-request-id"]
    assert live.post(path, body, headers={"x-request-id": "y" * 500}).json()["id"] == prefix + "y" * 256
    if "batch" not in path:
        events = live.post(path, {**body, "stream": True}, headers=mine).text
        assert f'"id":"{prefix}mine 1/ü"' in events


def test_wrong_content_type(live):
    response = live.client.post("/v1/completions", content=b"prompt=x", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def test_json_with_charset_and_without_a_content_type(live):
    body = b'{"prompt": "x", "max_tokens": 1}'
    for headers in ({"content-type": "application/json; charset=utf-8"}, {"content-type": "application/vnd.a+json"}):
        assert live.client.post("/v1/completions", content=body, headers=headers).status_code == 200
    assert live.client.post("/v1/completions", content=body).status_code == 200


def test_bodies_over_the_limit_are_refused_unread(make_live):
    live = make_live(max_body_bytes=4096)
    response = live.post("/v1/completions", {"prompt": "x" * 5000})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")

    def chunks():
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100

    response = live.client.post("/v1/completions", content=chunks())  # no content-length
    assert response.status_code == 413


def test_root_path_with_and_without_a_stripping_proxy(make_live):
    live = make_live(root_path="/llm", api_key=("k",))
    for path in ("/v1/models", "/llm/v1/models"):
        assert live.client.get(path).status_code == 401
        assert live.client.get(path, headers={"authorization": "Bearer k"}).status_code == 200
    for path in ("/health", "/llm/health"):
        assert live.client.get(path).status_code == 200
    assert live.client.get("/llm/llm/health").status_code == 401
    assert live.client.get("/llmhealth").status_code == 401
    for path in ("/?key=k", "/llm/?key=k"):
        assert "<title>Quire</title>" in live.client.get(path).text


def test_cors_only_for_the_named_origins(make_live, live):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in live.client.options("/v1/completions", headers=asked).headers
    live = make_live(allowed_origins=("https://a.example",), api_key=("k",))
    preflight = live.client.options("/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    other = live.client.options("/v1/completions", headers={**asked, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-credentials" not in preflight.headers
    refused = live.client.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    # Without this header a browser hides the reason from the page that asked.
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_cors_with_methods_headers_and_credentials(make_live):
    live = make_live(
        allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("x-mine",), allow_credentials=True
    )
    asked = {"origin": "https://a.example", "access-control-request-method": "GET"}
    preflight = live.client.options("/v1/models", headers={**asked, "access-control-request-headers": "x-mine"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-credentials"] == "true"
    for wrong in ({"access-control-request-method": "POST"}, {"access-control-request-headers": "x-other"}):
        assert live.client.options("/v1/models", headers={**asked, **wrong}).status_code == 400


def test_websockets_are_refused(live):
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    assert 400 <= live.client.get("/v1/models/ws", headers=headers).status_code < 500


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_is_refused(live, raw):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert live.client.get("/health").status_code == 200


def test_tokenize_and_detokenize(live):
    text = "the quire gathers: 東京 🎈"
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert "".join(answer["token_strs"]).startswith("theĠquireĠgathers:Ġ")
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text, "content": text}
    messages = [{"role": "user", "content": "hello"}]
    chat = live.post("/tokenize", {"messages": messages}).json()
    usage = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert chat["token_strs"] is None
    shorter = live.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] < chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/detokenize", {"tokens": [5, 4096]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/tokenize", {"prompt": "x", "model": "y"}, "model"),
    ],
)
def test_tokenize_refusals_name_the_field(live, path, body, param):
    response = live.post(path, body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert error_of(response)["param"] == param
