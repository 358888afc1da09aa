"""llama.cpp's own `llama-server`, over HTTP on the loopback, with one slot per request."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from program import Run, check_lengths, serve


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_slots = settings["max_num_seqs"]
    command = [
        settings["executable"], "--model", settings["file"], "--host", "127.0.0.1", "--port", str(port),
        "--parallel", str(num_slots), "--ctx-size", str(settings["max_model_len"] * num_slots),
    ]  # fmt: skip
    if settings["num_threads"]:
        command += ["--threads", str(settings["num_threads"]), "--threads-batch", str(settings["num_threads"])]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"
    while not _is_up(url):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode} while it started")
        time.sleep(0.01)
    pool = ThreadPoolExecutor(num_slots)

    def ask(prompt: list[int], length: int) -> int:
        body = {"prompt": prompt, "n_predict": length, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["tokens_predicted"])

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        check_lengths(list(pool.map(ask, prompts, output_lens)), output_lens)

    with urllib.request.urlopen(f"{url}/props") as response:
        return run, str(json.load(response).get("build_info", "unknown"))


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    serve(load)
