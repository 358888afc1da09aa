"""MCP servers are strangers: whatever they write costs a bounded amount of memory, log and time, and one that fails
keeps no other caller from its answer."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from quire_server import mcp_relay
from quire_server.mcp_http import bounded_client
from quire_server.mcp_relay import bounded_lines
from quire_server.mcp_servers import MAX_ANSWER_BYTES, MAX_RESULT_CHARS, MCPServer, MCPToolError, ServerSpec
from quire_server.mcp_tools import MAX_DESCRIPTION_CHARS, MCPTools

SCRIPT = str(Path(__file__).parent / "server_bad_mcp.py")


@asynccontextmanager
async def bad_server(wrong: str) -> AsyncIterator[MCPServer]:
    server = MCPServer("bad", ServerSpec(command=sys.executable, args=[SCRIPT, wrong]), timeout_s=60.0)
    try:
        yield server
    finally:
        await server.close()
        assert not running_scripts(wrong), "the server's process is left behind"


def running_scripts(wrong: str) -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if command_line(each)[1:] == [SCRIPT, wrong]]


def command_line(process: psutil.Process) -> list[str]:
    """Nothing for one that has ended meanwhile, whether its parent knows or not."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def relayed(wrong: str, *requests: dict[str, Any]) -> tuple[list[Any], str]:
    """Messages of a server, and its log, where the relay alone is asked."""
    command = [sys.executable, mcp_relay.__file__, str(MAX_ANSWER_BYTES), sys.executable, SCRIPT, wrong]
    text = "".join(json.dumps({"jsonrpc": "2.0", **request}) + "\n" for request in requests)
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
    return list(map(json.loads, run.stdout.splitlines())), run.stderr


def request(number: int, method: str = "tools/call", **params: Any) -> dict[str, Any]:
    return {"id": number, "method": method, "params": params}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("wrong", ["endless", "many", "wordy"])
async def test_a_list_of_tools_has_an_end(wrong: str) -> None:
    async with bad_server(wrong) as server:
        with pytest.raises(MCPToolError, match="lists more than 1000 tools"):
            await server.list_tools()


async def test_a_server_that_only_prints_is_not_there() -> None:
    async with bad_server("chatter") as server:
        with pytest.raises(MCPToolError, match="is not there"):
            await server.list_tools()


@pytest.mark.parametrize(("wrong", "printed"), [("chatter", "starting up"), ("almost", '"level": "info"')])
def test_output_that_is_no_message_ends_a_server(wrong: str, printed: str) -> None:
    messages, log = relayed(wrong)
    assert messages == []
    assert printed in log
    assert "bytes that are no messages" in log
    assert len(log) < 1_000


def test_a_little_output_that_is_no_message_is_passed_over() -> None:
    messages, log = relayed("noise", *(request(number) for number in range(3)))
    assert [message["id"] for message in messages] == [0, 1, 2]
    assert log.count("a line that is no message") == 1


