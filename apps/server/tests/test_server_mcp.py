"""Tools of a real MCP server, called by the server for the official client, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire_interfaces import ConfigError
from quire_server.mcp_servers import MCPServer, MCPToolError, read_mcp_servers
from quire_server.mcp_tools import MCPTools
from quire_server.responses_items import ItemReader

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: dict[str, Any] = {"type": "mcp", "server_label": "tools", "require_approval": "never"}
LOCAL: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}


NAMES = ["get_weather", "divide", "leave", "hang", "picture"]
HERE = str(Path(__file__).parent / "server_mcp_tools.py")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def server(make_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mcp") / "servers.json"
    command = {"command": sys.executable, "args": [HERE]}
    gone = {"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}
    path.write_text(json.dumps({"mcpServers": {"tools": command, "more tools": command, "gone": gone}}))
    return make_scripted(mcp_servers=str(path), engine={"max_model_len": 4096})


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with server.openai() as client:
        yield client


def ask(client: Any, text: str, **arguments: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": f"¤{text}¥", "tools": [TOOL], **arguments})


# The scripted model repeats itself in every turn, so a limit of calls ends it.
SAYS = f"I look.\n{call('get_weather', city='Paris')}\n{call('divide', a=1, b=0)}"


def check_items(output: Any) -> None:
    assert output[0].type == "mcp_list_tools"
    assert [tool.name for tool in output[0].tools] == NAMES
    assert output[0].tools[0].input_schema["properties"]["city"] == {"title": "City", "type": "string"}
    turns = [item.type for item in output[1:]]
    assert turns == ["message", "mcp_call", "mcp_call"] * 3
    good, bad = output[2], output[3]
    assert (good.name, good.server_label, good.status, good.output) == (
        "get_weather",
        "tools",
        "completed",
        "Sunny in Paris",
    )
    assert (bad.status, bad.output) == ("failed", None)
    assert "divide" in bad.error.content[0]["text"]
    assert output[-1].error.message == "no tool calls are left"


def test_calls_are_run_and_the_model_goes_on(client: Any, server: Any) -> None:
    whole = ask(client, SAYS, max_tool_calls=4)
    raw = server.client.get(f"/v1/responses/{whole.id}")
    Response.model_validate_json(raw.text, strict=True)
    check_items(whole.output)
    assert whole.usage.output_tokens > 3 * 40
    alone = ask(client, SAYS, max_tool_calls=0)
    assert alone.usage.input_tokens * 3 < whole.usage.input_tokens, "each turn sees what the calls gave"
    after = ask(client, "Done.", previous_response_id=whole.id)
    assert after.output_text == "Done."
    assert after.usage.input_tokens > alone.usage.input_tokens + 4 * 10
    given = server.post("/v1/responses", {"input": [item.to_dict() for item in whole.output] + [
        {"role": "user", "content": "¤ok¥"}]})  # fmt: skip
    assert given.status_code == 200, given.text


def test_the_same_streamed(client: Any) -> None:
    events = list(ask(client, SAYS, max_tool_calls=4, stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    check_items(response.output)
    of_call = [event.type for event in events if getattr(event, "output_index", None) == 2]
    assert [name for name in of_call if not name.endswith("delta")] == [
        "response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.done",
        "response.mcp_call.completed", "response.output_item.done",
    ]  # fmt: skip
    pieces = [e.delta for e in events if e.type == "response.mcp_call_arguments.delta" and e.output_index == 2]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    done = {e.output_index: e.item for e in events if e.type == "response.output_item.done"}
    assert [done[index].to_dict() for index in sorted(done)] == [item.to_dict() for item in response.output]


def test_a_call_of_the_client_s_own_ends_the_response(client: Any) -> None:
    says = f"{call('now')}\n{call('get_weather', city='Rome')}"
    response = ask(client, says, tools=[{**TOOL, "allowed_tools": ["get_weather"]}, LOCAL])
    assert [item.type for item in response.output] == ["mcp_list_tools", "function_call", "mcp_call"]
    assert [tool.name for tool in response.output[0].tools] == ["get_weather"]
    assert response.output[2].output == "Sunny in Rome"


def test_a_server_that_dies_fails_the_call_and_comes_back(client: Any) -> None:
    response = ask(client, call("leave"), max_tool_calls=1)
    assert response.output[1].status == "failed"
    assert ask(client, call("get_weather", city="Oslo"), max_tool_calls=1).output[1].output == "Sunny in Oslo"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"server_label": None}, "tools[0].server_label"),
        ({"server_label": "gone"}, "tools[0]"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval"),
        ({"require_approval": {"never": {"tool_names": ["other"]}}}, "tools[0].require_approval.never"),
        ({"server_url": "http://127.0.0.1:9"}, "tools[0].server_url"),
        ({"allowed_tools": ["other"]}, "tools[0].allowed_tools"),
        ({"allowed_tools": "x"}, "tools[0].allowed_tools"),
    ],
)
def test_wrong_requests_are_named(server: Any, changes: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {"input": "x", "tools": [{**TOOL, **changes}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_tool_of_a_function_s_name_is_known_by_its_server(client: Any) -> None:
    mine = {**LOCAL, "name": "divide"}
    response = ask(client, f"{call('divide')}\n{call('tools__divide', a=4, b=2)}", tools=[TOOL, mine])
    assert [item.type for item in response.output] == ["mcp_list_tools", "function_call", "mcp_call"]
    assert (response.output[1].name, response.output[2].name) == ("divide", "divide")
    assert response.output[2].output == "2.0"


def test_two_servers_with_tools_of_one_name(client: Any) -> None:
    """Each is known by its server to the model, and by its own name to the client; others keep their names."""
    more = {**TOOL, "server_label": "more tools", "allowed_tools": ["divide"]}
    tools = [{**TOOL, "allowed_tools": ["get_weather", "divide"]}, more]
    says = "\n".join(
        [call("tools__divide", a=1, b=2), call("more_tools__divide", a=3, b=4), call("get_weather", city="Bonn")]
    )
    first = ask(client, says, tools=tools, max_tool_calls=3)
    ran = [item for item in first.output if item.type == "mcp_call"][:3]
    assert [(item.server_label, item.name, item.output) for item in ran] == [
        ("tools", "divide", "0.5"),
        ("more tools", "divide", "0.75"),
        ("tools", "get_weather", "Sunny in Bonn"),
    ]
    listed = [item for item in first.output if item.type == "mcp_list_tools"]
    assert [[tool.name for tool in item.tools] for item in listed] == [["get_weather", "divide"], ["divide"]]
    after = ask(client, "Done.", tools=tools, previous_response_id=first.id)
    assert after.output_text == "Done."
    for choice, forced in (
        ({"type": "mcp", "server_label": "more tools", "name": "divide"}, "more tools"),
        ({"type": "mcp", "server_label": "tools", "name": "divide"}, "tools"),
    ):
        chosen = ask(client, call("divide", a=1, b=1), tools=tools, tool_choice=choice, max_tool_calls=1)
        called = next(item for item in chosen.output if item.type == "mcp_call")
        assert (called.server_label, called.name) == (forced, "divide")


def test_calls_are_told_to_the_model_by_the_names_that_it_knows(server: Any) -> None:
    async def tools() -> MCPTools:
        asked = [{**TOOL, "server_label": label} for label in ("tools", "more tools")]
        return await MCPTools.of(asked, server.context.mcp_servers, ["more_tools__divide"])

    mcp = server.call(tools())
    assert mcp.names_by_label()["more tools"]["divide"] == "more_tools__divide_2", "the client's has that name"
    ran = {"type": "mcp_call", "id": "mcp_1", "server_label": "more tools", "name": "divide", "arguments": "{}"}
    gone = {**ran, "id": "mcp_2", "server_label": "gone"}
    [message, *_] = ItemReader(mcp_name=mcp.shown_name).chat_messages([{**ran, "output": "1"}, {**gone, "output": "2"}])
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["more_tools__divide_2", "divide"]


def test_a_server_may_be_named_twice(client: Any) -> None:
    tools = [{**TOOL, "allowed_tools": ["divide"]}, {**TOOL, "require_approval": "always"}]
    response = ask(client, call("divide", a=1, b=2), tools=tools)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_list_tools", "mcp_approval_request"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_wait_for_approval(client: Any, server: Any, stream: bool) -> None:
    def run(text: Any, **arguments: Any) -> Any:
        if not stream:
            response = client.responses.create(model="tiny", input=text, **arguments)
            Response.model_validate_json(server.client.get(f"/v1/responses/{response.id}").text, strict=True)
            return response
        events = list(client.responses.create(model="tiny", input=text, stream=True, **arguments))
        for event in events:
            EVENT.validate_python(event.to_dict(), strict=True)
        done = {e.output_index: e.item for e in events if e.type == "response.output_item.done"}
        output = events[-1].response.output
        assert [done[index].to_dict() for index in sorted(done)] == [item.to_dict() for item in output]
        return events[-1].response

    # Left out means always, as does everything that an object does not name.
    tools = [{"type": "mcp", "server_label": "tools", "require_approval": {"never": {"tool_names": ["divide"]}}}]
    says = f"{call('get_weather', city='Bern')}\n{call('divide', a=4, b=2)}"
    asked = run(f"¤{says}¥", tools=tools)
    assert [item.type for item in asked.output] == ["mcp_list_tools", "mcp_approval_request", "mcp_call"]
    request = asked.output[1]
    assert (request.name, request.server_label, json.loads(request.arguments)) == (
        "get_weather", "tools", {"city": "Bern"},
    )  # fmt: skip
    assert asked.output[2].output == "2.0"

    answer = {"type": "mcp_approval_response", "approval_request_id": request.id}
    after = run(
        [{**answer, "approve": True}, {"role": "user", "content": "¤Done.¥"}],
        tools=tools,
        previous_response_id=asked.id,
    )
    assert [item.type for item in after.output] == ["mcp_list_tools", "mcp_call", "message"]
    ran = after.output[1]
    assert (ran.output, ran.status, ran.approval_request_id) == ("Sunny in Bern", "completed", request.id)
    refused = run(
        [{**answer, "approve": False, "reason": "No."}, {"role": "user", "content": "¤Done.¥"}],
        tools=tools, previous_response_id=asked.id,
    )  # fmt: skip
    assert [item.type for item in refused.output] == ["mcp_list_tools", "message"]
    again = run([{**answer, "approve": True}, {"role": "user", "content": "¤Done.¥"}], tools=tools,
        previous_response_id=after.id)  # fmt: skip
    assert [item.type for item in again.output] == ["mcp_list_tools", "message"], "a call is run once"


def test_what_was_approved_or_refused_is_told_to_the_model() -> None:
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "t", "name": "f", "arguments": "{}"}
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1"}
    ran = {"type": "mcp_call", "id": "mcp_1", "approval_request_id": "mcpr_1", "name": "f", "arguments": "{}"}
    question = {"type": "message", "role": "user", "content": "q"}
    assert ItemReader().chat_messages([question, asked]) == [{"role": "user", "content": "q"}]
    approved = ItemReader().chat_messages([question, asked, {**answer, "approve": True}, {**ran, "output": "good"}])
    assert [message["role"] for message in approved] == ["user", "assistant", "tool"]
    assert approved[-1]["content"] == "good"
    refused = ItemReader().chat_messages([question, asked, {**answer, "approve": False, "reason": "Too dear."}])
    assert [message["role"] for message in refused] == ["user", "assistant", "tool"]
    assert refused[-1]["content"] == "The user did not approve this call. Too dear."


def test_wrong_approvals_are_named(server: Any) -> None:
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "t", "name": "f", "arguments": "{}"}
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    for items, param in (
        ([answer], "input[0].approval_request_id"),
        ([asked, {**answer, "approve": "yes"}], "input[1].approve"),
        ([asked, answer], "input[1]"),
    ):
        response = server.post("/v1/responses", {"input": items, "tools": [TOOL]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def servers_of(folder: Path, timeout_s: float = 60.0, **specs: dict[str, Any]) -> dict[str, MCPServer]:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": specs}))
    return read_mcp_servers(str(folder / "servers.json"), timeout_s)


@pytest.mark.parametrize("kind", ["http", "sse"])
def test_a_server_by_address_with_headers(tmp_path: Path, kind: str) -> None:
    with subprocess.Popen([sys.executable, HERE, kind], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            far = {"type": kind, "url": url, "headers": {"authorization": "Bearer secret"}}
            servers = servers_of(tmp_path, far=far, shut={"type": kind, "url": url})

            async def use() -> None:
                tools = await servers["far"].list_tools()
                assert [tool["name"] for tool in tools] == NAMES
                assert await servers["far"].call("get_weather", {"city": "Ulm"}) == "Sunny in Ulm"
                with pytest.raises(MCPToolError):
                    await servers["shut"].list_tools()
                for server in servers.values():
                    await server.close()

            asyncio.run(use())
        finally:
            process.kill()


def test_odd_servers_and_tools(tmp_path: Path) -> None:
    many = {"type": "stdio", "command": sys.executable, "args": [HERE, "many"]}
    servers = servers_of(tmp_path, many=many)
    mute = {"command": sys.executable, "args": ["-c", "import time; time.sleep(3600)"]}
    [silent] = servers_of(tmp_path, timeout_s=0.5, mute=mute).values()

    async def use() -> None:
        server = servers["many"]
        tool = {"type": "mcp", "server_label": "many", "allowed_tools": ["tool_199", "picture"]}
        assert len((await MCPTools.of([{**tool, "allowed_tools": None}], servers, ())).chat_tools()) == 205
        some = (await MCPTools.of([tool], servers, ())).chat_tools()
        assert [each["function"]["name"] for each in some] == ["picture", "tool_199"]
        shown = await server.call("picture", {})
        assert shown.splitlines() == [
            "Here:", "[image of image/png: left out, this model reads text only]", "by the sea",
        ]  # fmt: skip
        with pytest.raises(MCPToolError, match="no_such"):
            await server.call("no_such", {})
        server._timeout_s = 0.5  # now that the connection is there
        with pytest.raises(MCPToolError, match=r"did not answer within 0\.5 s"):
            await server.call("hang", {})
        server._timeout_s = 60.0
        assert await server.call("tool_7", {}) == "7", "a tool that hangs keeps nobody else"
        with pytest.raises(MCPToolError, match=r"'mute' did not answer within 0\.5 s"):
            await silent.list_tools()
        for each in (server, silent):
            await each.close()

    asyncio.run(use())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"mcpServers": {"a": {}}}',
        '{"mcpServers": {"a": {"url": 3}}}',
        '{"mcpServers": {"a": {"type": "sse", "command": "x"}}}',
        '{"mcpServers": {"a": {"type": "stdio", "url": "http://x"}}}',
        '{"mcpServers": {"a": {"type": "ws", "url": "x"}}}',
    ],
)
def test_a_wrong_file_is_told_at_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(ConfigError):
        read_mcp_servers(str(tmp_path / "servers.json"), 1.0)
    with pytest.raises(ConfigError):
        read_mcp_servers(str(tmp_path / "missing.json"), 1.0)
