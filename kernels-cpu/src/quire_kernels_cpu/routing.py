"""How tokens choose their experts, by the compiled kernels: op `route_experts`, and the rule as a decoder takes it.

Knows the C interface; the arithmetic is in `csrc/routing.h`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import EXPERT_SCORINGS, RoutingRule, ops

__all__ = ["route_experts", "routing_rule"]


def routing_rule(rule: RoutingRule, num_experts: int) -> ctypes.Structure:
    """The rule among so many experts as the C interface takes it.

    Raises:
        ConfigError: There is no such scoring, or the rule cannot choose among them.
    """
    if rule.scoring not in EXPERT_SCORINGS:
        raise ConfigError(f"experts have no scoring {rule.scoring!r}; choose one of {', '.join(EXPERT_SCORINGS)}")
    if not rule.fits(num_experts):
        raise ConfigError(f"{rule} cannot choose among {num_experts} experts")
    values = {name: getattr(rule, name) for name, _ in STRUCTS["RoutingRule"]._fields_}  # type: ignore[misc]
    return STRUCTS["RoutingRule"](**{**values, "scoring": EXPERT_SCORINGS.index(rule.scoring)})


@backend_for(ops.route_experts)
def route_experts(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    numbers = routing_rule(rule, num_experts)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    assert bias is None or bias.is_contiguous()
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int64)
    weights = torch.empty(num_tokens, rule.top_k, dtype=torch.float32)
    library().quire_route_experts(
        logits.data_ptr(),
        logits.stride(0),
        None if bias is None else bias.data_ptr(),
        ctypes.byref(numbers),
        num_tokens,
        num_experts,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ids, weights
