"""A run of `quantize` that is killed, at whatever change to a folder, leaves what the next run can begin with.

Where a run stands is all about files, so weights are not computed here: `test_quire_quantize.py` does that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = """
import os, sys
from pathlib import Path
from quire.quantize import MARKER, _unfinished

CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "open"}
NAMES = ["config.json", "model-00001.safetensors", "part-0", "tokenizer.json"]
KILLED = 9

def write(out):
    with _unfinished(out) as folder:
        for name in NAMES:
            (folder / name).write_text(name)

def interrupted(out):
    try:
        with _unfinished(out) as folder:
            for name in NAMES:
                (folder / name).write_text(name)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass

def killed(run, out, change):
    "Whether `run` was killed before it made that change, the first being 0."
    pid = os.fork()
    if pid == 0:
        made = 0
        def count(event, arguments):
            nonlocal made
            if event in CHANGES:
                made += 1
                if made > change:
                    os._exit(KILLED)
        sys.addaudithook(count)
        try:
            run(out)
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED), f"change {change}: a run could not begin"
    return status == KILLED

def whole(out):
    return out.is_dir() and sorted({path.name for path in out.iterdir()} - {MARKER}) == NAMES

top, first, second = Path(sys.argv[1]), globals()[sys.argv[2]], globals()[sys.argv[3]]
num_changes = 0
while True:
    out = top / str(num_changes) / "out"
    if first is not second:
        assert killed(first, out, 8)  # with most files written
        assert (out.with_name("out.unfinished") / MARKER).exists()
    was_killed = killed(second, out, num_changes)
    if not whole(out):
        write(out)
    assert whole(out), num_changes
    assert not out.with_name("out.unfinished").exists()
    if not was_killed:
        break
    num_changes += 1
print("changes", num_changes)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [("write", "write", 9), ("interrupted", "interrupted", 10), ("interrupted", "write", 14)],
    ids=["a run", "an interrupted run", "a run after one that was killed"],
)
def test_whoever_is_killed_leaves_what_the_next_run_knows(
    first: str, second: str, changes: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUNS, str(tmp_path), first, second]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.rsplit(maxsplit=1)[-1]) >= changes
