"""How the kernels are compiled: flags of each build, the sources that a build is made of, and its C interface.

`csrc/kernels.h` is the one declaration of that interface. A build carries the ABI version that follows from it and the
layout that its compiler gave each struct; `abi.py` makes the Python side from the same header and compares both.

Standard library only: `hatch_build.py` and `noxfile.py` run this file by its path, before the package is installed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "AARCH64_BUILDS",
    "BUILDS",
    "COMPILE",
    "EXPORTS",
    "FLAGS",
    "Interface",
    "build_header",
    "read_interface",
    "sources_hash",
]

AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16", "-mavx512vbmi"]
BUILDS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": AVX512,
    "avx512vnni": AVX512_VNNI,
    "avx512bf16": AVX512_BF16,
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
"""Build -> flags of its instruction set, on x86-64."""
AARCH64_BUILDS = {"neon": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve", "-msve-vector-bits=256"]}
"""Build -> flags of its instruction set, on 64-bit Arm."""
# OpenMP's symbols are left open on purpose: they resolve to the runtime that torch has loaded, so that there is one
# pool of threads and not two. The warning is about gcc 12's own headers.
FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
"""What every build is compiled with, as a part of a program too."""
COMPILE = [*FLAGS, "-fPIC", "-fvisibility=hidden", "-c"]
"""What every build of the library is compiled with."""
EXPORTS = "{ global: quire_*; local: *; };"
"""Version script that every build is linked with: templates of namespace std are visible whatever `COMPILE` says."""


class Interface(NamedTuple):
    """What `kernels.h` declares. A type is `*` for any pointer, else its name in C."""

    structs: dict[str, tuple[tuple[str, str], ...]]
    """Name of a struct -> (type, name) of its fields."""
    functions: dict[str, tuple[str, tuple[str, ...]]]
    """Name of a function -> type of its result, types of its arguments."""

    @property
    def version(self) -> str:
        """ABI version: 16 hexadecimal digits that change with any name, type or order that is declared."""
        return hashlib.sha256(repr((self.structs, self.functions)).encode()).hexdigest()[:16]

    @property
    def layout(self) -> list[str]:
        """C++ expressions, struct by struct: its size, then the offset of each field."""
        expressions = []
        for struct, fields in self.structs.items():
            expressions += [f"sizeof({struct})", *(f"offsetof({struct},{name})" for _, name in fields)]
        return expressions


def read_interface(header: Path) -> Interface:
    """The C interface that a header declares.

    The header keeps to plain C: structs of fields without initialisers, functions with named arguments.

    Raises:
        OSError: The header cannot be read.
    """
    text = re.sub(r"//[^\n]*|^\s*#[^\n]*", "", header.read_text(), flags=re.MULTILINE)
    structs = {
        name: tuple(field for line in body.split(";") if line.strip() for field in _declared(line))
        for name, body in re.findall(r"\bstruct\s+(\w+)\s*\{([^{}]*)\};", text)
    }
    functions = {
        name: (_type(result), tuple(_declared(argument)[0][0] for argument in arguments.split(",") if argument.strip()))
        for result, name, arguments in re.findall(r"([\w\s*]+?)\b(quire_\w+)\s*\(([^()]*)\)\s*;", text)
    }
    return Interface(structs, functions)


def _declared(declaration: str) -> list[tuple[str, str]]:
    """(type, name) of each variable of `const float *a, *b` or `int64_t c, d`."""
    first, *others = declaration.split(",")
    base, name = re.fullmatch(r"(.*?)(\w+)", first.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    plain = _type(base.replace("*", " "))
    return [(_type(base), name), *(("*" if "*" in other else plain, other.split("*")[-1].strip()) for other in others)]


def _type(words: str) -> str:
    return "*" if "*" in words else words.replace("const", "").split()[-1]


def sources_hash(csrc: Path) -> str:
    """What the files of `csrc` are, by name and content: SHA-256 in hexadecimal digits.

    Raises:
        OSError: `csrc` is no folder that can be read.
    """
    digest = hashlib.sha256()
    for source in sorted(csrc.iterdir()):
        if source.suffix in (".h", ".cpp"):
            content = source.read_bytes()
            digest.update(f"{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def build_header(csrc: Path) -> str:
    """Text of the header that is included before `kernels.cpp`: the sources that a build is compiled from and the
    interface that it has, both of which `builds.py` compares when it loads the build.

    Raises:
        OSError: `csrc` is no folder that can be read, or has no `kernels.h`.
    """
    interface = read_interface(csrc / "kernels.h")
    layout = ", ".join(interface.layout)
    return (
        f'#define QUIRE_SOURCES "{sources_hash(csrc)}"\n'
        f'#define QUIRE_ABI_VERSION "{interface.version}"\n'
        f"#define QUIRE_ABI_LAYOUT {layout}\n"
    )
