"""How long one large request holds up everybody else: the streams and GET /health of a server of the demo model.

    python apps/server/benchmarks/body_stalls.py [--cases REGEX] [--every-field] [--max-model-len 2048]

Without `--every-field` each case is a body that some server has been stopped by. With it, also each field of each
route's body in turn: as a long text, as long lists of numbers, texts, lists and objects, as a wide and a deep object.
Values stay within the bounds on whole bodies, so that they are parsed and looked at.

Beside each request a process of its own reads a stream and asks for /health all the time. Per case: the status, the
processor time of the API process, the longest answer of /health, and the longest time between two events of the stream.
The first line, `nothing`, is the same without a request: what the machine itself does to these figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from hostile_constraints import Streams, ask, processor_ms
from pydantic import BaseModel

from quire_server.messages_request import CountTokensRequest, MessagesRequest
from quire_server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.token_protocol import (
    BatchChatCompletionRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
)

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, CHAT),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest, {**CHAT, "messages": [MESSAGES]}),
    "/v1/chat/completions/render": (ChatCompletionRequest, CHAT),
    "/v1/chat/completions/derender": (DerenderChatRequest, {"generate_response": {"choices": [{"token_ids": [5]}]}}),
    "/v1/completions": (CompletionRequest, TEXT),
    "/v1/completions/render": (CompletionRequest, TEXT),
    "/v1/completions/derender": (
        DerenderCompletionRequest,
        {"generate_responses": [{"choices": [{"token_ids": [5]}]}]},
    ),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/messages/count_tokens": (CountTokensRequest, CHAT),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2, "store": False}),
    "/v1/responses/compact": (CompactRequest, {"input": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
    "/inference/v1/generate": (GenerateRequest, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
}
VALUES: dict[str, str] = {
    "text": json.dumps("some words, and [some] " * 170_000),
    "numbers": json.dumps([7] * 450_000),
    "texts": json.dumps([f"w{n}" for n in range(450_000)]),
    "lists": json.dumps([[1]] * 90_000),
    "objects": json.dumps([{"role": "user", "content": f"c{n}"} for n in range(90_000)]),
    "wide": json.dumps(dict.fromkeys(range(450_000), 1)),
    "deep": '{"a":' * 80_000 + "1" + "}" * 80_000,
}


def with_field(body: dict[str, Any], field: str, value: str) -> bytes:
    """A body with one field as given in JSON."""
    rest = json.dumps({name: each for name, each in body.items() if name != field})
    return f"{rest[:-1]}{', ' if len(rest) > 2 else ''}{json.dumps(field)}:{value}}}".encode()


def known_cases() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of what has stopped servers."""
    text, chat = "/v1/completions", "/v1/chat/completions"
    words = [f"w{n}" for n in range(100_000)]
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(10_000)
    ]
    yield "lists, 31 MB", text, with_field(TEXT, "prompt", "[" + "[1]," * (7 << 20) + "[1]]")
    yield "texts, 31 MB", text, with_field(TEXT, "prompt", "[" + '"a",' * (7 << 20) + '"a"]')
    yield "numbers, 31 MB", text, with_field(TEXT, "prompt", "[" + "1," * (15 << 20) + "1]")
    yield "one text, 31 MB", text, with_field(TEXT, "prompt", '"' + "a" * (31 << 20) + '"')
    yield "escapes, 31 MB", text, with_field(TEXT, "prompt", '"' + "\\u00e9" * (5 << 20) + '"')
    yield "quotes, 31 MB", text, with_field(TEXT, "prompt", '"' + '\\"' * (15 << 20) + '"')
    yield "unknown field, 30 MB", chat, with_field(CHAT, "z", json.dumps({str(n): [] for n in range(2 * 10**6)}))
    yield "messages, 30 MB", chat, with_field(CHAT, "messages", json.dumps(MESSAGES * 800_000))
    yield "messages, 20,000", chat, with_field(CHAT, "messages", json.dumps(MESSAGES * 20_000))
    yield "messages, 10,000 agent", chat, json.dumps(agent(2500, 500)).encode()
    yield "tools, 10,000", chat, json.dumps({**CHAT, "tools": tools}).encode()
    yield "tools, 2,000", chat, json.dumps({**CHAT, "tools": tools[:2000]}).encode()
    yield "tools, 2,000, n 128", chat, json.dumps({**CHAT, "tools": tools[:2000], "n": 128}).encode()
    yield "arguments, 3 MB", chat, json.dumps(called('{"a":[' + "[]," * 10**6 + "[]]}")).encode()
    yield "bad_words, 100,000", text, json.dumps({**TEXT, "bad_words": words}).encode()
    yield "bad_words, 1,000", text, json.dumps({**TEXT, "bad_words": words[:1000]}).encode()
    yield (
        "bad_words, 1,000, 500 prompts",
        text,
        json.dumps({**TEXT, "prompt": ["x"] * 500, "bad_words": words[:1000]}).encode(),
    )
    yield "stop, 1,000 long", text, json.dumps({**TEXT, "stop": ["a" * 5000 + word for word in words[:1000]]}).encode()
    stop = {"stop": ["a" * 50 + word for word in words[:256]], "max_tokens": 500, "ignore_eos": True, "n": 16}
    yield "stop, 256, n 16", text, json.dumps({**TEXT, **stop}).encode()
    dry = {**TEXT, "dry_multiplier": 1, "dry_sequence_breakers": words}
    yield "dry breakers, 100,000", text, json.dumps(dry).encode()
    yield "dry breakers, 1,000", text, json.dumps({**dry, "dry_sequence_breakers": words[:1000]}).encode()
    yield "logit_bias, 300,000", text, json.dumps({**TEXT, "logit_bias": dict.fromkeys(range(300_000), 1)}).encode()
    yield (
        "logit_bias, 1,000, n 128",
        text,
        json.dumps({**TEXT, "n": 128, "logit_bias": dict.fromkeys(range(1000), 1)}).encode(),
    )
    yield "detokenize, 4,000,000", "/detokenize", json.dumps({"tokens": [5] * 4 * 10**6}).encode()
    yield "detokenize, 450,000", "/detokenize", json.dumps({"tokens": [5] * 450_000}).encode()
    yield "tokenize, 4 MB", "/tokenize", json.dumps({"prompt": "some words " * 360_000}).encode()
    yield "prompts, 1,000, n 16", text, json.dumps({**TEXT, "prompt": ["x"] * 1000, "n": 16}).encode()
    yield "batch, 1,000", "/v1/chat/completions/batch", json.dumps({**CHAT, "messages": [MESSAGES] * 1000}).encode()
    items = [{"type": "message", "role": "user", "content": f"c{n}"} for n in range(20_000)]
    yield "items, 20,000", "/v1/responses", json.dumps({"input": items, "store": False}).encode()


