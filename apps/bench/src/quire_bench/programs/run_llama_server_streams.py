"""llama.cpp's own `llama-server`, as clients see it, with a slot for each."""

from __future__ import annotations

import subprocess
from typing import Any

from program import Run, serve
from streams import FIRST_PROMPT, clients, free_port, start_server


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    port, num_slots = free_port(), settings["max_num_seqs"]
    command = [
        settings["executable"], "--model", settings["file"], "--host", "127.0.0.1", "--port", str(port),
        "--parallel", str(num_slots), "--ctx-size", str(settings["max_model_len"] * num_slots),
    ]  # fmt: skip
    if settings["num_threads"]:
        command += ["--threads", str(settings["num_threads"]), "--threads-batch", str(settings["num_threads"])]
    start_server(command, port)
    words = subprocess.run([settings["executable"], "--version"], capture_output=True, text=True, check=False)
    lines = (words.stdout + words.stderr).strip().splitlines()
    return clients(port, {"model": "model", "cache_prompt": False}), lines[0] if lines else "unknown"


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
