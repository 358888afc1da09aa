"""Choosing the attention backend once, when the model is built, with a report that says why."""

from __future__ import annotations

from typing import NamedTuple

from quire_attention.backend import (
    COMPUTE_DTYPES,
    AttentionAbilities,
    AttentionBackend,
    AttentionRequest,
    OpsAttentionBackend,
)
from quire_interfaces import ConfigError
from quire_ops import OpRequest, op_table, ops

__all__ = ["AttentionChoice", "attention_backend_names", "select_attention_backend"]


class AttentionChoice(NamedTuple):
    """The chosen backend, and why it and not another."""

    backend: AttentionBackend
    refused: dict[str, str]
    """Every other backend -> why it does not serve."""


FEATURES = ("sliding_window", "soft_cap", "sinks", "alibi")
_ANY_DEVICE = frozenset({"cpu", "cuda", "mps", "xpu"})


def attention_backend_names() -> tuple[str, ...]:
    """Names that `select_attention_backend` takes, best first: whatever serves the op `paged_attention`."""
    return tuple(backend.name for backend in op_table().backends(ops.paged_attention))


def select_attention_backend(request: AttentionRequest, name: str | None = None) -> AttentionChoice:
    """The best backend for `request`.

    Args:
        name: Take this backend or fail.

    Raises:
        ConfigError: Unknown name, or no backend can serve; the message lists the choices or every reason.
    """
    if name is not None and name not in attention_backend_names():
        raise ConfigError(
            f"there is no attention backend {name!r}; choose one of {', '.join(attention_backend_names())}",
            field="attention_backend",
        )
    chosen: AttentionBackend | None = None
    refused: dict[str, str] = {}
    table = op_table()
    sizes = {"head_dim": request.head_dim, "queries_per_kv_head": request.num_heads // request.num_kv_heads}
    if request.block_size is not None:
        sizes["block_size"] = request.block_size
    op_request = OpRequest(
        device=request.device, dtype=request.dtype, sizes=sizes, cache_dtype=request.cache_dtype,
        features=frozenset(name for name in FEATURES if getattr(request, name)),
    )  # fmt: skip
    for op_backend in table.backends(ops.paged_attention):
        candidate_name = op_backend.name
        features = frozenset(FEATURES) if op_backend.features is None else op_backend.features
        abilities = AttentionAbilities(
            devices=op_backend.devices or _ANY_DEVICE,
            dtypes=op_backend.dtypes or COMPUTE_DTYPES,
            sliding_window="sliding_window" in features,
            soft_cap="soft_cap" in features,
            sinks="sinks" in features,
            alibi="alibi" in features,
            device_lengths=op_backend.device_lengths,
            trees=op_backend.trees,
        )
        candidate = OpsAttentionBackend(candidate_name, table, abilities=abilities)
        reason = op_backend.unavailable or abilities.refusal(request) or op_backend.refusal(op_request)
        if reason is None and name not in (None, candidate_name):
            reason = f"{name} was asked for"
        if reason is None and chosen is not None:
            reason = f"{chosen.name} comes first"
        if reason is None:
            chosen = candidate
        else:
            refused[candidate_name] = reason
    if chosen is None:
        reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refused.items())
        raise ConfigError(f"no attention backend can serve this model ({reasons})", field="attention_backend")
    return AttentionChoice(chosen, refused)
