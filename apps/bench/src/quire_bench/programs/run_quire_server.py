"""`quire serve`, as clients see it."""

from __future__ import annotations

import sys
from typing import Any

from program import Run, serve
from streams import FIRST_PROMPT, clients, free_port, start_server


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    from quire import __version__

    port, block_size = free_port(), 16
    num_blocks = -(-settings["num_kv_tokens"] // block_size) + settings["max_num_seqs"] + 1
    command = [
        sys.executable, "-m", "quire_server.cli", "serve", settings["model"], "--host", "127.0.0.1",
        "--port", str(port), "--dtype", settings["dtype"], "--max-model-len", str(settings["max_model_len"]),
        "--max-num-seqs", str(settings["max_num_seqs"]), "--block-size", str(block_size),
        "--num-gpu-blocks-override", str(num_blocks), "--no-enable-prefix-caching",
        "--served-model-name", "model", "--no-access-log",
    ]  # fmt: skip
    if settings["num_threads"]:
        command += ["--num-threads", str(settings["num_threads"])]
    if settings.get("quantization"):
        command += ["--quantization", settings["quantization"]]
    start_server(command, port)
    return clients(port, {"model": "model"}), __version__


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
