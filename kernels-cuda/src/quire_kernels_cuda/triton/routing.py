"""From router logits to each token's experts and weights, in one kernel.

A program takes a token, whose experts are a tile of groups that one warp or a few hold in registers. Experts are
compared as whole numbers: above, the bits of the score in an order that grows with it, below, the expert's distance
from the last, so that the largest number is the best expert, the first among equals. What is no number is larger than
all others, as it is to torch.

Shape legend: T tokens, E experts, G groups of S experts each, K experts per token.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import EXPERT_SCORINGS, RoutingRule, implements, ops

__all__ = ["calls", "route_experts", "route_kernel"]


@triton.jit
def _ordered(score):
    """float32 -> int64 between -2^31 and 2^31 that grows with it."""
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, key, 0x7FFFFFFF).to(tl.int64)


@triton.jit
def route_kernel(
    logits, bias, ids, weights, num_experts, logits_row, minimum, scale,
    SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, SIZE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """ids and weights [T, TOP_K]. SIZE: experts of a group; G, S, K: powers of two that groups, SIZE, TOP_K fit in."""
    NEVER: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G), tl.arange(0, S)
    expert = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    logit = tl.load(logits + token * logits_row + expert, mask=inside, other=float("-inf"))
    if SCORING == "softmax":
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    elif SCORING == "sigmoid":
        score = tl.sigmoid(logit)
    else:
        score = logit
    choice = score
    if HAS_BIAS:
        choice = score + tl.load(bias + expert, mask=inside, other=0.0)
    behind = (num_experts - 1 - expert).to(tl.int64)
    rank = tl.where(inside, (_ordered(choice) << 32) + behind, NEVER)
    if TOP_GROUPS < GROUPS:
        best = tl.max(rank, 1)
        goodness = tl.sum(tl.where(rank == best[:, None], choice, 0.0), 1)
        if GROUP_BEST == 2:
            second = tl.max(tl.where(rank == best[:, None], NEVER, rank), 1)
            goodness += tl.sum(tl.where(rank == second[:, None], choice, 0.0), 1)
        of_group = tl.where(group < GROUPS, (_ordered(goodness) << 32) + (GROUPS - 1 - group), NEVER)
        num_better = tl.sum((of_group[None, :] > of_group[:, None]).to(tl.int32), 1)
        rank = tl.where((num_better < TOP_GROUPS)[:, None], rank, NEVER)
    slot = tl.arange(0, K)
    chosen_ids = tl.zeros([K], dtype=tl.int64)
    chosen = tl.zeros([K], dtype=tl.float32)
    for taken in tl.static_range(TOP_K):
        best = tl.max(tl.max(rank, 1), 0)
        is_best = rank == best
        chosen_ids = tl.where(slot == taken, num_experts - 1 - (best & 0xFFFFFFFF), chosen_ids)
        chosen = tl.where(slot == taken, tl.sum(tl.sum(tl.where(is_best, score, 0.0), 1), 0), chosen)
        rank = tl.where(is_best, NEVER, rank)
    used = slot < TOP_K
    if SCORING == "softmax_of_chosen":
        chosen = tl.where(used, tl.exp(chosen - tl.max(tl.where(used, chosen, float("-inf")), 0)), 0.0)
        chosen = chosen / tl.sum(chosen, 0)
    if RENORMALIZE:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0), minimum)
    tl.store(ids + token * TOP_K + slot, chosen_ids, mask=used)
    tl.store(weights + token * TOP_K + slot, chosen * scale, mask=used)


@implements(ops.route_experts)
def route_experts(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    if rule.scoring not in EXPERT_SCORINGS:
        raise ConfigError(f"experts have no scoring {rule.scoring!r}; choose one of {', '.join(EXPERT_SCORINGS)}")
    if not rule.fits(num_experts):
        raise ConfigError(f"{rule} cannot choose among {num_experts} experts")
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        is_limited = rule.topk_groups < rule.num_groups
        groups = rule.num_groups if is_limited else 1
        size = num_experts // groups
        tile = triton.next_power_of_2(groups), triton.next_power_of_2(size)
        route_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, ids, weights, num_experts, logits.stride(0), float(rule.minimum),
            float(rule.scale), SCORING=rule.scoring, HAS_BIAS=bias is not None, RENORMALIZE=rule.renormalize,
            TOP_K=rule.top_k, K=triton.next_power_of_2(rule.top_k), GROUPS=groups,
            TOP_GROUPS=rule.topk_groups if is_limited else 1, GROUP_BEST=rule.group_best, SIZE=size,
            G=tile[0], S=tile[1], num_warps=1 if tile[0] * tile[1] <= 512 else 4,
        )  # fmt: skip
    return ids, weights


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """The rules of Qwen3-MoE, gpt-oss and DeepSeek-V3."""
    if not shape.num_experts or shape.weights != "plain":
        return
    rules = (
        ("softmax", 128, False, RoutingRule(top_k=8, scoring="softmax", renormalize=True)),
        ("softmax of chosen", 32, False, RoutingRule(top_k=4, scoring="softmax_of_chosen")),
        ("sigmoid in groups", 256, True, RoutingRule(
            top_k=8, scoring="sigmoid", renormalize=True, minimum=1e-20, scale=2.5, num_groups=8, topk_groups=4,
            group_best=2)),
        ("sigmoid of many", 512, True, RoutingRule(top_k=22, scoring="sigmoid", renormalize=True, minimum=1e-20)),
    )  # fmt: skip
    for name, num_experts, has_bias, rule in rules:
        logits = torch.empty(16, num_experts, dtype=torch.float32, device="meta")
        yield f"{name} of {num_experts}", partial(route_experts, logits, logits[0] if has_bias else None, rule)
