"""Records what a piece of code launches, instead of launching it: kernels with everything that their code depends on.

Triton compiles a kernel anew for each combination of argument types, of constants, and of what it can tell from the
numbers: that one is 1, or a multiple of 16; for AMD GPUs also whether a pointer leads into less than 2 GiB, which 32
bits can address. `recording` notes these, as Triton 3.6 to 3.9 sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["POINTERS", "Build", "address_of", "kernel_of", "named", "recording"]

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""What pointers to elements of a dtype are to Triton."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True},
    "hip": {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True},
}
"""What a launch is made with, and Triton's values for each vendor where it does not say."""
_SHORT_BYTES = (1 << 31) - 1
"""Most that a tensor's memory may have for AMD's 32-bit addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One kernel, specialized: what there is to compile."""

    name: str
    """The kernel's name and what is special about it: "attend_tiles decode bfloat16 d128 g4"."""
    kernel: Any
    """A function under `triton.jit`."""
    signature: Mapping[str, str]
    """Each argument -> its type as Triton writes it: "*bf16", "i32", "fp32", "constexpr"."""
    constants: Mapping[str, Any]
    """Each argument of type "constexpr" -> its value."""
    aligned: frozenset[str]
    """Arguments that are multiples of 16 (of 16 bytes, if pointers), which allows wide loads."""
    short: frozenset[str] = frozenset()
    """Pointers into less than 2 GiB of memory, which allows 32-bit addresses; for NVIDIA GPUs, where it does not count,
    none."""
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True
    """Whether products and sums may become one instruction, which rounds once."""


def named(build: Build) -> Build:
    """The same with the kernel's name in the place of the kernel, which other processes cannot be sent."""
    return replace(build, kernel=f"{build.kernel.fn.__module__}:{build.kernel.fn.__name__}")


def kernel_of(build: Build) -> Any:
    """The kernel whose name `named` put there."""
    module, _, name = build.kernel.partition(":")
    return getattr(import_module(module), name)


@contextmanager
def recording(label: str, vendor: str = "cuda") -> Iterator[list[Build]]:
    """Within it, launches of Triton kernels in this process are put into the list, and nothing runs; a launch gives its
    build.

    Args:
        label: What is special about these launches: part of their names.
        vendor: Of the GPU that they are for, "cuda" or "hip": what Triton looks at, and its own options, differ.
    """
    from triton.runtime.jit import JITFunction

    found: list[Build] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Build:
        build = _build(self, label, vendor, args, kwargs)
        if build not in found:
            found.append(build)
        return build

    launch, JITFunction.run = JITFunction.run, run
    try:
        yield found
    finally:
        JITFunction.run = launch


def _build(kernel: Any, label: str, vendor: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
    options = {name: kwargs.pop(name, default) for name, default in _OPTIONS[vendor].items()}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned, short = {}, {}, set(), set()
    for param in kernel.params:
        value = values.get(param.name, param.default)
        kind, is_aligned = ("constexpr", False) if param.is_constexpr else _type(value, fixed=param.do_not_specialize)
        signature[param.name] = kind
        if kind == "constexpr":
            constants[param.name] = value
        if is_aligned and not param.do_not_specialize_on_alignment:
            aligned.add(param.name)
        if vendor == "hip" and not param.do_not_specialize and _is_short(value):
            short.add(param.name)
    return Build(
        name=f"{kernel.__name__} {label}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        aligned=frozenset(aligned),
        short=frozenset(short),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        enable_fp_fusion=options["enable_fp_fusion"],
    )


def address_of(tensor: Tensor) -> int:
    """Where a tensor's numbers begin. Memory that is not there yet will begin at a multiple of 512 bytes: here at 0."""
    from torch._subclasses.fake_tensor import FakeTensor  # where nothing is recorded, nobody needs it

    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.itemsize
    return tensor.data_ptr()


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() <= _SHORT_BYTES


def _type(value: Any, *, fixed: bool) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is a multiple of 16. fixed: nothing is told from its value."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], address_of(value) % 16 == 0 and not fixed
    if value is None:
        return "constexpr", False
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not fixed:
        return "constexpr", False
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64", value % 16 == 0 and not fixed
