"""Builds are chosen by processor and by name, and a processor without one is told so."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_kernels_cpu.builds import ENVIRONMENT, build_name

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"


@pytest.mark.skipif(shutil.which("g++") is None or build_name() is None, reason="needs g++ and a build")
def test_the_program_for_other_machines_finds_nothing_here(tmp_path: Path) -> None:
    """`nox -s kernels-cpu-aarch64` runs it under an emulator; here it keeps step with the C interface."""
    build = FOLDER.parent / "src" / "quire_kernels_cpu" / f"kernels_{build_name()}.so"
    program = tmp_path / "check_kernels"
    source = str(FOLDER / "check_kernels.cpp")
    command = ["g++", "-std=c++17", "-O1", "-fopenmp", source, str(build), f"-Wl,-rpath,{build.parent}", "-o"]
    subprocess.run([*command, str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout
    assert run.stdout.endswith("0 failures\n")


def test_without_kernels_torch_serves_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    code = "from quire_ops import *\nfor c in op_report(OpRequest()): print(c.op, c.backend, c.refused.get('cpu'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    served = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert served["linear"].startswith("torch QUIRE_CPU_KERNELS=none")
    assert served["decoder_stack"].startswith("reference ")


def test_an_unknown_build_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024.*amx, avx512bf16, avx512, avx2, sve, neon, none"):
        build_name()


def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
