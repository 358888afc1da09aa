"""Whatever is killed with SIGKILL while a batch runs, each of its lines is answered once."""

from __future__ import annotations

import json
import random
import signal
import time
from typing import Any

import httpx
import psutil

NUM_LINES = 400
ENDED = ("completed", "failed", "expired", "cancelled")


def engines(process: Any) -> list[psutil.Process]:
    """The engine process of a server."""
    children = psutil.Process(process.popen.pid).children()
    return [child for child in children if any("quire_engine" in each for each in child.cmdline())] or children


def completed(http: httpx.Client, name: str) -> int:
    return int(http.get(f"/v1/batches/{name}").json()["request_counts"]["completed"])


def test_each_line_is_answered_once_whatever_is_killed(launch, tmp_path):
    server = {"files_dir": str(tmp_path / "files"), "batch_max_concurrency": 16, "response_store": ":memory:"}
    choose = random.Random(0)

    def start() -> tuple[Any, httpx.Client]:
        process = launch({"step_time_s": 0.004}, server=server)
        return process, httpx.Client(base_url=process.url(), timeout=60)

    def line(index: int) -> dict[str, Any]:
        body = {"prompt": f"line {index}", "max_tokens": 1 + index % 9, "ignore_eos": True}
        body |= {"max_tokens": -1} if index % 50 == 0 else {}
        return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}

    process, http = start()
    text = "".join(json.dumps(line(index)) + "\n" for index in range(NUM_LINES))
    file = http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    name = http.post("/v1/batches", json=body).json()["id"]
    killed_at = []
    for victim in ("server", "engine", "server", "server"):
        before = completed(http, name)
        while completed(http, name) < min(before + 30, NUM_LINES - 60):
            time.sleep(0.005)
        time.sleep(choose.random() * 0.03)
        killed_at.append(completed(http, name))
        if victim == "engine":
            for engine in engines(process):
                engine.send_signal(signal.SIGKILL)
            continue
        http.close()
        children = psutil.Process(process.popen.pid).children(recursive=True)
        process.popen.send_signal(signal.SIGKILL)
        psutil.wait_procs(children, 30)
        process, http = start()
    assert killed_at[-1] < NUM_LINES, "it was not done when the last one was killed"
    deadline = time.monotonic() + 90
    while (batch := http.get(f"/v1/batches/{name}").json())["status"] not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    assert batch["status"] == "completed", batch
    results = [
        json.loads(each)
        for kind in ("output_file_id", "error_file_id")
        for each in http.get(f"/v1/files/{batch[kind]}/content").text.splitlines()
    ]
    assert sorted(each["custom_id"] for each in results) == sorted(f"r{index}" for index in range(NUM_LINES))
    for each in results:
        index, answer = int(each["custom_id"][1:]), each["response"]
        assert answer["status_code"] == (400 if index % 50 == 0 else 200)
        if answer["status_code"] == 200:
            assert answer["body"]["usage"]["completion_tokens"] == 1 + index % 9, "whole answers only"
    num_failed = NUM_LINES // 50
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES - num_failed, "failed": num_failed}
    http.close()
