"""Builds are chosen by processor and by name, and a processor without one is told so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_cpu_steps import same_for_each_build

from quire_interfaces import ConfigError
from quire_kernels_cpu.builds import ENVIRONMENT, build_name, build_path, unavailable
from quire_kernels_cpu.compilation import sources_hash

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent / "src" / "quire_kernels_cpu"
README = FOLDER.parent / "README.md"


@pytest.mark.skipif(shutil.which("g++") is None or build_path() is None, reason="needs g++ and a build")
def test_the_program_for_other_machines_finds_nothing_here(tmp_path: Path) -> None:
    """`nox -s kernels-cpu-aarch64` runs it under an emulator; here it keeps step with the C interface."""
    build = build_path()
    assert build is not None
    program = tmp_path / "check_kernels"
    source = str(FOLDER / "check_kernels.cpp")
    command = ["g++", "-std=c++17", "-O1", "-fopenmp", source, str(build), f"-Wl,-rpath,{build.parent}", "-o"]
    subprocess.run([*command, str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout
    assert run.stdout.endswith("0 failures\n")


@same_for_each_build
def test_without_kernels_torch_serves_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    code = "from quire_ops import *\nfor c in op_report(OpRequest()): print(c.op, c.backend, c.refused.get('cpu'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    served = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert served["linear"].startswith("torch QUIRE_CPU_KERNELS=none")
    assert served["decoder_stack"].startswith("reference ")


@same_for_each_build
@pytest.mark.skipif(unavailable() is not None, reason="needs a build that serves")
def test_a_build_of_other_sources_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may know other arguments than this Python gives it. Torch serves, and the report says why and what to do."""
    copy, build = tmp_path / "quire_kernels_cpu", build_path()
    assert build is not None
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(build, copy)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    header = copy / "csrc" / "kernels.h"
    header.write_text(header.read_text() + "// another\n")
    served = _linear_served(copy)
    assert served.startswith(f"torch was compiled from other sources than those in {copy / 'csrc'}: ")
    assert f"`python -m quire_kernels_cpu.compiler {build_name()}` compiles it" in served
    for source in (copy / "csrc").iterdir():  # a package may come without what it was compiled from, but for its header
        if source.name != "kernels.h":
            source.unlink()
    assert _linear_served(copy) == "cpu None"


def _linear_served(package: Path) -> str:
    """What serves the op, and why the kernels do not, where they are loaded from `package`."""
    code = (
        "from quire_ops import *\nimport quire_kernels_cpu\nprint(quire_kernels_cpu.__file__)\n"
        "for c in op_report(OpRequest()):\n  if c.op == 'linear': print(c.backend, c.refused.get('cpu'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, served = run.stdout.splitlines()
    assert Path(loaded).parent == package
    return served


def test_the_sum_of_the_sources_follows_each_of_them(tmp_path: Path) -> None:
    seen = set()
    for files in ({"a.h": "1"}, {"a.h": "2"}, {"b.h": "1"}, {"a.h": "1", "b.h": ""}, {"a.h": "1b.h", "k.cpp": "1"}):
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        seen.add(sources_hash(folder))
        (folder / "a.o").touch()  # nothing that is compiled
        seen.add(sources_hash(folder))
    assert len(seen) == 5


def test_an_unknown_build_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024.*amx, avx512bf16, avx512vnni, avx512, avx2, sve, neon, none"):
        build_name()


@same_for_each_build
@pytest.mark.skipif(unavailable() is not None, reason="needs a build that serves")
def test_a_path_is_loaded_in_place_of_the_package_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So tests load builds that they emulate; nobody gets one who does not name it, and its name says so."""
    build, own = build_path(), tmp_path / "kernels_amx-Emulated.so"
    assert build is not None
    shutil.copy(build, own)
    code = (
        "import torch\nfrom quire_kernels_cpu.builds import *\n"
        "print(build_name(), build_path(), unavailable())\nprint(library()._name)"
    )
    monkeypatch.setenv(ENVIRONMENT, str(own))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [f"amx-Emulated {own} None", str(own)]
    own.unlink()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"is to be loaded from {own} (QUIRE_CPU_KERNELS), which is no file" in run.stdout
    assert "ConfigError: quire-kernels-cpu is to be loaded from" in run.stderr


@same_for_each_build
def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
