"""Conversations and item references, as the official client speaks of them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationItemList

CLOCK: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted):
    with scripted.openai() as client:
        yield client


def ask(client, text, **arguments):
    return client.responses.create(**{"model": "tiny", "input": f"¤{text}¥", "tools": [CLOCK], **arguments})


def kinds(items):
    return [item.type if item.type != "message" else item.role for item in items]


def test_a_conversation_is_made_read_changed_and_deleted(client, scripted):
    made = client.conversations.create(
        metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "Hello"}]
    )
    raw = scripted.client.get(f"/v1/conversations/{made.id}")
    Conversation.model_validate_json(raw.text, strict=True)
    assert client.conversations.retrieve(made.id).to_dict() == made.to_dict()
    assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    added = client.conversations.items.create(
        made.id, items=[{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Ho"}]
    )
    assert kinds(added.data) == ["assistant", "user"]
    listed = scripted.client.get(f"/v1/conversations/{made.id}/items?order=asc&limit=2")
    page = ConversationItemList.model_validate_json(listed.text, strict=True)
    assert (kinds(page.data), page.has_more) == (["user", "assistant"], True)
    assert next(item.id for item in client.conversations.items.list(made.id, limit=1)) == added.data[1].id
    item = client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert item.to_dict() == added.data[0].to_dict()
    assert client.conversations.items.delete(item.id, conversation_id=made.id).id == made.id
    assert kinds(client.conversations.items.list(made.id, order="asc")) == ["user", "user"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(item.id, conversation_id=made.id)
    assert client.conversations.delete(made.id).deleted
    for gone in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            gone(made.id)
        assert caught.value.code == "conversation_not_found"


def test_responses_go_on_with_a_conversation_and_add_to_it(client):
    conversation = client.conversations.create(items=[{"role": "developer", "content": "Be short. " * 5}]).id
    first = ask(client, f"<think>t</think>One.\n{NOW}", conversation=conversation)
    assert first.conversation.id == conversation
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    with client.responses.stream(
        model="tiny", input=[result, {"role": "user", "content": "¤Two.¥"}], conversation={"id": conversation}
    ) as stream:
        second = stream.get_final_response()
    assert second.output_text == "Two."
    assert second.usage.input_tokens > first.usage.input_tokens + 30
    listed = list(client.conversations.items.list(conversation, order="asc"))
    expected = ["developer", "user", "reasoning", "assistant", "function_call", "function_call_output", "user"]
    assert kinds(listed) == [*expected, "assistant"]
    by_hand = [item.to_dict() for item in listed]
    same = ask(client, "", input=[*by_hand, {"role": "user", "content": "¤Three.¥"}], tools=[])
    third = client.responses.create(model="tiny", input="¤Three.¥", conversation=conversation)
    assert (third.output_text, third.usage.input_tokens) == ("Three.", same.usage.input_tokens)
    started = client.responses.create(model="tiny", input="¤Four.¥", conversation=conversation, background=True)
    while client.responses.retrieve(started.id).status in ("queued", "in_progress"):
        pass
    assert kinds(client.conversations.items.list(conversation, limit=2).data) == ["assistant", "user"]
    with pytest.raises(openai.NotFoundError):
        ask(client, "x", conversation="conv_missing")


def test_items_can_be_named_by_their_id(client):
    first = ask(client, f"One.\n{NOW}")
    asked = client.responses.input_items.list(first.id).data[0]
    references = [{"type": "item_reference", "id": item.id} for item in (asked, *first.output)]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "noon"}
    new = [result, {"role": "user", "content": "¤Two.¥"}]
    by_reference = ask(client, "", input=[*references, *new])
    by_previous = ask(client, "", input=new, previous_response_id=first.id)
    assert by_reference.usage.input_tokens == by_previous.usage.input_tokens
    listed = client.responses.input_items.list(by_reference.id, order="asc").data
    assert [item.to_dict() for item in listed[:3]] == [asked.to_dict(), *(item.to_dict() for item in first.output)]
    conversation = client.conversations.create(items=[{"role": "user", "content": "Far away"}]).id
    [item] = client.conversations.items.list(conversation).data
    answer = ask(client, "", input=[{"id": item.id}, {"role": "user", "content": "¤ok¥"}])
    assert answer.output_text == "ok"
    ask(client, "Again", conversation=conversation, input=[{"id": item.id}, {"role": "user", "content": "¤ok¥"}])
    assert kinds(client.conversations.items.list(conversation, order="asc")) == ["user", "user", "assistant"]


def test_conversations_outlive_the_server(make_scripted, tmp_path):
    path = str(tmp_path / "kept.sqlite")
    with make_scripted(response_store=path).openai() as first:
        conversation = first.conversations.create().id
        ask(first, "One.", conversation=conversation)
    with make_scripted(response_store=path).openai() as second:
        ask(second, "Two.", conversation=conversation)
        assert kinds(second.conversations.items.list(conversation, order="asc")) == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"role": "robot", "content": "x"}]}, "items[0].role"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("/ID/items", {"items": []}, "items"),
        ("/ID/items", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ("/ID/items", {}, "items"),
        ("/ID/items", {"items": [{"text": "x"}]}, "items[0].type"),
        ("/ID", {"metadata": []}, "metadata"),
    ],
)
def test_wrong_requests_are_named(scripted, client, path, body, param):
    path = path.replace("ID", client.conversations.create().id)
    response = scripted.post(f"/v1/conversations{path}", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_server_that_keeps_nothing_has_no_conversations(make_scripted):
    server = make_scripted(response_store="none")
    for path, body in (("/v1/conversations", {}), ("/v1/responses", {"input": "x", "conversation": "conv_1"})):
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "conversation"), response.text
