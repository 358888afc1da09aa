"""Which op multiplies with a quantized weight: kernels say as data what they take, the first to fit serves.

`QuantKey` is what they are asked: the form of a weight, and of inputs. Weights of quantized checkpoints and those that
are quantized while they are loaded are asked for alike. Knows forms and ops; does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_interfaces import ConfigError, QuantKey
from quire_ops import Op, OpRequest, QuantizedTokens, op_table, ops
from quire_ops.activation_quant import FP8_GROUP
from quire_ops.block_formats import BLOCK_FORMATS
from quire_quantization.blocks import BlockWeight
from quire_quantization.experts import FUSED
from quire_quantization.stored import GroupedWeight, exact_scale, grouped_weights

__all__ = [
    "FP8_GROUPS",
    "FP8_STEP",
    "FP8_TENSOR",
    "FP8_TOKENS",
    "INT8_TENSOR",
    "INT8_TOKENS",
    "KERNELS",
    "BoundOps",
    "KernelChoice",
    "QuantKey",
    "WeightKernel",
    "check_kernel_names",
    "choose_kernel",
    "form_on_device",
    "key_of",
]

_ELEMENTS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}

BoundOps = Callable[[Op[..., Tensor]], Callable[..., Tensor]]
"""An op -> the function that serves it on a layer's device in its dtype."""

