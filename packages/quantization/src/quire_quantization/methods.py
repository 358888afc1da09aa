"""Linear methods: how a linear layer keeps its weight and multiplies with it.

Each says as a `QuantKey` what it makes of a weight; which op multiplies with that is decided once, as for quantized
checkpoints (`quire_quantization.kernels`). Knows weights and ops; does not know layers, checkpoints or networks. A
method is stateless; the layer owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from quire_interfaces import ConfigError, LinearMethod, QuantKey
from quire_ops import OpRequest, QuantizedTokens, bind, ops
from quire_ops.encoder_stack import INPUT_GROUP
from quire_ops.grouped import GROUP_SIZES, block_groups, group_size_of, pack_int4, unblock_groups, unpack_int4
from quire_quantization.kernels import FP8_TOKENS, INT8_TOKENS, BoundOps, KernelChoice, choose_kernel
from quire_quantization.stored import GroupedWeight, exact_scale

__all__ = [
    "Float8PerTokenLinear",
    "Float8WeightOnlyLinear",
    "Int4WeightOnlyLinear",
    "Int8GroupedLinear",
    "Int8WeightOnlyLinear",
    "PlainLinear",
    "QuantizedLinear",
    "ServedLinear",
    "W8A8Linear",
    "head_method",
    "linear_method",
    "linear_method_names",
]

_ROWS = 4096
_SEARCH_ELEMENTS = 1 << 18
"""Weights whose scales are searched at a time: what a core's cache holds."""
_FP8_MAX, _FP8_EXPONENT = 448.0, 8
"""Largest magnitude of e4m3, and its exponent."""
_SHRINKS = (1.0, 0.93, 0.86, 0.79)


