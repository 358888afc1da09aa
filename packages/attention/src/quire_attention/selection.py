"""Choosing the attention backend once, when the model is built, with a report that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire_attention.backend import AttentionAbilities, AttentionBackend, AttentionRequest, OpsAttentionBackend
from quire_interfaces import ConfigError
from quire_ops import op_table

__all__ = ["AttentionChoice", "attention_backend_names", "select_attention_backend"]


class AttentionChoice(NamedTuple):
    """The chosen backend, and why it and not another."""

    backend: AttentionBackend
    refused: dict[str, str]
    """Every other backend -> why it does not serve."""


_ANY_DEVICE = AttentionAbilities(devices=frozenset({"cpu", "cuda", "mps", "xpu"}))

# Best first.
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch": lambda: OpsAttentionBackend("torch", op_table(), abilities=_ANY_DEVICE),
    "reference": lambda: OpsAttentionBackend("reference", op_table(), abilities=_ANY_DEVICE),
}


def attention_backend_names() -> tuple[str, ...]:
    """Names that `select_attention_backend` takes, best first."""
    return tuple(_BACKENDS)


def select_attention_backend(request: AttentionRequest, name: str | None = None) -> AttentionChoice:
    """The best backend for `request`.

    Args:
        name: Take this backend or fail.

    Raises:
        ConfigError: Unknown name, or no backend can serve; the message lists the choices or every reason.
    """
    if name is not None and name not in _BACKENDS:
        raise ConfigError(
            f"there is no attention backend {name!r}; choose one of {', '.join(_BACKENDS)}", field="attention_backend"
        )
    chosen: AttentionBackend | None = None
    refused: dict[str, str] = {}
    for candidate_name, make in _BACKENDS.items():
        candidate = make()
        reason = candidate.abilities.refusal(request)
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
