"""Whether a network's results depend on nothing but the tokens before them, looked up from what its layers chose."""

from __future__ import annotations

from typing import Any

from quire_models.layers.scope import Scope
from quire_ops import OpBackend, op_table, ops
from quire_ops.ops import op_named

__all__ = ["promised_by_ops"]

ELEMENTWISE = frozenset(
    {ops.embedding, ops.position_slots, ops.quantized_embedding, ops.rotary_embedding, ops.write_latent_cache}
)
"""Ops that copy numbers or act on each alone, with operations that round one way: alike in every backend."""
BY_ROW = frozenset({(ops.layer_norm, "torch")})
"""Op and backend: torch goes through each row in one way, however many rows there are."""


def promised_by_ops(scope: Scope) -> bool:
    """Whether every op of the network promises the same bits for a token whatever else is in the step.

    What stands between ops copies numbers, or is of single operations that IEEE 754 rounds in one way. Other functions
    of numbers are op `activation`: torch goes through a tensor by whole vectors and computes what is left over
    otherwise, so that its exponentials and the like follow where a number stands, and how many threads there are.

    Args:
        scope: Scope of any layer of the network. All layers have been made.
    """
    products = {scope.linear_method.op, *(method.op for method in scope.stored)}
    backends = [*scope.chosen, *(scope.choose(op_named(name)) for name in products)]
    if scope.attentions:
        name = scope.attention_backend.name
        backends += [each for each in op_table().backends(ops.paged_attention) if each.name == name]
    return all(map(_is_invariant, backends))


def _is_invariant(backend: OpBackend[..., Any]) -> bool:
    return backend.batch_invariant or backend.op in ELEMENTWISE or (backend.op, backend.name) in BY_ROW
