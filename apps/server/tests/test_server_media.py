"""Images in chat completions over HTTP: answers are those of Transformers after its processor's joint call."""

from __future__ import annotations

import base64
import concurrent.futures
import gc
import io
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, data_url, drawing, image_part, text_part

NUM_TOKENS = 8
OPTIONS = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}


def seeing(make_live: Any, folder: Path, server: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A server of this model."""
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, **settings}
    config = QuireConfig.of(model=str(folder), **own)
    return make_live(folder=folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own, **(server or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def server(make_live: Any, model: SeeingModel) -> Any:
    return seeing(make_live, model.folder)


def answered(server: Any, content: Any, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], **OPTIONS, **more}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def rendered(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_is_that_of_transformers(model: SeeingModel, server: Any) -> None:
    answer = answered(server, [text_part("What is "), image_part(1), text_part("and "), image_part(2)])
    seen = [drawing(1), drawing(2)]
    text = rendered("What is <image>and <image>")
    assert answer["choices"][0]["token_ids"] == model.expected(text, seen, NUM_TOKENS)
    other = answered(server, [text_part("What is "), image_part(2), text_part("and "), image_part(1)])
    assert other["choices"][0]["token_ids"] == model.expected(text, seen[::-1], NUM_TOKENS)
    assert other["choices"][0]["token_ids"] != answer["choices"][0]["token_ids"]


def url_of(number: int) -> str:
    return data_url(drawing(number))


@pytest.fixture(autouse=True)
def nothing_held(server: Any) -> Any:
    """After each test, however its requests ended, no item is held."""
    yield
    server.wait_idle()
    gc.collect()
    server.llm.media.reset()
    assert server.llm.media.preparer.num_bytes == 0


def test_every_protocol_sees_the_same(server: Any) -> None:
    text = "What is "
    with server.openai() as openai:
        chat = openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [text_part(text), image_part(1)]}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url_of(1)}]
        responses = openai.responses.create(
            model="tiny",
            input=[{"role": "user", "content": parts}],
            max_output_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    with server.anthropic() as anthropic:
        source = {"type": "base64", "media_type": "image/png", "data": url_of(1).partition(",")[2]}
        messages = anthropic.messages.create(
            model="tiny",
            messages=[{"role": "user", "content": [text_part(text), {"type": "image", "source": source}]}],
            max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True, "temperature": 0},
        )
    assert chat.choices[0].message.content
    assert responses.output_text == messages.content[0].text == chat.choices[0].message.content
    usage = messages.usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert chat.usage.prompt_tokens == responses.usage.input_tokens == num_prompt


def test_images_of_earlier_turns_and_of_tools_are_seen(model: SeeingModel, server: Any) -> None:
    turns = [
        {"role": "user", "content": [image_part(1), text_part("one")]},
        {"role": "assistant", "content": "yes"},
        {"role": "tool", "tool_call_id": "a", "content": [text_part("found "), image_part(2)]},
        {"role": "user", "content": "two"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": turns, **OPTIONS}).json()
    said = {"user": ["<image>one", "two"], "assistant": ["yes"], "tool": ["found <image>"]}
    order = ("user", "assistant", "tool", "user")
    text = "".join(f"<|im_start|>{role}\n{said[role].pop(0)}<|im_end|>\n" for role in order)
    expected = model.expected(f"{text}<|im_start|>assistant\n", [drawing(1), drawing(2)], NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == expected
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url_of(2)[22:]}}
    body = {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]},
        ]
    }
    count = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    body["messages"][-1]["content"][0]["content"] = "x"
    assert count > server.post("/v1/messages/count_tokens", body).json()["input_tokens"] + 12
    item = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": url_of(2)}]}
    call = {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"}
    counted = server.post("/v1/responses/input_tokens", {"model": "tiny", "input": [call, item]}).json()
    item["output"] = "x"
    plain = server.post("/v1/responses/input_tokens", {"model": "tiny", "input": [call, item]}).json()
    assert counted["input_tokens"] > plain["input_tokens"] + 12


@pytest.mark.parametrize(
    ("part", "complaint", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "", "invalid_media"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "base64", "invalid_media"),
        ({"type": "image_url", "image_url": {}}, "url", "invalid_media"),
        ({"type": "image_url", "image_url": {"url": "ftp://a/b"}}, "must begin", "unsupported_media"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "local files", "media_not_allowed"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}, "", "media_not_allowed"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio", "unsupported_media"),
        ({"type": "image_url", "uuid": "never seen"}, "uuid", "media_not_cached"),
        ({"type": "image_url", "image_url": {"url": "data:,"}, "uuid": 3}, "uuid", "invalid_media"),
        ({"type": "hologram", "hologram": {}}, "hologram", "unsupported_content_type"),
    ],
)
def test_a_bad_part_fails_its_request_by_name(server: Any, part: dict[str, Any], complaint: str, code: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [text_part("b"), image_part(1), part]}]
    response = server.post("/v1/chat/completions", {"messages": messages, **OPTIONS})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"] == "messages[1].content[2]"
    assert complaint in error["message"]
    assert answered(server, [image_part(1), text_part("still")])["choices"][0]["token_ids"]


def test_errors_name_the_parts_of_other_protocols(server: Any) -> None:
    bad = "data:image/png;base64,AAAA"
    part = {"type": "input_image", "image_url": bad}
    body = {"model": "tiny", "input": [{"role": "user", "content": [part]}]}
    assert server.post("/v1/responses", body).json()["error"]["param"] == "input[0].content[0]"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    message = {"role": "user", "content": [text_part("a"), block]}
    refusal = server.post("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": [message]})
    assert refusal.status_code == 400
    assert "messages[0].content[1]" in refusal.json()["error"]["message"]


def test_an_image_is_prepared_once(server: Any) -> None:
    before = server.llm.media.stats()["image"]
    first = answered(server, [image_part(7), text_part("a")])
    named = answered(server, [image_part(7, uuid="seven"), text_part("a")])
    again = answered(server, [{"type": "image_url", "uuid": "seven"}, text_part("a")])
    tokens = [each["choices"][0]["token_ids"] for each in (first, named, again)]
    assert tokens[0] == tokens[1] == tokens[2]
    after = server.llm.media.stats()["image"]
    assert after.num_items - before.num_items == 2  # by content, and by name
    assert after.num_queries - before.num_queries == 3


def test_clients_that_leave_hold_nothing(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": [image_part(3)]}], **OPTIONS, "max_tokens": 200, "stream": True}
    for _ in range(3):
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_bytes())
    data = json.dumps({**body, "stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + data
    for _ in range(3):  # who leaves while its image is prepared, or soon after
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(request)


def test_a_prompt_with_media_is_not_cut(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": [image_part(3)]}], **OPTIONS, "truncate_prompt_tokens": 5}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_text_only_by_choice_refuses_media_by_name(make_live: Any, model: SeeingModel) -> None:
    live = seeing(make_live, model.folder, language_model_only=True)
    content = [text_part("a"), image_part(1)]
    response = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "messages[0].content[1]"
    assert "--language-model-only" in error["message"]
    assert answered(live, "text")["choices"][0]["token_ids"] == model.expected(rendered("text"), [], NUM_TOKENS)


def test_figures_and_the_reset_of_media(make_live: Any, model: SeeingModel) -> None:
    live = seeing(make_live, model.folder, server={"enable_admin_routes": True})
    for _ in range(2):
        answered(live, [image_part(1), text_part("a")])
    figures = live.client.get("/metrics").text
    for line in ("mm_cache_queries_total", "mm_prepared_items_total", "mm_encoded_items_total", "mm_cache_hits_total"):
        (value,) = re.findall(rf'^quire:{line}{{modality="image"}} (.*)$', figures, re.MULTILINE)
        assert float(value) == (2 if "queries" in line else 1), line
    assert live.llm.media.preparer.num_bytes > 0
    (seconds,) = re.findall(r'^quire:mm_encode_seconds_total{modality="image"} (.*)$', figures, re.MULTILINE)
    assert float(seconds) > 0
    assert live.post("/reset_mm_cache", {}).status_code == 200
    assert live.llm.media.preparer.num_bytes == 0
    assert live.post("/reset_encoder_cache", {}).status_code == 200
    assert live.call(live.llm.client.stats()).encoder_cache_usage == 0


def test_conversations_of_a_batch_have_their_own_images(server: Any, model: SeeingModel) -> None:
    contents = [[image_part(1), text_part("a")], [text_part("b")], [image_part(2), image_part(1)]]
    messages = [[{"role": "user", "content": content}] for content in contents]
    response = server.post("/v1/chat/completions/batch", {**OPTIONS, "messages": messages})
    assert response.status_code == 200, response.text
    expected = [
        model.expected(rendered(text), seen, NUM_TOKENS)
        for text, seen in (("<image>a", [drawing(1)]), ("b", []), ("<image><image>", [drawing(2), drawing(1)]))
    ]
    assert [each["token_ids"] for each in response.json()["choices"]] == expected
    messages[2][0]["content"][1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused = server.post("/v1/chat/completions/batch", {**OPTIONS, "messages": messages}).json()["error"]
    assert "messages[2]" in refused["message"]
    assert refused["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "messages[0].content[0].source",
        ),
        ("/v1/responses", {"type": "input_image", "file_id": "f"}, "input[0].content[0]"),
    ],
)
def test_there_are_no_files_to_name(server: Any, path: str, content: dict[str, Any], param: str) -> None:
    turns = [{"role": "user", "content": [content]}]
    body = {"model": "tiny", "max_tokens": 4, "input" if path.endswith("responses") else "messages": turns}
    response = server.post(path, body)
    assert response.status_code == 400
    assert "--files-dir" in response.text
    assert param in response.text


def test_a_rendered_conversation_runs_by_the_hashes_of_its_images(server: Any, model: SeeingModel) -> None:
    content = [text_part("a "), image_part(3), text_part("b "), image_part(4), image_part(3)]
    body = {"messages": [{"role": "user", "content": content}], **OPTIONS}
    request = server.post("/v1/chat/completions/render", body).json()
    places = request["features"]["mm_placeholders"]["image"]
    assert [request["token_ids"][each["offset"]] for each in places] == [model.network.config.image_token_id] * 3
    first, _, again = request["features"]["mm_hashes"]["image"]
    assert first == again
    answer = server.post("/inference/v1/generate", request)
    assert answer.status_code == 200, answer.text
    expected = model.expected(rendered("a <image>b <image><image>"), [drawing(3), drawing(4), drawing(3)], NUM_TOKENS)
    assert answer.json()["choices"][0]["token_ids"] == expected
    moved = [{**places[0], "offset": places[0]["offset"] + 1}, *places[1:]]
    for features, param, code in (
        ({"mm_hashes": {"image": ["0" * 64] * 3}}, "features.mm_hashes.image[0]", "media_not_cached"),
        ({"mm_hashes": {"image": ["../../etc", again, again]}}, "features.mm_hashes.image[0]", "invalid_media"),
        ({"mm_hashes": {"image": [first]}}, "features", "invalid_request"),
        ({"mm_hashes": {"smell": [first]}}, "features", "invalid_request"),
        ({"mm_placeholders": {"image": moved}}, "features.mm_placeholders", "invalid_request"),
        ({"kwargs_data": {"image": ["AAAA", None, None]}}, "features.kwargs_data", "unsupported"),
    ):
        wrong = {**request, "features": {**request["features"], **features}}
        response = server.post("/inference/v1/generate", wrong)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code), error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/batch"])
@pytest.mark.parametrize("waits_s", [0.0, 0.02, 0.2])
def test_whoever_leaves_leaves_nothing_behind(server: Any, path: str, waits_s: float) -> None:
    preparer = server.llm.media.preparer
    for number in range(4):
        images = [image_part(10 + 5 * number + each) for each in range(5)]
        messages: Any = [{"role": "user", "content": images}]
        body = {**OPTIONS, "max_tokens": 100, "messages": [messages] * 2 if path.endswith("batch") else messages}
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        with socket.create_connection((server.client.base_url.host, server.client.base_url.port)) as connection:
            connection.sendall(head.encode() + data)
            time.sleep(waits_s)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # what is being prepared when its client leaves is prepared
        server.wait_idle()
        gc.collect()
        server.llm.media.reset()
        if preparer.num_bytes == 0 and preparer.num_waiting == 0:
            break
        time.sleep(0.05)
    assert (preparer.num_bytes, preparer.num_waiting) == (0, 0)


def test_embeddings_are_not_forgotten_while_their_tokens_are_computed(make_live: Any, model: SeeingModel) -> None:
    admin = {"enable_admin_routes": True}
    live = seeing(make_live, model.folder, server=admin, max_num_batched_tokens=2, max_num_seqs=1)
    seen = set()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for number in range(100):  # a step takes a moment: the first that falls into one is enough
            answering = pool.submit(answered, live, [image_part(number), image_part(number + 1)])
            while not answering.done():
                response = live.post("/reset_encoder_cache", {})
                seen.add((response.status_code, response.json()["error"]["code"] if response.content else ""))
            assert answering.result()
            if len(seen) > 1:
                break
    assert seen == {(200, ""), (409, "busy")}
    assert live.post("/reset_encoder_cache", {}).status_code == 200
    assert live.call(live.llm.client.stats()).encoder_cache_usage == 0


def test_embeddings_of_a_caller_stand_for_an_image(make_live: Any, model: SeeingModel, server: Any) -> None:
    live = seeing(make_live, model.folder, enable_mm_embeds=True)
    pixels = model.processor.image_processor(drawing(1), return_tensors="pt")["pixel_values"]
    file = io.BytesIO()
    torch.save(model.network.model.get_image_features(pixel_values=pixels).pooler_output[0].detach(), file)
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(file.getvalue()).decode(), "uuid": "one"}
    expected = model.expected(rendered("a<image>"), [drawing(1)], NUM_TOKENS)
    for each in (part, {"type": "image_embeds", "uuid": "one"}):
        assert answered(live, [text_part("a"), each])["choices"][0]["token_ids"] == expected
    body = {"messages": [{"role": "user", "content": [part]}]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[0]", "unsupported_media")
    assert "--enable-mm-embeds" in error["message"]


def test_a_server_that_ends_leaves_nothing_in_shared_memory(quire_serve: Any, model: SeeingModel) -> None:
    process = quire_serve(str(model.folder), "--dtype", "float32", "--kv-cache-memory-bytes", "16M")
    body = {"messages": [{"role": "user", "content": [image_part(1)]}], "max_tokens": 2}
    assert httpx.post(f"{process.url()}/v1/chat/completions", json=body, timeout=60).status_code == 200
    opened = [os.readlink(each) for each in Path(f"/proc/{process.popen.pid}/fd").iterdir() if each.is_symlink()]
    stores = {Path(each) for each in opened if "quire-media-" in each}
    assert stores
    assert all(each.exists() for each in stores)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert not any(each.exists() for each in stores)
