"""The process in which constraints of strangers are compiled first: `python -m quire_structured_output.trial_process`.

It reads the vocabulary once, and forks for each constraint: a child with a bound on its time and memory, whose crash is
nobody else's, and which goes on when nothing else wants to run once it has taken what its order allows. Not for use by
hand.

Messages, over the socket that comes with each order: the order is a line of JSON and the text of the constraint, to the
end of the stream. The child answers with a line of JSON and the text of the translated grammar, to the end of the
stream. Nothing at all means that it did not survive.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from quire_interfaces import GrammarSpec, RequestError
from quire_structured_output.allowance import NICE, lower_priority, pauses
from quire_structured_output.blame import largest_part
from quire_structured_output.llguidance_backend import LLGuidanceBackend
from quire_structured_output.vocabulary import read_vocabulary

__all__ = ["main"]

LOOK_S = 0.002
USUAL_S = 0.02
"""A usual constraint is done by then, and whoever sent it waits for nothing."""
MAX_MEMORY_BYTES = 1 << 30
"""What one constraint may need beyond what the process has."""


def _read_all(channel: socket.socket) -> bytes:
    """To the end of the stream. Raises TimeoutError as the socket is set."""
    parts = []
    while part := channel.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def main(fd: int) -> None:
    """Serve orders until the other end of socket `fd` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle; this process ends with it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no burial
    channel = socket.socket(fileno=fd)
    backend = LLGuidanceBackend(read_vocabulary(channel))
    gc.collect()
    gc.freeze()
    lower_priority(0, starve=False)  # from here on it works for strangers
    if sys.platform != "linux":
        os.nice(NICE)
    channel.sendall(b"r")
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            channel.close()
            with pauses(after_s=USUAL_S):
                _serve(backend, socket.socket(fileno=fds[0]))
        os.close(fds[0])


def _serve(backend: LLGuidanceBackend, order: socket.socket) -> None:
    """In the child: follow one order, and end."""
    status = 1
    try:
        head, _, text = _read_all(order).partition(b"\n")
        task = json.loads(head)
        timeout_s, quick_s = task["timeout_s"], task["quick_s"]
        _limit(timeout_s, task["most_s"] if quick_s > 0 else timeout_s)
        _starve_after(quick_s, time.monotonic() + timeout_s)
        spec = GrammarSpec(task["kind"], text.decode("utf-8", "surrogatepass"), *task["options"])
        answer, source = _blame(spec) if task["action"] == "blame" else _try(backend, spec)
        answer["used_s"] = time.process_time()
        order.sendall(json.dumps(answer).encode() + b"\n" + source.encode("utf-8", "surrogatepass"))
        status = 0
    finally:
        os._exit(status)


def _limit(timeout_s: float, most_s: float) -> None:
    """Bound the processor time, the time by the clock, the memory and the traces of this process."""
    import resource

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    signal.setitimer(signal.ITIMER_REAL, most_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MAX_MEMORY_BYTES,) * 2)
        # A library's last words would stand in the server's log, once per hostile request.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _starve_after(quick_s: float, deadline_s: float) -> None:
    """Let this process run on only when nothing else wants to once it has used the processor for so long, and to the
    deadline, by the clock."""
    if quick_s <= 0:
        lower_priority(0, starve=True)
        return
    main_id = threading.get_native_id()

    def watch() -> None:  # the library lets other threads run
        while (left_s := quick_s - time.process_time()) > 0:
            time.sleep(max(left_s, LOOK_S))
        lower_priority(main_id, starve=True)
        signal.setitimer(signal.ITIMER_REAL, max(LOOK_S, deadline_s - time.monotonic()))

    threading.Thread(target=watch, daemon=True).start()


def _try(backend: LLGuidanceBackend, spec: GrammarSpec) -> tuple[dict[str, Any], str]:
    try:
        tried = backend.try_out(spec)
    except RequestError as error:
        return {"error": str(error), "param": error.param, "code": error.code}, ""
    except Exception as error:
        param = f"structured_outputs.{spec.kind}"
        message = f"{param} cannot be used: {type(error).__name__}: {str(error)[:600]}"
        return {"error": message, "param": param, "code": "invalid_grammar"}, ""
    return {"walk": tried.walk, "compile_s": tried.compile_s}, tried.source


def _blame(spec: GrammarSpec) -> tuple[dict[str, Any], str]:
    return {}, largest_part(spec)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        main(int(sys.argv[1]))
