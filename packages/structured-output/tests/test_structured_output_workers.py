"""The end of a process waits for a worker, but not for ever."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time
from quire_structured_output import workers

def work():
    time.sleep({work_s})
    print("done", flush=True)

workers.LAST_WAIT_S = {wait_s}
pool = workers.WorkerPool(2, "test")
pool.submit(work)
{close}
"""


def run(**values: object) -> str:
    code = PROGRAM.format(**values)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_work_that_ends_soon_is_waited_for() -> None:
    assert run(work_s=0.5, wait_s=30, close="time.sleep(0.2)") == "done\n"
    assert run(work_s=0.5, wait_s=30, close="time.sleep(0.2); pool.close()") == "done\n"


def test_work_that_does_not_end_is_left() -> None:
    assert run(work_s=1000, wait_s=0.2, close="time.sleep(0.2)") == ""
