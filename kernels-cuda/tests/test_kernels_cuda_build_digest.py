"""What a build's digest depends on, and which builds are taken from the table instead of being built."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from quire_kernels_cuda.ahead_of_time import Resources, compiler, complaints, unchanged_lines
from quire_kernels_cuda.build_digest import build_digest
from quire_kernels_cuda.recording import Build
from quire_kernels_cuda.targets import NVIDIA_TARGETS

TARGET = NVIDIA_TARGETS["sm_90"]
SOURCE = """
import triton
import triton.language as tl

SCALE = tl.constexpr(3)
UNUSED = 1

@triton.jit
def innermost(x):
    return x * SCALE

@triton.jit
def inner(x):
    return innermost(x) + 1

@triton.jit
def stranger(x):
    return x - 7

@triton.jit
def kernel(pointer, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(pointer + offsets, inner(offsets))
"""


def load(folder: Path, source: str) -> ModuleType:
    """The source as a module, always of one name: where it lies is no part of a digest."""
    path = folder / "some_kernels.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("some_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    spec.loader.exec_module(module)
    return module


def build_of(folder: Path, source: str = SOURCE) -> Build:
    return Build(
        name="kernel few",
        kernel=load(folder, source).kernel,
        signature={"pointer": "*fp32", "SIZE": "constexpr"},
        constants={"SIZE": 64},
        aligned=frozenset({"pointer"}),
        num_warps=4,
        num_stages=3,
    )


def digest_of(folder: Path, number: int, source: str = SOURCE) -> str:
    """Each source in a folder of its own, since Python keeps the lines of files that it has read."""
    own = folder / str(number)
    own.mkdir()
    return build_digest(build_of(own, source), TARGET, "3.9.0")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("inner(offsets))", "inner(offsets) + 1)"),  # the kernel itself
        ("+ 1\n", "+ 2\n"),  # what it calls
        ("x * SCALE", "x + SCALE"),  # what that calls
        ("constexpr(3)", "constexpr(4)"),  # a constant read by that
    ],
)
def test_what_a_kernel_is_made_of_changes_its_digest(tmp_path: Path, before: str, after: str) -> None:
    assert before in SOURCE
    assert digest_of(tmp_path, 0) != digest_of(tmp_path, 1, SOURCE.replace(before, after))


def test_what_a_kernel_does_not_use_leaves_its_digest(tmp_path: Path) -> None:
    same = digest_of(tmp_path, 0)
    assert same == digest_of(tmp_path, 1, SOURCE.replace("x - 7", "x - 8").replace("UNUSED = 1", "UNUSED = 2"))
    assert same == digest_of(tmp_path, 2, "\n\n# Lines before it.\n" + SOURCE)


def test_specialization_compiler_and_target_change_a_digest(tmp_path: Path) -> None:
    build = build_of(tmp_path)
    others = [
        replace(build, constants={"SIZE": 128}),
        replace(build, aligned=frozenset()),
        replace(build, num_warps=8),
        replace(build, num_stages=2),
        replace(build, enable_fp_fusion=False),
        replace(build, signature={**build.signature, "pointer": "*bf16"}),
    ]
    digests = [build_digest(each, TARGET, "3.9.0") for each in (build, *others)]
    digests += [build_digest(build, TARGET, "3.8.0"), build_digest(build, NVIDIA_TARGETS["sm_100"], "3.9.0")]
    digests += [build_digest(build, replace(TARGET, shared_memory_bytes=1), "3.9.0")]
    assert len(set(digests)) == len(digests)
    assert build_digest(replace(build, name="another name"), TARGET, "3.9.0") == digests[0]


def test_unchanged_builds_are_taken_from_the_table_but_for_a_sample(tmp_path: Path) -> None:
    builds = [(replace(build_of(tmp_path), name=f"kernel {number}"), TARGET) for number in range(400)]
    digest = build_digest(builds[0][0], TARGET, compiler())
    line = Resources(kernel="", target="sm_90", registers=64, spilled=0, shared_bytes=1024, num_warps=4, digest=digest)
    table = [replace(line, kernel=f"kernel {number}") for number in range(400)]
    table[7] = replace(table[7], digest="0" * 16)
    drawn = []
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        found = unchanged_lines(builds, table[:-1], commit)
        assert ("kernel 7", "sm_90") not in found  # its digest differs
        assert ("kernel 399", "sm_90") not in found  # it is not in the table
        assert 330 < len(found) < 390
        drawn.append(set(found))
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_digest_alone_is_no_difference() -> None:
    line = Resources(kernel="k", target="sm_90", registers=64, spilled=0, shared_bytes=1, num_warps=4, digest="1")
    assert complaints([replace(line, digest="2")], [line], NVIDIA_TARGETS, exact=True) == []
