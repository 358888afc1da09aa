"""What images cost a server: texts that are written meanwhile, a second preparing process, memory after many.

    python apps/bench/benchmarks/media_serving.py waiting [--model FOLDER] [--images 50] [--rounds 3]
    python apps/bench/benchmarks/media_serving.py workers [--model FOLDER] [--images 24] [--rounds 3]
    python apps/bench/benchmarks/media_serving.py leaks [--model FOLDER] [--images 10000]

The model is a random LLaVA without --model. Images are drawn anew, so that none was seen before.

waiting: streams of text run all the time. Turn by turn, in rounds of the same length, there is nothing else, or so many
images of 12 megapixels are asked about. The gap from one token to the next as the client sees it, and how long /health
takes.
workers: seconds to prepare images of 12 megapixels with one process, and with two, turn by turn.
leaks: resident memory of the server's processes after 500 small images and after all, and what is in /dev/shm when it
has ended: by SIGTERM, and by SIGKILL and another start.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

HUGE = (4000, 3000)
SMALL = (40, 30)
WARM_IMAGES = 500
"""Before memory is read for the first time."""
SHARED = Path("/dev/shm")
KV_CACHE_BYTES = 1 << 23
"""So little that all of it is resident memory before it is read for the first time."""


def jpeg(size: tuple[int, int], seed: int) -> bytes:
    """A picture like a photograph in what it costs to decode; another for each seed."""
    import PIL.Image

    noise = random.Random(seed).randbytes(3 * 64 * 48)
    image = PIL.Image.frombytes("RGB", (64, 48), noise).resize(size, PIL.Image.Resampling.BICUBIC)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return data.getvalue()


class Server:
    """`quire serve` in a process of its own, on loopback."""

    def __init__(self, model: str, *arguments: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "quire_server.cli", "serve", model, "--port", str(self.port)]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *arguments]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it serves. RuntimeError with its last lines when it ends before."""
        while True:
            if self.process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(self._log.read()[-2000:].decode(errors="replace"))
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)

    def resident_bytes(self) -> int:
        """Of the process and those below it, without pages that they share."""
        pids, pages = [self.process.pid], 0
        for pid in pids:
            with contextlib.suppress(OSError):
                resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
                pages += int(resident) - int(shared)
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    pids += [int(child) for child in children.read_text().split()]
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, and wait until the process is gone."""
        self.process.send_signal(number)
        self.process.wait(60)
        self._log.close()


@contextlib.asynccontextmanager
async def running(model: str, *arguments: str) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """A server that is ready, and a session for it."""
    server = Server(model, *arguments)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            await server.ready(session)
            yield server, session
        finally:
            if server.process.poll() is None:
                server.end()


async def ask(session: aiohttp.ClientSession, url: str, image: bytes) -> None:
    """One question about an image, answered with a token."""
    data = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        await response.read()


async def write_text(session: aiohttp.ClientSession, url: str, gaps: list[float], stop: asyncio.Event) -> None:
    """Stream texts one after the other; seconds from each token to the next."""
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 1.0}
    while not stop.is_set():
        async with session.post(f"{url}/v1/completions", json=body) as response:
            before = None
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
                if stop.is_set():
                    break


async def watch_health(session: aiohttp.ClientSession, url: str, times: list[float], stop: asyncio.Event) -> None:
    while not stop.is_set():
        start = time.perf_counter()
        async with session.get(f"{url}/health") as response:
            await response.read()
        times.append(time.perf_counter() - start)
        await asyncio.sleep(0.05)


async def measure_waiting(model: str, num_images: int, rounds: int, arguments: list[str]) -> None:
    """Prints gaps between tokens and the time of /health, with and without images."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    health: dict[bool, list[float]] = {False: [], True: []}
    lasted = 0.0
    async with running(model, *arguments) as (server, session):
        await ask(session, server.url, jpeg(HUGE, -1))
        for number in range(rounds):
            images = [jpeg(HUGE, num_images * number + each) for each in range(num_images)]
            for has_images in (True, False):
                stop = asyncio.Event()
                tasks = [asyncio.create_task(write_text(session, server.url, gaps[has_images], stop)) for _ in range(4)]
                tasks.append(asyncio.create_task(watch_health(session, server.url, health[has_images], stop)))
                await asyncio.sleep(1)
                start = time.perf_counter()
                if has_images:
                    await asyncio.gather(*(ask(session, server.url, image) for image in images))
                    lasted = time.perf_counter() - start
                else:
                    await asyncio.sleep(lasted)
                stop.set()
                await asyncio.gather(*tasks)
            print(f"round {number + 1}: {num_images} images in {lasted:.1f} s")
    for name, samples in (("gap of tokens", gaps), ("/health", health)):
        cuts = {each: statistics.quantiles(samples[each], n=100, method="inclusive") for each in samples}
        for has_images, label in ((False, "texts alone"), (True, "and images")):
            middle, last = 1e3 * cuts[has_images][49], 1e3 * cuts[has_images][98]
            print(f"{name:14} {label:12} median {middle:7.2f} ms  p99 {last:7.2f} ms  worst "
                  f"{1e3 * max(samples[has_images]):7.2f} ms  ({len(samples[has_images])} samples)")  # fmt: skip
        print(f"{name:14} p99 with images / without: {cuts[True][98] / cuts[False][98]:.2f}")


