"""Builds kernels with no GPU, reads what each takes of a GPU, and holds it against limits and a committed table.

    python -m quire_kernels_cuda.ahead_of_time            build for every target; fail where anything became worse
    python -m quire_kernels_cuda.ahead_of_time --write    write the table anew
    ... --changed                                         only what differs from the table's digests, and a sample
    ... --targets sm_90,sm_100 --only decode              some targets, and builds whose name holds one of these texts

A kernel fails that needs more registers or shared memory than its target has, spills more registers to memory than the
table says, or loads memory in narrower pieces. With the version of Triton that the table was made with, every other
difference fails as well, so that what a change does to a kernel is seen in its diff.

The table keeps a digest of everything that each build depends on. With `--changed` a build whose digest is the table's
is taken from there instead of being built, but for a tenth of them, which the commit draws: what the digest misses is
found within a few commits.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from quire_kernels_cuda.build_digest import build_digest
from quire_kernels_cuda.builds import SHAPES, list_builds
from quire_kernels_cuda.inner_loop import InnerLoop, inner_loop_of_amdgcn, inner_loop_of_sass
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.recording import Build, kernel_of, named
from quire_kernels_cuda.targets import Target

__all__ = ["Resources", "compile_build", "complaints", "main", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one kernel takes of one target: a line of the table."""

    kernel: str
    target: str
    registers: int
    """Vector registers of 32 bits of a thread."""
    spilled: int
    """Of a thread, to memory: bytes on NVIDIA GPUs, registers on AMD GPUs."""
    shared_bytes: int
    """Of a block of threads."""
    num_warps: int
    loop_instructions: int | None = None
    """Of a turn of the loop that reads most (`inner_loop`); None where no loop reads anything, or where the line is
    older than these columns."""
    loop_bytes: int | None = None
    """That one thread loads in that turn."""
    bytes_per_load: float | None = None
    """Of the loads there, on average."""
    digest: str = field(default="", compare=False)
    """Of everything that the build depends on (`build_digest`)."""


NARROWER = 0.8
"""Share of the table's bytes per load below which loads count as narrower."""
_OF_LOOPS = ("loop_instructions", "loop_bytes", "bytes_per_load")
_SAMPLED_SHARE = 10
"""Of so many builds whose digest is the table's, one is built all the same."""


def compile_build(build: Build, target: Target) -> Any:
    """Triton's compiled kernel.

    Raises:
        RuntimeError: Triton is set to interpret, and compiles nothing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1; unset it")
    kernel = build.kernel
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    attrs: dict[tuple[int], list[list[Any]]] = {places[name]: [["tt.divisibility", 16]] for name in build.aligned}
    for name in build.short:
        attrs.setdefault(places[name], []).append(["tt.pointer_range", 32])
    source = ASTSource(
        fn=kernel,
        signature=dict(build.signature),
        constexprs={places[name]: value for name, value in build.constants.items()},
        attrs=attrs,
    )
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "enable_fp_fusion": build.enable_fp_fusion,
    }
    return triton.compile(source, target=GPUTarget(target.vendor, target.arch, target.warp_size), options=options)


def measure(build: Build, target: Target) -> Resources:
    """Build a kernel and read what it takes."""
    compiled = compile_build(build, target)
    read = _read_cubin if target.vendor == "cuda" else _read_amdgcn
    registers, spilled, loop = read(compiled.asm)
    return Resources(
        kernel=build.name,
        target=target.name,
        registers=registers,
        spilled=spilled,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        loop_instructions=loop and loop.instructions,
        loop_bytes=loop and loop.load_bytes,
        bytes_per_load=loop and loop.bytes_per_load,
        digest=build_digest(build, target, compiler()),
    )


def compiler() -> str:
    """The toolchain as far as it decides what is built: Triton's version, and how it is called."""
    import triton

    return f"{triton.__version__} {inspect.getsource(compile_build)}"


def _read_cubin(asm: Any) -> tuple[int, int, InnerLoop | None]:
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()

        def output(*command: str) -> str:
            return subprocess.run([tools / command[0], *command[1:], file.name], capture_output=True, text=True,
                                  check=True).stdout  # fmt: skip

        text, code = output("cuobjdump", "-res-usage"), output("nvdisasm", "-c")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local, inner_loop_of_sass(code)


