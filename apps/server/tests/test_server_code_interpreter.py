"""The code interpreter of the examples: bounded programs, and calls of it in responses."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseCodeInterpreterToolCall

from quire_server.responses_items import ItemReader

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "code_interpreter"
sys.path.insert(0, str(EXAMPLE))
from bounded_program import Limits, isolates, run_program  # noqa: E402

Run = Callable[..., str]


@pytest.fixture(scope="module", params=["isolated", "alone"])
def run(request: pytest.FixtureRequest) -> Run:
    is_isolated = request.param == "isolated"
    if is_isolated and not isolates():
        pytest.skip("the isolation was NOT tried: this system lets no namespaces be made")
    return lambda code, **limits: run_program(code, Limits(**limits), is_isolated=is_isolated)


def test_what_a_program_prints_is_its_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert run("print(6 * 7)") == "42\n"
    assert run("x = 6\nx * 7") == "42\n"
    assert run("None") == ""
    assert run("1 / 0").endswith("ZeroDivisionError: division by zero\n[it ended with status 1]")
    assert "SyntaxError" in run("print(")
    assert run("import os; open('a', 'w').write('b'); os.getcwd(), os.listdir(), 'SECRET' in os.environ").endswith(
        "['a'], False)\n"
    )


def test_programs_are_bounded(run: Run, tmp_path: Path) -> None:
    assert run("print('begun', flush=True)\nwhile True: pass", timeout_s=1) == "begun\n[ended: it took longer than 1 s]"
    assert "MemoryError" in run("x = bytearray(1 << 30)", memory_bytes=1 << 29)
    assert run("while True: print('x' * 99)", output_bytes=1000).endswith("x\n[ended: it printed more than 1000 bytes]")
    assert "File too large" in run("open('a', 'wb').write(bytes(1 << 20))", file_bytes=1 << 19)
    folder = run("import os; print(os.getcwd())").strip()
    assert not os.path.exists(folder)


@pytest.mark.skipif(not isolates(), reason="the isolation was NOT tried: this system lets no namespaces be made")
def test_an_isolated_program_has_no_network_and_sees_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('reached')"
        assert "Network is unreachable" in run_program(code, Limits(), is_isolated=True)
        assert run_program(code, Limits(), is_isolated=False) == "reached\n"
    code = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    assert run_program(code, Limits(), is_isolated=True) == "1\n"
    assert int(run_program(code, Limits(), is_isolated=False)) > 1
    code = (
        "import subprocess, time\n"
        "null = subprocess.DEVNULL\n"
        "subprocess.Popen(['sleep', '271.828'], start_new_session=True, stdout=null, stderr=null)"
    )
    run_program(code, Limits(), is_isolated=True)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"271.828" in line for line in lines), "what it began ends with it"


@pytest.fixture(scope="module")
def server(make_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mcp") / "servers.json"
    servers = json.loads((EXAMPLE / "mcp_servers.json").read_text())
    (entry,) = servers["mcpServers"].values()
    entry |= {"command": sys.executable, "args": [str(EXAMPLE / "server.py"), "--without-isolation"]}
    path.write_text(json.dumps(servers))
    return make_scripted(mcp_servers=str(path), engine={"max_model_len": 4096})


TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def ask(server: Any, code: str, **arguments: Any) -> dict[str, Any]:
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    text = f"¤<tool_call>\n{call}\n</tool_call>¥"
    response = server.post("/v1/responses", {"input": text, "tools": [TOOL], "max_tool_calls": 1, **arguments})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_response_calls_it(server: Any) -> None:
    response = ask(server, "print(sum(range(10)))", include=["code_interpreter_call.outputs"])
    call, refused = response["output"]
    assert (call["type"], call["status"], call["code"]) == (
        "code_interpreter_call",
        "completed",
        "print(sum(range(10)))",
    )
    assert call["outputs"] == [{"type": "logs", "logs": "45\n"}]
    assert (call["id"][:3], call["container_id"][:5]) == ("ci_", "cntr_")
    assert (refused["status"], refused["outputs"][0]["logs"]) == ("failed", "no tool calls are left")
    assert "warnings" not in response
    for item in (call, refused):
        ResponseCodeInterpreterToolCall.model_validate(item, strict=True, extra="forbid")
    forced = ask(server, "1", tool_choice={"type": "code_interpreter"})["output"]
    assert {item["type"] for item in forced} == {"code_interpreter_call"}
    named = {"type": "mcp", "server_label": "code_interpreter", "require_approval": "never"}
    listed, called, *_ = ask(server, "print(1)", tools=[named])["output"]
    assert (listed["type"], listed["tools"][0]["name"]) == ("mcp_list_tools", "python")
    isolation = "There is no network." if isolates() else "NOT ISOLATED"
    assert isolation in listed["tools"][0]["description"]
    assert (called["type"], called["output"]) == ("mcp_call", "1\n")


def test_a_stream_tells_the_program_as_it_is_written_and_what_it_printed(server: Any) -> None:
    code = 'print("a\\tb" * 2)\n'
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    text = f"¤<tool_call>\n{call}\n</tool_call>¥"
    asked = {"model": "tiny", "input": text, "tools": [TOOL], "max_tool_calls": 1}
    with (
        server.openai() as client,
        client.responses.create(**asked, stream=True, include=["code_interpreter_call.outputs"]) as stream,
    ):
        events = list(stream)
    first = [event for event in events if event.type.startswith("response.code_interpreter_call")]
    first = [event for event in first if event.output_index == first[0].output_index]
    *deltas, done = [event for event in first if "_code." in event.type]
    assert {event.type for event in deltas} == {"response.code_interpreter_call_code.delta"}
    assert deltas, "how many there are depends on how many tokens the server reads at once"
    assert "".join(event.delta for event in deltas) == done.code == code
    assert [event.type.rpartition(".")[2] for event in first if "_code." not in event.type] == [
        "in_progress",
        "interpreting",
        "completed",
    ]
    ends = [event.item for event in events if event.type == "response.output_item.done"]
    assert isinstance(ends[0], ResponseCodeInterpreterToolCall)
    assert ends[0].outputs[0].logs == "a\tba\tb\n"
    assert events[-1].response.output[0] == ends[0]


def test_the_model_is_told_of_earlier_programs(server: Any) -> None:
    item = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "print(6)",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "6\n"}],
        "status": "completed",
    }
    messages = ItemReader(interpreter_name="python").chat_messages([item])
    assert messages[0]["tool_calls"][0]["function"] == {"name": "python", "arguments": {"code": "print(6)"}}
    assert (messages[1]["role"], messages[1]["content"]) == ("tool", "6\n")
    first = ask(server, "print(6)")
    again = server.post(
        "/v1/responses",
        {"input": "¤fine¥", "tools": [TOOL], "previous_response_id": first["id"], "max_output_tokens": 8},
    )
    assert again.status_code == 200, again.text
    assert again.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"] / 2


def test_files_of_other_containers_are_not_there(server: Any) -> None:
    for container in ("cntr_1", {"type": "auto", "file_ids": ["file-1"]}):
        response = ask(server, "1", tools=[{"type": "code_interpreter", "container": container}])
        assert [warning["param"] for warning in response["warnings"]] == ["tools[0].container"]
