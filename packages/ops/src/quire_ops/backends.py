"""Which backends there are: the two of this package as data, and those of other packages by entry point.

A package adds backends with an entry point of the group `quire.ops` that names a function without arguments, which
returns `OpBackend` records. What cannot work on this machine is still returned, with `unavailable` saying why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

import torch

from quire_interfaces import ConfigError
from quire_ops import (
    lora,
    recurrent_reference,
    reference,
    sparse_reference,
    torch_attention,
    torch_encoder_attention,
    torch_latent_attention,
    torch_lora,
    torch_ops,
    torch_recurrent,
    torch_sparse_attention,
    torch_step_inputs,
)
from quire_ops.declarations import OPS
from quire_ops.decode_step import reference_decode_step
from quire_ops.decoder_stack import reference_decoder_stack
from quire_ops.drawing import reference_draw, reference_draw_masked
from quire_ops.fused_moe import reference_fused_moe
from quire_ops.kernel_builds import KernelBuilder
from quire_ops.penalties import reference_penalize
from quire_ops.recurrent import RECURRENT_OPS
from quire_ops.routing import reference_route_experts
from quire_ops.table import OpBackend, OpChoice, OpFunction, OpRequest, OpTable, SizeRule
from quire_ops.torch_moe import torch_fused_moe

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

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_MODULES: dict[str, ModuleType] = {
    "index_topk": torch_sparse_attention,
    "biased_paged_attention": torch_attention,
    "encoder_attention": torch_encoder_attention,
    "head_linear": torch_latent_attention,
    "latent_attention": torch_latent_attention,
    "lora_linear": torch_lora,
    "decode_inputs": torch_step_inputs,
    "paged_attention": torch_attention,
    "position_slots": torch_sparse_attention,
    "sparse_latent_attention": torch_sparse_attention,
    "step_inputs": torch_step_inputs,
    "write_latent_cache": torch_latent_attention,
}
"""Where the torch backend of an op is, if not in `torch_ops`."""
_REFERENCES: dict[str, ModuleType] = {
    "index_topk": sparse_reference,
    "lora_linear": lora,
    "position_slots": sparse_reference,
    "sparse_latent_attention": sparse_reference,
    **{op.name: recurrent_reference for op in RECURRENT_OPS},
}
"""Where the reference of an op is, if not in `reference`."""
_OPTIONS: dict[str, OpFunction] = {
    "add_rms_norm_quant": reference.add_rms_norm_quant,
    "decoder_stack": reference_decoder_stack,
    "decode_step": reference_decode_step,
    "draw": reference_draw,
    "draw_masked": reference_draw_masked,
    "fp8_linear": reference.fp8_linear,
    "penalize": reference_penalize,
    "gate_quant": reference.gate_quant,
    "gated_linear": reference.gated_linear,
    "rope_and_write_kv": reference.rope_and_write_kv,
    "route_experts": reference_route_experts,
}
"""Reference of each op that has no torch backend: networks do without where no other package brings one."""
_EVEN_HEAD = {"head_dim": SizeRule(minimum=2, multiple_of=2)}


def builtin_table() -> OpTable:
    """A table with the backends of this package only."""
    table = OpTable(OPS)
    for op in OPS:
        if op.name in _OPTIONS:
            table.add(OpBackend(op=op.name, name="reference", function=_OPTIONS[op.name], priority=-100))
            continue
        if op.name == "fused_moe":
            table.add(OpBackend(op=op.name, name="reference", function=reference_fused_moe, priority=-100))
            table.add(OpBackend(op=op.name, name="torch", function=torch_fused_moe, dtypes=_FLOATS))
            continue
        function = getattr(_REFERENCES.get(op.name, reference), op.name)
        trees = op.name in ("paged_attention", "latent_attention")
        table.add(OpBackend(op=op.name, name="reference", function=function, priority=-100, trees=trees))
        module = torch_recurrent if op in RECURRENT_OPS else _MODULES.get(op.name, torch_ops)
        sizes = _EVEN_HEAD if op.name == "rotary_embedding" else {}
        fused = getattr(module, op.name)
        table.add(OpBackend(op=op.name, name="torch", function=fused, dtypes=_FLOATS, sizes=sizes, trees=trees))
    return table


def op_table() -> OpTable:
    """The table of this process: the backends of this package and those of every installed package.

    Raises:
        ConfigError: An installed package's entry point cannot be loaded; the message names it.
    """
    return _pretended[-1] if _pretended else _installed_table()


_pretended: list[OpTable] = []


@contextmanager
def replaced_backends(backends: Iterable[OpBackend]) -> Iterator[None]:
    """Within it, the table of this process has these backends in the place of those of the same op and name: for asking
    what would serve on another machine than this one."""
    new = {(backend.op, backend.name): backend for backend in backends}
    table = OpTable(OPS)
    for op in OPS:
        for backend in op_table().backends(op.name):
            table.add(new.get((op.name, backend.name), backend))
    _pretended.append(table)
    try:
        yield
    finally:
        _pretended.pop()


def kernel_builders() -> tuple[KernelBuilder, ...]:
    """What builds kernels ahead of time, of all installed packages."""
    table = op_table()
    found = [backend.builder for op in table.ops for backend in table.backends(op.name)]
    return tuple({id(builder): builder for builder in found if builder is not None}.values())


@cache
def _installed_table() -> OpTable:
    table = builtin_table()
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            backends = list(entry_point.load()())
        except Exception as error:
            raise ConfigError(
                f"entry point {entry_point.name!r} of group {ENTRY_POINT_GROUP!r} ({entry_point.value}) failed: "
                f"{type(error).__name__}: {error}; repair or uninstall that package"
            ) from error
        for backend in backends:
            table.add(backend)
    return table


def bind(op: str, request: OpRequest, *, backend: str | None = None) -> OpFunction:
    """The function that serves `op` for `request` in this process. See `OpTable.bind`."""
    return op_table().bind(op, request, backend=backend)


def op_report(request: OpRequest, *, backends: Mapping[str, str] | None = None) -> list[OpChoice]:
    """Which backend each op gets for `request` in this process, and why not the others. See `OpTable.report`."""
    return op_table().report(request, backends=backends)
