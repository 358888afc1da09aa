"""vLLM's own server; on a processor it must be vLLM's build for processors."""

from __future__ import annotations

import os
import sys
from importlib.metadata import packages_distributions, version
from typing import Any

from program import Run, serve
from streams import FIRST_PROMPT, clients, free_port, start_server


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    # Whole GiB; 128 KiB per token is what an 8B model keeps.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, settings["num_kv_tokens"] >> 13)))
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings["model"],
        "--host", "127.0.0.1", "--port", str(port), "--dtype", settings["dtype"],
        "--max-model-len", str(settings["max_model_len"]), "--max-num-seqs", str(settings["max_num_seqs"]),
        "--no-enable-prefix-caching", "--served-model-name", "model", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    start_server(command, port)
    return clients(port, {"model": "model"}), version(packages_distributions()["vllm"][0])


if __name__ == "__main__":
    serve(load, FIRST_PROMPT)
