"""Two network namespaces as two hosts, and `TorchCollectives` over the link between them: plain, delayed, lossy, cut.

    python packages/distributed/tests/two_hosts.py

The link is a thread of this program between two TUN devices, which keeps packets for some time, or loses them; so it
needs root, `ip` and /dev/net/tun, and nothing of the kernel's traffic control. Everything it makes is removed again.
Exits with 1 and says what is wrong when a result is wrong, or when a rank does not raise `RankDeadError` in time after
the link was cut. Not collected by pytest: `nox -s hosts` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from quire_distributed import TorchRendezvous
from quire_interfaces import RankDeadError

ADDRESSES = ("10.199.77.1", "10.199.77.2")
PORT = 29_877
SILENCE_S = 2.0
BOUND_S = SILENCE_S + 2.0
"""Seconds after the cut in which every rank raises."""


class Traffic(NamedTuple):
    """What a link does to packets."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    """Share of the packets that are lost."""


PLAIN, CUT = Traffic(), Traffic(loss=1.0)
LINKS = {
    "plain": PLAIN,
    "delayed": Traffic(delay_s=0.02, jitter_s=0.005),
    "lossy": Traffic(loss=0.05),
    "delayed and lossy": Traffic(delay_s=0.01, loss=0.02),
    "cut while busy": CUT,
    "cut while idle": CUT,
    "cut while sending": CUT,
}
"""Name of a link -> what it does in both directions; one that is cut is plain at first."""


class Link(threading.Thread):
    """Carries packets between two TUN devices, whose names are given."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__(daemon=True)
        self.traffic = PLAIN
        self._files = [_open_tun(name) for name in devices]

    def run(self) -> None:
        random_numbers = random.Random(1)
        waiting: list[tuple[float, int, int, bytes]] = []  # when, number, to where, what
        number = 0
        while True:
            wait_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else 1.0
            for file in select.select(self._files, [], [], wait_s)[0]:
                try:
                    packet, traffic = os.read(file, 65536), self.traffic
                except OSError:  # the hosts are being removed
                    return
                if random_numbers.random() >= traffic.loss:
                    number += 1
                    when = time.monotonic() + traffic.delay_s + traffic.jitter_s * random_numbers.random()
                    heapq.heappush(waiting, (when, number, self._files[file == self._files[0]], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the device is down, or full
                    os.write(file, packet)


def _open_tun(name: str) -> int:
    """A new TUN device (linux/if_tun.h): what is sent through it is read here, and what is written here arrives."""
    set_interface, is_tun, no_header = 0x400454CA, 0x0001, 0x1000
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, set_interface, struct.pack("16sH22x", name.encode(), is_tun | no_header))
    return file


def sh(*command: str) -> None:
    subprocess.run(command, check=True)


class TwoHosts:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self.names = [f"quire-{os.getpid()}-{i}" for i in range(2)]
        self.devices = [f"quire{os.getpid() % 100_000}{letter}" for letter in "ab"]

    def set_up(self) -> None:
        for name in self.names:
            sh("ip", "netns", "add", name)
        self.link = Link(self.devices)
        for name, device, address in zip(self.names, self.devices, ADDRESSES, strict=True):
            sh("ip", "link", "set", device, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            sh("ip", "-n", name, "link", "set", device, "mtu", "9000")
            for each in (device, "lo"):
                sh("ip", "-n", name, "link", "set", each, "up")
        self.link.start()

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def start(self, rank: int, link: str) -> subprocess.Popen[str]:
        """The program of a rank on its host."""
        command = [
            "ip",
            "netns",
            "exec",
            self.names[rank],
            sys.executable,
            __file__,
            "--rank",
            str(rank),
            "--link",
            link,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    try:
        hosts.set_up()
        yield hosts
    finally:
        hosts.remove()


def run_rank(rank: int, link: str) -> None:
    """Collectives until the link is cut, or 30 rounds. Prints "ready", then what it saw."""
    group = TorchRendezvous(ADDRESSES[0], PORT, rank, 2, timeout_s=60).group("world", (0, 1), silence_s=SILENCE_S)
    parts = [torch.arange(20_000.0) + rank for rank in range(2)]
    times: list[float] = []
    print("ready", flush=True)
    last = time.monotonic()
    try:
        while link.startswith("cut") or len(times) < 30:
            if link == "cut while idle" and times:
                group.recv(parts[0], 1 - rank)
            if link == "cut while sending" and times:
                group.send(torch.zeros(1 << 24), 1 - rank)
            assert torch.equal(group.all_reduce(parts[rank]), parts[0] + parts[1])
            assert torch.equal(group.all_gather(parts[rank][:5]), torch.cat([part[:5] for part in parts]))
            times.append(time.monotonic() - last)
            last = time.monotonic()
        result = {"median_ms": round(statistics.median(times) * 1000, 2)}
    except RankDeadError as error:
        result = {"rank": error.rank, "cause": error.cause, "raised_at": time.time()}
    group.close()
    print(json.dumps(result), flush=True)


def check(hosts: TwoHosts, link: str) -> str | None:
    """Run both ranks over a link; None, or what was wrong."""
    is_cut = link.startswith("cut")
    hosts.link.traffic = PLAIN if is_cut else LINKS[link]
    ranks = [hosts.start(rank, link) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                return "a rank did not start"
        cut_at = 0.0
        if is_cut:
            time.sleep(1.5)
            hosts.link.traffic = LINKS[link]
            cut_at = time.time()
        try:
            results = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
        except subprocess.TimeoutExpired:
            return "a rank hangs"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, result in enumerate(results):
        if is_cut:
            if "raised_at" not in result:
                return f"rank {rank} did not notice: {result}"
            result["raised_after_s"] = round(result.pop("raised_at") - cut_at, 2)
            if result["rank"] != 1 - rank or result["raised_after_s"] > BOUND_S:
                return f"rank {rank} raised otherwise: {result}"
        elif "median_ms" not in result:
            return f"rank {rank} raised: {result}"
    print(f"{link:20}{results}", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", choices=LINKS, help="only this one")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.link)
        return 0
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        print("two_hosts.py needs root, ip and /dev/net/tun: nothing was tried", file=sys.stderr)
        return 1
    with two_hosts() as hosts:
        failures = {link: check(hosts, link) for link in ([options.link] if options.link else LINKS)}
    for link, failure in failures.items():
        if failure is not None:
            print(f"{link}: {failure}", file=sys.stderr)
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
