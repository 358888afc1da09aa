"""What an upload takes of the API process's memory, and what a download does.

    python apps/server/benchmarks/upload_memory.py [--megabytes 1000]

A server of the demo model is sent a file of this size by POST /v1/files; then GET /v1/files/ID/content reads it.
Prints the memory of the API process (unique set size) when idle, and the most during each of the two.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

HEAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n\r\n'
)
PIECE = bytes(range(256)) * 4096


class Peak(threading.Thread):
    """The most memory of a process while this runs."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._is_over = threading.Event()
        self.most_bytes = 0

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            self.most_bytes = max(self.most_bytes, self._process.memory_full_info().uss)

    def end(self) -> int:
        self._is_over.set()
        self.join()
        return self.most_bytes


def form(num_bytes: int) -> Iterator[bytes]:
    yield HEAD
    for start in range(0, num_bytes, len(PIECE)):
        yield PIECE[: num_bytes - start]
    yield b"\r\n--x--\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    num_bytes = parser.parse_args().megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "serve.log"
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none"]
        command += ["--num-threads", "1", "--max-num-seqs", "4", "--files-dir", f"{name}/files"]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            with httpx.Client(base_url=found[1], timeout=600) as http:
                measure(http, psutil.Process(server.pid), num_bytes)
        finally:
            server.terminate()
            server.wait()


def measure(http: httpx.Client, process: psutil.Process, num_bytes: int) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    small = http.post("/v1/files", content=form(1000), headers=headers).json()  # what the first use loads
    http.get(f"/v1/files/{small['id']}/content")
    idle = process.memory_full_info().uss
    print(f"idle      {idle / 1e6:7.1f} MB")
    peak, start_s = Peak(process), time.perf_counter()
    peak.start()
    reply = http.post("/v1/files", content=form(num_bytes), headers=headers).json()
    seconds = time.perf_counter() - start_s
    assert reply["bytes"] == num_bytes, reply
    print(f"upload    {(peak.end() - idle) / 1e6:+7.1f} MB at most, {num_bytes / 1e6 / seconds:.0f} MB/s")
    peak, start_s, num_read = Peak(process), time.perf_counter(), 0
    peak.start()
    with http.stream("GET", f"/v1/files/{reply['id']}/content") as response:
        for piece in response.iter_raw():
            num_read += len(piece)
    seconds = time.perf_counter() - start_s
    assert num_read == num_bytes
    print(f"download  {(peak.end() - idle) / 1e6:+7.1f} MB at most, {num_bytes / 1e6 / seconds:.0f} MB/s")
    http.delete(f"/v1/files/{reply['id']}")


if __name__ == "__main__":
    main()
