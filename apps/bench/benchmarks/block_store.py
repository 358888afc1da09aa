"""Bytes per second of tiers behind the KV cache, beside memcpy: host memory, files on tmpfs, a block store.

    python apps/bench/benchmarks/block_store.py [--block-mib 1.75] [--blocks 64] [--rounds 5] [--tmpfs /dev/shm]

Blocks go to a tier and come back through a stack, which makes and checks their headers and checksums, turn by turn with
copies of as many bytes from one buffer to another; the median over rounds, and its share of memcpy. The block store is
a process of its own (`quire kv-serve`) on a unix socket and on loopback TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire_interfaces import BlockKey
from quire_kv_transfer import BlockFiles, BlockTier, FolderUsage, HostMemoryTier, RemoteTier, TierFolder, TierStack

FINGERPRINT = bytes(32)


@contextlib.contextmanager
def block_store(folder: Path, memory_bytes: int) -> Iterator[list[str]]:
    """A block store in a process of its own; its addresses."""
    command = [sys.executable, "-m", "quire_server.cli", "kv-serve", "--memory", str(memory_bytes)]
    command += ["--listen", f"unix:{folder}/store", "--listen", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().removeprefix("block store: ").strip() for _ in range(2)]
        finally:
            process.terminate()


def seconds(action: Callable[[], None]) -> float:
    """How long it takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


class Blocks:
    """Random blocks, and a place to read them into.

    Args:
        num_blocks: How many.
        block_bytes: Length of each.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.data = [memoryview(random.Random(number).randbytes(block_bytes)) for number in range(num_blocks)]
        self.place = memoryview(bytearray(block_bytes))

    def copy(self) -> None:
        """Copy each block into the place."""
        for block in self.data:
            self.place[:] = block

    def write(self, stack: TierStack, first: int) -> None:
        """Write each block under a key that was not used before."""
        for number, block in enumerate(self.data):
            assert stack.write(_key(first + number), block)

    def read(self, stack: TierStack, first: int) -> None:
        """Read each block into the place."""
        for number in range(len(self.data)):
            assert stack.read(_key(first + number), [self.place])


def _key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(32, "big"))


def main() -> None:
    """Measure all tiers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-mib", type=float, default=1.75, help="as 16 tokens of Qwen3 0.6B in bf16")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tmpfs", default="/dev/shm")
    args = parser.parse_args()
    block_bytes = int(args.block_mib * (1 << 20))
    total_bytes = args.blocks * block_bytes
    blocks, bound = Blocks(args.blocks, block_bytes), 2 * (total_bytes + (1 << 20))
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=args.tmpfs)))
        unix, tcp = exits.enter_context(block_store(folder, bound))
        tiers: dict[str, BlockTier] = {
            "host memory": HostMemoryTier(bound),
            "files on tmpfs": BlockFiles(TierFolder(str(folder), FINGERPRINT), FolderUsage(str(folder), bound)),
            "store, unix socket": RemoteTier(unix, FINGERPRINT),
            "store, loopback TCP": RemoteTier(tcp, FINGERPRINT),
        }
        times: dict[str, list[float]] = {}
        for round_number in range(args.rounds):
            first = round_number * args.blocks
            for name, tier in tiers.items():
                stack = TierStack([tier], FINGERPRINT, [block_bytes])
                times.setdefault("memcpy", []).append(seconds(blocks.copy))
                times.setdefault(f"{name}, write", []).append(seconds(lambda: blocks.write(stack, first)))  # noqa: B023
                times.setdefault(f"{name}, read", []).append(seconds(lambda: blocks.read(stack, first)))  # noqa: B023
        rates = {name: total_bytes / statistics.median(each) / 1e9 for name, each in times.items()}
        for name, rate in rates.items():
            print(f"{name:28} {rate:6.2f} GB/s  {rate / rates['memcpy']:5.2f} of memcpy")
        for tier in tiers.values():
            tier.close()


if __name__ == "__main__":
    main()
