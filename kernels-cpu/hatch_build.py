"""Compiles the kernels when the package is built or installed, once per instruction set of the machine's architecture.

A machine without a C++ compiler still gets the package: the op table then says that it is unavailable and why, and
torch's operators serve.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "src" / "quire_kernels_cpu"
RECIPE = runpy.run_path(str(FOLDER / "compilation.py"))
ARCHITECTURES = {
    "x86_64": RECIPE["BUILDS"],
    "AMD64": RECIPE["BUILDS"],
    "aarch64": RECIPE["AARCH64_BUILDS"],
    "arm64": RECIPE["AARCH64_BUILDS"],
}


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it collects the files of a wheel (editable ones too)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        builds = ARCHITECTURES.get(platform.machine())
        if builds is None or platform.system() != "Linux":
            self.app.display_warning(
                f"quire-kernels-cpu: nothing is compiled for {platform.system()} on {platform.machine()}; torch serves"
            )
            return
        if compiler is None:
            self.app.display_warning(
                "quire-kernels-cpu: no C++ compiler (g++ or clang++) on the PATH, so the kernels are not compiled and "
                "torch serves; install one and install this package again"
            )
            return
        sources = RECIPE["sources_hash"](FOLDER / "csrc")
        recipe_s = (FOLDER / "compilation.py").stat().st_mtime

        def compile_build(name: str) -> None:
            built = FOLDER / f"kernels_{name}.so"
            if built.exists() and built.stat().st_mtime >= recipe_s and sources.encode() in built.read_bytes():
                return
            obj = built.with_suffix(".o")
            source = str(FOLDER / "csrc" / "kernels.cpp")
            flags = [*RECIPE["COMPILE"], *builds[name], RECIPE["sources_define"](FOLDER / "csrc")]
            try:
                subprocess.run([compiler, *flags, source, "-o", str(obj)], check=True)
                subprocess.run([compiler, "-shared", str(obj), "-o", str(built)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"quire-kernels-cpu: the {name} build failed: {error}")
            finally:
                obj.unlink(missing_ok=True)

        with ThreadPoolExecutor(min(len(builds), os.cpu_count() or 1)) as pool:  # each of them waits for a compiler
            list(pool.map(compile_build, builds))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
