"""How the files of gpt-oss keep its experts.

Shape legend: E experts, M width within an expert, I width of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.layers.moe import SparseMoE
from quire_models.layers.scope import Scope

__all__ = ["make_moe"]


def make_moe(spec: SparseMoESpec, scope: Scope) -> SparseMoE:
    """The experts of a layer, in the scope of the layer."""
    moe, experts = SparseMoE(spec, scope), scope / spec.name / "experts"
    _accept_transposed(experts, spec)
    if scope.quantization is not None:
        _accept_mxfp4(experts, spec)
    return moe


def _accept_transposed(scope: Scope, spec: SparseMoESpec) -> None:
    """Files have [E, I, 2 M] and [E, M, I], inputs first, and gate and up by turns."""
    num, size, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size

    def split_gate_up(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        kind = "weight" if tensor.ndim == 3 else "bias"
        for expert, stored in enumerate(tensor):
            outputs_first = stored.movedim(0, -1)  # a vector stays what it is
            yield f"{scope.prefix}{expert}.gate_proj.{kind}", outputs_first[0::2].contiguous()
            yield f"{scope.prefix}{expert}.up_proj.{kind}", outputs_first[1::2].contiguous()

    def split_down(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        kind = "weight" if tensor.ndim == 3 else "bias"
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.down_proj.{kind}", stored.movedim(0, -1).contiguous()

    scope.packed("gate_up_proj", (num, size, 2 * inner), split_gate_up)
    scope.packed("gate_up_proj_bias", (num, 2 * inner), split_gate_up)
    scope.packed("down_proj", (num, inner, size), split_down)
    scope.packed("down_proj_bias", (num, size), split_down)


def _accept_mxfp4(scope: Scope, spec: SparseMoESpec) -> None:
    """Or [E, 2 M, I / 32, 16] and [E, I, M / 32, 16] in MXFP4, outputs first, with their scales."""
    num, size, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size

    def split_gate_up(tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.gate_proj.{kind}", stored[0::2].flatten(1)
            yield f"{scope.prefix}{expert}.up_proj.{kind}", stored[1::2].flatten(1)

    def split_down(tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.down_proj.{kind}", stored.flatten(1)

    for name, outputs, inputs, split in (
        ("gate_up_proj", 2 * inner, size, split_gate_up),
        ("down_proj", size, inner, split_down),
    ):
        scope.packed(f"{name}_blocks", (num, outputs, inputs // 32, 16), partial(split, kind="weight"))
        scope.packed(f"{name}_scales", (num, outputs, inputs // 32), partial(split, kind="weight_scale"))
