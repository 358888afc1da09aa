"""What a wheel of the kernels is called and holds, and what a source tree compiles.

The package is built as it is, but for its C++: nothing compiles in a moment, the kernels take minutes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire_kernels_cpu.abi import INTERFACE
from quire_kernels_cpu.builds import build_path
from quire_kernels_cpu.compiler import find_compiler, machine_builds, wheel_platform
from quire_kernels_cpu.processor import BUILDS, processor_flags, supported_builds

FOLDER = Path(__file__).parents[1]
SOURCE = """#pragma GCC visibility push(default)
extern "C" {
extern const char *const quire_sources, *const quire_abi_version;
extern const long quire_abi_layout[];
const char *const quire_sources = QUIRE_SOURCES, *const quire_abi_version = QUIRE_ABI_VERSION;
const long quire_abi_layout[] = {0};
}
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, which builds wheels"),
    pytest.mark.skipif(not machine_builds(), reason="needs Linux on x86-64 or 64-bit Arm"),
]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs g++ or clang++")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the package whose C++ computes nothing, and with a library that another machine left behind."""
    copy = tmp_path / "kernels-cpu"
    ignored = shutil.ignore_patterns("*.so", "*.o", "csrc", "__pycache__", "tests", "benchmarks")
    shutil.copytree(FOLDER, copy, ignore=ignored)
    package = copy / "src" / "quire_kernels_cpu"
    (package / "csrc").mkdir()
    (package / "csrc" / "kernels.cpp").write_text(SOURCE)
    (package / "csrc" / "kernels.h").touch()
    (package / "kernels_left_behind.so").write_bytes(b"")
    return copy


def run_uv(*arguments: str | Path, **environment: str) -> None:
    uv = shutil.which("uv")
    assert uv is not None
    alone = {"UV_NO_SOURCES": "1", **environment}  # a copy is no member of a workspace
    run = subprocess.run([uv, *arguments], env={**os.environ, **alone}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def build_wheel(project: Path, **environment: str) -> Path:
    run_uv("build", "--wheel", "--python", sys.executable, "--out-dir", project / "dist", project, **environment)
    (wheel,) = (project / "dist").glob("*.whl")
    return wheel


def path_without_compilers(folder: Path) -> str:
    """PATH on which there is everything but compilers."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            if not program.name.startswith(("g++", "clang")) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


@needs_compiler
def test_a_wheel_has_every_build_and_serves_every_python(project: Path) -> None:
    wheel = build_wheel(project)
    assert wheel.name.split("-", 2)[2] == f"py3-none-manylinux_2_28_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist()}
        (info,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(info).decode()
    assert {name for name in names if name.endswith(".so")} == {f"kernels_{build}.so" for build in machine_builds()}
    assert {"LICENSE", "kernels.cpp", "py.typed"} <= names


def test_without_a_compiler_a_wheel_is_pure_python(project: Path, tmp_path: Path) -> None:
    wheel = build_wheel(project, PATH=path_without_compilers(tmp_path / "bin"), CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@needs_compiler
def test_a_source_tree_compiles_the_one_build_that_serves_here(project: Path, tmp_path: Path) -> None:
    run_uv("pip", "install", "--no-deps", "--target", tmp_path / "site", "--python", sys.executable, "-e", project)
    compiled = {path.name for path in (project / "src" / "quire_kernels_cpu").glob("*.so")}
    assert compiled - {"kernels_left_behind.so"} == {f"kernels_{name}.so" for name in supported_builds()[:1]}
    assert not list((tmp_path / "site").glob("**/*.so"))


@needs_compiler
@pytest.mark.skipif(len(supported_builds()) < 2, reason="needs a processor that runs two builds")
def test_a_lower_build_serves_where_the_best_is_not_compiled(project: Path) -> None:
    best, lower = supported_builds()[:2]
    environment = {**os.environ, "PYTHONPATH": f"{project / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("QUIRE_CPU_KERNELS", None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)

    asked = ("-c", "from quire_kernels_cpu.builds import *; print(build_name(), unavailable())")
    assert f"{best} was not compiled: with a C++ compiler" in run(*asked).stdout
    compiled = run("-m", "quire_kernels_cpu.compiler", lower)
    assert compiled.returncode == 0, compiled.stderr
    assert f"quire-kernels-cpu: compiling {lower}" in compiled.stderr
    assert run(*asked).stdout.startswith(lower)
    assert run("-m", "quire_kernels_cpu.compiler").returncode == 0
    assert run(*asked).stdout.startswith(best)


def test_a_build_that_does_not_exist_is_refused() -> None:
    run = subprocess.run([sys.executable, "-m", "quire_kernels_cpu.compiler", "mmx"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "there is no build 'mmx'; choose from" in run.stderr


@pytest.mark.parametrize(
    ("symbols", "system"),
    [
        (b"\0GLIBC_2.28\0GLIBC_2.2.5\0GLIBCXX_3.4.24\0CXXABI_1.3.11\0GCC_3.0\0GOMP_5.0\0", "manylinux_2_28"),
        (b"\0GLIBC_2.29\0", "linux"),
        (b"\0GLIBC_2.17\0GLIBCXX_3.4.29\0", "linux"),
    ],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="manylinux is for glibc")
def test_a_wheel_is_for_as_old_systems_as_its_libraries_are(symbols: bytes, system: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(symbols)
    assert wheel_platform([library]) == f"{system}_{platform.machine()}"


@pytest.mark.skipif(build_path() is None or platform.libc_ver()[0] != "glibc", reason="needs a build and glibc")
def test_the_kernels_need_no_newer_system_than_torch_does() -> None:
    built = [path for path in FOLDER.glob("src/quire_kernels_cpu/kernels_*.so") if not path.is_symlink()]
    assert built
    assert wheel_platform(built).startswith("manylinux_2_28_")


@pytest.mark.skipif(build_path() is None or shutil.which("nm") is None, reason="needs a build and nm")
def test_a_build_exports_only_the_c_interface() -> None:
    run = subprocess.run(["nm", "-D", "--defined-only", str(build_path())], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in run.stdout.splitlines()}
    data = {"quire_sources", "quire_abi_version", "quire_abi_layout"}
    assert exported == INTERFACE.functions.keys() | data


def test_supported_builds_are_those_whose_instructions_are_here() -> None:
    assert supported_builds() == [name for name in BUILDS if BUILDS[name] <= processor_flags()]
