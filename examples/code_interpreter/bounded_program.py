"""Runs a program in a process of its own that is bounded and sees little: the part of the example that needs no MCP.

`run_program` starts this file again, as `python -I bounded_program.py LIMITS`, which bounds itself and runs what stands
on its standard input.
"""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

__all__ = ["ISOLATION", "Limits", "isolates", "run_program"]

ISOLATION = (
    "unshare", "--user", "--map-root-user", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
"""Namespaces of its own for users, network, messages, host name and processes (util-linux)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may take."""

    timeout_s: float = 20.0
    memory_bytes: int = 1 << 30
    """Of addresses, of each process."""
    file_bytes: int = 64 << 20
    """Of each file."""
    num_processes: int = 64
    """Counted in its own namespace of users; not bounded without isolation."""
    output_bytes: int = 64 << 10
    """What it prints beyond is cut off, and ends it."""


def isolates() -> bool:
    """Whether this system lets namespaces be made."""
    try:
        return subprocess.run([*ISOLATION, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run_program(code: str, limits: Limits, *, is_isolated: bool) -> str:
    """Run a program; what it printed, with a last line where it was ended or failed.

    Args:
        code: Python.
        is_isolated: In namespaces of its own, which end with it. Otherwise processes that it leaves behind go on.
    """
    deadline = time.monotonic() + limits.timeout_s
    bounds = (limits.timeout_s, limits.memory_bytes, limits.file_bytes, limits.num_processes if is_isolated else 0)
    command = [*(ISOLATION if is_isolated else ()), sys.executable, "-I", __file__, *map(str, bounds)]
    with tempfile.TemporaryDirectory(prefix="code-") as folder, tempfile.TemporaryFile() as given:
        given.write(code.encode())
        given.seek(0)
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        with subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                output, end = _read(process, deadline, limits)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if not end and process.returncode:
        end = f"[it ended with status {process.returncode}]"
    text = output.decode(errors="replace")
    return f"{text.rstrip()}\n{end}".lstrip() if end else text


def _read(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> tuple[bytes, str]:
    """What it prints, and why it is to be ended, if it is; else it has ended."""
    assert process.stdout is not None
    too_late = f"[ended: it took longer than {limits.timeout_s:g} s]"
    output = bytearray()
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return bytes(output), too_late
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        output += chunk
        if len(output) > limits.output_bytes:
            return bytes(output[: limits.output_bytes]), f"[ended: it printed more than {limits.output_bytes} bytes]"
        if not chunk:
            break
    try:
        process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return bytes(output), too_late
    return bytes(output), ""


def main(timeout_s: float, memory_bytes: int, file_bytes: int, num_processes: int) -> None:
    """In the process of its own: bound it, and run the program that stands on its standard input."""
    code = sys.stdin.read()
    limits = {
        resource.RLIMIT_CPU: int(timeout_s) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if num_processes:
        limits[resource.RLIMIT_NPROC] = num_processes
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    tree = ast.parse(code, "program.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {"__name__": "__main__"}
    exec(compile(tree, "program.py", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "program.py", "eval"), names)
        if value is not None:
            print(repr(value))


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
