"""What a compiled kernel does in the loop in which it reads most: instructions, bytes, and how wide its loads are.

A kernel that reads memory as fast as there is any needs few instructions for each byte, and loads of 16 bytes. Whether
the compiler makes wide ones depends on what it can tell of addresses, so a change anywhere may narrow them without a
test of results noticing. Read from NVIDIA's disassembly (`nvdisasm`) and from AMD's assembly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["InnerLoop", "inner_loop_of_amdgcn", "inner_loop_of_sass"]


class InnerLoop(NamedTuple):
    """The loop of a kernel that reads most bytes of global memory in one turn, and has no such loop within."""

    instructions: int
    """Of a turn, of one thread."""
    load_bytes: int
    """That one thread loads from global memory in a turn."""
    bytes_per_load: float
    """Of its load instructions on average, at most 16; loads that a thread makes for its threads' common address count
    as any. Loads past the L1 cache, of what other programs have just written, do not count."""


class _Line(NamedTuple):
    label: str = ""
    """The label here, without an instruction."""
    target: str = ""
    """Where the instruction may jump to."""
    load_bytes: int = 0


_SASS_LABEL = re.compile(r"^\s*(\.L[\w.]*):")
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_SASS_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_GCN_LABEL = re.compile(r"^(\.?L\w+):")
_GCN_INSTRUCTION = re.compile(r"^\s+([a-z]\w+)(.*)")
_GCN_WIDTHS = {
    "ubyte": 1, "sbyte": 1, "u8": 1, "i8": 1, "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "i16": 2, "d16": 2,
    "dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16,
}  # fmt: skip


def inner_loop_of_sass(text: str) -> InnerLoop | None:
    """Of a disassembly by `nvdisasm`; None where no loop loads anything."""
    return _inner_loop(_sass_lines(text))


def inner_loop_of_amdgcn(text: str) -> InnerLoop | None:
    """Of an assembly as LLVM writes it for AMD's GPUs; None where no loop loads anything."""
    return _inner_loop(_amdgcn_lines(text))


def _sass_lines(text: str) -> Iterable[_Line]:
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            yield _Line(label=label[1])
        elif found := _SASS_INSTRUCTION.match(line):
            name, *modifiers = found[1].split(".")
            if name in ("LDG", "LDGSTS") and "STRONG" not in modifiers:
                yield _Line(load_bytes=next((_SASS_WIDTHS[each] for each in modifiers if each in _SASS_WIDTHS), 4))
            elif name == "BRA":
                target = re.search(r"`\((\.L[\w.]*)\)", found[2])
                yield _Line(target=target[1] if target else "")
            elif name != "NOP":
                yield _Line()


def _amdgcn_lines(text: str) -> Iterable[_Line]:
    for line in text.splitlines():
        if label := _GCN_LABEL.match(line):
            yield _Line(label=label[1])
        elif (found := _GCN_INSTRUCTION.match(line)) is not None:
            name = found[1]
            if name.startswith(("global_load_", "buffer_load_", "flat_load_")):
                widths = [_GCN_WIDTHS[each] for each in name.split("_")[2:] if each in _GCN_WIDTHS]
                yield _Line(load_bytes=widths[0] if widths else 4)
            elif name.startswith(("s_branch", "s_cbranch")):
                yield _Line(target=found[2].split(";")[0].strip())
            else:
                yield _Line()


def _inner_loop(given: Iterable[_Line]) -> InnerLoop | None:
    lines = list(given)
    labels = {line.label: place for place, line in enumerate(lines) if line.label}
    spans = [
        (labels[line.target], end) for end, line in enumerate(lines) if line.target in labels
        and labels[line.target] <= end
    ]  # fmt: skip
    loops = []
    for begin, end in spans:
        loads = [line.load_bytes for line in lines[begin : end + 1] if line.load_bytes]
        within = any(
            begin <= first and last <= end and (first, last) != (begin, end)
            and any(line.load_bytes for line in lines[first : last + 1])
            for first, last in spans
        )  # fmt: skip
        if loads and not within:
            instructions = sum(not line.label for line in lines[begin : end + 1])
            loops.append(InnerLoop(instructions, sum(loads), round(sum(loads) / len(loads), 1)))
    return max(loops, key=lambda loop: loop.load_bytes, default=None)
