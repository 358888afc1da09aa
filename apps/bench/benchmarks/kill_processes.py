"""Kill processes of a running server at random while requests stream, and compare every stream with an undisturbed one.

    python apps/bench/benchmarks/kill_processes.py --kills 200 --what engine --engines 2
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what engine --engines 1        # the only one
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what all-engines --engines 2   # both at once
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what rank --ranks 2
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what store --store
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what api-server --api-servers 3
    python apps/bench/benchmarks/kill_processes.py --kills 200 --what engine,store,api --engines 2 --store
    python apps/bench/benchmarks/kill_processes.py --kills 1000 --minutes 20 --engines 2 --ranks 2 --api-servers 2 \\
        --store --what engine,rank,store,api-server,api                              # a fleet of every kind

A kind that `--what` names twice is killed twice as often; with `--minutes` it ends then, and says how many kills there
were of each kind.

`engine`, `all-engines`, `rank` (one beside rank 0) and `api-server` (one of several that answer HTTP) are started again
by the server, `store` (`quire kv-serve`) and `api` (the server's own process, and all with it) by this program, as a
service manager does. The streams of an API process end with it: what they had must be the beginning of the right
answer, and the request is sent again.

Ends with status 1 when an answer differs, is lost or hangs, or when a process, a file in /dev/shm or a folder of
sockets is left behind. A stream hangs that gets nothing for longer than `--hang-s` beyond the restart, which lasts
until `GET /ready` says yes again, and beyond what the same load waits undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "years": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "years"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


class Kind(NamedTuple):
    """A request that the load repeats."""

    name: str
    path: str
    body: dict[str, Any]


def _completion(name: str, prompt: str, **fields: Any) -> Kind:
    return Kind(name, COMPLETION, {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, **fields})


def _chat(name: str, content: str, **fields: Any) -> Kind:
    return Kind(name, CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 200, **fields})


KINDS = (
    _completion("greedy", "Once upon a time", temperature=0.0),
    _completion("seeded", "The sea was", temperature=0.9, top_p=0.9, seed=5),
    _chat(
        "schema",
        "A record.",
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}},
    ),
    _chat("tools", "Note it.", seed=4, tools=[TOOL], tool_choice="required"),
    _completion("logprobs", "Numbers are", temperature=0.7, seed=8, logprobs=2),
    _completion("several", "Three ways", temperature=1.0, seed=11, n=3),
    _completion("penalties", "A penalty", temperature=0.8, seed=2, repetition_penalty=1.2, min_p=0.05),
)
GIVE_UP_S = 120.0
"""A stream that waited this long beyond the restart is given up."""
START_S = 300.0
"""How long a server gets to start."""
END_S = 30.0
"""How long processes get to end behind the server."""
POLL_S = 0.05
COMMAND = [sys.executable, "-m", "quire_server.cli"]
WORDS_OF = {
    "engine": b"quire_engine.child",
    "all-engines": b"quire_engine.child",
    "rank": b"quire_distributed.worker",
    "api-server": b"quire_server.api_process",
}
"""What stands in the command line of the processes of a kind."""
WHAT = (*WORDS_OF, "store", "api")


class StreamEndedError(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Choice:
    """What a caller puts together from the deltas of one answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index of a tool call -> its name and arguments."""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take a delta of a completion or of a chat."""
        self.token_ids += choice.get("token_ids") or []
        delta = choice.get("delta") or {}
        self.text += (choice.get("text") or "") + (delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            parts = self.calls.setdefault(call["index"], ["", ""])
            parts[0] += call["function"].get("name") or ""
            parts[1] += call["function"].get("arguments") or ""
        logprobs = choice.get("logprobs") or {}
        self.logprobs += zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def begins(self, other: Choice) -> bool:
        """Whether this may become the other one."""
        return self.token_ids == other.token_ids[: len(self.token_ids)] and other.text.startswith(self.text)


Answer = dict[int, Choice]


def _processes() -> dict[int, tuple[int, bytes, bytes]]:
    """Process id -> parent, command line and environment; without zombies."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(path.name)] = (
                        int(parent),
                        (path / "cmdline").read_bytes(),
                        (path / "environ").read_bytes(),
                    )
    return found


def _in_use() -> set[str]:
    """Names in /dev/shm that a process has open or mapped."""
    names: set[str] = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                for line in (path / "maps").read_text().splitlines():
                    if "/dev/shm/" in line:
                        names.add(line.rpartition("/dev/shm/")[2].removesuffix(" (deleted)"))
                for link in (path / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        names.add(os.readlink(link).removeprefix("/dev/shm/"))
    return names


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


# Many attributes: a server, the store behind it, what they were started with, and the time since when all is well.
class Fleet:
    """A server and what belongs to it, started as processes of their own; each carries a mark in its environment.

    Args:
        flags: Of `quire serve`.
        has_store: Whether a block store stands behind the engines.
    """

    def __init__(self, flags: Sequence[str], *, has_store: bool = False) -> None:
        self._mark = f"QUIRE_KILL_RUN={uuid.uuid4().hex}"
        self._folder = tempfile.TemporaryDirectory(prefix="kill-")
        self.log = Path(self._folder.name) / "log"
        self._sockets = Path(self._folder.name) / "tmp"
        self._sockets.mkdir()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._serve = ["serve", "--host", "127.0.0.1", "--port", str(port), *flags]
        address = f"unix:{self._folder.name}/store"
        self._store_command = ["kv-serve", "--listen", address, "--memory", "64MB"] if has_store else None
        if has_store:
            self._serve += ["--kv-tier", address]
        self._shm_before = _shm()
        self.server: subprocess.Popen[bytes] | None = None
        self.store: subprocess.Popen[bytes] | None = None
        self.num_api_kills = 0
        self._pids: set[str] = set()
        """Of all processes that were seen."""
        self.clear_s = time.monotonic()
        """Since when nobody was killed and the server is ready; in the future while it is not."""

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        name, value = self._mark.split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(self._sockets)}
        with open(self.log, "ab") as log:
            return subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=log, env=environment)

    def start(self) -> None:
        """Start what is not there."""
        if self._store_command is not None and (self.store is None or self.store.poll() is not None):
            self.store = self._start(self._store_command)
        if self.server is None or self.server.poll() is not None:
            self.server = self._start(self._serve)

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        """Whether the server takes requests."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(5)) as response:
                return response.status == 200
        return False

    async def wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        """Raises SystemExit when the server ends, or takes too long."""
        assert self.server is not None
        deadline_s = time.monotonic() + START_S
        while not await self.is_ready(session):
            if self.server.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start:\n{self.last_lines()}")
            await asyncio.sleep(POLL_S)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Note for ever since when all is well."""
        is_ready = True
        while True:
            was_ready, is_ready = is_ready, await self.is_ready(session)
            if not is_ready:
                self.clear_s = float("inf")
            elif not was_ready:
                self.clear_s = time.monotonic()
            await asyncio.sleep(POLL_S)

    def victims(self, what: str) -> list[int]:
        """Processes of a kind, dead ones left out."""
        if what in ("store", "api"):
            process = self.store if what == "store" else self.server
            return [process.pid] if process is not None and process.poll() is None else []
        assert self.server is not None
        processes = self._note_processes()

        def is_ours(pid: int) -> bool:
            while pid in processes:
                if pid == self.server.pid:
                    return True
                pid = processes[pid][0]
            return False

        return [pid for pid, each in processes.items() if WORDS_OF[what] in each[1] and is_ours(pid)]

    def _note_processes(self) -> dict[int, tuple[int, bytes, bytes]]:
        processes = _processes()
        self._pids |= {str(pid) for pid, each in processes.items() if self._mark.encode() in each[2].split(b"\0")}
        return processes

    def kill(self, what: str, pids: Sequence[int]) -> None:
        """SIGKILL to these; the server starts its own again."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.clear_s = max(self.clear_s, time.monotonic())
        if what == "api-server":
            self.num_api_kills += 1
        elif what == "api":
            self.num_api_kills += 1
            self.clear_s = float("inf")
            assert self.server is not None
            self.server.wait()
        elif what == "store":
            assert self.store is not None
            self.store.wait()

    async def stop(self) -> list[str]:
        """End everything in good order; what is left behind."""
        self._note_processes()
        for process in (self.server, self.store):
            if process is not None and process.poll() is None:
                process.terminate()
                await asyncio.to_thread(process.wait, START_S)
        left = []
        deadline_s = time.monotonic() + END_S
        while orphans := [pid for pid, each in _processes().items() if self._mark.encode() in each[2].split(b"\0")]:
            if time.monotonic() > deadline_s:
                left += [f"process {pid}" for pid in orphans]
                break
            await asyncio.sleep(POLL_S)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        # Names hold the number of the process that made them; other servers may run beside these.
        ours = {name for name in _shm() - self._shm_before if self._pids & set(re.findall(r"\b\d+\b", name))}
        left += [f"/dev/shm/{name}" for name in sorted((ours - _in_use()) & _shm())]
        left += [str(path) for path in self._sockets.iterdir()]
        return left

    def last_lines(self) -> str:
        """The end of what all of them printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


# Many attributes: the load, and what came of it.
class Load:
    """Requests that stream at the same time.

    Args:
        fleet: Whom they are sent to.
        session: HTTP.
        expected: The right answer of each kind; None while they are not known.
    """

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, expected: list[Answer] | None = None) -> None:
        self._fleet, self._session, self._expected = fleet, session, expected
        self._kinds = itertools.count()
        self.is_over = False
        self.num_streams = self.num_retries = self.num_tokens = 0
        self.longest_gap_s = 0.0
        """Longest time between two outputs of a stream."""
        self.longest_wait_s = 0.0
        """The same, restarts left out."""
        self.waits: list[str] = []
        self.wrong: list[str] = []

    async def read(self, kind: Kind, answer: Answer) -> None:
        """Stream one request into an answer.

        Raises:
            StreamEndedError: the connection ended, or could not be made.
            RuntimeError: the server answered an error.
            TimeoutError: it hangs.
        """
        body = {**kind.body, "stream": True, "return_token_ids": True}
        last_s, is_done = time.monotonic(), False

        async def watch(limit: asyncio.Timeout) -> None:
            while time.monotonic() - max(last_s, self._fleet.clear_s) < GIVE_UP_S:
                await asyncio.sleep(1.0)
            limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as limit:
                watcher = asyncio.create_task(watch(limit))
                try:
                    async with self._session.post(self._fleet.url + kind.path, json=body) as response:
                        if response.status != 200:
                            raise RuntimeError(f"status {response.status}: {await response.text()}")
                        async for line in response.content:
                            if not line.startswith(b"data: "):
                                continue
                            now_s = time.monotonic()
                            self._note_wait(kind, now_s, last_s)
                            last_s = now_s
                            is_done = line.startswith(b"data: [DONE]")
                            if not is_done:
                                self._take(json.loads(line[6:]), answer)
                finally:
                    watcher.cancel()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise StreamEndedError(f"{type(error).__name__}: {error}") from None
        if not is_done:
            raise StreamEndedError("no [DONE]")

    def _note_wait(self, kind: Kind, now_s: float, last_s: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
        wait_s = now_s - max(last_s, self._fleet.clear_s)
        if wait_s > 1.0:
            self.waits.append(f"{kind.name} waited {wait_s:.1f} s")
        self.longest_wait_s = max(self.longest_wait_s, wait_s)

    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            raise RuntimeError(f"error in the stream: {event['error']}")
        for choice in event["choices"]:
            part = answer.setdefault(choice["index"], Choice())
            num_tokens = len(part.token_ids)
            part.add(choice)
            self.num_tokens += len(part.token_ids) - num_tokens

    async def keep_streaming(self) -> None:
        """One request after the other until it is over; the last one ends by itself."""
        while not self.is_over:
            place = next(self._kinds) % len(KINDS)
            try:
                answer = await self._answer(place)
            except Exception as error:
                self.wrong.append(f"{KINDS[place].name} failed: {type(error).__name__}: {error}")
                continue
            self.num_streams += 1
            assert self._expected is not None
            if answer != self._expected[place]:
                self.wrong.append(_difference(KINDS[place].name, answer, self._expected[place]))

    async def _answer(self, place: int) -> Answer:
        """The whole answer; a stream that ended with an API process is begun anew."""
        assert self._expected is not None
        while True:
            num_kills, answer = self._fleet.num_api_kills, Answer()
            try:
                await self.read(KINDS[place], answer)
                return answer
            except StreamEndedError:
                is_down = self._fleet.clear_s == float("inf")
                if num_kills == self._fleet.num_api_kills and not (num_kills and is_down):
                    raise
            self.num_retries += bool(answer)
            for index, part in answer.items():
                if not part.begins(self._expected[place][index]):
                    raise RuntimeError("what came before the connection ended is not the beginning of the answer")
            await asyncio.sleep(POLL_S)


def _difference(name: str, ours: Answer, right: Answer) -> str:
    """What is wrong with an answer, in a line."""
    for index, part in right.items():
        mine = ours.get(index, Choice())
        for what in Choice.__slots__:
            if getattr(mine, what) != getattr(part, what):
                return (
                    f"{name}: choice {index} differs in {what}: {getattr(mine, what)!r}, not {getattr(part, what)!r}"[
                        :2000
                    ]
                )
    return f"{name} has choices {sorted(ours)}, not {sorted(right)}"


async def kill_processes(fleet: Fleet, load: Load, args: argparse.Namespace) -> Counter[str]:
    """Kill, each time a moment of chance after tokens have come again; also processes that are only just starting.

    Returns:
        Number of kills of each kind.
    """
    chance, num_killed = random.Random(args.seed), Counter[str]()
    start_s = time.monotonic()
    for number in range(1, args.kills + 1):
        if time.monotonic() - start_s > 60.0 * args.minutes:
            break
        num_tokens = load.num_tokens
        deadline_s = time.monotonic() + 2 * START_S
        while load.num_tokens == num_tokens:
            await asyncio.sleep(0.005)
            if time.monotonic() > deadline_s:
                load.wrong.append(f"no tokens at all for {2 * START_S:g} s before kill {number}")
                return num_killed
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        kind = chance.choice(args.what)
        while not (pids := fleet.victims(kind)):
            await asyncio.sleep(0.01)
        fleet.kill(kind, pids if kind == "all-engines" else [chance.choice(pids)])
        if kind in ("api", "store"):
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            fleet.start()
        num_killed[kind] += 1
        seconds = time.monotonic() - start_s
        print(
            f"{number}/{args.kills} {kind} at {seconds:.0f} s; {load.num_streams} streams, {load.num_tokens} tokens, "
            f"longest wait {load.longest_wait_s:.1f} s, {len(load.wrong)} wrong",
            flush=True,
        )
    return num_killed


async def undisturbed(flags: Sequence[str], num_streams: int) -> tuple[list[Answer], float]:
    """The right answer of each kind from one engine, each alone, and the longest wait with others beside it."""
    fleet = Fleet(flags)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            fleet.start()
            await fleet.wait_until_ready(session)
            alone = Load(fleet, session)
            answers: list[Answer] = [{} for _ in KINDS]
            for kind, answer in zip(KINDS, answers, strict=True):
                await alone.read(kind, answer)
            load = Load(fleet, session, answers)
            workers = [asyncio.create_task(load.keep_streaming()) for _ in range(num_streams)]
            while load.num_streams + len(load.wrong) < 2 * len(KINDS):
                await asyncio.sleep(POLL_S)
            load.is_over = True
            await asyncio.gather(*workers)
    finally:
        left = await fleet.stop()
        fleet.close()
    if load.wrong:
        raise SystemExit(
            "answers differ though nobody was killed; equal tokens are promised with compiled CPU kernels only "
            "(`quire ops` says what is missing):\n" + "\n".join(load.wrong[:5])
        )
    if left:
        raise SystemExit(f"left behind though nobody was killed: {', '.join(left)}")
    return answers, load.longest_wait_s


async def measure(args: argparse.Namespace) -> int:
    """Run everything; the exit status."""
    common = ["--num-threads", "1", "--num-gpu-blocks-override", "1024", "--max-model-len", "512"]
    common += ["--structured-output-timeout", "300"]
    answers, calm_wait_s = await undisturbed(common, args.streams)
    print(f"undisturbed: longest wait {calm_wait_s:.1f} s", flush=True)
    flags = [*common, "--max-restarts", str(args.kills + 10)]
    flags += ["--data-parallel-size", str(args.engines)] if args.engines > 1 else []
    flags += ["--api-server-count", str(args.api_servers)]
    flags += ["--tensor-parallel-size", str(args.ranks)] if args.ranks > 1 else []
    fleet = Fleet([*flags, *args.flags], has_store=args.store)
    left: list[str] = []
    start_s = time.monotonic()
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(None)
        ) as session:
            fleet.start()
            await fleet.wait_until_ready(session)
            watcher = asyncio.create_task(fleet.watch(session))
            load = Load(fleet, session, answers)
            for kind in KINDS:  # schemas are compiled once, as in the undisturbed run
                await load.read(kind, {})
            load.longest_gap_s = load.longest_wait_s = 0.0
            load.waits.clear()
            workers = [asyncio.create_task(load.keep_streaming()) for _ in range(args.streams)]
            start_s = time.monotonic()
            num_killed = await kill_processes(fleet, load, args)
            load.is_over = True
            await asyncio.gather(*workers)
            seconds = time.monotonic() - start_s
            watcher.cancel()
    finally:
        left = await fleet.stop()
        words = fleet.last_lines()
        fleet.close()
    is_slow = load.longest_wait_s > args.hang_s + calm_wait_s
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(num_killed.items()))
    print(
        f"{num_killed.total()} kills ({kinds}) in {seconds:.0f} s: {load.num_streams} streams with "
        f"{load.num_tokens} tokens, {load.num_retries} sent again, longest gap {load.longest_gap_s:.1f} s, longest "
        f"wait beyond restarts {load.longest_wait_s:.1f} s (undisturbed {calm_wait_s:.1f} s); {len(load.wrong)} wrong, "
        f"{len(left)} left behind"
    )
    for each in (*load.wrong[:20], *(f"left: {each}" for each in left), *(load.waits[:20] if is_slow else ())):
        print(each)
    is_bad = bool(load.wrong or left or is_slow or load.num_streams < args.streams)
    if is_bad:
        print(words)
    return int(is_bad)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := set(kinds) - set(WHAT):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(WHAT)}")
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end then, with fewer kills")
    parser.add_argument("--what", type=_kinds, default=["engine"], help=f"some of {','.join(WHAT)}")
    parser.add_argument("--engines", type=int, default=1, help="--data-parallel-size")
    parser.add_argument("--ranks", type=int, default=1, help="--tensor-parallel-size")
    parser.add_argument("--api-servers", type=int, default=1, help="--api-server-count")
    parser.add_argument("--store", action="store_true", help="a block store behind the engines (--kv-tier)")
    parser.add_argument("--streams", type=int, default=8, help="requests at the same time")
    parser.add_argument("--hang-s", type=float, default=2.0, help="see above")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("flags", nargs="*", help="further flags of `quire serve`, after --")
    args = parser.parse_args()
    if ("rank" in args.what and args.ranks < 2) or ("store" in args.what and not args.store):
        parser.error("to kill a rank takes --ranks 2, to kill the store takes --store")
    if "api-server" in args.what and args.api_servers < 2:
        parser.error("to kill one of several API processes takes --api-servers 2")
    return asyncio.run(measure(args))


if __name__ == "__main__":
    raise SystemExit(main())
