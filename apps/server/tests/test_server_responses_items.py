"""Histories of the Responses API: every kind of item is read, and none makes a conversation impossible."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from quire_interfaces import RequestError
from quire_server.client_tools import ClientTool, ClientTools
from quire_server.responses_items import ItemReader
from quire_server.responses_tools import client_tools_of
from quire_server.sealing import Sealer, Summary, pack_summary

Q = {"type": "message", "role": "user", "content": "q"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
LEFT_OUT = "[image left out: this model reads text only]\n"


def read(*items: dict[str, Any], reader: ItemReader | None = None) -> list[dict[str, Any]]:
    return (reader or ItemReader()).chat_messages([Q, *items])[1:]


def calls(*items: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(id, name, arguments) of all calls in what items are read as."""
    found = [call for message in read(*items) for call in message.get("tool_calls", ())]
    made = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in found]
    return [(name, tool, json.loads(each) if isinstance(each, str) else each) for name, tool, each in made]


@pytest.mark.parametrize(
    ("item", "call"),
    [
        (
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "ns", "arguments": '{"a": 1}'},
            ("c", "ns__f", {"a": 1}),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'é "x"\n'},
            ("c", "patch", {"input": 'é "x"\n'}),
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "status": "completed",
             "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None, "working_directory": "/"}},
            ("c", "local_shell", {"command": ["ls"], "env": {}, "working_directory": "/"}),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": None}},
            ("c", "shell", {"commands": ["ls"]}),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            ("c", "apply_patch", {"type": "delete_file", "path": "a"}),
        ),
        (
            {"type": "computer_call", "id": "i", "call_id": "c", "action": {"type": "wait"}, "actions": None},
            ("c", "computer", {"actions": [{"type": "wait"}]}),
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
            ("c", "tool_search", {"query": "q"}),
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_calls_of_every_kind_are_calls(item: dict[str, Any], call: Any) -> None:
    assert calls(item) == [call]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "x"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x\n"}, IMAGE]},
            f"x\n{LEFT_OUT}",
        ),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": [IMAGE]}, LEFT_OUT),
        ({"type": "local_shell_call_output", "id": "c", "output": '{"exit_code": 0}'}, '{"exit_code": 0}'),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [
                {"stdout": "a\n", "stderr": "b\n", "outcome": {"type": "exit", "exit_code": 2}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ]},
            "a\nb\nexit code: 2\ntimeout\n",
        ),
        ({"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no"}, "no"),
        ({"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}, "status: completed"),
        (
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
            "[screenshot left out: this model reads text only]\n",
        ),
        (
            {"type": "tool_search_output", "call_id": "c", "execution": "client",
             "tools": [{"type": "function", "name": "f"}, {"type": "namespace", "name": "ns", "tools": []}]},
            "Tools found: f, ns",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": None}, ""),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "filename": "a.pdf"}]},
            "[file 'a.pdf' left out: this model reads text only]\n",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "smell"}, 5]},
            "['smell' left out: this model reads text only]\n['int' left out: this model reads text only]\n",
        ),
    ],
)  # fmt: skip
def test_outputs_of_every_kind_are_results(item: dict[str, Any], text: str) -> None:
    assert read(item) == [{"role": "tool", "tool_call_id": "c", "content": text}]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"type": "web_search_call", "id": "ws_1", "status": "completed",
             "action": {"type": "search", "query": "weather"}},
            "[web_search_call: weather]\n",
        ),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, None),
        ({"type": "file_search_call", "id": "fs", "queries": ["a", "b"], "results": None}, "[file_search_call: a b]\n"),
        (
            {"type": "code_interpreter_call", "code": "print(1)", "outputs": [{"type": "logs", "logs": "1"}]},
            "[code_interpreter_call: 1 print(1)]\n",
        ),
        ({"type": "image_generation_call", "id": "ig", "result": "iVBORw0KGgo="}, None),
        ({"type": "tool_search_call", "execution": "server", "arguments": {}}, None),
        ({"type": "ghost_snapshot", "ghost_commit": {"id": "x"}}, None),
        ({"type": "song_of_the_future", "content": [{"type": "note", "text": "la"}]}, "[song_of_the_future: la]\n"),
        ({"type": "additional_tools", "role": "developer", "tools": [{}]}, None),
        ({"type": "compaction_trigger"}, None),
        ({"type": "context_compaction"}, None),
    ],
)  # fmt: skip
def test_what_nobody_here_can_read_is_a_line_or_nothing(item: dict[str, Any], text: str | None) -> None:
    assert read(item) == ([] if text is None else [{"role": "assistant", "content": text}])


def test_images_are_refused_in_the_newest_message_only() -> None:
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See "}, IMAGE]}
    with pytest.raises(RequestError, match="input_image") as caught:
        read(message, {"type": "additional_tools", "tools": []})
    assert caught.value.param == "input[1].content[1]"
    assert read(message, Q)[0]["content"] == f"See {LEFT_OUT}"
    assert read(message, {"type": "function_call", "call_id": "c", "name": "f"})[0]["content"] == f"See {LEFT_OUT}"
    assert ItemReader().chat_messages([message], has_new=False)[0]["content"] == f"See {LEFT_OUT}"