def test_what_nobody_asked_for_is_not_passed_on() -> None:
    """A hundred thousand notifications cost the event loop nothing; what the server asks is answered beside it."""
    command = [sys.executable, mcp_relay.__file__, str(MAX_ANSWER_BYTES), sys.executable, SCRIPT, "talk"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        relay.stdin.write(json.dumps({"jsonrpc": "2.0", **request(1)}) + "\n")
        relay.stdin.flush()
        first = json.loads(relay.stdout.readline())
        rest, log = relay.communicate()
    assert (first["id"], rest) == (1, "")
    pong, refusal = (json.loads(line.split("got ")[1]) for line in log.splitlines() if "got " in line)
    assert pong == {"jsonrpc": "2.0", "id": 7, "result": {}}
    assert (refusal["id"], refusal["error"]["code"]) == (7, -32601)


async def served(answer: bytes, parts: int) -> AsyncIterator[str]:
    """The address of a server that sends these bytes to whoever asks, so many times."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for _ in range(parts):
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@pytest.mark.parametrize(
    ("answer", "fits"), [(b"data: " + b"x" * 900 + b"\r\n\r\n", True), (b"data: x\n" * 100, False)]
)
async def test_each_event_of_a_stream_is_bounded(answer: bytes, fits: bool) -> None:
    async for address in served(answer, 50):
        async with bounded_client(None, 10.0, 1000, reads_events=True) as client:
            if fits:
                assert (await client.get(address)).content == answer * 50
            else:
                with pytest.raises(httpx2.ReadError, match="more than the 1000 bytes"):
                    await client.get(address)
        async with bounded_client(None, 10.0, 1000) as client:
            assert (await client.get(address)).status_code == 405, "what a server says unasked is not read"
            with pytest.raises(httpx2.ReadError, match="more than the 1000 bytes"):
                await client.post(address)


def test_logs_are_bounded() -> None:
    messages, log = relayed("log", *(request(number, "tools/list") for number in range(20)))
    assert len(messages) == 20
    assert "debug: xxx" in log
    assert "more lines of its log are left out" in log
    assert len(log) < 50_000


def test_a_server_that_does_not_end_is_ended_with_who_asked_it() -> None:
    command = [sys.executable, mcp_relay.__file__, "1000", sys.executable, "-c", "import time; time.sleep(600)"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=60).returncode == 128 + 9


def test_only_the_request_that_is_named_by_a_long_message_fails() -> None:
    messages, log = relayed("nothing", request(1, arguments={"num_chars": 5_000_000}), request(2))
    failed, done = messages
    assert failed["id"] == 1
    assert "more than the 4194304 that are read" in failed["error"]["message"]
    assert done["id"] == 2
    assert "result" in done
    assert "is left out" in log


async def test_a_message_that_is_too_long_fails_who_waits_for_it_and_nobody_else() -> None:
    async with bad_server("nothing") as server:
        with pytest.raises(MCPToolError, match="more than the 4194304 that are read"):
            await server.call("go", {"num_chars": 20_000_000})
        (process,) = running_scripts("nothing")
        assert await server.call("go", {}) == "done"
        assert running_scripts("nothing") == [process], "it is asked over the same connection"


async def test_a_long_result_is_shortened_and_says_so() -> None:
    async with bad_server("nothing") as server:
        result = await server.call("go", {"num_chars": MAX_RESULT_CHARS + 7})
    assert result.startswith("a" * MAX_RESULT_CHARS + "\n[")
    assert str(MAX_RESULT_CHARS + 7) in result
    assert len(result) < MAX_RESULT_CHARS + 100


async def test_a_server_that_hangs_is_left_and_made_anew() -> None:
    async with bad_server("nothing") as server:
        await server.list_tools()
        (hanging,) = running_scripts("nothing")
        server._timeout_s = 0.5  # now that the connection is there
        with pytest.raises(MCPToolError, match=r"did not answer within 0\.5 s"):
            await server.call("go", {"hang": True})
        server._timeout_s = 60.0
        await until(lambda: hanging not in running_scripts("nothing"))
        assert await server.call("go", {}) == "done"


async def test_work_ends_when_its_caller_goes_away() -> None:
    async with bad_server("nothing") as server:
        await server.list_tools()
        connection = server._connection
        assert connection is not None
        caller = asyncio.ensure_future(server.call("go", {"hang": True}))
        await until(lambda: connection.num_waiting == 1 and connection.questions.empty())
        caller.cancel()
        await asyncio.wait((caller,))
        await until(lambda: not any("MCPServer._answer" in repr(task.get_coro()) for task in asyncio.all_tasks()))


async def test_a_server_is_told_when_nobody_waits_for_a_call(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    spec = ServerSpec(command=sys.executable, args=[SCRIPT, "ok", str(calls)])
    server = MCPServer("bad", spec, timeout_s=60.0)
    caller = asyncio.ensure_future(server.call("go", {"wait": True}))
    await until(lambda: calls.exists() and calls.read_text() == "x")
    caller.cancel()
    await until(lambda: calls.read_text() == "xc")
    await server.close()


async def test_odd_tools_are_left_out_and_long_descriptions_cut() -> None:
    async with bad_server("odd") as server:
        tool = {"type": "mcp", "server_label": "bad"}
        tools = await MCPTools.of([tool], {"bad": server}, ())
    (shown,) = tools.chat_tools()
    assert shown["function"]["name"] == "go"
    assert shown["function"]["description"] == "d" * MAX_DESCRIPTION_CHARS + " [...]"
    assert [(each.code, each.param) for each in tools.warnings] == [("tool_left_out", "tools[0]")] * 2
    assert max(len(each.message) for each in tools.warnings) < 300


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_lines_come_whole_unless_they_are_too_long(chunk: int) -> None:
    class Pieces(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return self.read(chunk)

    lines = [b"", b"short", b"x" * 1000, b'{"id": 3, ' + b"y" * 500_000 + b' "end"}', b"last"]
    found = list(bounded_lines(Pieces(b"\n".join(lines)), 1000))
    assert [length for _, length in found] == [len(line) for line in lines]
    assert [kept for kept, length in found if length <= 1000] == [line for line in lines if len(line) <= 1000]
    kept = found[3][0]
    assert len(kept) <= 1 << 17
    assert kept.startswith(b'{"id": 3')
    assert kept.endswith(b'"end"}')


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls") / "calls"


@pytest.fixture(scope="module")
def client(make_scripted: Any, counted: Path) -> Any:
    path = counted.parent / "servers.json"
    path.write_text(
        json.dumps({"mcpServers": {"bad": {"command": sys.executable, "args": [SCRIPT, "ok", str(counted)]}}})
    )
    server = make_scripted(mcp_servers=str(path), engine={"max_model_len": 1024, "num_blocks": 512})
    with server.openai() as client:
        yield client


def ask_for(client: Any, num_chars: int, **arguments: Any) -> Any:
    call = json.dumps({"name": "go", "arguments": {"num_chars": num_chars}})
    tool = {"type": "mcp", "server_label": "bad", "require_approval": "never"}
    text = f"¤<tool_call>\n{call}\n</tool_call>¥"
    return client.responses.create(model="tiny", input=text, tools=[tool], max_tool_calls=1, **arguments)


@pytest.mark.parametrize("num_chars", [20_000, 150_000, 5_000_000])
def test_a_result_that_does_not_fit_is_told_and_the_tool_runs_once(client: Any, counted: Path, num_chars: int) -> None:
    counted.write_text("")
    whole = ask_for(client, num_chars)
    assert counted.read_text() == "x"
    first, *_ = [item for item in whole.output if item.type == "mcp_call"]
    if num_chars > MAX_ANSWER_BYTES:
        assert "more than the" in first.error.content[0]["text"]
    else:
        assert first.output.startswith("aaaa")
        assert f"[The result has {num_chars} characters; the others are left out.]" in first.output
        assert first.output.count("[The result") == 1
    *_, last = ask_for(client, num_chars, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output[1].output == first.output


def test_a_context_that_is_full_keeps_what_was_called(client: Any, counted: Path) -> None:
    """Not even a line of the result fits: the answer ends, and nobody has to call the tool again."""
    counted.write_text("")
    tool = {"type": "mcp", "server_label": "bad", "require_approval": "never"}
    call = json.dumps({"name": "go", "arguments": {"num_chars": 3000}})
    filler = "abcdefgh " * 5
    for _ in range(400):  # as much as the context holds beside the call itself
        longer = filler + "abcdefgh " * 5
        tokens = client.responses.input_tokens.count(
            model="tiny", input=f"{longer}¤<tool_call>\n{call}\n</tool_call>¥", tools=[tool]
        )
        if tokens.input_tokens > 930:
            break
        filler = longer
    events = list(
        client.responses.create(
            model="tiny",
            input=f"{filler}¤<tool_call>\n{call}\n</tool_call>¥",
            tools=[tool],
            max_tool_calls=1,
            stream=True,
        )
    )
    assert counted.read_text() == "x"
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert response.incomplete_details.reason == "max_output_tokens"
    (ran,) = [item for item in response.output if item.type == "mcp_call"]
    assert (ran.status, ran.output[:4]) == ("completed", "aaaa")
    assert client.responses.retrieve(response.id).status == "incomplete"
