"""A whole Quire server in processes of its own, whose model says what rules say (`rule_engine.py`).

Routes, protocols, parsers and scheduler are those of `quire serve`; only the sampled text is scripted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rule_engine import FACTORY

__all__ = ["Rule", "scripted_server"]

Rule = tuple[str, str]
"""(text in a prompt, what the model says when this is the last known text in it)."""

MODEL = "demo"
_START_S = 90
_ENGINE = {
    "vocab_size": 1024, "num_token_ids": 1024, "num_blocks": 16384, "max_num_batched_tokens": 8192, "check_kv": False,
}  # fmt: skip


@contextlib.contextmanager
def scripted_server(folder: Path, rules: Sequence[Rule], *, max_model_len: int = 131072) -> Iterator[str]:
    """Serve until the block ends; the address.

    Args:
        folder: Of a checkpoint with a tokenizer; the server's log is written beside it.
        rules: What the model says. A rule for "" is for any other prompt.
        max_model_len: The context.
    """
    engine = {**_ENGINE, "model": str(folder), "rules": rules, "end_token_id": 1023, "max_model_len": max_model_len}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "200",
    }
    command = [sys.executable, __file__, str(folder), json.dumps(engine)]
    log_path = folder.with_name("server.log")
    with open(log_path, "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield _address(server, log_path)
    finally:
        server.terminate()
        server.wait(60)


def _address(server: subprocess.Popen[bytes], log_path: Path) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"OpenAI API:\s+(http://\S+)/v1", log_path.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log_path.read_text()}")


def _serve(folder: str, engine: dict[str, Any]) -> int:
    from quire import QuireConfig
    from quire_server.config import ServerConfig
    from quire_server.serve import serve

    config = QuireConfig.of(model=folder, tool_call_parser="hermes", reasoning_parser="qwen3")
    server = ServerConfig(port=0, served_model_name=(MODEL,), response_store=":memory:")
    return serve(config, server, factory=(FACTORY, engine))


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1], json.loads(sys.argv[2])))
