"""Several API processes in front of the engines: one address, one state, one count, and each may be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_server.api_servers import num_api_processes
from quire_server.config import ServerConfig

BODY = {"prompt": list(range(3, 40)), "max_tokens": 300, "ignore_eos": True, "seed": 1, "stream": True}
ENGINE = {"step_time_s": 0.01}


def children(process: Any, words: str) -> list[psutil.Process]:
    return [each for each in psutil.Process(process.popen.pid).children() if any(words in w for w in each.cmdline())]


def api_processes(process: Any) -> list[psutil.Process]:
    return children(process, "quire_server.api_process")


class Stream(threading.Thread):
    """A streamed completion on a connection of its own."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self._url, self._body = url, {**BODY, **fields}
        self.text, self.num_events, self.is_done = "", 0, False
        self.error: Exception | None = None
        self.port = 0
        """Of this end of the connection."""
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(timeout=120) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=self._body) as response,
            ):
                self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                for line in response.iter_lines():
                    self.is_done = self.is_done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self.text += json.loads(line[6:])["choices"][0]["text"]
                        self.num_events += 1
        except httpx.HTTPError as error:
            self.error = error


def until(condition: Any, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def owner_of(processes: list[psutil.Process], port: int) -> int | None:
    """Which of the processes has the other end of a connection."""
    for each in processes:
        if any(link.raddr and link.raddr.port == port for link in each.net_connections("tcp")):
            return each.pid
    return None


def fresh(url: str, method: str, path: str, **arguments: Any) -> httpx.Response:
    """Ask on a connection of its own, which any of the processes may take."""
    return httpx.request(method, f"{url}{path}", timeout=60, **arguments)


def test_processes_share_engines_state_and_figures_and_each_may_be_killed(launch: Any) -> None:
    process = launch(
        ENGINE, data_parallel_size=2, server={"enable_admin_routes": True, "enable_sleep_mode": True}, max_restarts=9
    )
    url = process.url()
    first = api_processes(process)
    assert len(first) == 2, "as many as there are engines"
    alone = Stream(url)
    alone.join()
    assert alone.is_done

    # Whichever process is asked, it sees the engines and all requests.
    names = {each["id"] for each in fresh(url, "GET", "/v1/requests").json()["data"]}
    assert len(names) == 1
    for _ in range(4):
        (told,) = fresh(url, "GET", f"/v1/requests/{min(names)}/explain").json()["requests"]
        assert (told["status"], told["numbers"]["num_output_tokens"]) == ("finished", 300)
        assert fresh(url, "GET", "/v1/engine/events?engine=1&num_events=2").text.count('"engine":1') == 2

    # Settings that change hold for all, and for a process that is started again.
    refused = fresh(
        url, "PATCH", "/v1/admin/config", json={"settings": {"api_key_limits": {"x": {}}, "max_num_seqs": 2}}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "api_key_limits")
    settings = {"max_num_seqs": 50, "max_prompts_per_request": 1}
    patched = fresh(url, "PATCH", "/v1/admin/config", json={"settings": settings})
    assert patched.status_code == 200, patched.text
    assert patched.json()["settings"]["max_num_seqs"]["value"] == 50

    def takes_one_prompt() -> None:
        two = {**BODY, "prompt": [[1, 2], [3, 4]], "stream": False}
        for _ in range(12):
            assert fresh(url, "POST", "/v1/completions", json=two).status_code == 400
            assert fresh(url, "GET", "/v1/admin/config").json() == patched.json()

    time.sleep(0.2)
    takes_one_prompt()

    # Streams of both; one of them is killed.
    streams: list[Stream] = []
    while len({owner_of(first, stream.port) for stream in streams}) < 2 or len(streams) < 6:
        streams.append(Stream(url))
        until(lambda: streams[-1].num_events > 2)
        assert len(streams) < 40
    victim = first[0].pid
    lost = [stream for stream in streams if owner_of(first, stream.port) == victim]
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join()
        if stream in lost:
            assert not stream.is_done
            assert alone.text.startswith(stream.text)
        else:
            assert stream.is_done
            assert stream.text == alone.text
    process.wait_for("API process [01] ended by SIGKILL, and with it [0-9]+ requests in flight; it is started again")
    again = Stream(url)
    again.join()
    assert again.text == alone.text
    until(lambda: len(api_processes(process)) == 2 and first[0].pid not in [e.pid for e in api_processes(process)])

    takes_one_prompt()

    # An engine dies: both processes' streams go on.
    engine = children(process, "quire_engine.child")[0]
    streams = [Stream(url) for _ in range(6)]
    until(lambda: all(stream.num_events > 2 for stream in streams))
    os.kill(engine.pid, signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert stream.text == alone.text

    # What one of them was told holds for all.
    assert fresh(url, "POST", "/pause?mode=keep").status_code == 200
    for _ in range(12):
        assert fresh(url, "GET", "/is_paused").json() == {"is_paused": True}
        assert fresh(url, "GET", "/ready").json()["error"]["code"] == "paused"
    assert fresh(url, "POST", "/resume").status_code == 200
    assert fresh(url, "POST", "/sleep?level=0").status_code == 200
    for _ in range(12):
        assert fresh(url, "GET", "/is_sleeping").json() == {"is_sleeping": True, "level": 0}
    assert fresh(url, "POST", "/wake_up").status_code == 200
    until(lambda: fresh(url, "GET", "/ready").status_code == 200)

    # Every one tells the figures of all.
    total = 1 + len(streams) + 1
    pattern = r'request_success_total\{engine="\d",finished_reason="length",model_name="[^"]*"\} (.*)'
    for _ in range(12):
        counts = [float(count) for count in re.findall(pattern, fresh(url, "GET", "/metrics").text)]
        assert sum(counts) >= total
        assert fresh(url, "GET", "/load").json() == {"server_load": 0}
    refused = fresh(url, "POST", "/v1/completions", json={**BODY, "data_parallel_rank": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")
    assert (
        fresh(url, "POST", "/scale_elastic_ep", json={"new_data_parallel_size": 1, "drain_timeout": 0}).status_code
        == 200
    )
    assert fresh(url, "POST", "/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}

    # In good order: what streams is finished, and nothing stays behind.
    last = Stream(url)
    until(lambda: last.num_events > 2)
    everybody = [process.popen.pid, *(each.pid for each in psutil.Process(process.popen.pid).children(recursive=True))]
    process.popen.send_signal(signal.SIGTERM)
    last.join()
    assert last.text == alone.text
    assert process.end() == 0, process.output
    until(lambda: not any(psutil.pid_exists(pid) for pid in everybody))
    assert "Traceback" not in process.output


def test_a_background_response_is_read_and_cancelled_by_any_of_them(launch: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "responses.sqlite")
    process = launch({"step_time_s": 0.05}, server={"api_server_count": 2, "response_store": store})
    url = process.url()
    body = {"input": "hello", "background": True, "max_output_tokens": 400, "ignore_eos": True}
    made = fresh(url, "POST", "/v1/responses", json=body).json()
    path = f"/v1/responses/{made['id']}"
    for _ in range(12):
        assert fresh(url, "GET", path).json()["status"] in ("queued", "in_progress")
    statuses = {fresh(url, "POST", f"{path}/cancel").json()["status"] for _ in range(12)}
    assert statuses == {"cancelled"}
    assert fresh(url, "GET", path).json()["status"] == "cancelled"


def test_they_end_with_the_process_that_has_the_engines(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = launch(ENGINE, server={"api_server_count": 2})
    url = process.url()
    stream = Stream(url)
    until(lambda: stream.num_events > 2)
    everybody = psutil.Process(process.popen.pid).children(recursive=True)
    assert len(everybody) >= 3
    assert len(list(tmp_path.glob("quire-*"))) == 1  # of the sockets of API processes
    process.popen.kill()
    stream.join()
    assert not stream.is_done
    psutil.wait_procs(everybody, 30)
    assert not any(each.is_running() for each in everybody)
    assert not list(tmp_path.glob("quire-*"))


def test_a_wrong_template_ends_the_server_with_the_status_of_a_wrong_setting(launch: Any) -> None:
    process = launch(ENGINE, server={"api_server_count": 2, "chat_template": "/no/such/file"})
    assert process.end() == 2
    assert "there is no chat template file" in process.output


@pytest.mark.parametrize(
    ("settings", "server", "count"),
    [
        ({}, {}, 1),
        ({"data_parallel_size": 3}, {}, 3),
        ({"data_parallel_size": 3}, {"api_server_count": 1}, 1),
        ({"data_parallel_size": 3, "data_parallel_rank": 1}, {}, 1),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, {}, 2),
        ({"data_parallel_size": 2}, {"response_store": ":memory:"}, 1),
        ({"data_parallel_size": 2}, {"pooling_model": "m"}, 1),
        ({"data_parallel_size": 2}, {"files_dir": "f"}, 1),
    ],
)
def test_how_many_there_are(settings: dict[str, Any], server: dict[str, Any], count: int) -> None:
    assert num_api_processes(QuireConfig.of(**settings), ServerConfig(**server)) == count


@pytest.mark.parametrize(
    ("server", "words"), [({"response_store": ":memory:"}, "give a file"), ({"pooling_model": "m"}, "on its own")]
)
def test_what_one_process_alone_can_give_is_refused_beside_several(server: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        num_api_processes(QuireConfig.of(), ServerConfig(api_server_count=2, **server))
    assert caught.value.field == "api_server_count"
