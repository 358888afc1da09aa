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
    response = ask(server, "print(sum(range(10)))")
    listed, call, refused = response["output"]
    assert (listed["type"], listed["tools"][0]["name"]) == ("mcp_list_tools", "python")
    isolation = "There is no network." if isolates() else "NOT ISOLATED"
    assert isolation in listed["tools"][0]["description"]
    assert (call["type"], call["server_label"], call["status"], call["output"]) == (
        "mcp_call",
        "code_interpreter",
        "completed",
        "45\n",
    )
    assert refused["error"]["message"] == "no tool calls are left"
    assert "warnings" not in response
    forced = ask(server, "1", tool_choice={"type": "code_interpreter"})["output"][1:]
    assert {(item["type"], item["server_label"], item["name"]) for item in forced} == {
        ("mcp_call", "code_interpreter", "python")
    }


def test_files_of_other_containers_are_not_there(server: Any) -> None:
    for container in ("cntr_1", {"type": "auto", "file_ids": ["file-1"]}):
        response = ask(server, "1", tools=[{"type": "code_interpreter", "container": container}])
        assert [warning["param"] for warning in response["warnings"]] == ["tools[0].container"]
