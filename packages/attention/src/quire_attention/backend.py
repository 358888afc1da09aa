"""Attention backends: the ops that write and read a layer's paged cache, chosen once, when the model is built.

Knows ops and who serves them; does not know blocks' owners, requests or networks. What the ops compute is declared in
`quire_ops`.
"""

from __future__ import annotations

from typing import NamedTuple

from quire_interfaces import ConfigError
from quire_ops import OpRequest, OpTable, op_table, ops

__all__ = ["AttentionBackend", "AttentionChoice", "attention_backend_names", "select_attention_backend"]


class AttentionBackend:
    """Functions of the three ops by which a layer uses its paged cache. Holds no state of any step."""

    def __init__(self, name: str, table: OpTable) -> None:
        """Args:
            name: The op backend that serves `paged_attention`, and `write_kv_cache` and `rope_and_write_kv` if it has
                them; also the name of this backend.
            table: Where the ops are found.

        Raises:
            ConfigError: There is no such op backend.
        """
        self.name = name
        self.op_backend = table.named(ops.paged_attention, name)
        """What `paged_attention` can do, as data."""
        self.paged_attention = self.op_backend.function
        # A package may bring attention alone; the cache is then written by what this device has.
        has_write = any(backend.name == name for backend in table.backends(ops.write_kv_cache))
        self.write_kv_cache = table.named(ops.write_kv_cache, name if has_write else "torch").function
        has_fused = any(backend.name == name for backend in table.backends(ops.rope_and_write_kv))
        self.rope_and_write_kv = table.named(ops.rope_and_write_kv, name).function if has_fused else None


class AttentionChoice(NamedTuple):
    """The chosen backend, and why it and not another."""

    backend: AttentionBackend
    refused: dict[str, str]
    """Every other backend -> why it does not serve."""


def attention_backend_names() -> tuple[str, ...]:
    """Names that `select_attention_backend` takes, best first: whatever serves the op `paged_attention`."""
    return tuple(backend.name for backend in op_table().backends(ops.paged_attention))


def select_attention_backend(request: OpRequest, name: str | None = None) -> AttentionChoice:
    """The best backend for `request`.

    Args:
        request: Of op `paged_attention`: sizes "head_dim" and "queries_per_kv_head", and "block_size" once it is
            decided; features and dtype of the cache that the model needs.
        name: Take this backend or fail.

    Raises:
        ConfigError: Unknown name, or no backend can serve; the message lists the choices or every reason.
    """
    if name is not None and name not in attention_backend_names():
        raise ConfigError(
            f"there is no attention backend {name!r}; choose one of {', '.join(attention_backend_names())}",
            field="attention_backend",
        )
    try:
        report = op_table().report(ops.paged_attention, request, backend=name)
    except ConfigError as error:
        raise ConfigError(str(error), field="attention_backend") from None
    return AttentionChoice(AttentionBackend(report.backend, op_table()), report.refused)