def agent(num_turns: int, num_tools: int) -> dict[str, Any]:
    """What an agent sends after many turns of four messages each."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "what"} for n in range(10)}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "does", "parameters": schema}}
        for n in range(num_tools)
    ]
    call = called('{"p1": "v"}')["messages"][1]
    turn = [
        MESSAGES[0],
        call,
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    return {"messages": turn * num_turns + MESSAGES, "tools": tools, "max_tokens": 2}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {**CHAT, "messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": "r"}]}


def cases_of_fields() -> Iterator[tuple[str, str, bytes]]:
    for path, (model, body) in ROUTES.items():
        for field in (*model.model_fields, "unknown"):
            for kind, value in VALUES.items():
                yield f"{path} {field} {kind}", path, with_field(body, field, value)


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\nconnection: close\r\n\r\n" + body


def watch(address: tuple[str, int], orders: Connection) -> None:
    """In a process of its own: from each order to the next, read a stream and ask for /health; answer with the longest
    gap and the longest wait."""
    streams = Streams(address, 1)
    health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    while orders.recv():
        waits_s: list[float] = []
        is_over = threading.Event()

        def poll(waits_s: list[float] = waits_s, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                start_s = time.perf_counter()
                ask(address, health)
                waits_s.append(time.perf_counter() - start_s)
                time.sleep(0.01)

        polling = threading.Thread(target=poll)
        polling.start()
        orders.send(None)
        gaps_s = streams.read(orders.poll)
        orders.recv()
        is_over.set()
        polling.join()
        orders.send((max(gaps_s, default=0.0), max(waits_s)))


def measure(name: str, address: tuple[str, int], api_id: int, watcher: Connection, request: bytes) -> float:
    """Send one request, and print what it cost. The longest gap."""
    watcher.send(True)
    watcher.recv()
    time.sleep(0.3)
    before_ms, start_s = processor_ms(api_id), time.perf_counter()
    status = ask(address, request) if request else 0
    took_s, spent_ms = time.perf_counter() - start_s, processor_ms(api_id) - before_ms
    time.sleep(0.3)
    watcher.send(False)
    gap_s, wait_s = watcher.recv()
    print(
        f"{name[:60]:<62}{len(request) / 1e6:6.1f} MB  {status:3}  {took_s:6.2f} s  API {spent_ms:6.0f} ms  "
        f"longest /health {wait_s * 1e3:5.0f} ms  longest gap {gap_s * 1e3:5.0f} ms",
        flush=True,
    )
    return float(gap_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only those whose name has a match of this pattern")
    parser.add_argument("--every-field", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=2048)
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none"]
    command += ["--max-model-len", str(options.max_model_len), "--num-threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    processes = multiprocessing.get_context("spawn")
    try:
        assert server.stdout is not None
        url = next(found for line in server.stdout if (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", line)))
        parts = urlsplit(url.group(1))
        address = (parts.hostname or "", parts.port or 0)
        ours, theirs = processes.Pipe()
        watcher = processes.Process(target=watch, args=(address, theirs), daemon=True)
        watcher.start()
        ask(address, post("/v1/chat/completions", json.dumps(CHAT).encode()))
        base_s = max(measure("nothing", address, server.pid, ours, b"") for _ in range(3))
        worst_s, worst = 0.0, "nothing"
        for name, path, body in itertools.chain(known_cases(), cases_of_fields() if options.every_field else ()):
            if re.search(options.cases, name):
                gap_s = measure(name, address, server.pid, ours, post(path, body))
                worst_s, worst = max((worst_s, worst), (gap_s, name))
        print(f"the longest gap, {worst_s * 1e3:.0f} ms, is that of {worst}; without requests {base_s * 1e3:.0f} ms")
        ours.send(False)
        watcher.join(10)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
