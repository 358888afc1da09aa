"""Tools of Anthropic's Messages API: those of the client are served whatever their shape, others left out and told."""

from __future__ import annotations

import json

import anthropic
import pytest

from quire_interfaces import RequestError
from quire_server.messages_request import MessagesRequest

CUSTOM = {"name": "now", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}


def request(*tools, messages=({"role": "user", "content": "x"},), **fields):
    body = {"max_tokens": 1, "messages": list(messages), "tools": list(tools), **fields}
    return MessagesRequest.model_validate(body)


def names(tools):
    return [tool["function"]["name"] for tool in tools or ()]


@pytest.mark.parametrize(
    ("tool", "name", "fields"),
    [
        ({"type": "bash_20241022", "name": "bash"}, "bash", {"command", "restart"}),
        ({"type": "bash_20250124", "name": "bash", "cache_control": {}}, "bash", {"command", "restart"}),
        ({"type": "text_editor_20241022", "name": "str_replace_editor"}, "str_replace_editor", {"command", "path"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
            "str_replace_based_edit_tool",
            {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line", "insert_text"},
        ),
        ({"type": "memory_20250818", "name": "memory"}, "memory", {"command", "path", "old_path", "new_path"}),
        (
            {"type": "computer_20251124", "name": "computer", "display_width_px": 1024, "display_height_px": 768},
            "computer",
            {"action", "coordinate", "text", "scroll_direction", "scroll_amount", "duration", "region"},
        ),
        ({"type": "bash_20991231", "name": "bash"}, "bash", {"command", "restart"}),
        ({**CUSTOM, "type": "custom"}, "now", {"zone"}),
        ({**CUSTOM, "type": None, "defer_loading": False, "allowed_callers": ["direct"]}, "now", {"zone"}),
        ({**CUSTOM, "type": "some_future_tool_20270101"}, "now", {"zone"}),
    ],
)
def test_tools_of_the_client_have_a_schema(tool, name, fields):
    use = request(tool).tool_use()
    (shown,) = use.shown
    function = shown["function"]
    assert function["name"] == name
    assert fields <= set(function["parameters"]["properties"])
    assert set(function["parameters"].get("required", ())) <= set(function["parameters"]["properties"])
    assert use.offered.warnings == []
    if "display_width_px" in tool:
        assert "1024 by 768" in function["description"]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305", "web_search_20260209", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset",
        "advisor_20260301", "something_else",
    ],
)  # fmt: skip
def test_tools_that_only_another_server_runs_are_left_out_and_told(kind):
    use = request({"type": kind, "name": "w", "max_uses": 5, "mcp_server_name": "s"}, CUSTOM).tool_use()
    assert names(use.shown) == ["now"]
    (warning,) = use.offered.warnings
    assert (warning.code, warning.param) == ("tool_left_out", "tools[0]")
    assert kind in warning.message
    assert request({"type": kind, "name": "w"}).tool_use().shown is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "w"}):
        with pytest.raises(RequestError) as caught:
            request({"type": kind, "name": "w"}, tool_choice=choice).tool_use()
        assert caught.value.param.startswith("tool_choice")


@pytest.mark.parametrize("name", [None, 5, [], ["now"], {}, {"now": 1}])
def test_a_forced_name_that_is_no_text_is_refused(name):
    with pytest.raises(RequestError) as caught:
        request(CUSTOM, tool_choice={"type": "tool", "name": name}).tool_use()
    assert caught.value.param == "tool_choice.name"


SEARCH = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
LATER = [{**CUSTOM, "name": name, "description": f"Does {name}.", "defer_loading": True} for name in ("f", "g")]


def found(*found_names):
    references = [{"type": "tool_reference", "tool_name": name} for name in found_names]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": references}]},
    ]


def test_tools_that_are_found_later_are_described_where_they_were_found():
    """So the beginning of the prompt stays, and with it what the prefix cache holds."""
    before, after = request(SEARCH, *LATER), request(SEARCH, *LATER, messages=found("g", "unknown"))
    assert names(before.tool_use().shown) == names(after.tool_use().shown) == ["search"]
    assert names(before.tool_use().tools) == ["search"]
    assert names(after.tool_use().tools) == ["search", "g"]
    described, unknown = after.chat_messages()[-1]["content"].splitlines()
    assert json.loads(described) == {"name": "g", "description": "Does g.", "parameters": CUSTOM["input_schema"]}
    assert unknown == "unknown"


def test_a_tool_that_must_be_called_is_shown():
    use = request(SEARCH, *LATER, tool_choice={"type": "tool", "name": "f"}).tool_use()
    assert (names(use.shown), use.name) == (["search", "f"], "f")


def test_a_summary_takes_what_was_found_with_it():
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "s"}]}
    messages = [*found("g"), summary, {"role": "user", "content": "y"}]
    assert names(request(SEARCH, *LATER, messages=messages).tool_use().tools) == ["search"]


def test_without_the_server_s_search_all_tools_are_shown():
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    use = request(search, *LATER).tool_use()
    assert names(use.shown) == ["f", "g"]
    assert "shows all of them" in use.offered.warnings[0].message
    references = [{"type": "tool_reference", "tool_name": "g"}]
    result = {"type": "tool_search_tool_search_result", "tool_references": references}
    block = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": result}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]
    assert names(request(*LATER, messages=[*history, {"role": "user", "content": "y"}]).tool_use().shown) == ["g"]


def test_over_http(scripted):
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]
    arguments = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": f"¤{call}¥"}]}
    with scripted.anthropic() as client:
        whole = client.messages.create(**arguments, tools=tools)
        with client.messages.stream(**arguments, tools=tools) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert (block.type, block.name, block.input) == ("tool_use", "bash", {"command": "ls"})
            (warning,) = message.model_extra["warnings"]
            assert (warning["code"], warning["param"]) == ("tool_left_out", "tools[1]")
        assert "warnings" not in client.messages.create(**arguments, tools=tools[:1]).model_extra

        def count(tools):
            body = {key: value for key, value in arguments.items() if key != "max_tokens"}
            return client.messages.count_tokens(**body, tools=tools).input_tokens

        assert (
            count(tools)
            == count(tools[:1])
            == whole.usage.input_tokens
            + whole.usage.cache_read_input_tokens
            + (whole.usage.cache_creation_input_tokens)
        )
        forced = {"tool_choice": {"type": "tool", "name": "web_search"}}
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice.name must name one of the tools"):
            client.messages.create(**arguments, **forced, tools=tools)
