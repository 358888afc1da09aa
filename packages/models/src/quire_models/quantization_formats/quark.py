"""AMD's Quark. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import CheckpointError, Fields, QuantKey
from quire_models.quantization_config import PLAIN, QuantizationConfig
from quire_models.quantization_formats.reading import (
    float8_of,
    microscaled,
    name_patterns,
    pattern,
    together,
    unsupported,
)

__all__ = ["parse_quark"]

_OBSERVED = (
    "observer_cls",
    "round_method",
    "ch_axis",
    "scale_type",
    "is_dynamic",
    "symmetric",
    "zero_point_type",
    "scale_calculation_mode",
    "is_scale_quant",
    "mx_element_dtype",
    "block_size",
    "group_size",
    "scale_format",
    "sub_block_size",
)
"""How scales were found, and what the rest of a form says again."""


def parse_quark(fields: Fields) -> QuantizationConfig:
    """One form for all layers, others for layers of some names, and for all linear ones (which that is then)."""
    fields.skip(
        "quant_method",
        "quant_mode",
        "version",
        "export",
        "kv_cache_quant_config",
        "kv_cache_group",
        "log_severity_level",
        "kv_cache_post_rope",
        "softmax_quant_spec",
        "min_kv_scale",
    )
    _check_algorithms(fields)
    for name in ("layer_quant_config", "layer_type_quant_config"):
        if not isinstance(fields.get(name) or {}, dict):
            raise CheckpointError(f"{fields.source}: {name} must be an object, is {fields.get(name)!r}")
    by_name, by_type = fields.objects("layer_quant_config"), fields.objects("layer_type_quant_config")
    linear = next((kind for kind in by_type if kind.rpartition(".")[2].strip("'>") == "Linear"), None)
    if linear is None:
        source = f"{fields.source}.global_quant_config"
        everywhere = _form(fields.object("global_quant_config"), source)
    else:
        fields.skip("global_quant_config")
        everywhere = _form(by_type[linear], f"{fields.source}.layer_type_quant_config.{linear}")
    others = []
    for name, values in by_name.items():
        source = f"{fields.source}.layer_quant_config.{name}"
        others.append(replace(_form(values, source, may_be_plain=True), targets=(pattern(name),)))
    return together(everywhere, others, name_patterns(fields, "exclude"))


def _check_algorithms(fields: Fields) -> None:
    """Algorithms that left something to do while the model runs."""
    for name in ("algo_config", "pre_quant_opt_config"):
        given = fields.get(name) or []
        for one in given if isinstance(given, list) else [given]:
            kind = str(one.get("name", one) if isinstance(one, dict) else one).lower()
            if "rotation" in kind or "quarot" in kind:
                raise unsupported(fields.source, f"{name} with {kind!r}, which rotates tokens while the model runs,")


def _form(values: Fields | None, source: str, *, may_be_plain: bool = False) -> QuantizationConfig:
    given = None if values is None else values.get("weight")
    if values is not None and given is None and may_be_plain:
        values.skip("input_tensors", "output_tensors", "bias", "target_device")
        return QuantizationConfig(layout=PLAIN, bits=16, group_size=None)
    if values is None or not isinstance(given, dict):
        raise CheckpointError(f"{source}.weight must be an object, is {given!r}")
    values.skip("target_device")
    for name in ("bias", "output_tensors"):
        if values.get(name):
            raise unsupported(source, f"{name} in a form of quark")
    of = values.object("weight")
    assert of is not None
    dtype, scheme, inputs = of.text("dtype"), of.text("qscheme"), _inputs(values.object("input_tensors"))
    layout = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}.get(dtype)
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        form = float8_of(scheme.removeprefix("per_"), inputs=inputs)
    elif layout and scheme == "per_group" and of.get("scale_format") == "e8m0" and of.integer("group_size") == 32:
        form = microscaled(layout, inputs=inputs)
    else:
        raise unsupported(of.source, f"dtype {dtype!r} with qscheme {scheme!r} of quark")
    of.skip(*_OBSERVED)
    return form


def _inputs(of: Fields | None) -> QuantKey | None:
    if of is None:
        return None
    dtype, scheme = of.text("dtype"), of.text("qscheme", default="per_tensor").removeprefix("per_")
    static = not of.flag("is_dynamic", default=False)
    key = QuantKey(
        dtype={"fp4": "fp4_e2m1"}.get(dtype, dtype),
        scale_dtype="e8m0" if of.get("scale_format") == "e8m0" else "float32",
        granularity="token" if scheme == "channel" and not static else scheme,
        group_size=of.integer("group_size") if scheme == "group" else None,
        symmetric=of.get("symmetric") is not False,
        static=static,
    )
    of.skip(*_OBSERVED)
    return key
