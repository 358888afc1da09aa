"""Tools that the client runs, whatever their shape, and tools that nobody here runs, over the three chat protocols."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire_server.call_input import CallInput, input_of
from quire_server.chat_history import readable_messages
from quire_server.client_tools import ClientTool, ClientTools

F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
PATCH = '*** Begin Patch\n*** Add File: a "b" \\ c.txt\n+é \U0001f600\n*** End Patch\n'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def respond(server: Any, text: str, tools: list[Any], *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """A response whose model says `text`; that of a stream is put together from its events and equals its last one."""
    request = {"model": "tiny", "input": f"¤{text}¥", "tools": tools, "max_output_tokens": 600, **body}
    if not stream:
        response = server.client.post("/v1/responses", json=request)
        assert response.status_code == 200, response.text
        return response.json()
    lines = server.client.post("/v1/responses", json={**request, "stream": True}).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    assert events[0]["response"].get("warnings") == events[-1]["response"].get("warnings")
    items: dict[int, dict[str, Any]] = {}
    inputs: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.custom_tool_call_input.delta":
            inputs[event["item_id"]] = inputs.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.custom_tool_call_input.done":
            assert inputs.get(event["item_id"], "") == event["input"]
        elif event["type"] == "response.output_item.done":
            items[event["output_index"]] = event["item"]
    response = events[-1]["response"]
    assert [items[index] for index in sorted(items)] == response["output"]
    return response


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_tools_of_a_namespace_come_back_under_their_own_names(scripted: Any, stream: bool) -> None:
    group = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [F, {**F, "name": "g"}]}
    response = respond(scripted, call("crm__g", a=1), [F, group], stream=stream)
    (item,) = response["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "crm", "g")
    assert json.loads(item["arguments"]) == {"a": 1}
    assert "warnings" not in response
    plain = respond(scripted, call("f"), [F, group], stream=stream)["output"][0]
    assert (plain["name"], plain.get("namespace")) == ("f", None)


@both
def test_a_custom_tool_is_called_with_text(scripted: Any, stream: bool) -> None:
    tool = {"type": "custom", "name": "apply_patch", "description": "Free text."}
    (item,) = respond(scripted, call("apply_patch", input=PATCH), [tool], stream=stream)["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (item["status"], "arguments" in item) == ("completed", False)


@both
def test_a_custom_call_that_is_cut_is_incomplete(scripted: Any, stream: bool) -> None:
    tool = {"type": "custom", "name": "note"}
    text = call("note", input="one two three four five six seven eight nine ten")
    response = respond(scripted, text, [tool], stream=stream, max_output_tokens=55)
    assert response["status"] == "incomplete"
    (item,) = response["output"]
    assert item["status"] == "incomplete"
    assert "one two three four five six seven eight nine ten".startswith(item["input"])


@both
def test_tools_that_only_another_server_runs_are_left_out(scripted: Any, stream: bool) -> None:
    hosted = [
        {"type": "web_search", "external_web_access": True},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "code_interpreter", "container": "cntr_1"},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "gone", "server_url": "https://example.com"},
        {"type": "tool_search"},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ]
    response = respond(scripted, call("f"), [*hosted, F], stream=stream)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert sorted(warning["param"] for warning in response["warnings"]) == [f"tools[{index}]" for index in range(7)]
    assert {warning["code"] for warning in response["warnings"]} == {"tool_left_out"}
    assert "web_search" in response["warnings"][0]["message"]
    assert respond(scripted, "Hi.", hosted, stream=stream)["output"][0]["type"] == "message"
    assert respond(scripted, "Hi.", hosted, stream=stream, tool_choice="none")["status"] == "completed"


@both
@pytest.mark.parametrize(
    ("tool", "name", "arguments", "kind", "fields"),
    [
        (
            {"type": "shell"}, "shell", {"commands": ["ls"], "timeout_ms": 5}, "shell_call",
            {"action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None}},
        ),
        (
            {"type": "local_shell"}, "local_shell", {"command": ["ls", "-l"], "working_directory": "/"},
            "local_shell_call",
            {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None, "user": None,
                        "working_directory": "/"}},
        ),
        (
            {"type": "apply_patch"}, "apply_patch", {"type": "create_file", "path": "a", "diff": "+x"},
            "apply_patch_call", {"operation": {"type": "create_file", "path": "a", "diff": "+x"}},
        ),
        (
            {"type": "computer"}, "computer", {"actions": [{"type": "wait"}]}, "computer_call",
            {"actions": [{"type": "wait"}], "pending_safety_checks": []},
        ),
        (
            {"type": "computer_use_preview", "display_height": 9, "display_width": 9, "environment": "linux"},
            "computer", {"type": "screenshot"}, "computer_call",
            {"action": {"type": "screenshot"}, "pending_safety_checks": []},
        ),
        (
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}, "tool_search",
            {"query": "q"}, "tool_search_call", {"arguments": {"query": "q"}, "execution": "client"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_built_in_tools_of_the_client_have_items_of_their_own(
    scripted: Any, stream: bool, tool: Any, name: str, arguments: Any, kind: str, fields: Any
) -> None:
    response = respond(scripted, call(name, **arguments), [tool], stream=stream)
    (item,) = response["output"]
    assert (item["type"], item["status"]) == (kind, "completed")
    assert {key: item[key] for key in fields} == fields
    assert item["call_id"]


def test_tool_choice_names_tools_of_every_shape(scripted: Any) -> None:
    group = {"type": "namespace", "name": "crm", "description": "x", "tools": [F, {"type": "custom", "name": "note"}]}
    tools = [F, group, {"type": "custom", "name": "patch"}, {"type": "shell"}, {"type": "web_search"}]
    for choice, name in (
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "crm"}, "crm__f"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "custom", "name": "note", "namespace": "crm"}, "crm__note"),
        ({"type": "shell"}, "shell"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}, "patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]}, "crm__f"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"type": "shell"}]},
            "shell",
        ),
    ):
        forced = choice.get("mode") != "auto" and choice["type"] != "allowed_tools"
        text = "{}}\n</tool_call>" if forced else call(name)
        if choice["type"] == "allowed_tools" and choice["mode"] == "required":
            text = text.removeprefix('<tool_call>\n{"name": "')
        response = respond(scripted, text, tools, tool_choice=choice)
        told = [warning["param"] for warning in response["warnings"]]
        assert (len(response["output"]), told) == (1, ["tools[4]"]), (choice, response["output"])
        assert response["output"][0]["type"] != "message", (choice, response["output"])


def test_names_that_collide_stay_apart_and_doubles_are_told() -> None:
    tools = ClientTools()
    for index, (namespace, name) in enumerate([(None, "a__b"), ("a", "b"), ("a", "b"), (None, "a__b")]):
        tools.add(ClientTool(function={"name": name}, name=name, namespace=namespace), f"tools[{index}]")
    assert tools.shown_names() == ["a__b", "a__b_2"]
    assert (tools.get("a__b_2").namespace, tools.get("a__b_2").name) == ("a", "b")  # type: ignore[union-attr]
    assert [warning.param for warning in tools.warnings] == ["tools[2]", "tools[3]"]
    assert tools.shown_name("b", "a") == "a__b_2"
    assert tools.shown_name("gone", "a") == "a__gone"


def test_ten_thousand_tools_in_one_namespace(scripted: Any) -> None:
    inner = [{"type": "function", "name": f"f{index}"} for index in range(10_000)]
    body = {"model": "tiny", "input": "x", "tools": [{"type": "namespace", "name": "n", "tools": inner}]}
    # Without the description that OpenAI's type of a namespace wants.
    answer = httpx.post(f"{scripted.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' { "input" :"\\ud83d\\ude00\\u00e9\\"\\\\/"} ', '\U0001f600é"\\/'),
        ('{"input": "\\ud83d x"}', "� x"),
        ('{"patch": "a"}', "a"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"a": "x", "input": "y"}', "y"),
        ('"text"', "text"),
        ("{}", ""),
        ("no json", "no json"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"input": "', ""),
    ],
)
def test_the_text_of_a_call_is_the_same_however_it_comes(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    for size in (1, 2, 3, 5):
        reading = CallInput()
        pieces = [reading.feed(arguments[start : start + size]) for start in range(0, len(arguments), size)]
        assert "".join(pieces) + reading.finish() == text


@pytest.fixture(scope="module")
def demo(quire_serve: Any) -> Any:
    """The demo model, whose calls are held to grammars."""
    url = quire_serve("--served-model-name", "tiny").url()
    with httpx.Client(base_url=url, timeout=120) as client:
        yield SimpleNamespace(client=client)


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF "b"+\n%import common.LF'}


@both
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (GRAMMAR, "a\nbbbb"),
        ({"type": "grammar", "syntax": "regex", "definition": r'a\n"(b|c)+"'}, 'a\n"bcb"'),
    ],
)
def test_the_text_of_a_custom_tool_follows_its_grammar(
    demo: Any, stream: bool, form: dict[str, Any], text: str
) -> None:
    """The demo model would say something else; forced or not, what it says in a call follows the grammar."""
    tool = {"type": "custom", "name": "note", "format": form}
    choice = {"type": "custom", "name": "note"}
    response = respond(demo, "x", [tool], stream=stream, tool_choice=choice, max_output_tokens=200, temperature=1.0)
    (item,) = response["output"]
    assert item["type"] == "custom_tool_call"
    pattern = r"a\nb+" if form is GRAMMAR else form["definition"]
    if item["status"] == "completed":
        assert re.fullmatch(pattern, item["input"]), item
    else:
        assert item["input"][:2] == text[:2], item
        assert set(item["input"]) <= set('abc\n"'), item


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_that_does_not_compile_is_named(scripted: Any, syntax: str) -> None:
    wrong = {"type": "grammar", "syntax": syntax, "definition": "start: ("}
    tools = [F, {"type": "custom", "name": "a", "format": GRAMMAR}, {"type": "custom", "name": "b", "format": wrong}]
    error = scripted.post("/v1/responses", {"model": "tiny", "input": "x", "tools": tools}).json()["error"]
    assert (error["param"], error["code"]) == ("tools[2].format.definition", "invalid_grammar")
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": "start: ("}}
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "custom", "custom": {"name": "a", "format": form}}],
    }  # fmt: skip
    error = scripted.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools[0].custom.format.grammar.definition"


def test_a_grammar_that_is_not_followed_is_told(make_scripted: Any) -> None:
    server = make_scripted(config={"tool_call_parser": "qwen3_coder"})
    tool = {"type": "custom", "name": "note", "format": GRAMMAR}
    text = "<tool_call>\n<function=note>\n<parameter=input>\nfree\n</parameter>\n</function>\n</tool_call>"
    response = respond(server, text, [tool])
    assert response["output"][0]["input"] == "free"
    assert [(each["code"], each["param"]) for each in response["warnings"]] == [
        ("grammar_not_enforced", "tools[0].format.definition")
    ]


CHAT_PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Free text."}}


def test_a_custom_tool_in_chat_completions(scripted: Any) -> None:
    messages = [{"role": "user", "content": f"¤{call('patch', input=PATCH)}¥"}]
    body = {"model": "tiny", "messages": messages, "tools": [CHAT_PATCH, {"type": "web_search"}], "max_tokens": 600}
    whole = scripted.client.post("/v1/chat/completions", json=body).json()
    (made,) = whole["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": PATCH})
    assert "function" not in made
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert [warning["param"] for warning in whole["warnings"]] == ["tools[1]"]
    # OpenAI's client knows no custom calls in streams.
    answer = httpx.post(f"{scripted.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
    lines = answer.text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [chunk.get("warnings") for chunk in chunks] == [whole["warnings"], *[None] * (len(chunks) - 1)]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "patch")
    assert "".join(delta["custom"]["input"] for delta in deltas) == PATCH
    again = [*messages, whole["choices"][0]["message"], {"role": "tool", "tool_call_id": made["id"], "content": "ok"}]
    arguments = json.loads(readable_messages(again)[1]["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"input": PATCH}
    more = scripted.client.post("/v1/chat/completions", json={**body, "messages": [*again, messages[0]]})
    assert more.status_code == 200, more.text


def test_what_a_model_cannot_read_becomes_a_line_in_old_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    old = {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "file", "filename": "a.pdf"}, image]}
    read = readable_messages([old, result, old])
    assert [message["content"] for message in read] == [
        "Look: [image left out: this model reads text only]\n",
        "[file 'a.pdf' left out: this model reads text only]\n[image left out: this model reads text only]\n",
        old["content"],
    ]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHAT_PATCH]}},
    ],
)
def test_a_custom_tool_of_chat_completions_can_be_chosen(scripted: Any, choice: dict[str, Any]) -> None:
    text = json.dumps({"input": PATCH}) + "}\n</tool_call>"
    if choice["type"] == "allowed_tools":
        text = f'patch", "arguments": {text}'
    messages = [{"role": "user", "content": f"¤{text}¥"}]
    tools = [CHAT_PATCH, {"type": "function", "function": {"name": "f"}}]
    body = {"model": "tiny", "messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 600}
    (made,) = scripted.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    assert made["custom"] == {"name": "patch", "input": PATCH}
