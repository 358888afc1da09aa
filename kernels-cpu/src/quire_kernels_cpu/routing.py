"""How tokens choose their experts, by the compiled kernels: op `route_experts`, and the rule as a decoder takes it.

Knows the C interface; the arithmetic is in `csrc/routing.h`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import EXPERT_SCORINGS, RoutingRule, ops

__all__ = ["Rule", "route_experts"]


class Rule(ctypes.Structure):
    """`RoutingRule` of `csrc/routing.h`."""

    _fields_ = (
        ("top_k", ctypes.c_int32),
        ("scoring", ctypes.c_int32),
        ("renormalize", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("topk_groups", ctypes.c_int32),
        ("group_best", ctypes.c_int32),
        ("minimum", ctypes.c_float),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, rule: RoutingRule, num_experts: int) -> Rule:
        """The rule, among so many experts.

        Raises:
            ConfigError: There is no such scoring, or the rule cannot choose among them.
        """
        if rule.scoring not in EXPERT_SCORINGS:
            raise ConfigError(f"experts have no scoring {rule.scoring!r}; choose one of {', '.join(EXPERT_SCORINGS)}")
        if not rule.fits(num_experts):
            raise ConfigError(f"{rule} cannot choose among {num_experts} experts")
        values = {name: getattr(rule, name) for name, _ in cls._fields_}
        return cls(**{**values, "scoring": EXPERT_SCORINGS.index(rule.scoring)})


@backend_for(ops.route_experts)
def route_experts(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    numbers = Rule.of(rule, num_experts)
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
