"""Several engines behind one address: requests that choose one, figures of each, more and fewer of them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import time
from typing import Any

import pytest

from quire_engine import EnginePool
from quire_server import cli

BODY = {"prompt": list(range(3, 103)), "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(make_live: Any) -> Any:
    config = {"data_parallel_size": 2, "max_restarts": 20, "forward_output": False}
    return make_live(config=config, engine={"step_time_s": 0.002}, enable_admin_routes=True)


def completed(server: Any, **fields: Any) -> str:
    headers = fields.pop("headers", {})
    response = server.client.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def num_finished(server: Any) -> dict[str, float]:
    """Rank -> requests that ended by their length."""
    text = server.client.get("/metrics").text
    pattern = r'request_success_total\{engine="(\d)",finished_reason="length"\} (.*)'
    return {rank: float(count) for rank, count in re.findall(pattern, text)}


def test_a_header_or_a_field_chooses_the_engine_and_metrics_tell_the_engines_apart(server: Any) -> None:
    before = num_finished(server)
    assert set(before) == {"0", "1"}
    for _ in range(3):
        completed(server, max_tokens=2, headers={"X-data-parallel-rank": "1"})
    completed(server, max_tokens=2, data_parallel_rank=0)
    completed(server, max_tokens=2, data_parallel_rank=0, headers={"X-data-parallel-rank": "1"})
    after = num_finished(server)
    assert {rank: after[rank] - before[rank] for rank in after} == {"0": 2, "1": 3}
    for headers, fields in (({"X-data-parallel-rank": "2"}, {}), ({}, {"data_parallel_rank": 7})):
        response = server.client.post("/v1/completions", json={**BODY, **fields}, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "data_parallel_rank"
    response = server.client.post("/v1/completions", json=BODY, headers={"X-data-parallel-rank": "first"})
    assert response.status_code == 400
    assert "X-data-parallel-rank must be a rank, got 'first'" in response.json()["error"]["message"]


def test_each_engine_is_watched(server: Any) -> None:
    with server.client.stream("GET", "/v1/engine/events") as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        next(events)
        for rank in (0, 1):
            completed(server, max_tokens=20 + rank, data_parallel_rank=rank)
        told: dict[int, list[int]] = {0: [], 1: []}
        while not all(told.values()):
            event = next(events)
            told[event["engine"]] += [each["num_output_tokens"] for each in event["requests"] if each["finished_at"]]
    assert told == {0: [20], 1: [21]}
    response = server.client.get("/v1/engine/events?engine=1&num_events=3")
    assert response.text.count('"engine":1') == 3
    assert '"engine":0' not in response.text


def test_pauses_and_caches_are_those_of_all_engines(server: Any) -> None:
    client = server.client
    assert client.post("/pause?mode=wait").status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": True}
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        held = [threads.submit(completed, server, max_tokens=2, data_parallel_rank=rank) for rank in (0, 1)]
        time.sleep(0.2)
        assert not any(each.done() for each in held)
        assert client.post("/resume").status_code == 200
        for each in held:
            each.result(60)
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.get("/health").status_code == 200


def streamed(server: Any, has_begun: list[int], **fields: Any) -> str:
    text = ""
    with server.client.stream("POST", "/v1/completions", json={**BODY, **fields, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                has_begun.append(1)
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def test_streams_go_on_while_engines_are_killed_restarted_added_and_taken_away(server: Any) -> None:
    expected = [completed(server, prompt=[n + 3] * 20, seed=n) for n in range(4)]
    pool = server.llm.client
    assert isinstance(pool, EnginePool)

    def kill() -> None:
        pid = pool.engines[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def admin(path: str, **body: Any) -> None:
        response = server.client.post(path, **({"json": body} if body else {}))
        assert response.status_code == 200, response.text

    changes = (
        kill,
        lambda: admin("/restart_engines?drain_timeout=0"),
        lambda: admin("/scale_elastic_ep", new_data_parallel_size=3),
        lambda: admin("/scale_elastic_ep", new_data_parallel_size=2, drain_timeout=0),
    )
    for change in changes:
        has_begun: list[int] = []
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            streams = [threads.submit(streamed, server, has_begun, prompt=[n + 3] * 20, seed=n) for n in range(4)]
            while len(has_begun) < 8:
                time.sleep(0.005)
            change()
            assert [each.result(120) for each in streams] == expected
    assert server.client.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
    assert list(pool.engines) == [0, 1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/scale_elastic_ep", {"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ("/scale_elastic_ep", {}, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 2, "drain_timeout": -1}, "drain_timeout"),
        ("/restart_engines?drain_timeout=soon", None, "drain_timeout"),
        ("/restart_engines?drain_timeout=nan", None, "drain_timeout"),
    ],
)
def test_what_cannot_be_scaled_is_refused(server: Any, path: str, body: Any, param: str) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_server_with_one_engine_says_how_it_may_have_more(make_live: Any) -> None:
    server = make_live(enable_admin_routes=True)
    response = server.client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert response.status_code == 400
    assert "--enable-elastic-ep" in response.json()["error"]["message"]
    response = server.client.post("/v1/completions", json={**BODY, "data_parallel_rank": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "data_parallel_rank"


def test_a_plan_shows_what_each_engine_gets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--data-parallel-size", "2", "--num-threads", "1", "--max-model-len", "256"]) == 0
    told = capsys.readouterr().out
    assert "for each of 2 engines, " in told
    assert "  rank 0: cpu, 1 threads" in told
    assert "  rank 1: cpu, 1 threads" in told
    assert cli.main(["plan", "-dp", "4", "-dpn", "3", "--max-model-len", "256", "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["data_parallel_rank"] == 3


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "Paris, " * 40 + '"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def called(server: Any, has_begun: list[int]) -> tuple[str, str, str]:
    """Name, arguments and finish reason of the call that a stream tells piece by piece."""
    body = {"messages": [{"role": "user", "content": f"¤{CALL}¥"}], "tools": [TOOL], "stream": True}
    name = arguments = reason = ""
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"] or [{"delta": {}}]
            reason = choice.get("finish_reason") or reason
            for call in choice["delta"].get("tool_calls") or ():
                has_begun.append(1)
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    return name, arguments, reason


def test_a_tool_call_is_streamed_on_by_another_engine(make_scripted: Any) -> None:
    config = {"data_parallel_size": 2, "max_restarts": 5, "forward_output": False}
    server = make_scripted(config=config, engine={"step_time_s": 0.01})
    expected = called(server, [])
    assert expected[::2] == ("weather", "tool_calls")
    assert json.loads(expected[1]) == {"city": "Paris, " * 40}
    pool, has_begun = server.llm.client, list[int]()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stream = threads.submit(called, server, has_begun)
        while len(has_begun) < 5:
            time.sleep(0.005)
        (victim,) = [engine for engine in pool.engines.values() if engine.num_requests()]
        os.kill(victim.pid, signal.SIGKILL)
        assert stream.result(60) == expected
    assert pool.num_restarts == 1
