"""Sweeps, the search for the largest load, Pareto plots, figures under vLLM's names, and starts."""

from __future__ import annotations

import asyncio
import csv
import json
import sys
import threading
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from quire_bench.pareto import ParetoPoint, html_page, pareto_front, point_of, svg_plot
from quire_bench.search import largest_load, misses, parse_limits
from quire_bench.serve import Timing
from quire_bench.serving_results import parse_goals, serving_results
from quire_interfaces import ConfigError, QuireError

SERVER = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.2)
        self.answer(b"{}")
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Served:
    """A server in a thread whose tokens take the longer the more requests run."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.most_at_once = 0
        self.is_ready = True
        self.token_s = 0.002
        """Time of a token of each request that runs."""
        self.url = ""
        self._running = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self._up.wait(10)

    def _serve(self) -> None:
        async def begin() -> web.AppRunner:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_get("/health", self._health)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/{route:.*}", self._answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return runner

        runner = self._loop.run_until_complete(begin())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_ready else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body, dict(request.headers)))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        first = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
        count = body.get("max_tokens") or 2
        for number in range(count):
            await asyncio.sleep(self.token_s * self._running)
            piece = {"delta": {"content": f"t{number} "}} if is_chat else {"text": f"t{number} "}
            for choice in [*first, piece]:
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            first = []
        usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": count}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        self._running -= 1
        return response


@pytest.fixture(scope="module")
def serving() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


@pytest.fixture
def server(serving: Served) -> Served:
    serving.requests.clear()
    serving.most_at_once, serving.token_s = 0, 0.002
    return serving


def test_a_run_under_vllms_names(server: Served, quire: Callable[..., int], tmp_path: Path, tiny_model: Path) -> None:
    flags = ("--base-url", server.url, "--num-prompts", 6, "--random-input-len", 20, "--random-output-len", 4)
    flags = (*flags, "--random-prefix-len", 8, "--backend", "openai-chat", "--tokenizer", tiny_model)
    more = ("--goodput", "e2el:60000", "--metadata", "gpu=none", "--header", "X-Test=1", "--extra-body", '{"top_k": 5}')
    files = (
        "--save-detailed",
        "--result-dir",
        tmp_path,
        "--result-filename",
        "r.json",
        "--metric-percentiles",
        "99,99.9",
    )
    assert quire("bench", "serve", *flags, *more, *files, "--num-warmups", 2, "--temperature", 0.5) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(server.requests) == 8, "two to warm up"
    for path, body, headers in server.requests:
        assert path == "/v1/chat/completions"
        assert (body["max_tokens"], body["top_k"], body["temperature"], body["ignore_eos"]) == (4, 5, 0.5, True)
        assert headers["X-Test"] == "1"
    assert result["completed"] == result["num_prompts"] == 6
    assert result["total_output_tokens"] == 24
    assert result["input_lens"] == [20] * 6
    assert result["generated_texts"] == ["t0 t1 t2 t3 "] * 6
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert (result["gpu"], result["request_rate"], result["backend"]) == ("none", "inf", "openai-chat")
    assert [len(each) for each in result["itls"]] == [3] * 6, "the event of the role is no token"
    assert {f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")
            for kind in ("mean", "median", "std", "p99", "p99.9")} <= result.keys()  # fmt: skip


def test_turns_go_on_from_what_was_answered(server: Served, quire: Callable[..., int], tmp_path: Path) -> None:
    said = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}, {"from": "human", "value": "Two?"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"conversations": said}]))
    flags = ("--base-url", server.url, "--backend", "openai-chat", "--dataset-name", "multi-turn", "--num-prompts", 2)
    path = tmp_path / "out.json"
    flags = (*flags, "--dataset-path", tmp_path / "talk.json", "--multi-turn-output-len", 2, "--output-json", path)
    assert quire("bench", "serve", *flags) == 0
    bodies = [body for _, body, _ in server.requests]
    assert sorted(len(body["messages"]) for body in bodies) == [1, 1, 3, 3]
    assert max(bodies, key=lambda body: len(body["messages"]))["messages"] == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "t0 t1 "},
        {"role": "user", "content": "Two?"},
    ]
    figures = json.loads(path.read_text())
    assert (figures["num_requests"], figures["input_tokens"]) == (4, 44), "counted by the server"


def test_a_sweep_and_its_plot(
    server: Served, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "svg", "html")}
    files = [word for kind, path in names.items() for word in (f"--{kind}", path)]
    flags = ("--base-url", server.url, "--num-prompts", 8, "--input-len", 5, "--output-len", 4, "--output-json", "-")
    assert quire("bench", "sweep", "serve", *flags, "--max-concurrencies", "1,4", "--num-runs", 2, *files) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["max_concurrency"], run["run_number"]) for run in runs] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert server.most_at_once == 4
    assert [run["max_concurrent_requests"] for run in runs] == [1, 1, 4, 4]
    with open(names["csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["p99_ttft_ms"]) for row in rows] == [run["p99_ttft_ms"] for run in runs]
    assert names["svg"].read_text().count('class="load"') == 4
    page = names["html"].read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "").replace(server.url, "")
    assert "src=" not in page
    plotted = tmp_path / "again.svg"
    assert quire("bench", "sweep", "plot-pareto", names["csv"], "--svg", plotted) == 0
    assert plotted.read_text() == names["svg"].read_text()


def test_the_largest_load_of_a_server(server: Served, quire: Callable[..., int], capsys: Any) -> None:
    server.token_s = 0.02
    flags = ("--base-url", server.url, "--num-prompts", 10, "--input-len", 5, "--output-len", 2, "--output-json", "-")
    search = ("--variable", "max-concurrency", "--sla", "mean_itl_ms=100", "--max", 16)
    assert quire("bench", "sweep", "serve-sla", *flags, *search) == 0
    found = json.loads(capsys.readouterr().out)
    kept = {run["max_concurrency"]: run["sla_met"] for run in found["runs"]}
    assert found["largest"] == max(load for load, is_kept in kept.items() if is_kept)
    assert 1 <= found["largest"] <= 6, "7 of them take 140 ms for most of the tokens"
    assert kept[found["largest"] + 1] is False
    assert quire("bench", "sweep", "serve-sla", *flags, *search[:2], "--sla", "p99_ttft_ms=0.01") == 1


def test_waiting_for_a_server(server: Served, quire: Callable[..., int], free_port: int) -> None:
    flags = ("--num-prompts", 1, "--input-len", 5, "--output-len", 1)
    server.is_ready = False
    timer = threading.Timer(0.5, setattr, (server, "is_ready", True))
    timer.start()
    begin_s = time.monotonic()
    assert quire("bench", "serve", "--base-url", server.url, *flags, "--ready-check-timeout-sec", 20) == 0
    assert time.monotonic() - begin_s > 0.4
    assert len(server.requests) == 1
    with pytest.raises(QuireError, match=r"no server was ready at .* within 0.1 s"):
        quire("bench", "serve", "--port", free_port, *flags, "--ready-check-timeout-sec", 0.1)


@pytest.mark.parametrize("limit", [1.0, 3.7, 100.0, 99.9])
def test_search(limit: float) -> None:
    tried: list[float] = []

    def is_kept(load: float) -> bool:
        tried.append(load)
        return load <= limit

    found = largest_load(is_kept, low=1, high=128, tolerance=0.02)
    assert found is not None
    assert limit / 1.02 <= found <= limit
    assert len(tried) == len(set(tried)) < 16
    assert largest_load(lambda load: load <= limit, low=1, high=128, is_whole=True) == int(limit)
    assert largest_load(lambda load: False, low=2, high=8) is None
    assert largest_load(lambda load: True, low=2, high=9) == 9


def test_limits() -> None:
    limits = parse_limits(["p99_ttft_ms=200", "mean_itl_ms<=5.5"])
    assert limits == {"p99_ttft_ms": 200, "mean_itl_ms": 5.5}
    figures = {"completed": 3, "failed": 0, "p99_ttft_ms": 201.0, "mean_itl_ms": 5.5}
    assert misses(figures, limits) == ["p99_ttft_ms 201.0 > 200"]
    assert misses({**figures, "failed": 1, "p99_ttft_ms": 1.0}, limits) == ["1 requests failed"]
    for text in ("ttft=5", "p99_ttft_ms", "p99_ttft_ms=-1", "p99_ttft_ms=x"):
        with pytest.raises(ConfigError, match="--sla takes"):
            parse_limits([text])
    with pytest.raises(ConfigError, match="at least one limit"):
        parse_limits([])


def test_goodput_counts_requests_that_kept_to_every_goal() -> None:
    def timing(ttft_s: float, total_s: float, tokens: int = 11, error: str | None = None) -> Timing:
        return Timing(5, tokens, tokens, ttft_s, [(total_s - ttft_s) / 10] * 10, total_s, error)

    timings = [
        timing(0.1, 0.6),
        timing(0.3, 0.8),
        timing(0.1, 1.2),
        timing(0.1, 0.1, tokens=1),
        timing(0, 0, error="x"),
    ]
    goals = parse_goals(["ttft:200", "tpot:100"])
    results = serving_results(timings, 2.0, goals=goals)
    assert results["request_goodput"] == 2 / 2.0, "the second is late, the third slow, the last failed"
    assert (results["completed"], results["failed"], results["total_input_tokens"]) == (4, 1, 20)
    assert results["mean_ttft_ms"] == pytest.approx(150)
    assert results["median_tpot_ms"] == pytest.approx(50)
    for text in ("ttft", "itl:5", "ttft:-1"):
        with pytest.raises(ConfigError, match="--goodput takes"):
            parse_goals([text])


def test_pareto() -> None:
    points = [ParetoPoint("a", 10, 10), ParetoPoint("b", 5, 20), ParetoPoint("c", 5, 15), ParetoPoint("d", 2, 20)]
    assert [each.label for each in pareto_front(points)] == ["b", "a"]
    figures = {"output_throughput": 80.0, "mean_concurrent_requests": 3.2, "max_concurrency": 4, "request_rate": "inf"}
    assert point_of(figures) == ParetoPoint("4 at once", 20, 80)
    assert point_of({**figures, "max_concurrency": "", "request_rate": 2.0}) == ParetoPoint("2.0 requests/s", 25, 80)
    picture = xml.etree.ElementTree.fromstring(svg_plot([*points, ParetoPoint("<&>", 0, 0, "other")]))
    circles = [each for each in picture.iter() if each.get("class") == "load"]
    assert len(circles) == 5
    assert float(circles[0].get("cx", 0)) > float(circles[1].get("cx", 0)), "more of each is right"
    assert float(circles[0].get("cy", 0)) > float(circles[1].get("cy", 0)), "more of all is up"
    assert "&lt;&amp;&gt;" in html_page([ParetoPoint("<&>", 1, 1)], [{"a": "<b>"}], "t")
    for wrong in ({}, {**figures, "output_throughput": "x"}):
        with pytest.raises(ConfigError, match="no figures"):
            point_of(wrong)


def test_starts(quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    command = (
        "--serve-cmd",
        f"{sys.executable} {program} {{port}} 0.3",
        "--num-iters-warmup",
        0,
        "--num-iters-warm",
        2,
    )
    assert quire("bench", "startup", *command, "--output-json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["cold_startup_times"]) == 1
    assert len(figures["warm_startup_times"]) == 2
    assert min(figures["warm_startup_times"]) > 0.3
    assert figures["avg_warm_first_token_time"] > figures["avg_warm_startup_time"] + 0.19
    with pytest.raises(QuireError, match=r"ended with status 2 before it was ready(.|\n)*can't open file"):
        quire("bench", "startup", "--serve-cmd", f"{sys.executable} /none {{port}}")
    with pytest.raises(ConfigError, match=r"must say \{port\}"):
        quire("bench", "startup", "--serve-cmd", "server")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--backend", "openai-chat", "--num-prompts", 1), "name the model's tokenizer with --tokenizer"),
        (
            ("serve", "--dataset-name", "random-mm", "--num-prompts", 1, "--image-size", "8x8"),
            "need the backend openai-chat",
        ),
        (("serve", "--dataset-name", "random-mm", "--image-size", "8"), "--image-size must be"),
        (("serve", "--dataset-name", "sonnet"), "give --tokenizer"),
        (("serve", "--extra-body", "["), "--extra-body is no JSON"),
        (("serve", "--header", "x"), "--header takes KEY=VALUE"),
        (("serve", "--endpoint", "v1"), "endpoint must be a path"),
        (("serve", "--burstiness", 0), "burstiness must be above 0"),
        (("serve", "--ramp-up-strategy", "linear"), "needs --ramp-up-start-rps"),
        (("serve", "--metric-percentiles", "101"), "--metric-percentiles takes"),
        (("serve", "--percentile-metrics", "ttfx"), "--percentile-metrics takes"),
        (("serve", "--save-result", "--result-dir", "/none"), "is no folder"),
        (("sweep", "serve"), "needs --request-rates, --max-concurrencies"),
        (("sweep", "serve", "--request-rates", "1,x"), "--request-rates takes numbers"),
        (("sweep", "serve", "--max-concurrencies", "1.5"), "whole numbers"),
        (("sweep", "serve-sla"), "at least one limit"),
        (("sweep", "plot-pareto", "/none.csv", "--svg", "/x.svg"), "cannot read /none.csv"),
        (("sweep", "plot-pareto", "x.csv"), "give --svg FILE"),
        (("startup", "--num-iters-cold", 0, "--num-iters-warm", 0), "nor all 0"),
    ],
)
def test_bad_input(server: Served, quire: Callable[..., int], arguments: tuple[Any, ...], words: str) -> None:
    kind, *rest = arguments
    where = [] if kind == "startup" or "plot-pareto" in rest else ["--base-url", server.url]
    with pytest.raises(ConfigError, match=words):
        quire("bench", kind, *rest, *where)
    assert server.requests == []