def _read_amdgcn(asm: Any) -> tuple[int, int, InnerLoop | None]:
    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", asm["amdgcn"], re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the assembly does not say its {name}")
        return int(found[1])

    return number("vgpr_count"), number("vgpr_spill_count"), inner_loop_of_amdgcn(asm["amdgcn"])


def complaints(
    measured: Iterable[Resources], table: Iterable[Resources], targets: dict[str, Target], *, exact: bool
) -> list[str]:
    """What is wrong with what was measured.

    Args:
        table: What was measured before.
        exact: Every difference is wrong, for the compiler is the same.
    """
    known = {(line.kernel, line.target): line for line in table}
    found = []
    for line in measured:
        target, before = targets[line.target], known.pop((line.kernel, line.target), None)
        where = f"{line.kernel} on {line.target}"
        if line.registers > target.registers:
            found.append(f"{where} needs {line.registers} registers, there are {target.registers}")
        if line.shared_bytes > target.shared_memory_bytes:
            found.append(
                f"{where} needs {line.shared_bytes} bytes of shared memory, there are {target.shared_memory_bytes}"
            )
        if before is None:
            found.append(f"{where} is not in the table; write it anew")
        elif line.spilled > before.spilled:
            found.append(f"{where} spills {line.spilled}, and spilled {before.spilled} before")
        elif is_narrower(line, before):
            found.append(f"{where} loads {line.bytes_per_load:g} bytes at a time, and {before.bytes_per_load:g} before")
        elif exact and _differences(before, line):
            found.append(
                f"{where} differs from the table: {_differences(before, line)}; look at it, then write it anew"
            )
    found += [f"{kernel} on {target} is in the table, but not built; write it anew" for kernel, target in known]
    return found


def is_narrower(line: Resources, before: Resources) -> bool:
    """Whether loads of the loop that reads most became narrower, by more than a load or two beside the others make."""
    now, then = line.bytes_per_load, before.bytes_per_load
    return now is not None and then is not None and now < NARROWER * then


def _differences(before: Resources, now: Resources) -> str:
    """What differs, digests aside, and what older lines do not have."""
    names = [
        each.name
        for each in fields(Resources)
        if each.compare and getattr(before, each.name) != getattr(now, each.name)
        and not (each.name in _OF_LOOPS and before.loop_instructions is None)
    ]  # fmt: skip
    return ", ".join(f"{name} {getattr(before, name)} -> {getattr(now, name)}" for name in names)


