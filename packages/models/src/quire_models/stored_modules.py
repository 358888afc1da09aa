"""What a checkpoint's files hold of each linear layer, from the headers alone, and which form that is. Free of torch.

Knows names, dtypes and shapes of tensors; does not know what the configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire_models.quantization_config import QuantizationConfig

__all__ = ["StoredModule", "TensorHeader", "stored_modules"]


class TensorHeader(NamedTuple):
    """What the header of a file says of a tensor."""

    dtype: str
    """As safetensors has it: "BF16", "F8_E4M3", "I32", ..."""
    shape: tuple[int, ...]


_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FLOAT8 = "F8_E4M3"
_ELEMENTS = ("weight", "qweight", "weight_packed", "_weight_qdata")
"""Tensors of which a linear layer has one."""
_SCALES = ("weight_scale", "weight_scale_inv")
_FACTORS = ("weight_global_scale", "weight_scale_2")
"""Of NVFP4's scales."""
_TORCHAO_ELEMENTS = {"I8": "int8", _FLOAT8: "float8"}
_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The tensors of one module, by what is behind its name."""

    parts: Mapping[str, TensorHeader]

    def __str__(self) -> str:
        """For messages: "qweight (I32), scales (F16)"."""
        return ", ".join(f"{name} ({header.dtype})" for name, header in sorted(self.parts.items()) if name != "bias")

    @property
    def is_plain(self) -> bool:
        """Whether it is a weight in floating point."""
        weight = self.parts.get("weight")
        return weight is not None and weight.dtype in _FLOATS

    def fits(self, layout: str) -> bool:
        """Whether it is what `quire_models.layers.stored_layouts.LAYOUTS` has under this name, as far as a few tensors
        tell the layouts apart; what is missing beside them is for the loader to say."""
        has = self._has
        match layout:
            case "gptq" | "gptq-planes":
                return has("qweight", "I32") and self._outputs_per_column in (None, 1)
            case "awq":
                return has("qweight", "I32") and self._outputs_per_column in (None, 8)
            case "packed":
                return has("weight_packed", "I32")
            case "int8":
                return has("weight", "I8") and "SCB" not in self.parts and not self._powers_of_two
            case "bitsandbytes8":
                return has("weight", "I8") and "SCB" in self.parts
            case "bitsandbytes4":
                return has("weight", "U8") and "weight.absmax" in self.parts
            case "fp8":
                return has("weight", _FLOAT8) and not (self._powers_of_two and self._has_scales_of_outputs)
            case "mxfp8":
                return has("weight", _FLOAT8) and self._powers_of_two and self._has_scales_of_outputs
            case "mxfp4":
                is_signed = has("weight", "I8")  # two elements in a byte all the same (DeepSeek-V4)
                return (is_signed or self._fp4_elements is not None) and self._powers_of_two
            case "nvfp4":
                return self._fp4_elements is not None and self._scale_dtype in (None, _FLOAT8)
        return "_weight_qdata" in self.parts  # torchao's, of which a checkpoint has one

    def matrix_shape(self, form: QuantizationConfig) -> tuple[int, int]:
        """[outputs, inputs] of the weight that it holds in a form, for planners: of as many numbers where its tensors
        do not say how they are arranged."""
        name = next(part for part in _ELEMENTS if part in self.parts)
        shape = self.parts[name].shape
        if len(shape) != 2 or form.layout == "bitsandbytes4":
            per_element = {"U8": 2, "I32": 8}.get(self.parts[name].dtype, 1)
            return -(-math.prod(shape) * per_element // 64), 64
        rows, columns = shape
        match form.layout:
            case "gptq" | "gptq-planes":
                return columns, rows * 32 // form.bits
            case "awq":
                return columns * 32 // form.bits, rows
            case "packed":
                return rows, columns * 32 // form.bits
            case "mxfp4" | "nvfp4" | "torchao-int4":
                return rows, columns * 2
        return rows, columns

    def refined(self, form: QuantizationConfig) -> QuantizationConfig:
        """The form with what the shapes say more exactly than a configuration of all layers does."""
        if form.layout in ("fp8", "int8"):
            return self._with_scales(form)
        if form.layout in ("gptq", "awq"):
            return self._with_groups(form)
        if form.layout == "mxfp8":
            return replace(form, scale_name=next((name for name in _SCALES if name in self.parts), form.scale_name))
        if form.layout in ("mxfp4", "nvfp4"):
            return self._with_names(form)
        if form.layout == "torchao":
            return self._with_rows(form)
        if form.layout == "bitsandbytes4":
            return self._with_code(form)
        if form.layout == "packed" and "weight_zero_point" in self.parts:
            return replace(form, symmetric=False)
        return form

    def _with_rows(self, form: QuantizationConfig) -> QuantizationConfig:
        """torchao has a row of scales for each output, or one for all."""
        elements, scale = self.parts["_weight_qdata"], self.parts.get("_weight_scale")
        form = replace(form, weight_name=_TORCHAO_ELEMENTS.get(elements.dtype, form.weight_name))
        if scale is None or len(elements.shape) != 2 or len(scale.shape) != 2 or not all(scale.shape):
            return form
        (outputs, inputs), groups = elements.shape, scale.shape[1]
        if math.prod(scale.shape) == 1:
            return replace(form, granularity="tensor", group_size=None)
        if scale.shape[0] != outputs or inputs % groups:
            return form
        size = inputs // groups
        if groups == 1:
            return replace(form, granularity="channel", group_size=None)
        return replace(form, granularity="group", group_size=size) if size in (32, 64) or not size % 128 else form

    def _with_names(self, form: QuantizationConfig) -> QuantizationConfig:
        """compressed-tensors and ModelOpt call the same things differently."""
        factor = next((name for name in _FACTORS if name in self.parts), form.global_scale_name)
        return replace(form, weight_name=self._fp4_elements or form.weight_name, global_scale_name=factor)

    def _with_code(self, form: QuantizationConfig) -> QuantizationConfig:
        """Which table bitsandbytes' places are in, and whether its scales are quantized, too."""
        code = next((part.removeprefix(_STATE) for part in self.parts if part.startswith(_STATE)), form.weight_name)
        nested = "nested" if "weight.nested_absmax" in self.parts else "absmax"
        return replace(form, weight_name=code, scale_name=nested) if code in ("nf4", "fp4") else form

    def _with_scales(self, form: QuantizationConfig) -> QuantizationConfig:
        """What shares a scale."""
        name = next((name for name in (form.scale_name, *_SCALES) if name in self.parts), None)
        if name is None or len(self.parts["weight"].shape) != 2:
            return form
        outputs, inputs = self.parts["weight"].shape
        shape, form = self.parts[name].shape, replace(form, scale_name=name)
        if form.layout == "int8" and "weight_zero_point" in self.parts:
            form = replace(form, symmetric=False)
        if math.prod(shape) == 1:
            return replace(form, granularity="tensor", block_shape=None, group_size=None)
        if shape in ((outputs,), (outputs, 1)):
            return replace(form, granularity="channel", block_shape=None, group_size=None)
        block = form.block_shape or (128, 128)
        if shape == (-(-outputs // block[0]), -(-inputs // block[1])) and form.layout == "fp8":
            return replace(form, granularity="block", block_shape=block, group_size=None)
        return form

    def _with_groups(self, form: QuantizationConfig) -> QuantizationConfig:
        """Bits of an element, and inputs of a group."""
        elements, scales = self.parts["qweight"].shape, self.parts.get("scales")
        order = self.parts.get("g_idx")
        if scales is None or len(elements) != 2 or len(scales.shape) != 2 or not all((*elements, *scales.shape)):
            return form
        bits, groups = form.bits, scales.shape[0]
        if form.layout == "awq":
            inputs = elements[0]
        elif order is not None and len(order.shape) == 1 and order.shape[0]:
            inputs = order.shape[0]
            bits = 32 * elements[0] // inputs
        else:
            return form
        size = None if groups == 1 and form.group_size is None else inputs // groups
        known = (bits in (2, 3, 4, 8) and inputs * bits == 32 * elements[0]) or form.layout == "awq"
        fits = groups == 1 or size in (32, 64) or not inputs // groups % 128
        return replace(form, bits=bits, group_size=size) if known and fits and not inputs % groups else form

    def _has(self, name: str, dtype: str) -> bool:
        return name in self.parts and self.parts[name].dtype == dtype

    @property
    def _outputs_per_column(self) -> int | None:
        """Outputs that a column of packed integers holds; None where nothing says it."""
        scales, elements = self.parts.get("scales"), self.parts["qweight"].shape
        if scales is None or len(scales.shape) != 2 or len(elements) != 2 or not elements[1]:
            return None
        return scales.shape[1] // elements[1]

    @property
    def _fp4_elements(self) -> str | None:
        """Name of two elements in a byte."""
        return next((name for name in ("weight_packed", "weight") if self._has(name, "U8")), None)

    @property
    def _scale_dtype(self) -> str | None:
        return next((self.parts[name].dtype for name in _SCALES if name in self.parts), None)

    @property
    def _has_scales_of_outputs(self) -> bool:
        """Each output has scales of its own, not each block of outputs."""
        name = next((name for name in _SCALES if name in self.parts), None)
        return name is not None and self.parts[name].shape[:1] == self.parts["weight"].shape[:1]

    @property
    def _powers_of_two(self) -> bool:
        return self._scale_dtype in ("U8", "F8_E8M0")


def stored_modules(headers: Iterable[tuple[str, TensorHeader]]) -> dict[str, StoredModule]:
    """Name of each module that has a weight in some form -> what it has. A tensor of three dimensions without a module
    of its own is one: the experts of a layer."""
    parts: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers:
        module, part = _parted(name)
        if len(header.shape) == 3 and part not in _ELEMENTS:
            module, part = name, "weight"
        parts.setdefault(module, {})[part] = header
    return {module: StoredModule(of) for module, of in parts.items() if any(name in of for name in _ELEMENTS)}


def _parted(name: str) -> tuple[str, str]:
    """ "a.b.weight.absmax" -> "a.b", "weight.absmax"."""
    place = name.find(".weight.")
    if place >= 0:
        return name[:place], name[place + 1 :]
    module, _, part = name.rpartition(".")
    return module, part