def measure_workers(model: str, num_images: int, rounds: int) -> None:
    """Prints how much faster two processes prepare than one."""
    from quire_interfaces import Modality
    from quire_multimodal import MediaConfig, MediaPreparer, MediaSource

    seconds: dict[int, list[float]] = {1: [], 2: []}
    preparers = {count: MediaPreparer(Path(model), MediaConfig(media_processes=count)) for count in seconds}
    for number in range(-1, rounds):
        for count, preparer in preparers.items():
            images = [jpeg(HUGE, 1000 * (number + 1) + 500 * count + each) for each in range(num_images)]
            start = time.perf_counter()
            items = preparer.prepare_now([MediaSource(modality=Modality.IMAGE, value=image) for image in images])
            if number >= 0:  # the round before starts the processes
                seconds[count].append(time.perf_counter() - start)
            preparer.release(items)
    for count, preparer in preparers.items():
        preparer.close()
        print(f"{count} process(es): median {statistics.median(seconds[count]):.2f} s for {num_images} images")
    print(f"two over one: {statistics.median(seconds[1]) / statistics.median(seconds[2]):.2f}")


def new_entries(before: set[str]) -> set[str]:
    """Names in the shared memory that were not there before."""
    return {path.name for path in SHARED.iterdir()} - before


async def measure_leaks(model: str, num_images: int) -> None:
    """Prints memory and what is left in the shared memory."""
    before = {path.name for path in SHARED.iterdir()}
    arguments = ["--mm-processor-cache-gb", "0.01", "--max-num-seqs", "16"]
    async with running(model, *arguments) as (server, session):
        seeds = iter(range(num_images))
        warm = 0

        async def client(last: int) -> None:
            for seed in seeds:
                await ask(session, server.url, jpeg(SMALL, seed))
                if seed >= last:
                    return

        await asyncio.gather(*(client(min(WARM_IMAGES, num_images // 2)) for _ in range(8)))
        warm = server.resident_bytes()
        await asyncio.gather(*(client(num_images) for _ in range(8)))
        grown = server.resident_bytes() - warm
        print(f"{num_images} images: resident memory {warm / 2**20:.1f} MiB, grew by {grown / 2**20:.1f} MiB")
        server.end()
        print(f"left in shared memory after SIGTERM: {sorted(new_entries(before)) or 'nothing'}")
    async with running(model, *arguments) as (server, session):
        await asyncio.gather(*(ask(session, server.url, jpeg(SMALL, seed)) for seed in range(8)))
        server.end(signal.SIGKILL)
    left = new_entries(before)
    async with running(model, *arguments) as (server, session):
        await ask(session, server.url, jpeg(SMALL, 0))
        server.end()
    rest = sorted(new_entries(before)) or "nothing"
    print(f"left by SIGKILL: {len(left)} entries; after another start and its end: {rest}")


@contextlib.contextmanager
def seeing_model(path: str | None) -> Iterator[str]:
    """The folder, or that of a random LLaVA."""
    if path is not None:
        yield path
        return
    from quire_testkit.seeing_models import SeeingModel

    with tempfile.TemporaryDirectory() as folder:
        SeeingModel(Path(folder))
        yield folder


def main() -> None:
    """Print the figures of the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=["waiting", "workers", "leaks"])
    parser.add_argument("--model", help="checkpoint folder; default: a random LLaVA")
    parser.add_argument("--images", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arguments", type=json.loads, default=[], help="more for `quire serve`, as a JSON list")
    args: Any = parser.parse_args()
    with seeing_model(args.model) as model:
        if args.part == "waiting":
            asyncio.run(measure_waiting(model, args.images or 50, args.rounds, args.arguments))
        elif args.part == "workers":
            measure_workers(model, args.images or 24, args.rounds)
        else:
            asyncio.run(measure_leaks(model, args.images or 10_000))


if __name__ == "__main__":
    main()
