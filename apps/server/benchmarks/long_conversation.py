"""Time to first token of turn 40 of a long conversation, against what its new tokens cost the engine.

    python apps/server/benchmarks/long_conversation.py --tokens 100000 --turns 40 --threads 1 [--model tiny]

A client holds a conversation over the Responses API, by `previous_response_id`, with a model of the demo model's shape
(the demo model itself, told that its context is long), or with a tiny random one. The latter makes the harder test, for
its prefill hides less, and the quicker one: nearly all the time goes to attention, which grows with the square of the
length, about an hour with the demo model on one slow core. Each turn before the last is told as it ends.

The last turn is asked with new parts of several lengths. For each, the time from sending the request to the first event
with output is compared with the prefill of that request alone, as the engine's metrics count it: from the first step to
the first token. What is above 1 is the price of remembering: reading the conversation from the store, rendering,
tokenizing, hashing, sending. Needs httpx.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from quire_demo_model import checkpoint_path
from quire_testkit.checkpoints import make_checkpoint

PREFILL = "request_prefill_time_seconds_sum"


def long_model(folder: Path, context: int, model: str) -> Path:
    """The demo model with a longer context than it was trained for: its words make no sense, its steps cost as much. Or
    a tiny random model."""
    if model == "tiny":
        return make_checkpoint(folder, like="qwen3", max_position_embeddings=context)
    shutil.copytree(checkpoint_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return folder


class Talk:
    """A conversation with a server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=3600)
        self._words = random.Random(3)

    def text(self, num_tokens: int) -> str:
        """About so many tokens."""
        pieces: list[str] = []
        count = 0
        while count < num_tokens:
            pieces.append(" ".join("".join(self._words.choices("aeiourtnsl", k=4)) for _ in range(400)))
            answer = self._client.post("/tokenize", json={"prompt": pieces[-1]}).json()
            if count + answer["count"] > num_tokens:
                keep = answer["tokens"][: num_tokens - count]
                pieces[-1] = self._client.post("/detokenize", json={"tokens": keep}).json()["prompt"]
            count += answer["count"]
        return " ".join(pieces)

    def turn(self, text: str, previous: str | None) -> dict[str, Any]:
        """Ask, and read to the end: id, seconds to the first event, and the usage."""
        body = {"input": text, "previous_response_id": previous, "max_output_tokens": 4, "stream": True}
        before = self._prefill_s()
        start, first, last = time.perf_counter(), 0.0, ""
        with self._client.stream("POST", "/v1/responses", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(response.read().decode())
            for line in response.iter_lines():
                if not first and line:
                    first = time.perf_counter() - start
                last = line.removeprefix("data: ") if line.startswith("data: ") else last
        done = json.loads(last)["response"]
        cached = done["usage"]["input_tokens_details"]["cached_tokens"]
        return {
            "id": done["id"],
            "prompt_tokens": done["usage"]["input_tokens"],
            "computed_tokens": done["usage"]["input_tokens"] - cached,
            "first_token_s": round(first, 4),
            "prefill_s": round(self._prefill_s() - before, 4),
        }

    def _prefill_s(self) -> float:
        text = self._client.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if PREFILL in line and line[0] != "#")


def start(folder: Path, scratch: Path, context: int, threads: int) -> tuple[subprocess.Popen[bytes], str]:
    """A server in a process of its own, and its address."""
    log = scratch / "log"
    flags = ["--port", "0", "--max-model-len", str(context), "--max-num-seqs", "4", "--num-threads", str(threads)]
    flags += ["--response-store", str(scratch / "kept.sqlite")]
    command = [sys.executable, "-m", "quire_server.cli", "serve", str(folder), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    while (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())) is None:
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return process, found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the conversation before the last turn")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[2500, 500, 100], help="of the last turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    context = args.tokens + max(args.new_tokens) * 2 + 4096
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        process, url = start(long_model(scratch / "model", context, args.model), scratch, context, args.threads)
        try:
            talk, previous = Talk(url), None
            for number in range(1, args.turns):
                turn = talk.turn(talk.text(args.tokens // (args.turns - 1)), previous)
                previous = turn["id"]
                print(f"turn {number}: {json.dumps(turn)}", file=sys.stderr, flush=True)
            for num_tokens in args.new_tokens:
                turns = [talk.turn(talk.text(num_tokens), previous) for _ in range(args.repeats)]
                best = min(turns, key=lambda turn: turn["first_token_s"] / turn["prefill_s"])
                ratio = round(best["first_token_s"] / best["prefill_s"], 3)
                print(json.dumps({"new_tokens": num_tokens, **best, "ratio": ratio}), flush=True)
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
