"""FP8 of Transformers and vLLM, and of FBGEMM. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields, QuantKey
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats.reading import (
    FLOAT8_TENSOR,
    FLOAT8_TOKEN,
    MXFP8_INPUTS,
    block_shape,
    float8_of,
    layer_names,
    microscaled,
    unsupported,
)

__all__ = ["parse_fbgemm_fp8", "parse_fp8", "with_fp4_experts"]


def parse_fp8(fields: Fields) -> QuantizationConfig:
    """Blocks, or one scale for a tensor or an output: which of these, the files say. Blocks of 32 inputs whose scales
    are powers of two are MXFP8."""
    fields.skip("quant_method", "kv_cache_scheme", "kv_cache_dtype", "scale_fmt", "dequantize")
    fields.fixed("fmt", "e4m3", "float8_e4m3", "float8_e4m3fn")
    fields.fixed("weight_dtype", "e4m3", "fp8", "float8_e4m3", "float8_e4m3fn")
    block = fields.get("weight_block_size")
    ignored = ("lm_head", *layer_names(fields, "modules_to_not_convert"), *layer_names(fields, "ignored_layers"))
    static = fields.text("activation_scheme", default="dynamic") == "static"
    if tables := [name for name in layer_names(fields, "modules_to_convert") if not name.endswith("ngram_embedding")]:
        raise unsupported(fields.source, f"modules_to_convert {tables} (n-gram embeddings are)")
    if block == [1, MXFP8_INPUTS.group_size]:
        fields.fixed("scale_fmt", "ue8m0")
        return microscaled("mxfp8", ignored=ignored, inputs=MXFP8_INPUTS)
    if block is None:
        inputs = replace(FLOAT8_TENSOR, static=static)
        return QuantizationConfig(
            layout="fp8", bits=8, group_size=None, granularity="tensor", ignored=ignored, inputs=inputs
        )
    return QuantizationConfig(
        layout="fp8",
        bits=8,
        group_size=None,
        granularity="block",
        block_shape=block_shape(fields.source, block),
        scale_name="weight_scale_inv",
        ignored=ignored,
        inputs=QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="group", group_size=128),
    )


def with_fp4_experts(form: QuantizationConfig, fields: Fields, config: Fields) -> QuantizationConfig:
    """The form, with routed experts in MXFP4 where `expert_dtype` of it or of config.json says fp4 (DeepSeek-V4)."""
    said = fields.get("expert_dtype") or config.get("expert_dtype")
    if said in (None, "fp8"):
        return form
    if said != "fp4":
        raise unsupported(fields.source, f"expert_dtype {said!r}")
    experts = microscaled("mxfp4", targets=(r"re:.*\.experts\.\d+\.",), scale_name="weight_scale_inv")
    return replace(form, others=(*form.others, experts))


def parse_fbgemm_fp8(fields: Fields) -> QuantizationConfig:
    """A scale for each output. The bound of scales of inputs (`activation_scale_ub`) cuts off what stands out of a
    token, which is left whole."""
    fields.skip("quant_method", "activation_scale_ub")
    ignored = ("lm_head", *layer_names(fields, "modules_to_not_convert"))
    return float8_of("channel", ignored=ignored, inputs=FLOAT8_TOKEN)
