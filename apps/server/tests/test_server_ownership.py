"""Whatever is kept belongs to the API key that made it: to another key it is not there, in the same words as what never
was. Every kind of kept thing meets every operation that names it, over HTTP, with the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

import quire_demo_model
from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY

ANN, BEN, ROOT = "key-of-ann", "key-of-ben", "key-of-root"
SECRET = "the-secret-of-ann"


@pytest.fixture(scope="module")
def server(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("kept") / "responses.sqlite"
    folder = quire_demo_model.checkpoint_path()
    engine = QuireConfig.of(model=str(folder), max_model_len=1024, num_threads=1).to_dict()
    keys = {"api_key": (ANN, BEN), "response_store": str(store)}
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, **keys)


class Client:
    """One key's."""

    def __init__(self, server: Any, key: str) -> None:
        self.url, self.key = server.url, key
        self.http = httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"})

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.http.request(method, path, **({} if body is None else {"json": body}))

    def get(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, which must be one."""
        reply = self.ask(method, path, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def respond(self, text: Any = "Who are you?", **fields: Any) -> Any:
        return self.get("POST", "/v1/responses", {"input": text, "max_output_tokens": 4, "temperature": 0, **fields})


@pytest.fixture(scope="module")
def ann(server: Any) -> Iterator[Client]:
    client = Client(server, ANN)
    yield client
    client.http.close()


@pytest.fixture(scope="module")
def ben(server: Any) -> Iterator[Client]:
    client = Client(server, BEN)
    yield client
    client.http.close()


def a_response(ann: Client) -> str:
    return str(ann.respond(f"{SECRET}")["id"])


def a_response_in_the_background(ann: Client) -> str:
    """One that still runs."""
    fields = {"background": True, "max_output_tokens": 900, "ignore_eos": True}
    return str(ann.respond(SECRET, **fields)["id"])


def a_conversation(ann: Client) -> str:
    item = {"role": "user", "content": SECRET}
    return str(ann.get("POST", "/v1/conversations", {"metadata": {"about": SECRET}, "items": [item]})["id"])


def an_item_of_a_response(ann: Client) -> str:
    ann.respond([{"type": "message", "id": "msg_of_ann", "role": "user", "content": SECRET}])
    return "msg_of_ann"


def an_item_of_an_answer(ann: Client) -> str:
    return str(ann.respond(SECRET)["output"][0]["id"])


def an_item_of_a_conversation(ann: Client) -> str:
    item = {"id": "item_of_ann", "role": "user", "content": SECRET}
    ann.get("POST", "/v1/conversations", {"items": [item]})
    return "item_of_ann"


RESPONSES = [
    ("GET", "/v1/responses/ID", None),
    ("GET", "/v1/responses/ID?stream=true", None),
    ("GET", "/v1/responses/ID?stream=true&starting_after=1", None),
    ("GET", "/v1/responses/ID/input_items", None),
    ("POST", "/v1/responses/ID/cancel", {}),
    ("DELETE", "/v1/responses/ID", None),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "ID"}),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "ID", "background": True}),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "ID", "stream": True}),
    ("POST", "/v1/responses/compact", {"input": "x", "previous_response_id": "ID"}),
    ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "ID"}),
    ("SOCKET", "/v1/responses", {"input": "x", "previous_response_id": "ID"}),
]
CONVERSATIONS = [
    ("GET", "/v1/conversations/ID", None),
    ("POST", "/v1/conversations/ID", {"metadata": {"about": "ben"}}),
    ("DELETE", "/v1/conversations/ID", None),
    ("GET", "/v1/conversations/ID/items", None),
    ("POST", "/v1/conversations/ID/items", {"items": [{"role": "user", "content": "x"}]}),
    ("GET", "/v1/conversations/ID/items/x", None),
    ("DELETE", "/v1/conversations/ID/items/x", None),
    ("POST", "/v1/responses", {"input": "x", "conversation": "ID"}),
    ("POST", "/v1/responses", {"input": "x", "conversation": {"id": "ID"}, "background": True}),
    ("POST", "/v1/responses/input_tokens", {"input": "x", "conversation": "ID"}),
    ("SOCKET", "/v1/responses", {"input": "x", "conversation": "ID"}),
]
REFERENCE = {"input": [{"type": "item_reference", "id": "ID"}]}
ITEMS = [
    ("POST", "/v1/responses", REFERENCE),
    ("POST", "/v1/responses/compact", REFERENCE),
    ("POST", "/v1/responses/input_tokens", REFERENCE),
    ("SOCKET", "/v1/responses", REFERENCE),
]
MODEL_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "x"}]]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/compact": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
"""Routes that take a model's name, and what else they need."""
MATRIX = [
    *((make, each) for make in (a_response, a_response_in_the_background) for each in RESPONSES),
    *((a_conversation, each) for each in CONVERSATIONS),
    *(
        (make, each)
        for make in (an_item_of_a_response, an_item_of_an_answer, an_item_of_a_conversation)
        for each in ITEMS
    ),
]


def answer(client: Client, operation: tuple[str, str, Any], name: str) -> tuple[int, str]:
    """Status and text of the answer to an operation on this id."""
    method, path, body = operation
    body = json.loads(json.dumps(body).replace("ID", name))
    if method != "SOCKET":
        reply = client.ask(method, path.replace("ID", name), body)
        return reply.status_code, re.sub(r'"request_id":"[^"]*"', "", reply.text)
    address = client.url.replace("http", "ws", 1) + path
    with connect(address, additional_headers={"authorization": f"Bearer {client.key}"}) as socket:
        socket.send(json.dumps({"type": "response.create", "model": "tiny", **body}))
        told = json.loads(socket.recv(60))
        return int(told.get("status", 200)), json.dumps(told)


@pytest.mark.parametrize(
    ("make", "operation"), MATRIX, ids=[f"{make.__name__}-{' '.join(map(str, each))}" for make, each in MATRIX]
)
def test_to_another_key_it_is_not_there(
    ann: Client, ben: Client, make: Callable[[Client], str], operation: tuple[str, str, Any]
) -> None:
    name = make(ann)
    before = state(ann, make, name)
    there, never = answer(ben, operation, name), answer(ben, operation, "never_was")
    assert there[0] in (400, 404), there
    assert (there[0], there[1].replace(name, "never_was")) == never
    assert SECRET not in there[1]
    assert state(ann, make, name) == before, "the owner's is as it was"
    if make is a_response_in_the_background:
        ann.get("POST", f"/v1/responses/{name}/cancel", {})


def state(ann: Client, make: Callable[[Client], str], name: str) -> Any:
    if make is a_conversation:
        return [ann.get("GET", f"/v1/conversations/{name}{each}") for each in ("", "/items")]
    if make is a_response_in_the_background:
        return ann.get("GET", f"/v1/responses/{name}")["status"] in ("queued", "in_progress")
    if make is a_response:
        return [ann.get("GET", f"/v1/responses/{name}{each}") for each in ("", "/input_items")]
    return ann.get("POST", "/v1/responses/input_tokens", {"input": [{"type": "item_reference", "id": name}]})


@pytest.mark.parametrize("make", [a_response, a_conversation])
def test_its_owner_has_it_by_every_operation(ann: Client, make: Callable[[Client], str]) -> None:
    """So that the matrix above shows that operations are refused, not that they do not work."""
    for operation in RESPONSES if make is a_response else CONVERSATIONS:
        path = operation[1]
        status, text = answer(ann, operation, make(ann))
        is_refused = make is a_response and ("cancel" in path or "stream=" in path)  # it is none of the background
        refusal = 400 if is_refused else 404 if path.endswith("/x") else 200
        assert status == refusal, (operation, text)
    status, text = answer(ann, ("GET", "/v1/responses/ID?stream=true", None), a_response_in_the_background(ann))
    assert (status, "response.completed" in text or "response.incomplete" in text) == (200, True)


def test_two_keys_may_have_items_of_one_id_and_nobody_poisons_another_s(ann: Client, ben: Client) -> None:
    def said(client: Client, text: str) -> None:
        client.respond([{"type": "message", "id": "msg_9", "role": "user", "content": text}])

    said(ben, "text of ben")
    said(ann, "text of ann")
    for client, text in ((ann, "text of ann"), (ben, "text of ben")):
        response = client.respond([{"type": "item_reference", "id": "msg_9"}])
        items = client.get("GET", f"/v1/responses/{response['id']}/input_items")["data"]
        assert [item["content"] for item in items] == [[{"type": "input_text", "text": text}]] or text in str(items)
        assert all(other not in str(items) for other in {"text of ann", "text of ben"} - {text})


def test_ids_that_a_client_takes_for_itself_change_nothing(ann: Client, ben: Client) -> None:
    """Ben knows the id of Ann's response, and gives it to items of his own."""
    response, conversation = a_response(ann), a_conversation(ann)
    for name in (response, conversation):
        ben.respond([{"type": "message", "id": name, "role": "user", "content": "x"}], request_id=name)
    ann.get("GET", f"/v1/responses/{response}")
    assert ben.ask("GET", f"/v1/responses/{response}").status_code == 404


def test_what_is_sealed_for_one_key_is_nothing_to_another(ann: Client, ben: Client) -> None:
    compacted = ann.get("POST", "/v1/responses/compact", {"input": SECRET, "max_output_tokens": 20})["output"]

    def num_tokens(client: Client) -> int:
        body = {"input": [*compacted, {"role": "user", "content": "x"}]}
        return int(client.get("POST", "/v1/responses/input_tokens", body)["input_tokens"])

    damaged = [{**compacted[0], "encrypted_content": "AAAA"}, {"role": "user", "content": "x"}]
    unread = int(ben.get("POST", "/v1/responses/input_tokens", {"input": damaged})["input_tokens"])
    assert num_tokens(ben) == unread
    assert num_tokens(ann) != unread


def test_a_running_request_for_tokens_is_aborted_by_its_key_alone(ann: Client, ben: Client) -> None:
    body = {
        "token_ids": list(range(5, 15)),
        "request_id": "of-ann",
        "stream": True,
        "sampling_params": {"max_tokens": 900, "ignore_eos": True},
    }
    with ann.http.stream("POST", "/inference/v1/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert ben.ask("POST", "/inference/v1/abort_requests", {"request_ids": "of-ann"}).status_code == 200
        seen = [json.loads(line[6:]) for _, line in zip(range(20), lines, strict=False) if line.startswith("data: {")]
        assert not any(choice["finish_reason"] for each in seen for choice in each["choices"])
        assert ann.ask("POST", "/inference/v1/abort_requests", {"request_ids": "of-ann"}).status_code == 200
        assert '"finish_reason":"abort"' in "".join(lines)


@pytest.fixture(scope="module")
def adapters(make_live: Any) -> Any:
    """A server with an adapter from its start, which keys may load more to."""
    folder = quire_demo_model.checkpoint_path()
    paths = quire_demo_model.adapter_paths()
    settings = {"lora_modules": (f"shared={paths['demo-capitals']}",), "enable_lora": True, "max_loras": 2}
    engine = QuireConfig.of(model=str(folder), max_model_len=512, num_threads=1, **settings).to_dict()
    return make_live(
        folder=folder,
        factory=REAL_FACTORY,
        engine=engine,
        api_key=(ANN, BEN),
        admin_api_key=(ROOT,),
        enable_admin_routes=True,
        allowed_local_lora_path=str(paths["demo-capitals"].parent),
    )


def test_adapters_belong_to_the_key_that_loaded_them(adapters: Any) -> None:
    ann, ben, root = (Client(adapters, key) for key in (ANN, BEN, ROOT))
    paths = {name: str(path) for name, path in quire_demo_model.adapter_paths().items()}

    def load(client: Client, name: str, path: str = "demo-capitals", **more: Any) -> tuple[int, str]:
        body = {"lora_name": name, "lora_path": paths[path], **more}
        reply = client.ask("POST", "/v1/load_lora_adapter", body)
        return reply.status_code, reply.text

    def unload(client: Client, name: str) -> tuple[int, str]:
        reply = client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        return reply.status_code, reply.text

    def names(client: Client) -> set[str]:
        return {card["id"] for card in client.get("GET", "/v1/models")["data"]}

    def text(client: Client, name: str) -> str:
        body = {"model": name, "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
        answer = client.get("POST", "/v1/chat/completions", {**body, "max_tokens": 60})
        assert answer["model"] == name
        return str(answer["choices"][0]["message"]["content"])

    assert names(ann) == names(ben) == {"tiny", "shared"}
    assert load(ann, "mine")[0] == 200
    assert names(ann) == {"tiny", "shared", "mine"}
    assert names(ben) == names(root) == {"tiny", "shared"}
    for method, path, body in (
        ("GET", "/v1/models/ID", None),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "ID"}),
        *(("POST", path, {"model": "ID", **body}) for path, body in MODEL_ROUTES.items()),
    ):
        there, never = (answer(ben, (method, path, body), name) for name in ("mine", "none"))
        assert there[0] == 404, (path, there)
        assert (there[0], there[1].replace("'mine'", "'none'")) == never
    assert text(ann, "mine").isupper()

    # Ben has another one under the same name; the metrics tell the two apart by their tenants.
    assert load(ben, "mine", "demo-json")[0] == 200
    assert text(ann, "mine").isupper()
    assert text(ben, "mine").startswith('{"answer"')
    status, told = load(ben, "mine")
    assert (status, "adapter_exists" in told, "@" in told) == (400, True, False)
    assert load(ben, "mine", load_inplace=True)[0] == 200
    assert text(ben, "mine").isupper()
    assert unload(ben, "mine")[0] == 200
    assert unload(ben, "mine")[0] == 404
    assert text(ann, "mine").isupper()

    # What is the server's is for all, and for its administrators alone to change.
    for client in (ann, ben):
        assert text(client, "shared").isupper()
        assert load(client, "shared", "demo-json", load_inplace=True)[0] == 400
        assert unload(client, "shared")[0] == 404
        assert text(client, "shared").isupper()
    assert load(root, "more", "demo-json")[0] == 200
    assert text(ben, "more").startswith('{"answer"')
    assert unload(root, "mine")[0] == 404
    assert unload(root, "shared")[0] == 200
    assert names(ben) == {"tiny", "more"}
    assert names(ann) == {"tiny", "more", "mine"}
    assert ben.ask("POST", "/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": "/nowhere"}).status_code == 400
    assert names(ben) == {"tiny", "more"}
    for client in (ann, ben, root):
        client.http.close()


def test_what_was_deleted_is_gone_from_the_file(server: Any, ann: Client) -> None:
    path = Path(server.context.config.response_store)

    def raw() -> bytes:
        return b"".join(each.read_bytes() for each in path.parent.iterdir())

    name = ann.respond("a text that nobody wants to keep")["id"]
    assert b"a text that nobody wants to keep" in raw()
    ann.get("DELETE", f"/v1/responses/{name}")
    assert b"a text that nobody wants to keep" not in raw()


def test_owners_are_the_same_after_a_restart(make_live: Any, server: Any, ann: Client) -> None:
    name = a_response(ann)
    config = server.context.config
    again = make_live(api_key=(ANN, BEN), response_store=config.response_store)
    for key, status in ((ANN, 200), (BEN, 404)):
        client = Client(again, key)
        assert client.ask("GET", f"/v1/responses/{name}").status_code == status
        client.http.close()