def read_table(path: Path) -> tuple[str, list[Resources]]:
    """The version of Triton that a table was made with, and its lines."""
    with path.open(newline="") as file:
        version = file.readline().removeprefix("# Triton ").strip()
        kinds: dict[str, Any] = dict.fromkeys(("registers", "spilled", "shared_bytes", "num_warps", *_OF_LOOPS), int)
        kinds["bytes_per_load"] = float
        rows: list[dict[str, Any]] = [
            {name: (kinds[name](text) if text else None) if name in kinds else text for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
        return version, [Resources(**row) for row in rows]


def write_table(path: Path, version: str, lines: Iterable[Resources]) -> None:
    """Write a table that `read_table` reads."""
    with path.open("w", newline="") as file:
        file.write(f"# Triton {version}\n")
        writer = csv.DictWriter(file, [each.name for each in fields(Resources)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def platform_builds(platform: Platform) -> list[tuple[Target, Build]]:
    """Everything in the table of a platform. What several networks share is there once, by its first name."""
    found: list[tuple[Target, Build]] = []
    for target in platform.targets.values():
        known: list[Build] = []
        for shape in SHAPES:
            for build in list_builds(shape, platform, target):
                if not any(replace(build, name=other.name) == other for other in known):
                    known.append(build)
        found += [(target, build) for build in sorted(known, key=lambda build: build.name)]
    return found


def _measure_part(part: list[tuple[Build, Target]]) -> list[Resources | str]:
    """In a process of its own: builds as `named` gives them. What does not build is told in words."""
    found: list[Resources | str] = []
    for build, target in part:
        try:
            found.append(measure(replace(build, kernel=kernel_of(build)), target))
        except Exception as error:
            found.append(f"{build.name} on {target.name} does not build: {type(error).__name__}: {error}")
    return found


def _merged(
    before: Iterable[Resources], measured: Iterable[Resources], names: Iterable[tuple[str, str]]
) -> list[Resources]:
    """The lines of a table in which some are measured anew; those of nothing that is built any more are left out."""
    lines = {(line.kernel, line.target): line for line in (*before, *measured)}
    return [lines[name] for name in names if name in lines]


def unchanged_lines(
    builds: Iterable[tuple[Build, Target]], table: Iterable[Resources], drawn_by: str
) -> dict[tuple[str, str], Resources]:
    """The table's lines of builds whose digest is still theirs: (kernel, target) -> line.

    Args:
        drawn_by: Text that draws a tenth of them, which are left out, to be built all the same.
    """
    known = {(line.kernel, line.target): line for line in table}
    found = {}
    for build, target in builds:
        key = (build.name, target.name)
        line = known.get(key)
        if line is None or line.digest != build_digest(build, target, compiler()):
            continue
        lot = hashlib.sha256(" ".join((drawn_by, *key)).encode()).digest()
        if int.from_bytes(lot[:4], "big") % _SAMPLED_SHARE:
            found[key] = line
    return found


def _commit() -> str:
    """The hash of the commit that is checked out, or nothing where there is none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _find(module: str, attribute: str) -> Platform:
    platform: Platform = getattr(import_module(module), attribute)
    return platform


def main(module: str, attribute: str, table: Path, arguments: list[str] | None = None) -> int:
    """The command line of a platform, which is `attribute` of `module`.

    Args:
        table: The committed table.
        arguments: Instead of the process's own.

    Returns:
        What the process should exit with.
    """
    parser = argparse.ArgumentParser(description="Build the Triton kernels for every target and watch what they take.")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument(
        "--changed", action="store_true", help="only what differs from the table's digests, and a tenth of the rest"
    )
    parser.add_argument("--targets", help="only these, separated by commas")
    parser.add_argument("--only", help="only builds whose name holds one of these texts, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    platform = _find(module, attribute)
    import triton

    targets = options.targets.split(",") if options.targets else list(platform.targets)
    if unknown := sorted(set(targets) - set(platform.targets)):
        parser.error(f"no target {', '.join(unknown)}; choose of {', '.join(platform.targets)}")
    only = [""] if options.only is None else options.only.split(",")
    builds = platform_builds(platform)
    listed = [(build.name, target.name) for target, build in builds]
    asked = [
        (build, target)
        for target, build in builds
        if target.name in targets and any(text in build.name for text in only)
    ]
    version, before = read_table(table) if table.exists() else (triton.__version__, [])
    unchanged = unchanged_lines(asked, before, _commit()) if options.changed else {}
    jobs = [(named(build), target) for build, target in asked if (build.name, target.name) not in unchanged]
    parts = [jobs[begin : begin + 4] for begin in range(0, len(jobs), 4)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_measure_part, part) for part in parts]
        results = [result for future in futures for result in future.result()]
    measured = [result for result in results if isinstance(result, Resources)]
    for line in measured:
        print(*asdict(line).values(), sep="  ")
    num_built = len(measured)
    measured += unchanged.values()
    partial = len(asked) < len(listed)
    if options.write:
        version, before = triton.__version__, _merged(before, measured, listed)
        write_table(table, version, before)
    chosen = {(build.name, target.name) for build, target in asked}
    before = [line for line in before if (line.kernel, line.target) in chosen] if partial else before
    found = [result for result in results if isinstance(result, str)]
    found += complaints(measured, before, dict(platform.targets), exact=version == triton.__version__)
    for complaint in found:
        print(complaint, file=sys.stderr)
    print(
        f"{num_built} kernels built with Triton {triton.__version__}, {len(unchanged)} unchanged, "
        f"{len(found)} complaints"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main("quire_kernels_cuda.platform", "NVIDIA", Path(__file__).with_name("resources.csv")))
