"""The C interface has one declaration: what is made of it, and that a library of another one is refused in words."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_cpu_steps import same_for_each_build

from quire_kernels_cpu.abi import INTERFACE, STRUCTS
from quire_kernels_cpu.builds import build_name, library, unavailable
from quire_kernels_cpu.compilation import build_header, read_interface

PACKAGE = Path(__file__).parents[1] / "src" / "quire_kernels_cpu"
HEADER = """
#include <cstdint>
extern "C" {
// A point { of; two } numbers.
struct Point {
    const float *x, *const *y;  // pointers
    int64_t count, rest;
};
struct Line {
    Point from;
    double length;
};
extern const char* const quire_version;
void* quire_new(int dtype, const Line* lines,
                float eps);
int quire_count(const void* line);
}
"""
EMPTY_LIBRARY = """extern "C" {
extern const char *const quire_sources, *const quire_abi_version;
extern const long quire_abi_layout[];
const char *const quire_sources = QUIRE_SOURCES, *const quire_abi_version = QUIRE_ABI_VERSION;
const long quire_abi_layout[] = {QUIRE_ABI_LAYOUT};
}
"""
needs_build = pytest.mark.skipif(unavailable() is not None, reason="needs a build that serves")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_a_header_is_read_as_structs_and_functions(tmp_path: Path) -> None:
    (tmp_path / "kernels.h").write_text(HEADER)
    interface = read_interface(tmp_path / "kernels.h")
    point = (("*", "x"), ("*", "y"), ("int64_t", "count"), ("int64_t", "rest"))
    assert interface.structs == {"Point": point, "Line": (("Point", "from"), ("double", "length"))}
    assert interface.functions == {
        "quire_new": ("*", ("int", "*", "float")),
        "quire_count": ("int", ("*",)),
    }
    assert interface.layout[-3:] == ["sizeof(Line)", "offsetof(Line,from)", "offsetof(Line,length)"]


def test_the_version_follows_what_is_declared_and_nothing_else(tmp_path: Path) -> None:
    def version(text: str) -> str:
        (tmp_path / "kernels.h").write_text(text)
        return read_interface(tmp_path / "kernels.h").version

    same = {HEADER, HEADER.replace("two }", "three }"), HEADER.replace("int dtype", "int kind")}
    others = [("count, rest", "rest, count"), ("double length", "float length"), ("float eps", "double eps")]
    assert len({version(text) for text in same}) == 1
    assert len({version(HEADER), *(version(HEADER.replace(*change)) for change in others)}) == 4


def test_the_header_is_read_whole() -> None:
    text = (PACKAGE / "csrc" / "kernels.h").read_text()
    assert set(INTERFACE.functions) == set(re.findall(r"\b(quire_\w+)\(", re.sub(r"//.*", "", text)))
    assert set(INTERFACE.structs) == set(re.findall(r"^struct (\w+)", text, re.MULTILINE))
    used = {name for path in PACKAGE.glob("*.py") for name in re.findall(r"STRUCTS\[\"(\w+)\"\]", path.read_text())}
    assert used <= set(STRUCTS)


@needs_build
def test_functions_know_their_arguments() -> None:
    """A call with too few, or with a pointer for a number, is an error and no crash."""
    with pytest.raises(TypeError, match="at least 8 arguments"):
        library().quire_rms_norm(0, None)
    with pytest.raises(ctypes.ArgumentError, match="argument 6"):
        library().quire_rms_norm(0, None, None, None, None, "rows", 1, 1e-6)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package without libraries and sources but for its header, on the path of new processes."""
    folder = tmp_path / "quire_kernels_cpu"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.so", "*.cpp", "__pycache__"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return folder


def compile_library(package: Path, source: str) -> None:
    (package / "library.cpp").write_text(source)
    target = package / f"kernels_{build_name()}.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(package / "library.cpp"), "-o", str(target)], check=True)


def refusal() -> str:
    """Why the copy's kernels do not serve."""
    code = "from quire_kernels_cpu.builds import unavailable\nprint(unavailable())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@same_for_each_build
@needs_build
@needs_compiler
def test_a_library_of_another_interface_is_refused_in_words(copy: Path) -> None:
    again = f"`python -m quire_kernels_cpu.compiler {build_name()}` compiles it"
    header, *defines = copy / "csrc" / "kernels.h", *build_header(PACKAGE / "csrc").splitlines()[:2]
    compile_library(copy, "int nothing;")
    assert refusal() == f"was compiled before builds had an ABI version: {again}"
    compile_library(copy, "\n".join([*defines, "#define QUIRE_ABI_LAYOUT 0, 0", EMPTY_LIBRARY]))
    assert refusal() == f"lays out MatrixArgument otherwise than this Python: {again}"
    header.write_text(header.read_text().replace("int32_t format, group", "int32_t group, format"))
    needed = read_interface(header).version
    assert needed != INTERFACE.version
    assert refusal() == f"has ABI version {INTERFACE.version} where this Python needs {needed}: {again}"