def test_thoughts_are_read_back_from_any_of_their_forms() -> None:
    sealer = Sealer(b"key")
    reader = ItemReader(sealer=sealer)
    sealed = sealer.seal("Hidden \U0001f600.")
    for item, text in (
        ({"content": [{"type": "reasoning_text", "text": "Open."}], "encrypted_content": sealed}, "Open."),
        ({"summary": [{"type": "summary_text", "text": "Short."}], "encrypted_content": sealed}, "Hidden \U0001f600."),
        ({"summary": [{"type": "summary_text", "text": "Short."}], "encrypted_content": "gAAAA"}, "Short."),
        ({"summary": [], "encrypted_content": sealed[:-8] + "AAAAAAA="}, ""),
        ({"summary": [], "encrypted_content": Sealer(b"other").seal("x")}, ""),
        ({"summary": [], "encrypted_content": 5}, ""),
        ({"summary": [], "encrypted_content": None}, ""),
    ):
        (message,) = read({"type": "reasoning", "id": "rs_1", **item}, reader=reader)
        assert message["reasoning_content"] == text, item


def test_summaries_stand_for_what_was_said() -> None:
    def compaction(text: str, *, replaces: bool) -> dict[str, Any]:
        return {"type": "compaction", "encrypted_content": pack_summary(Summary(text, replaces))}

    rules = {"type": "message", "role": "developer", "content": "Rules."}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    newest = {"type": "message", "role": "user", "content": "newest"}
    said = ("Summary of the conversation so far:\n{}").format
    kept = ItemReader().chat_messages([rules, Q, answer, compaction("S", replaces=False), newest])
    assert [message["content"] for message in kept] == ["Rules.", "q", "a", said("S"), "newest"]
    pruned = ItemReader().chat_messages([rules, Q, answer, newest, compaction("S", replaces=True), answer, Q])
    assert [message["content"] for message in pruned] == ["Rules.", said("S"), "newest", "a", "q"]
    for foreign in ("gAAAAABo", "§", 5, pack_summary(Summary("x", False))[:-4] + "AAA="):
        item = {"type": "compaction_summary", "encrypted_content": foreign}
        assert "another server" in read(item)[0]["content"]


def test_calls_without_results_and_results_without_calls_are_read() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert [message["role"] for message in read(call)] == ["assistant"]
    output = {"type": "function_call_output", "call_id": "gone", "output": "x"}
    assert [message["role"] for message in read(output, call, Q)] == ["tool", "assistant", "user"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": None}, "type"),
        ({"type": ["message"]}, "type"),
        ({"type": "function_call", "call_id": "c"}, "name"),
        ({"type": "custom_tool_call", "call_id": "c", "name": 5}, "name"),
        ({"type": "message", "role": "robot", "content": "x"}, "role"),
        ({"type": "message", "role": "user", "content": 5}, "content"),
    ],
)
def test_forged_items_are_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(item)
    assert caught.value.param == f"input[1].{param}"


@pytest.mark.parametrize(
    "kind",
    [
        "shell_call", "local_shell_call", "apply_patch_call", "computer_call", "mcp_call", "tool_search_call",
        "shell_call_output", "tool_search_output", "web_search_call", "mcp_approval_request", "mcp_approval_response",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [5], {"type": 5}])
def test_forged_fields_of_items_never_fail_otherwise(kind: str, value: Any) -> None:
    names = ("action", "actions", "operation", "arguments", "output", "tools", "execution", "query", "name")
    item = {"type": kind, "call_id": "c", "id": "i", "approve": False, **dict.fromkeys(names, value)}
    forged_ids = dict.fromkeys(("id", "call_id", "approval_request_id"), value)
    for each in ({**item, "execution": "client"}, {**item, **forged_ids}):
        with contextlib.suppress(RequestError):
            read(item, each)


def test_tools_that_a_search_brought_can_be_called() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": {"type": "object"}}
    deferred = {"type": "function", "name": "late", "defer_loading": True}
    found = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "late"}, {"type": 5}]}
    items = [
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}, {}]},
    ]
    offered = client_tools_of([search, deferred], items)
    assert offered.shown_names() == ["tool_search", "ns__late", "more"]
    left_out = [warning.param for warning in offered.warnings]
    assert left_out == ["input[0].tools[0].tools[1].type", "input[1].tools[1].type"]
    assert client_tools_of([{"type": "tool_search"}, deferred]).shown_names() == ["late"]


def test_names_of_histories_are_those_that_the_model_is_shown() -> None:
    tools = ClientTools()
    tools.add(ClientTool(function={"name": "a__b"}, name="a__b"), "tools[0]")
    tools.add(ClientTool(function={"name": "b"}, name="b", namespace="a"), "tools[1]")
    item = {"type": "function_call", "call_id": "c", "name": "b", "namespace": "a", "arguments": "{}"}
    (message,) = read(item, reader=ItemReader(tools))
    assert message["tool_calls"][0]["function"]["name"] == "a__b_2"
