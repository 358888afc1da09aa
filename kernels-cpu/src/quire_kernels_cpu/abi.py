"""The C interface as ctypes knows it, made from the one header that declares it: `csrc/kernels.h`.

Knows structs and functions; does not know tensors. A struct here is filled by the names of its fields, so that no order
of values is written down twice; a library that lays one out differently is refused when it is loaded (`builds.py`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from quire_kernels_cpu.compilation import read_interface

__all__ = ["INTERFACE", "STRUCTS", "declare_functions", "layout_difference"]

_TYPES: dict[str, type] = {
    "*": ctypes.c_void_p,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
"""Type in the header -> ctypes; structs are added as they come."""

INTERFACE = read_interface(Path(__file__).with_name("csrc") / "kernels.h")
"""What the header declares."""


def _make_structs() -> dict[str, type[ctypes.Structure]]:
    types = dict(_TYPES)
    for name, fields in INTERFACE.structs.items():
        types[name] = type(name, (ctypes.Structure,), {"_fields_": [(field, types[of]) for of, field in fields]})
    return {name: types[name] for name in INTERFACE.structs}


STRUCTS = _make_structs()
"""Name of a struct -> its ctypes class. Instances do not keep what they point to."""


def declare_functions(library: ctypes.CDLL) -> None:
    """Give every function of the interface its argument and result types.

    Raises:
        AttributeError: The library lacks one.
    """
    for name, (result, arguments) in INTERFACE.functions.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[argument] for argument in arguments]
        function.restype = None if result == "void" else _TYPES[result]


def layout_difference(library: ctypes.CDLL) -> str | None:
    """The first struct that the library's compiler laid out otherwise than ctypes, or None."""
    numbers = iter((ctypes.c_int64 * len(INTERFACE.layout)).in_dll(library, "quire_abi_layout"))
    for name, fields in INTERFACE.structs.items():
        struct = STRUCTS[name]
        here = [ctypes.sizeof(struct), *(getattr(struct, field).offset for _, field in fields)]
        if here != [next(numbers) for _ in here]:
            return name
    return None
