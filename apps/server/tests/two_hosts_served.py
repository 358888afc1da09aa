"""A model that two network namespaces serve together: over a plain link, a delayed one, and one that is cut and mended.

    python apps/server/tests/two_hosts_served.py

The server and rank 0 are on one host, rank 1 on the other (`--headless`). Every stream must have the text of one
process. While the link is cut, the engine ends with the cause and waits for the other host; mended, the stream goes on.
Needs what two_hosts.py of quire-distributed needs. Exits with 1 and says what is wrong. Not collected by pytest:
`nox -s hosts` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[3] / "packages/distributed/tests"))

from two_hosts import ADDRESSES, LINKS, TwoHosts, two_hosts

from quire import LLM, SamplingParams
from quire_demo_model import checkpoint_path

PORT = 18_077
PROMPT = "The capital of France is"
PARAMS = {"temperature": 1.0, "seed": 11, "max_tokens": 120}
SETTINGS = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
FLAGS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
CUT_S = 6.0
"""How long the link is cut; twice as long and more as a host may be silent."""
SILENCE_S = 2
START_S = 240.0


def start(hosts: TwoHosts, node: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """`quire serve` on one of the hosts."""
    command = [
        *("ip", "netns", "exec", hosts.names[node]),
        *(sys.executable, "-m", "quire_server.cli", "serve", str(checkpoint_path()), *FLAGS),
        *("-tp", "2", "--nnodes", "2", "--node-rank", str(node), "--master-addr", ADDRESSES[0]),
        *("--distributed-timeout-seconds", str(SILENCE_S)),
        *(("--headless",) if node else ("--port", str(PORT), "--max-restarts", "20")),
    ]
    environment = {**os.environ, "QUIRE_NODE_SECRET": "of these two", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def client(hosts: TwoHosts) -> subprocess.Popen[str]:
    """A program on the server's host that streams one completion and prints its pieces as JSON lines."""
    command = ["ip", "netns", "exec", hosts.names[0], sys.executable, __file__, "--client"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stream() -> None:
    """The client."""
    url = f"http://127.0.0.1:{PORT}"
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).read()
            break
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
    body = {"prompt": PROMPT, "stream": True, "ignore_eos": True, **PARAMS}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                print(json.dumps(json.loads(line[6:])["choices"][0]["text"]), flush=True)


def check(hosts: TwoHosts, link: str, expected: str, log: Path) -> str | None:
    """Stream a completion over a link; None, or what was wrong."""
    hosts.link.traffic = LINKS["plain" if link == "cut" else link]
    begin_s, before = time.monotonic(), log.read_text().count("started again")
    reading = client(hosts)
    assert reading.stdout is not None
    text, cut_at_s, noticed_s = "", 0.0, 0.0
    for number, line in enumerate(reading.stdout):
        text += json.loads(line)
        if link == "cut" and number == 10:
            hosts.link.traffic = LINKS["cut while busy"]
            cut_at_s = time.monotonic()
            while time.monotonic() - cut_at_s < CUT_S:
                time.sleep(0.05)
                if not noticed_s and log.read_text().count("started again") > before:
                    noticed_s = time.monotonic() - cut_at_s
            hosts.link.traffic = LINKS["plain"]
    reading.wait()
    if text != expected:
        return f"the stream is {text!r}, and one process says {expected!r}"
    if link == "cut" and not noticed_s:
        return f"the engine did not notice within {CUT_S:g} s that the link was cut"
    told = f", noticed after {noticed_s:.1f} s" if link == "cut" else ""
    print(f"{link:10}the tokens of one process, {time.monotonic() - begin_s:.1f} s{told}", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().client:
        stream()
        return 0
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        print("two_hosts_served.py needs root, ip and /dev/net/tun: nothing was tried", file=sys.stderr)
        return 1
    with LLM(**SETTINGS) as alone:
        (output,) = alone.generate([PROMPT], SamplingParams(ignore_eos=True, **PARAMS))
        expected = output.outputs[0].text
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        logs = [Path(folder, f"node{node}.log") for node in range(2)]
        files = [log.open("wb") for log in logs]
        programs = [start(hosts, node, file) for node, file in enumerate(files)]
        try:
            failures = {link: check(hosts, link, expected, logs[0]) for link in ("plain", "delayed", "cut")}
        finally:
            for program in programs:
                program.terminate()
            for program in programs:
                try:
                    program.wait(30)
                except subprocess.TimeoutExpired:
                    program.kill()
            for file in files:
                file.close()
        for link, failure in failures.items():
            if failure is not None:
                print(f"{link}: {failure}", file=sys.stderr)
        if any(failures.values()):
            for log in logs:
                print(f"{log.name}:\n{log.read_text()}", file=sys.stderr)
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
