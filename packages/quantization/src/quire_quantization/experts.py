"""Which method runs the experts of a layer: each says what forms of weights it takes, the first to fit serves.

Every method takes routed ids and weights (`quire_ops.RunExperts`); none decides itself where tokens go. Knows forms of
weights; does not know layers, routing or files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops import LinearWeights, is_in_blocks
from quire_ops.block_formats import format_in_planes

__all__ = ["EACH_EXPERT", "FUSED", "ExpertsChoice", "alike", "choose_experts_method", "form_of"]

FUSED = "fused_moe"
"""The op for all experts of a layer at once: an expert's weights are read once for all of its tokens."""
EACH_EXPERT = "each_expert"
"""Expert by expert through their own layers: takes everything."""

_FORMS = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}


class ExpertsChoice(NamedTuple):
    """The method of one layer's experts."""

    method: str
    against: tuple[tuple[str, str], ...] = ()
    """(method, why not) of those before it."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.against)
        return f"{self.method} ({reasons})" if reasons else self.method


def choose_experts_method(
    gate: Sequence[LinearWeights], up: Sequence[LinearWeights], down: Sequence[LinearWeights], *,
    refusal: str = "", disabled: Collection[str] = (),
) -> ExpertsChoice:  # fmt: skip
    """The method for experts with these weights, those of each role already `alike`.

    Args:
        refusal: Why the op cannot have the weights, where a layer keeps something that is not in them.
        disabled: Ops that may not serve.
    """
    reason = "disabled" if FUSED in disabled else refusal or _reason_against(gate, up, down)
    return ExpertsChoice(EACH_EXPERT, ((FUSED, reason),)) if reason else ExpertsChoice(FUSED)


def _reason_against(*roles: Sequence[LinearWeights]) -> str:
    """Why op `fused_moe` does not take the weights; empty when it does."""
    forms = {_form(one): None for role in roles for one in role}
    if len(forms) > 1:
        return f"takes weights of one form, not {' beside '.join(forms)}"
    formats = [{_format(one): None for one in role} for role in roles]
    for role, found in (("gate and up", formats[0] | formats[1]), ("down", formats[2])):
        if len(found) > 1:
            return f"takes {role} in blocks of one format, not {' beside '.join(map(str, found))}"
    gate, up, down = ({_scales(one) for one in role} for role in roles)
    if len(gate | up) > 1 or len(down) > 1:
        return "takes matrices whose scales are for as many inputs each, and whose biases are all there or none"
    return ""


def form_of(*roles: Sequence[LinearWeights]) -> str:
    """What experts have to have in common to run together: ranks compare it. Weights that are `alike` on each rank may
    have scales of another dtype, or zero points, elsewhere."""
    first = [role[0] for role in roles]
    shapes = [None if (scales := _group_scales(one)) is None else tuple(scales.shape) for one in first]
    return str([(_form(one), _format(one), shape, one.bias is None) for one, shape in zip(first, shapes, strict=True)])


def _form(weights: LinearWeights) -> str:
    """What the elements are and how they meet inputs."""
    if _format(weights) is not None:
        return "blocks in planes"
    if weights.scale is None or is_in_blocks(weights):  # which are decoded to plain ones
        return "plain"
    element = _FORMS[weights.weight.dtype]
    if weights.scale.ndim > 1:
        return f"{element} in groups"
    return element if weights.input_scale is None else f"{element} with rounded inputs"


def _format(weights: LinearWeights) -> str | None:
    """Of weights in planes, which kernels are made for; None of others."""
    return format_in_planes(weights.scale) if weights.scale is not None and is_in_blocks(weights) else None


def _scales(weights: LinearWeights) -> tuple[object, ...]:
    """What matrices of one role must have in common beside their form."""
    scale = _group_scales(weights)
    return (None if scale is None else (scale.shape, scale.dtype), weights.zero is None, weights.bias is None)


def _group_scales(weights: LinearWeights) -> Tensor | None:
    """What elements are multiplied with; None of plain ones and of those in blocks, which have a header there."""
    return None if is_in_blocks(weights) else weights.scale


def alike(role: Sequence[LinearWeights]) -> tuple[LinearWeights, ...]:
    """Scales of groups of all experts' matrices in one dtype, and zero points for all of them or none; values stay.

    Scales are kept in the compute dtype only where that holds them exactly, and zero points only where one is not zero:
    experts of the same checkpoint may differ in both.
    """
    grouped = [one for one in role if one.scale is not None and one.scale.ndim > 1]
    if len(grouped) < len(role):
        return tuple(role)
    wide = any(one.scale is not None and one.scale.dtype == torch.float32 for one in role)
    offset = any(one.zero is not None for one in role)

    def changed(one: LinearWeights) -> LinearWeights:
        assert one.scale is not None
        zero = torch.zeros_like(one.scale, dtype=torch.int16) if offset and one.zero is None else one.zero
        return one._replace(scale=one.scale.float() if wide else one.scale, zero=zero)

    return tuple(changed(one) for one in role)
