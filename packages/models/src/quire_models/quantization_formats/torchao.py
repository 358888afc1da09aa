"""`quantization_config` of torchao, as Transformers writes it, in one record. Free of torch.

`quant_type` is the configuration object that layers were quantized with: {"default": {"_type": "Int8WeightOnlyConfig",
"_version": 2, "_data": {...}}}, objects in it in the same form.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats.reading import layer_names

__all__ = ["parse_torchao"]

_WEIGHTS = {
    "Int8WeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8WeightOnlyConfig": "float8_e4m3fn",
    "Float8DynamicActivationFloat8WeightConfig": "float8_e4m3fn",
    "IntxWeightOnlyConfig": "int8",
    "Int8DynamicActivationIntxWeightConfig": "int4",
}
"""Configuration -> dtype of weights where it does not say."""
_INT4 = "Int4WeightOnlyConfig"
_INT4_LAYOUTS = {"plain": "torchao-int4", "tile_packed_to_4d": "torchao-int4-tiles"}
"""Packing -> layout; the others are for one device (preshuffled, plain_int32, opaque, marlin_sparse)."""
_GROUP_STEP = 32
_KERNELS = (
    "act_mapping_type", "activation_dtype", "activation_value_lb", "activation_value_ub",
    "int4_choose_qparams_algorithm",
    "intx_choose_qparams_algorithm", "kernel_preference", "layout", "mm_config", "packing_format", "scale_dtype",
    "set_inductor_config", "version", "weight_only_decode", "weight_scale_dtype",
)  # fmt: skip
"""How scales were found, inputs are rounded, and what a kernel of torchao's would like."""


def parse_torchao(fields: Fields) -> QuantizationConfig:
    """The object -> how layers are stored.

    Raises:
        CheckpointError: A configuration that is not read, or a field that is missing or wrong.
    """
    fields.skip("quant_method", "quant_type_kwargs", "untie_embedding_weights")
    types = fields.get("quant_type")
    if not isinstance(types, dict) or set(types) != {"default"} or not isinstance(types["default"], dict):
        raise _unsupported(fields.source, f"quant_type {types!r}")
    of = fields.objects("quant_type")["default"]
    kind = of.text("_type")
    if kind == _INT4:
        return _int4(fields, of)
    if kind not in _WEIGHTS:
        raise _unsupported(fields.source, f"quant_type {kind}")
    values = _values(fields, of)
    dtype = _inner(values, "weight_dtype") or _WEIGHTS[kind]
    bits = int(dtype.removeprefix("int")) if dtype in {f"int{n}" for n in range(1, 9)} else 8
    if not dtype.startswith("int") and dtype != "float8_e4m3fn":
        raise _unsupported(values.source, f"weight_dtype {dtype}")
    packing = _inner(values, "intx_packing_format")
    if packing not in (None, "UNPACKED_TO_INT8", "unpacked_to_int8"):
        raise _unsupported(values.source, f"intx_packing_format {packing}")
    granularity, size = _granularity(values)
    note = "" if "WeightOnly" in kind else "activations stay as they are (weight-only)"
    return QuantizationConfig(
        layout="torchao",
        bits=bits,
        group_size=size,
        symmetric=_inner(values, "mapping_type") != "ASYMMETRIC",
        granularity=granularity,
        weight_name="float8" if dtype.startswith("float8") else "int8",
        ignored=_ignored(fields),
        note=note,
    )


def _int4(fields: Fields, of: Fields) -> QuantizationConfig:
    """Zero points in floating point, in one of several packings."""
    values = _values(fields, of)
    packing = (_inner(values, "int4_packing_format") or "plain").lower()
    if packing not in _INT4_LAYOUTS:
        raise _unsupported(values.source, f"int4_packing_format {packing} ({' and '.join(_INT4_LAYOUTS)} are)")
    size = values.integer("group_size", default=128)
    if size not in (32, 64, 128, 256):
        raise _unsupported(values.source, f"group_size {size!r} of int4 (32, 64, 128 and 256 are)")
    return QuantizationConfig(
        layout=_INT4_LAYOUTS[packing],
        bits=4,
        group_size=size,
        symmetric=False,
        ignored=_ignored(fields),
        note="zero points are no whole numbers: widened to the compute dtype",
    )


def _values(fields: Fields, of: Fields) -> Fields:
    """What is in the configuration object."""
    if fields.flag("include_input_output_embeddings", default=False):
        raise _unsupported(fields.source, "include_input_output_embeddings")
    data = of.get("_data")
    if not isinstance(data, dict) or of.integer("_version", default=1) < 2:
        raise _unsupported(fields.source, f"{of.get('_type')} of version {of.get('_version')!r} (from 2 on is)")
    values = of.object("_data")
    assert values is not None
    values.skip(*_KERNELS)
    return values


def _ignored(fields: Fields) -> tuple[str, ...]:
    return ("lm_head", *layer_names(fields, "modules_to_not_convert"))


def _inner(values: Fields, name: str) -> str | None:
    """A dtype or a member of an enumeration: {"_type": ..., "_data": "int4"}."""
    value = values.get(name)
    if isinstance(value, dict):
        value = value.get("_data")
    return None if value is None else str(value)


def _granularity(values: Fields) -> tuple[str, int | None]:
    """What shares a scale, and the inputs of a group."""
    value: Any = values.get("granularity") or values.get("weight_granularity")
    if isinstance(value, list) and value:  # of activations and weights
        value = value[-1]
    size = values.get("group_size")
    if isinstance(value, dict) and value.get("_type") == "PerGroup":
        size = (value.get("_data") or {}).get("group_size")
    if size is not None:
        if (
            type(size) is not int
            or size < _GROUP_STEP
            or size % _GROUP_STEP
            or (size > 128 and size % 128)
            or size == 96
        ):
            raise _unsupported(values.source, f"group_size {size!r} (32, 64, 128 and multiples of 128 are)")
        return "group", size
    kind = value.get("_type") if isinstance(value, dict) else None
    if kind not in (None, "PerRow", "PerAxis", "PerTensor"):
        raise _unsupported(values.source, f"granularity {kind}")
    return ("tensor" if kind == "PerTensor" else "channel"), None


def _unsupported(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: {what} of torchao is not supported; {', '.join((*_WEIGHTS, _INT4))} are read. Formats that are "
        "packed for the kernel of one device are not: quantize with one of these, or use a checkpoint of "
        "compressed-tensors, or the unquantized one with --quantization int8 or int4"
    )
