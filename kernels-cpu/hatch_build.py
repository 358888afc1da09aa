"""Compiles the kernels when the package is built or installed, once per instruction set of the machine's architecture.

A machine without a C++ compiler still gets the package: the op table then says that it is unavailable and why, and
torch's operators serve.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
BUILDS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": AVX512,
    "avx512bf16": AVX512_BF16,
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
AARCH64_BUILDS = {"neon": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve", "-msve-vector-bits=256"]}
ARCHITECTURES = {"x86_64": BUILDS, "AMD64": BUILDS, "aarch64": AARCH64_BUILDS, "arm64": AARCH64_BUILDS}
# OpenMP's symbols are left open on purpose: they resolve to the runtime that torch has loaded, so that there is one
# pool of threads and not two. The two warnings are about gcc 12's own headers.
COMPILE = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-c"]


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it collects the files of a wheel (editable ones too)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "src" / "quire_kernels_cpu"
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
        sources = sorted((folder / "csrc").iterdir())
        newest = max(source.stat().st_mtime for source in sources)

        def compile_build(name: str) -> None:
            built = folder / f"kernels_{name}.so"
            if built.exists() and built.stat().st_mtime >= newest:
                return
            obj = built.with_suffix(".o")
            source = str(folder / "csrc" / "kernels.cpp")
            try:
                subprocess.run([compiler, *COMPILE, *builds[name], source, "-o", str(obj)], check=True)
                subprocess.run([compiler, "-shared", str(obj), "-o", str(built)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"quire-kernels-cpu: the {name} build failed: {error}")
            finally:
                obj.unlink(missing_ok=True)

        with ThreadPoolExecutor(min(len(builds), os.cpu_count() or 1)) as pool:  # each of them waits for a compiler
            list(pool.map(compile_build, builds))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
