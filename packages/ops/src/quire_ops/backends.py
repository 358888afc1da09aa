"""Which backends there are: the two of this package, and those of other packages by entry point.

A package adds backends with an entry point of the group `quire.ops` that names a function without arguments, which
returns `OpBackend` records. What cannot work on this machine is still returned, with `unavailable` saying why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from quire_interfaces.plugins import installed_plugins
from quire_ops import torch_attention, torch_recurrent
from quire_ops.kernel_builds import KernelBuilder
from quire_ops.op import Op, P, R
from quire_ops.ops import OPS
from quire_ops.table import OpBackend, OpReport, OpRequest, OpTable, torch_backend_for

__all__ = [
    "ENTRY_POINT_GROUP",
    "bind",
    "builtin_table",
    "kernel_builders",
    "op_report",
    "op_table",
    "replaced_backends",
]

ENTRY_POINT_GROUP = "quire.ops"

TORCH_MODULES = (torch_attention, torch_recurrent)
"""Modules of torch backends whose ops are declared elsewhere: importing them adds the backends."""


def builtin_table() -> OpTable:
    """A table with the backends of this package only."""
    table = OpTable(OPS)
    for op in OPS:
        table.add(OpBackend(op=op, name="reference", function=op.reference, priority=-100, trees=op.trees))
    for backend in torch_backend_for.records():
        table.add(backend)
    return table


def op_table() -> OpTable:
    """The table of this process: the backends of this package and those of every installed package.

    Raises:
        ConfigError: An installed package's entry point cannot be loaded; the message names it.
    """
    return _pretended[-1] if _pretended else _installed_table()


_pretended: list[OpTable] = []


@contextmanager
def replaced_backends(backends: Iterable[OpBackend[..., Any]]) -> Iterator[None]:
    """Within it, the table of this process has these backends in the place of those of the same op and name: for asking
    what would serve on another machine than this one."""
    new = {(backend.op.name, backend.name): backend for backend in backends}
    table = OpTable(OPS)
    for op in OPS:
        for backend in op_table().backends(op):
            table.add(new.get((op.name, backend.name), backend))
    _pretended.append(table)
    try:
        yield
    finally:
        _pretended.pop()


def kernel_builders() -> tuple[KernelBuilder, ...]:
    """What builds kernels ahead of time, of all installed packages."""
    table = op_table()
    builders = [backend.builder for op in table.ops for backend in table.backends(op)]
    return tuple({id(builder): builder for builder in builders if builder is not None}.values())


@cache
def _installed_table() -> OpTable:
    table = builtin_table()
    for plugin in installed_plugins(ENTRY_POINT_GROUP).values():
        function = plugin.load()
        try:
            backends = list(function())
        except Exception as error:
            raise plugin.error(f"failed: {type(error).__name__}: {error}") from error
        for backend in backends:
            if not isinstance(backend, OpBackend):
                raise plugin.error(f"must return OpBackend records, and returned one of type {type(backend).__name__}")
            table.add(backend)
    return table


def bind(op: Op[P, R], request: OpRequest, *, backend: str | None = None) -> Callable[P, R]:
    """The function that serves `op` for `request` in this process: look it up once, call it often.

    Args:
        backend: Take this backend or fail, whatever the priorities say.

    Raises:
        ConfigError: Unknown backend, or nothing can serve the request; the message lists every reason.
    """
    return op_table().bind(op, request, backend=backend)


def op_report(request: OpRequest) -> list[OpReport]:
    """Which backend each op gets for `request` in this process, and why not the others. Raises as `bind` does."""
    return [op_table().report(op, request) for op in OPS]