INT8_TOKENS = QuantKey(dtype="int8", scale_dtype="float32", granularity="token")
"""Inputs quantized to int8, each with a scale of its own."""
INT8_TENSOR = QuantKey(dtype="int8", scale_dtype="float32", granularity="tensor", static=True)
"""Inputs quantized to int8 with one scale, which the checkpoint brings."""
FP8_TOKENS = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="token")
"""Inputs quantized to fp8, each with a scale of its own."""
FP8_TENSOR = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="tensor", static=True)
"""Inputs quantized to fp8 with one scale, which the checkpoint brings."""
FP8_STEP = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="tensor")
"""Inputs quantized to fp8 with one scale for a step; each has its own here, so that none depends on its neighbours."""
FP8_GROUPS = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="group", group_size=FP8_GROUP)
"""Inputs quantized to fp8, each 128 numbers of one with a scale of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKernel:
    """What an op takes; None for everything. On which devices and in which dtypes, its backends say (`OpBackend`)."""

    op: Op[..., Tensor]
    dtypes: frozenset[str] | None = None
    granularities: frozenset[str] | None = None
    group_step: int = 1
    """Groups are 32, 64 or multiples of 128 inputs where it is 32."""
    float32_scales: bool = True
    zero_points: bool = True
    inputs: tuple[QuantKey, ...] = ()
    """What it quantizes inputs to, where it does not take them as they come."""
    most_inputs: int | None = None
    """Largest number of inputs of an output."""
    make: Callable[[Any, OpRequest, str], dict[str, Tensor]]
    """(weight, the layer's request, its name) -> what the op is given."""
    arguments: tuple[str, ...] = ("weight", "scale")
    """Names of what `make` gives, in the order of the op's arguments behind x."""

    def multiply(
        self,
        bound: BoundOps,
        weights: dict[str, Tensor],
        x: Tensor | QuantizedTokens,
        *,
        logits: bool,
    ) -> Tensor:
        """x [N, in_features], or quantized as the op does it -> [N, out_features]; for `logits` float32, without a
        bias."""
        if "order" in weights:
            assert isinstance(x, Tensor)
            x = x.index_select(1, weights["order"])
        arguments = [weights.get(name) for name in self.arguments]
        if self.op is ops.linear:  # the one op whose logits are another op's
            return (
                bound(ops.lm_head)(x, *arguments) if logits else bound(ops.linear)(x, *arguments, weights.get("bias"))
            )
        return bound(self.op)(x, *arguments, None if logits else weights.get("bias"), wide=logits)

    def reason_against(self, weight: QuantKey, inputs: QuantKey | None, request: OpRequest) -> str:
        """Why it does not take a weight, and inputs (None: as they come), on the request's device in its dtype; empty
        when it does."""
        size, in_features = weight.group_size or 128, request.sizes.get("in_features", 1)
        accepted = "inputs in " + " or ".join(map(str, self.inputs))
        reasons = (
            (self.dtypes is not None and weight.dtype not in self.dtypes, f"takes no {weight.dtype}"),
            (bool(self.inputs) and inputs is None, "inputs stay as they are"),
            (bool(self.inputs) and inputs not in self.inputs, f"takes {accepted}, not in {inputs}"),
            (
                self.op is ops.fp8_linear and (weight.granularity == "group") != (inputs == FP8_GROUPS),
                f"takes no weight in {weight.granularity} scales with inputs in {inputs}",
            ),
            (not self.zero_points and not weight.symmetric, "takes no zero points"),
            (
                self.granularities is not None and weight.granularity not in self.granularities,
                f"takes no scales by {weight.granularity}",
            ),
            (size % self.group_step or (size > 128 and size % 128) or size == 96, f"takes no groups of {size}"),
            (not self.float32_scales and weight.scale_dtype != "compute", "takes scales of the compute dtype only"),
            (
                self.most_inputs is not None and in_features > self.most_inputs,
                f"takes at most {self.most_inputs} inputs, not {in_features}",
            ),
        )
        return next((text for applies, text in reasons if applies), "") or self._reason_on_device(weight, request)

    def _reason_on_device(self, weight: QuantKey, request: OpRequest) -> str:
        try:
            backend = op_table().choose(self.op, request)
        except ConfigError as error:
            return str(error)
        if backend.planes and not BLOCK_FORMATS[weight.dtype].planes:
            return f"takes no {weight.dtype} on {request.device}"
        return f"only the reference computes it on {request.device}" if backend.name == "reference" else ""


class KernelChoice(NamedTuple):
    """The kernel of one weight."""

    kernel: WeightKernel
    against: tuple[tuple[str, str], ...]
    """(op, why not) of those before it."""
    inputs: QuantKey | None = None
    """What inputs were meant to be quantized to."""

    def report(self, count: int) -> str:
        """For so many layers: "grouped_linear for 14 (int8_linear: takes no int4)"."""
        reasons = "; ".join(f"{op}: {reason}" for op, reason in self.against)
        stay = ", inputs stay as they are" if self.inputs is not None and not self.kernel.inputs else ""
        return f"{self.kernel.op.name} for {count}{stay}" + (f" ({reasons})" if reasons else "")


def _one_scale(weight: GroupedWeight, request: OpRequest, name: str) -> dict[str, Tensor]:
    return {"weight": weight.elements.contiguous(), "scale": weight.scale[:, 0].to(request.dtype).contiguous()}


def _grouped(weight: GroupedWeight, request: OpRequest, name: str) -> dict[str, Tensor]:
    return grouped_weights(weight, request.dtype, name)


def _fp8(weight: GroupedWeight, request: OpRequest, name: str) -> dict[str, Tensor]:
    inputs, groups = weight.elements.shape[1], weight.scale.shape[1]
    scale = weight.scale.float()
    if groups > 1:  # larger groups have the same scale several times
        size = weight.group_size or inputs // groups
        scale = scale.repeat_interleave(size // FP8_GROUP, dim=1)[:, : -(-inputs // FP8_GROUP)]
    return {"weight": weight.elements.contiguous(), "scale": scale.contiguous()}


def _in_blocks(weight: BlockWeight, request: OpRequest, name: str) -> dict[str, Tensor]:
    return weight.linear_weights(planes=op_table().choose(ops.block_linear, request).planes)


def _widened(weight: GroupedWeight | BlockWeight, request: OpRequest, name: str) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight):
        return {"weight": weight.dequantized(request.dtype)}
    return {"weight": weight.dequantized().to(request.dtype)}


_INT8, _BY_OUTPUT = frozenset({"int8"}), frozenset({"tensor", "channel"})

KERNELS = (
    WeightKernel(
        op=ops.w8a8_linear,
        dtypes=_INT8,
        granularities=_BY_OUTPUT,
        float32_scales=False,
        zero_points=False,
        inputs=(INT8_TOKENS, INT8_TENSOR),
        most_inputs=131072,  # whose products, of at most 127 x 128, a sum in int32 holds
        make=_one_scale,
        arguments=("weight", "scale", "input_scale"),
    ),
    WeightKernel(
        op=ops.int8_linear,
        dtypes=_INT8,
        granularities=_BY_OUTPUT,
        float32_scales=False,
        zero_points=False,
        make=_one_scale,
    ),
    WeightKernel(
        op=ops.fp8_linear,
        dtypes=frozenset({"fp8_e4m3"}),
        granularities=_BY_OUTPUT | {"group"},
        group_step=128,
        zero_points=False,
        inputs=(FP8_TOKENS, FP8_TENSOR, FP8_STEP, FP8_GROUPS),
        make=_fp8,
        arguments=("weight", "scale", "input_scale"),
    ),
    WeightKernel(
        op=ops.grouped_linear,
        dtypes=frozenset({"int4", "int8", "fp8_e4m3"}),
        group_step=32,
        make=_grouped,
        arguments=("weight", "scale", "zero"),
    ),
    WeightKernel(op=ops.block_linear, dtypes=frozenset(BLOCK_FORMATS), make=_in_blocks),
    WeightKernel(op=ops.linear, make=_widened, arguments=("weight",)),
)
"""In the order of preference. `linear` takes any weight, widened to the compute dtype: rounded to it, and as large."""


def form_on_device(
    weight: GroupedWeight | BlockWeight, request: OpRequest, disabled: Collection[str] = ()
) -> tuple[GroupedWeight | BlockWeight, QuantKey]:
    """A weight of a checkpoint in the form that an op multiplies with, and its key: one in blocks that none takes is of
    whole numbers, where it can be, or "coded", which is widened."""
    key = key_of(weight, request.dtype)
    if not isinstance(weight, BlockWeight):
        return weight, key
    kernel = next(each for each in KERNELS if each.op is ops.block_linear)
    if kernel.op.name not in disabled and not kernel.reason_against(key, None, request):
        return weight, key
    if weight.whole_numbers is None:
        return weight, replace(key, dtype="coded")
    whole = weight.whole_numbers(weight.blocks)
    return whole, key_of(whole, request.dtype)


def key_of(weight: GroupedWeight | BlockWeight, dtype: torch.dtype) -> QuantKey:
    """The key of a weight of a checkpoint for a network that computes in `dtype`."""
    if isinstance(weight, BlockWeight):
        return QuantKey(dtype=weight.form, scale_dtype="compute", granularity="group", group_size=32)
    inputs, groups = weight.elements.shape[1], weight.scale.shape[1]
    elements = _ELEMENTS.get(weight.elements.dtype, "coded")
    return QuantKey(
        dtype="int4" if elements == "int8" and weight.bits <= 4 else elements,
        scale_dtype="compute" if exact_scale(weight.scale, dtype).dtype == dtype else "float32",
        granularity="channel" if groups == 1 else "group",
        group_size=None if groups == 1 else weight.group_size or inputs // groups,
        symmetric=weight.zero is None,
        ordered=weight.order is None,
    )


def choose_kernel(
    weight: QuantKey, inputs: QuantKey | None, request: OpRequest, disabled: Collection[str] = ()
) -> KernelChoice:
    """The first kernel that takes the weight and is not disabled.

    Args:
        inputs: What they are meant to be quantized to; None for as they come. A kernel that takes them as they come may
            serve all the same.
        request: Device and compute dtype, with the sizes in_features and out_features.
        disabled: Ops that may not serve.

    Raises:
        ConfigError: None is left.
    """
    against: list[tuple[str, str]] = []
    for kernel in KERNELS:
        if kernel.op is ops.block_linear and weight.dtype not in BLOCK_FORMATS:
            continue  # nobody expects it
        reason = "disabled" if kernel.op.name in disabled else kernel.reason_against(weight, inputs, request)
        if not reason:
            return KernelChoice(kernel, tuple(against), inputs)
        against.append((kernel.op.name, reason))
    reasons = "; ".join(f"{op}: {reason}" for op, reason in against)
    raise ConfigError(
        f"no linear kernel is left for weights in {weight} ({reasons}); enable one of them",
        field="disabled_linear_kernels",
    )


def check_kernel_names(names: Collection[str]) -> None:
    """Raises ConfigError for a name that no kernel has."""
    kernel_names = [*(kernel.op.name for kernel in KERNELS), FUSED]
    for name in names:
        if name not in kernel_names:
            raise ConfigError(
                f"there is no linear kernel {name!r}; choose of {', '.join(kernel_names)}",
                field="disabled_linear_kernels",
            )
