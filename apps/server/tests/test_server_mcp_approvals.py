"""An approval runs its call once: whoever sends it again, at the same time, after a failure, or after a restart."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire_server.approved_calls import BegunCalls

SCRIPT = str(Path(__file__).parent / "server_bad_mcp.py")
TOOL = {"type": "mcp", "server_label": "once"}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    once = {"command": sys.executable, "args": [SCRIPT, "ok", str(folder / "calls")]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"once": once}}))
    return folder / "calls"


@pytest.fixture(scope="module")
def start(make_scripted: Any, counted: Path) -> Any:
    def start() -> Any:
        folder = counted.parent
        return make_scripted(mcp_servers=str(folder / "servers.json"), response_store=str(folder / "kept.sqlite"))

    return start


@pytest.fixture(scope="module")
def server(start: Any) -> Any:
    return start()


def asked(server: Any, counted: Path, **arguments: Any) -> dict[str, Any]:
    """A response that waits for the approval of a call."""
    counted.write_text("")
    call = json.dumps({"name": "go", "arguments": arguments})
    response = server.post("/v1/responses", {"input": f"¤<tool_call>\n{call}\n</tool_call>¥", "tools": [TOOL]}).json()
    assert response["output"][-1]["type"] == "mcp_approval_request"
    return dict(response)


def approval(response: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The request that approves it, and goes on."""
    name = response["output"][-1]["id"]
    return {
        "input": [
            {"type": "mcp_approval_response", "approval_request_id": name, "approve": True},
            {"role": "user", "content": "¤Done.¥"},
        ],
        "tools": [TOOL],
        "previous_response_id": response["id"],
        **fields,
    }


def outcome(response: dict[str, Any]) -> str:
    (call,) = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert response["status"] == "completed"
    assert response["output"][-1]["content"][0]["text"] == "Done."
    return str(call["output"] or call["error"]["content"][0]["text"])


@pytest.mark.parametrize("store", [True, False])
def test_sent_again_and_at_the_same_time(server: Any, counted: Path, store: bool) -> None:
    body = approval(asked(server, counted, seconds=0.3), store=store)
    with ThreadPoolExecutor(4) as pool:
        replies = [each.json() for each in pool.map(lambda _: server.post("/v1/responses", body), range(4))]
    replies.append(server.post("/v1/responses", body).json())
    assert {outcome(reply) for reply in replies} == {"done"}
    assert counted.read_text() == "x"
    other = approval(asked(server, counted))
    assert outcome(server.post("/v1/responses", other).json()) == "done"
    assert counted.read_text() == "x", "another approval runs another call"


def test_after_the_client_left(server: Any, counted: Path) -> None:
    body = approval(asked(server, counted, seconds=0.5))
    with server.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        next(line for line in reply.iter_lines() if "mcp_call.in_progress" in line)
    assert outcome(server.post("/v1/responses", body).json()) == "done"
    assert counted.read_text() == "x"


def test_after_a_restart(server: Any, start: Any, counted: Path) -> None:
    body = approval(asked(server, counted))
    assert outcome(server.post("/v1/responses", body).json()) == "done"
    unkept = approval(asked(server, counted), store=False)
    assert outcome(server.post("/v1/responses", unkept).json()) == "done"
    counted.write_text("")
    again = start()
    assert outcome(again.post("/v1/responses", body).json()) == "done"
    assert "was run before" in outcome(again.post("/v1/responses", unkept).json())
    assert counted.read_text() == ""


def test_after_the_answer_failed(server: Any, start: Any, counted: Path) -> None:
    """The call ran, and what came of it is kept, whatever becomes of the answer."""
    body = approval(asked(server, counted))
    with server.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        line = next(line for line in reply.iter_lines() if "response.mcp_call.completed" in line)
        assert line
    assert counted.read_text() == "x"
    assert outcome(start().post("/v1/responses", body).json()) == "done"
    assert counted.read_text() == "x"


def test_what_was_begun_is_each_owner_s_and_is_forgotten(tmp_path: Path) -> None:
    store = BegunCalls(str(tmp_path / "kept.sqlite"), ttl_s=1000)
    assert store.begin(("ann", b"1"), "resp_1") is None
    assert store.begin(("ann", b"1"), "resp_2") == "resp_1"
    assert store.begin(("ben", b"1"), "resp_3") is None
    store.close()
    later = BegunCalls(str(tmp_path / "kept.sqlite"), ttl_s=0)
    assert later.begin(("ann", b"1"), "resp_4") is None
    later.close()
