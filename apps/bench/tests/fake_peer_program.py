"""An engine program that pretends: how fast, and what goes wrong, is in its environment (FAKE_PEER, JSON).

Speaks through the real frame, as the real programs do. Not a test; run by the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = Path(importlib.util.find_spec("quire_bench").origin).parent / "programs"  # type: ignore[union-attr, arg-type]
sys.path.insert(0, str(PROGRAMS))

from program import Run, check_lengths, serve  # noqa: E402

ASKED: dict[str, Any] = json.loads(os.environ.get("FAKE_PEER", "{}"))


class OwnClock:
    """Seconds of the tokens alone: nothing of the machine, and of no pause."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


OWN_CLOCK = OwnClock()


def load(settings: dict[str, Any]) -> tuple[Run, str]:
    print("loading loudly on standard output")
    if ASKED.get("fails_at") == "start":
        print("the licence has expired", file=sys.stderr)
        raise RuntimeError("asked to fail at the start")
    if ASKED.get("hangs_at") == "start":
        time.sleep(600)
    if ASKED.get("child"):  # an engine with a process of its own
        subprocess.Popen([sys.executable, "-c", "x = bytearray(80_000_000); import time; time.sleep(600)"])
    log = open(ASKED["log"], "a", encoding="utf-8") if "log" in ASKED else None  # noqa: SIM115
    memory = bytearray(ASKED.get("memory_bytes", 0))

    def run(prompts: list[list[int]], output_lens: list[int]) -> None:
        assert memory is not None
        if log is not None:
            print(ASKED.get("name", "fake"), len(prompts), len(prompts[0]), output_lens[0], file=log, flush=True)
        if ASKED.get("fails_at") == len(prompts):
            raise MemoryError("asked to fail")
        if ASKED.get("exits_at") == len(prompts):
            os._exit(9)
        if ASKED.get("hangs_at") == len(prompts):
            time.sleep(600)
        left_s = ASKED.get("token_s", 0.0001) * sum(output_lens)
        OWN_CLOCK.now_s += left_s
        if ASKED.get("own_clock"):
            left_s = 0
        while left_s > 0:  # in pieces: a sleep goes on while the process is stopped
            time.sleep(min(left_s, 0.005))
            left_s -= 0.005
        check_lengths([length - ASKED.get("short_by", 0) for length in output_lens], output_lens)

    return run, f"fake {settings['dtype']} {settings['max_num_seqs']}"


if __name__ == "__main__":
    serve(load, **({"clock": OWN_CLOCK} if ASKED.get("own_clock") else {}))
