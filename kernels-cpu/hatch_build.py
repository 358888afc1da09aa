"""Compiles the kernels when the package is built or installed.

A wheel gets every build of the machine's architecture; a source tree (an editable install) only the one that this
processor runs, since nobody else runs it. A machine without a C++ compiler still gets the package: the op table then
says that it is unavailable and why, and torch's operators serve.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path(__file__).parent / "src"
sys.path.insert(0, str(SOURCES))
from quire_kernels_cpu.compiler import compile_builds, find_compiler, machine_builds, wheel_platform  # noqa: E402
from quire_kernels_cpu.processor import supported_builds  # noqa: E402


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it collects the files of a wheel (editable ones too)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        is_editable = version == "editable"
        builds = list(machine_builds())
        if is_editable:
            builds = [name for name in supported_builds() if name in builds][:1]
        compiler = find_compiler()
        if not builds:
            self._warn(f"nothing is compiled for {platform.system()} on this {platform.machine()}; torch serves")
        elif compiler is None:
            self._warn(
                "no C++ compiler (g++ or clang++) on the PATH, so the kernels are not compiled and torch serves; "
                "install one and install this package again"
            )
        elif libraries := compile_builds(builds, compiler, self._report):
            if not is_editable:  # there they are found where they lie
                build_data["force_include"] |= {str(path): str(path.relative_to(SOURCES)) for path in libraries}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wheel_platform(libraries)}"

    def _report(self, line: str) -> None:
        self.app.display_info(f"quire-kernels-cpu: {line}")

    def _warn(self, line: str) -> None:
        self.app.display_warning(f"quire-kernels-cpu: {line}")