class PlainLinear:
    """The weight as loaded."""

    name, op = "plain", "linear"
    logits_op = "lm_head"

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind(ops.linear, request)
        self._lm_head = bind(ops.lm_head, request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Keeps `weight` [out_features, in_features] itself, without a copy."""
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self._linear(x, weights["weight"], weights.get("bias"))
        return out

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        out: Tensor = self._lm_head(x, weights["weight"])
        return out


class QuantizedLinear:
    """A weight that is quantized while it is loaded: what its methods have in common."""

    name: str
    op: str
    """That multiplies with the weight in the form in which it is made; so do `logits`."""
    logits_op: str
    key: QuantKey
    inputs: QuantKey | None = None
    """What inputs are rounded to; None as they come."""
    choice: KernelChoice | None = None
    """What serves, and why nothing before it does."""

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        raise NotImplementedError


class Int8WeightOnlyLinear(QuantizedLinear):
    """The weight in int8 with one symmetric scale per output, max |weight[o]| / 127; activations as they are.

    Rounded to nearest: absmax quantization of each row (LLM.int8(), Dettmers et al. 2022, sec. 2.1).
    """

    name = "int8"
    op = logits_op = "int8_linear"
    key = QuantKey(dtype="int8", scale_dtype="compute", granularity="channel")

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind(ops.int8_linear, request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> int8 of the same shape, and scale [out_features] in its dtype."""
        scale = weight.new_empty(weight.shape[0])
        quantized = torch.empty_like(weight, dtype=torch.int8)
        for begin in range(0, weight.shape[0], _ROWS):  # bounds the wide copies
            rows = slice(begin, begin + _ROWS)
            wide = weight[rows].float()
            scale[rows] = wide.abs().amax(dim=1) / 127.0
            # A row of zeros (or one so small that its scale is rounded to zero) is kept as zeros.
            divisor = torch.where(scale[rows] == 0, 1.0, scale[rows].float())[:, None]
            quantized[rows] = (wide / divisor).round_().clamp_(-127, 127)
        weights = {"weight": quantized, "scale": scale}
        if bias is not None:
            weights["bias"] = bias
        return weights

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self._linear(x, weights["weight"], weights["scale"], weights.get("bias"))
        return out

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        out: Tensor = self._linear(x, weights["weight"], weights["scale"], None, wide=True)
        return out


class W8A8Linear(Int8WeightOnlyLinear):
    """Weights as `Int8WeightOnlyLinear` keeps them, and tokens rounded to int8, each with one scale, max |x| / 127.

    Products of whole numbers in the manner of LLM.int8() (Dettmers et al. 2022, sec. 2.1), without its exceptions for
    outliers.
    """

    name, op = "w8a8", "w8a8_linear"
    inputs = INT8_TOKENS

    def __init__(self, request: OpRequest) -> None:
        super().__init__(request)
        self._both_int8 = bind(ops.w8a8_linear, request)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """See `Int8WeightOnlyLinear`; and "input_scale", as op `w8a8_linear` takes it."""
        return {**super().make_weights(weight, bias), "input_scale": torch.zeros(1, device=weight.device)}

    def apply(self, weights: dict[str, Tensor], x: Tensor | QuantizedTokens) -> Tensor:
        """x [N, in_features], or rounded as the op does it -> [N, out_features]."""
        out: Tensor = self._both_int8(
            x, weights["weight"], weights["scale"], weights["input_scale"], weights.get("bias")
        )
        return out

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        out: Tensor = self._both_int8(x, weights["weight"], weights["scale"], weights["input_scale"], None, wide=True)
        return out


class _GroupedLinear(QuantizedLinear):
    """A weight that op `grouped_linear` multiplies with; activations as they are."""

    op = logits_op = "grouped_linear"

    def __init__(self, request: OpRequest) -> None:
        self._linear = bind(ops.grouped_linear, request)

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self._linear(x, weights["weight"], weights["scale"], None, weights.get("bias"))
        return out

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        out: Tensor = self._linear(x, weights["weight"], weights["scale"], None, None, wide=True)
        return out


class Int4WeightOnlyLinear(_GroupedLinear):
    """The weight in int4 with one symmetric scale for each group of inputs of an output; activations as they are.

    Rounded to nearest. A group's weight of the largest magnitude becomes -8, or more than that: of a few scales the one
    with the smallest squared error is taken (Nagel et al. 2021, "A White Paper on Neural Network Quantization", sec.
    3.1, the range by mean squared error).
    """

    def __init__(self, request: OpRequest, *, group_size: int) -> None:
        super().__init__(request)
        self.key = QuantKey(dtype="int4", scale_dtype="compute", granularity="group", group_size=group_size)
        self.name = "int4" if group_size == GROUP_SIZES[0] else f"int4-g{group_size}"
        self.group_size = group_size

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> as op `grouped_linear` takes it, scales in the weight's dtype."""
        outputs, inputs = weight.shape
        rows = max(16, _SEARCH_ELEMENTS // inputs // 16 * 16)
        parts = [self._quantize(weight[begin : begin + rows]) for begin in range(0, outputs, rows)]
        scale = torch.cat([scale for _, scale in parts])
        weights = {"weight": torch.cat([elements for elements, _ in parts]), "scale": block_groups(scale)}
        return weights if bias is None else {**weights, "bias": bias}

    def _quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Some rows -> packed elements, and scales [rows, groups]."""
        outputs, inputs = weight.shape
        num_groups = -(-inputs // self.group_size)
        padded = torch.nn.functional.pad(weight.float(), (0, num_groups * self.group_size - inputs))
        groups = padded.view(outputs, num_groups, self.group_size)
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
        for shrink in _SHRINKS:
            candidate = (extreme * (shrink / -8.0)).to(weight.dtype).float()
            error = _elements(groups, candidate).mul_(candidate).sub_(groups).square_().sum(dim=2, keepdim=True)
            better = error < least
            scale, least = torch.where(better, candidate, scale), torch.where(better, error, least)
        # Of NaN no error is the smallest; as a scale it stays, where zeros would hide a broken checkpoint.
        scale = torch.where(least.isfinite(), scale, torch.nan)
        elements = _elements(groups, scale).view(outputs, -1)[:, :inputs].to(torch.int8)
        return pack_int4(elements), scale[:, :, 0].to(weight.dtype)


class Int8GroupedLinear(_GroupedLinear):
    """The weight in int8 with one symmetric scale for each `INPUT_GROUP` inputs of an output, max |weight| / 127.

    For op `encoder_stack`, which rounds inputs in the same groups; a layer by itself takes them as they come. Rounded
    to nearest, as "Q8_0" of llama.cpp is in groups of 32.
    """

    name = "w8a8-g64"
    key = QuantKey(dtype="int8", scale_dtype="compute", granularity="group", group_size=INPUT_GROUP)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> as op `grouped_linear` takes it, scales in the weight's dtype."""
        outputs, inputs = weight.shape
        elements = torch.empty_like(weight, dtype=torch.int8)
        scales = weight.new_empty(outputs, -(-inputs // INPUT_GROUP))
        for begin in range(0, outputs, _ROWS):  # bounds the wide copies
            rows = slice(begin, begin + _ROWS)
            padded = torch.nn.functional.pad(weight[rows].float(), (0, -inputs % INPUT_GROUP))
            groups = padded.view(len(padded), -1, INPUT_GROUP)
            scales[rows] = groups.abs().amax(dim=2) / 127.0
            # A group of zeros (or one so small that its scale is rounded to zero) is kept as zeros.
            divisor = torch.where(scales[rows] == 0, 1.0, scales[rows].float())[:, :, None]
            whole = (groups / divisor).round_().clamp_(-127, 127)
            elements[rows] = whole.view(len(padded), -1)[:, :inputs].to(torch.int8)
        weights = {"weight": elements, "scale": block_groups(scales)}
        return weights if bias is None else {**weights, "bias": bias}


class Float8WeightOnlyLinear(_GroupedLinear):
    """The weight in fp8 e4m3, rounded to nearest; activations as they are.

    With one scale per output, max |weight[o]| / 448 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"); or, of
    groups of 32 inputs, a power of two each: that of the largest magnitude, so that what is above 448 is cut off (OCP
    Microscaling Formats 1.0, sec. 6.3).
    """

    def __init__(self, request: OpRequest, *, group_size: int | None = None) -> None:
        super().__init__(request)
        # A power of two may be too small for float16.
        scale = "float32" if group_size is not None and request.dtype == torch.float16 else "compute"
        granularity = "channel" if group_size is None else "group"
        self.key = QuantKey(dtype="fp8_e4m3", scale_dtype=scale, granularity=granularity, group_size=group_size)
        self.name = "fp8" if group_size is None else "mxfp8"
        self.group_size = group_size

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """weight [out_features, in_features] float -> as op `grouped_linear` takes it, scales in the weight's dtype or,
        where that cannot hold them, in float32."""
        outputs, inputs = weight.shape
        size = self.group_size or GROUP_SIZES[0]
        elements = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scales = torch.empty(outputs, -(-inputs // size), device=weight.device)
        for begin in range(0, outputs, _ROWS):  # bounds the wide copies
            rows = slice(begin, begin + _ROWS)
            wide = weight[rows].float()
            scales[rows] = self._scales(wide, size, weight.dtype)
            divisor = torch.where(scales[rows] == 0, 1.0, scales[rows]).repeat_interleave(size, dim=1)[:, :inputs]
            elements[rows] = (wide / divisor).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        weights = {"weight": elements, "scale": block_groups(exact_scale(scales, weight.dtype))}
        return weights if bias is None else {**weights, "bias": bias}

    def _scales(self, weight: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Some rows [R, I] -> [R, groups]."""
        if self.group_size is None:
            scale = (weight.abs().amax(dim=1, keepdim=True) / _FP8_MAX).to(dtype).float()
            return scale.expand(-1, -(-weight.shape[1] // size))
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size))
        largest = padded.view(len(weight), -1, size).abs().amax(dim=2)
        return torch.where(largest == 0, 0.0, torch.exp2(largest.log2().floor().clamp_min(-119) - _FP8_EXPONENT))


class Float8PerTokenLinear(Float8WeightOnlyLinear):
    """Weights as `Float8WeightOnlyLinear` keeps them with one scale per output, and tokens rounded to fp8 e4m3, each
    with one scale, where the device has op `fp8_linear`; elsewhere activations as they are. (PTPC-FP8 of vLLM.)"""

    inputs = FP8_TOKENS

    def __init__(self, request: OpRequest) -> None:
        super().__init__(request)
        self.name = "ptpc_fp8"


class ServedLinear:
    """A method whose weight another op multiplies with than the one that its form was made for."""

    def __init__(self, method: QuantizedLinear, choice: KernelChoice, request: OpRequest) -> None:
        self.name, self.choice, self._method, self._request = method.name, choice, method, request
        self.op = choice.kernel.op.name
        self.logits_op = "lm_head" if self.op == "linear" else self.op
        self._ops: BoundOps = cache(lambda op: bind(op, request))

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """The numbers that the method makes of the weight, as the other op takes them."""
        grouped = _as_grouped(self._method.make_weights(weight, None), weight.shape[1], self._method.key)
        weights = self.choice.kernel.make(grouped, replace(self._request, dtype=weight.dtype), self.name)
        if self.choice.kernel.inputs:  # a scale for each token, which the op finds
            weights["input_scale"] = torch.zeros(1, device=weight.device)
        return weights if bias is None else {**weights, "bias": bias}

    def apply(self, weights: dict[str, Tensor], x: Tensor | QuantizedTokens) -> Tensor:
        """x [N, in_features], or rounded as the op does it -> [N, out_features]."""
        return self.choice.kernel.multiply(self._ops, weights, x, logits=False)

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features] float32, without a bias."""
        return self.choice.kernel.multiply(self._ops, weights, x, logits=True)


def _as_grouped(weights: dict[str, Tensor], inputs: int, key: QuantKey) -> GroupedWeight:
    """What a method that makes `key` made of a weight [O, inputs]."""
    weight, scale = weights["weight"], weights["scale"]
    if scale.ndim == 1:
        return GroupedWeight(weight, scale[:, None], None)
    packed = weight.dtype == torch.uint8
    elements = unpack_int4(weight, inputs) if packed else weight
    if key.granularity == "channel":  # the op's groups have the same scale several times
        return GroupedWeight(elements, unblock_groups(scale, len(weight))[:, :1], None)
    size = group_size_of(inputs, scale.shape[1])
    return GroupedWeight(elements, unblock_groups(scale, len(weight)), None, group_size=size, bits=4 if packed else 8)


def _elements(groups: Tensor, scale: Tensor) -> Tensor:
    # A group of zeros (or one so small that its scale is rounded to zero) is kept as zeros.
    return groups.div(torch.where(scale == 0, torch.inf, scale)).round_().clamp_(-8, 7)


_METHODS: dict[str, Callable[[OpRequest], LinearMethod]] = {
    "plain": PlainLinear,
    "int8": Int8WeightOnlyLinear,
    "w8a8": W8A8Linear,
    "w8a8-g64": Int8GroupedLinear,
    "int4": partial(Int4WeightOnlyLinear, group_size=128),
    "int4-g64": partial(Int4WeightOnlyLinear, group_size=64),
    "int4-g32": partial(Int4WeightOnlyLinear, group_size=32),
    "fp8": Float8WeightOnlyLinear,
    "ptpc_fp8": Float8PerTokenLinear,
    "mxfp8": partial(Float8WeightOnlyLinear, group_size=32),
}


_WITHOUT_INPUTS = {"w8a8": "int8", "ptpc_fp8": "fp8"}
"""Method that rounds inputs -> the one that keeps the same weights and takes inputs as they are."""


def linear_method_names() -> tuple[str, ...]:
    """Names that `linear_method` takes."""
    return tuple(_METHODS)


def head_method(name: str, request: OpRequest, disabled: Collection[str] = ()) -> LinearMethod:
    """The method of an LM head where linear layers have the one called `name`: hidden states reach it as they are.
    Raises as `linear_method` does."""
    return linear_method(_WITHOUT_INPUTS.get(name, name), request, disabled)


def linear_method(name: str, request: OpRequest, disabled: Collection[str] = ()) -> LinearMethod:
    """The method called `name`, its ops chosen and bound for `request`.

    Args:
        disabled: Ops that may not multiply with quantized weights; others do, which may take more memory.

    Raises:
        ConfigError: There is no such method, or no op is left for it; the message lists the choices.
    """
    if name not in _METHODS:
        raise ConfigError(
            f"there is no linear method {name!r}; choose one of {', '.join(_METHODS)} "
            "('plain' keeps the weights as the checkpoint has them)",
            field="quantization",
        )
    method = _METHODS[name](request)
    if not isinstance(method, QuantizedLinear):
        return method
    choice = choose_kernel(method.key, method.inputs, request, disabled)
    if choice.kernel.op.name != method.op:
        return ServedLinear(method, choice, request)
    method.choice = choice
    return method
