"""NVIDIA's ModelOpt. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields, QuantKey
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats.reading import (
    FLOAT8_TENSOR,
    FLOAT8_TOKEN,
    MXFP8_INPUTS,
    float8_of,
    microscaled,
    name_patterns,
    together,
    unsupported,
)

__all__ = ["parse_modelopt"]

_NVFP4_INPUTS = QuantKey(dtype="fp4_e2m1", scale_dtype="fp8_e4m3", granularity="group", group_size=16, static=True)


def parse_modelopt(fields: Fields) -> QuantizationConfig | None:
    """One algorithm for all layers, or one for each (`MIXED_PRECISION`); None where only the KV cache has scales."""
    fields.skip("quant_method", "kv_cache_quant_algo", "kv_cache_scheme", "producer", "config_groups")
    ignored = (*name_patterns(fields, "ignore"), *name_patterns(fields, "exclude_modules"))
    if fields.get("quant_algo") is None and fields.get("kv_cache_quant_algo"):
        return None
    algorithm = fields.text("quant_algo")
    if algorithm != "MIXED_PRECISION":
        return replace(_form(fields, algorithm), ignored=ignored, quantizes_head="lm_head" not in ignored)
    forms = []
    for name, layer in fields.objects("quantized_layers").items():
        forms.append(replace(_form(layer, layer.text("quant_algo")), targets=(name,)))
    if not forms:
        raise unsupported(fields.source, "quant_algo 'MIXED_PRECISION' without quantized_layers")
    return together(forms[0], forms[1:], ignored)


def _form(fields: Fields, algorithm: str) -> QuantizationConfig:
    if algorithm == "NVFP4":
        fields.fixed("group_size", 16)
        return microscaled("nvfp4", inputs=_NVFP4_INPUTS, global_scale_name="weight_scale_2")
    if algorithm == "MXFP8":
        fields.fixed("group_size", 32)
        return microscaled("mxfp8", inputs=MXFP8_INPUTS)
    fields.skip("group_size")
    if algorithm == "FP8":
        return float8_of("tensor", inputs=FLOAT8_TENSOR)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return float8_of("channel", inputs=FLOAT8_TOKEN)
    raise unsupported(
        fields.source,
        f"quant_algo {algorithm!r} of modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, MXFP8 and MIXED_PRECISION of "
        "these are)",
    )
