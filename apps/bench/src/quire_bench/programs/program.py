"""The frame of a benchmark program: load one engine, then serve batches of token ids on request, timed in here.

A program runs in a process of its own, maybe in another interpreter where nothing of Quire is installed: this file and
its neighbours import only the standard library and their own engine. Spoken in lines of JSON: the settings come in, and
`{"ready": version}` goes out when the first token is there; each `{"prompts": ..., "output_lens": ...}` is answered by
`{"seconds": ..., "ended_s": ...}` (a duration, and the monotonic clock at its end) and what else was measured, and
everything that goes wrong by `{"error": ...}`. The end of the input ends the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Run = Callable[[list[Any], list[int]], "dict[str, Any] | None"]
"""Serves prompts (token ids, or messages of `picture.py`), all at once, each with exactly (or at least) so many greedy
tokens; an end token ends nothing. What it returns goes into the reply."""

FIRST_PROMPT = list(range(10, 18))


def serve(
    load: Callable[[dict[str, Any]], tuple[Run, str]],
    first_prompt: Any = FIRST_PROMPT,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the program.

    Args:
        load: Makes the engine from the settings: `model` (folder), `file` (converted model, or None), `dtype`,
            `num_threads` (or None), `max_model_len`, `max_num_seqs`, `num_kv_tokens`; and its version.
        first_prompt: What is answered with one token before the engine is ready.
        clock: Seconds, by which runs are timed.
    """
    _die_with_parent()
    # What libraries print to standard output must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        run, version = load(json.loads(sys.stdin.readline()))
        run([first_prompt], [1])
        reply(ready=version)
        for line in sys.stdin:
            request = json.loads(line)
            start = clock()
            measured = run(request["prompts"], request["output_lens"])
            end = clock()
            reply(seconds=end - start, ended_s=end, **(measured or {}))
    except BaseException as error:
        # No traceback: the last lines that are shown should be the engine's own.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        reply(error=f"{type(error).__name__}: {str(error)[:2000]} ({where})")
        raise SystemExit(1) from None


def check_lengths(got: list[int], wanted: list[int]) -> None:
    """Raise when a request did not get its tokens: a figure from such a run would be worth nothing."""
    for count, asked in zip(got, wanted, strict=True):
        if count < asked:
            raise RuntimeError(f"a request for {asked} tokens ended with {count}")


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process with its parent, even while it is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
