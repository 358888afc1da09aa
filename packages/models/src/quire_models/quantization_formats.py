"""`quantization_config` of each method, as their projects write it, in one record. Free of torch.

Functions of one kind: the object -> how layers are stored. Does not know tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.fields import Fields
from quire_models.gguf.names import COMPRESSED
from quire_models.quantization_config import QuantizationConfig
from quire_models.torchao_format import parse_torchao

__all__ = ["parse_kv_cache", "parse_quantization"]

_SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized, pack-quantized, mxfp4-, mxfp8- and "
    "nvfp4-pack-quantized), gptq (2, 3, 4 or 8 bits), awq (4 bits, gemm), fp8, modelopt, quark, bitsandbytes, torchao "
    "(Int8, Float8 and Intx) and GGUF files are read"
)
_ADVICE = "use a checkpoint in one of these, or the unquantized one with --quantization int8 or int4"
_GROUP_STEP = 32
_WEIGHT_ONLY = "activations stay as they are (weight-only)"
_MICROSCALED = {
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8",
    "nvfp4-pack-quantized": "nvfp4",
}
"""Formats of compressed-tensors -> layout."""


def parse_quantization(config: Fields) -> QuantizationConfig | None:
    """The field `quantization_config` of config.json, or None when the checkpoint is not quantized.

    Raises:
        CheckpointError: A format that is unknown or was removed, or a field that is missing or wrong.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    source = f"{config.source}: quantization_config"
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} must be an object, is {values!r}")
    fields = Fields(values, source)
    method = fields.text("quant_method", default="(none)")
    if method == "gguf":
        return _gguf(fields)
    if method == "compressed-tensors" and not fields.get("config_groups") and fields.get("kv_cache_scheme"):
        return None  # weights are as they were
    parsers: dict[str, Callable[[Fields], QuantizationConfig]] = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "quark": _quark,
        "bitsandbytes": _bitsandbytes,
        "torchao": parse_torchao,
    }
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None  # only experts are, and the network unpacks them as they are loaded
    if method not in parsers:
        raise _unsupported(source, f"quant_method {method!r}")
    return parsers[method](fields)


def parse_kv_cache(config: Fields) -> str | None:
    """What the checkpoint has scales for, a name of `quire_interfaces.KV_CACHE_DTYPES`: `kv_cache_scheme` of
    compressed-tensors, `kv_cache_quant_algo` of ModelOpt. None where it says nothing, or asks for a format that is not
    kept with the checkpoint's scales (whole numbers, scales computed on the way): more exact is always right."""
    values = config.get("quantization_config")
    if not isinstance(values, dict):
        return None
    if values.get("kv_cache_quant_algo") == "FP8":
        return "fp8_e4m3"
    scheme, source = values.get("kv_cache_scheme"), f"{config.source}: quantization_config.kv_cache_scheme"
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{source} must be an object, is {scheme!r}")
    of = Fields(scheme, source)
    is_float8 = (of.text("type", default="int"), of.integer("num_bits", default=8)) == ("float", 8)
    return "fp8_e4m3" if is_float8 and not of.flag("dynamic", default=False) else None


def _gguf(fields: Fields) -> QuantizationConfig | None:
    """As `quire_models.gguf.config` writes it; None for a file of plain numbers."""
    types: dict[str, str] = fields.get("types")
    if set(types.values()) <= {"F32", "F16", "BF16"}:
        return None
    widened = ", ".join(sorted({kind for kind in types.values() if kind not in COMPRESSED}))
    return QuantizationConfig(
        layout="gguf",
        bits=8,
        group_size=32,
        quantizes_head=True,
        ggml_types=tuple(types.items()),
        plain_share=fields.number("plain_share"),
        bytes_per_weight=fields.number("bytes_per_weight"),
        note=f"{widened}: widened to the compute dtype when they are loaded" if widened else "",
    )


def _unsupported(source: str, what: str) -> CheckpointError:
    return CheckpointError(f"{source}: {what} is not supported; {_SUPPORTED}: {_ADVICE}")


def _group_size(fields: Fields, name: str = "group_size") -> int | None:
    size = fields.integer(name, default=-1)
    if size == -1:
        return None
    if size < _GROUP_STEP or size % _GROUP_STEP or (size > 128 and size % 128) or size == 96:
        raise _unsupported(fields.source, f"{name} {size} (groups of 32, 64, 128 or a multiple of 128 are)")
    return size


def _ignored(fields: Fields, name: str) -> tuple[str, ...]:
    names = fields.get(name) or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise CheckpointError(f"{fields.source}: {name} must be a list of names, is {names!r}")
    return tuple(names)


def _gptq(fields: Fields) -> QuantizationConfig:
    bits = fields.integer("bits")
    if bits not in (2, 3, 4, 8):
        raise _unsupported(fields.source, f"gptq with {bits} bits")
    layout = fields.text("checkpoint_format", default="gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(fields.source, f"checkpoint_format {layout!r} of gptq")
    head = fields.flag("lm_head", default=False)
    return QuantizationConfig(
        layout="gptq",
        bits=bits,
        group_size=_group_size(fields),
        symmetric=False,
        zero_offset=1 if layout == "gptq" else 0,
        activation_order=fields.flag("desc_act", default=False),
        ignored=() if head else ("lm_head",),
        quantizes_head=head,
    )


def _awq(fields: Fields) -> QuantizationConfig:
    bits = fields.integer("bits", default=fields.get("w_bit"))
    version = fields.text("version", default="gemm").lower()
    if bits != 4 or version != "gemm":
        raise _unsupported(fields.source, f"awq with {bits} bits and version {version!r}")
    name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    return QuantizationConfig(
        layout="awq",
        bits=4,
        group_size=_group_size(fields, name),
        symmetric=False,
        ignored=("lm_head", *_ignored(fields, "modules_to_not_convert")),
    )


def _fp8(fields: Fields) -> QuantizationConfig:
    block = fields.get("weight_block_size")
    ignored = ("lm_head", *_ignored(fields, "modules_to_not_convert"), *_ignored(fields, "ignored_layers"))
    if block is None:
        return QuantizationConfig(layout="fp8", bits=8, group_size=None, granularity="tensor", ignored=ignored)
    return QuantizationConfig(
        layout="fp8",
        bits=8,
        group_size=None,
        granularity="block",
        block_shape=_block_shape(fields.source, block),
        scale_name="weight_scale_inv",
        ignored=ignored,
    )


def _block_shape(source: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int for size in block):
        raise CheckpointError(f"{source}: the block of scales must be two whole numbers, is {block!r}")
    if block[0] < 1 or block[1] % 128:
        raise _unsupported(source, f"a block of {block[0]} x {block[1]} (a multiple of 128 inputs is)")
    return block[0], block[1]


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _unsupported(fields.source, f"{len(groups or {})} config_groups (one is)")
    (name, group), source = next(iter(groups.items())), fields.source
    layout = (group.get("format") if isinstance(group, dict) else None) or fields.text("format")
    weights = group.get("weights") if isinstance(group, dict) else None
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _unsupported(source, f"sparsity_config with format {sparsity['format']!r}")
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if layout not in (*known, *_MICROSCALED):
        raise _unsupported(source, f"format {layout!r}")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source}: config_groups.{name}.weights must be an object, is {weights!r}")
    if layout in _MICROSCALED:
        return _microscaled(_MICROSCALED[layout], weight_name="weight_packed", ignored=_ignored(fields, "ignore"))
    of = Fields(weights, f"{source}.config_groups.{name}.weights")
    bits, kind = of.integer("num_bits"), of.text("type", default="int")
    strategy = of.text("strategy", default="tensor")
    packed = layout == "pack-quantized"
    if (kind, bits) not in ([("int", 4), ("int", 8)] if packed else [("int", 8), ("float", 8)]):
        raise _unsupported(source, f"{kind}{bits} in format {layout!r}")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _unsupported(source, f"strategy {strategy!r} of weights")
    layout_name = "packed" if packed else "int8" if kind == "int" else "fp8"
    activations = _activations(group.get("input_activations"), f"{source}.config_groups.{name}", layout_name, strategy)
    return QuantizationConfig(
        layout=layout_name,
        bits=bits,
        group_size=_group_size(of) if strategy == "group" else None,
        symmetric=of.flag("symmetric", default=True),
        activation_order=of.get("actorder") not in (None, False, "weight", "static"),
        granularity=strategy,
        block_shape=_block_shape(of.source, of.get("block_structure")) if strategy == "block" else None,
        ignored=_ignored(fields, "ignore"),
        activations=activations,
        quantizes_head=True,
        note="activations stay as they are (weight-only)" if group.get("input_activations") and not activations else "",
    )


def _activations(values: Any, source: str, layout: str, strategy: str) -> str | None:
    """How inputs are rounded: "dynamic", "static", or None where they may stay as they are."""
    if values is None or layout != "int8" or strategy == "group":
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}.input_activations must be an object, is {values!r}")
    of = Fields(values, f"{source}.input_activations")
    granularity, dynamic = of.text("strategy", default="tensor"), of.flag("dynamic", default=False)
    if (of.integer("num_bits"), of.text("type", default="int")) != (8, "int"):
        raise _unsupported(source, "input_activations other than int8")
    if not of.flag("symmetric", default=True):
        return None
    if granularity != ("token" if dynamic else "tensor"):
        raise _unsupported(
            source, f"input_activations with strategy {granularity!r} and dynamic {str(dynamic).lower()}"
        )
    return "dynamic" if dynamic else "static"


def _microscaled(
    layout: str, *, weight_name: str = "weight", ignored: tuple[str, ...], **more: Any
) -> QuantizationConfig:
    """FP4 or FP8 with a scale for a few inputs; inputs, which these formats mean to round as well, stay as they are."""
    if layout == "nvfp4":
        more = {
            "global_scale_name": "weight_global_scale",
            "note": f"widened to the compute dtype; {_WEIGHT_ONLY}",
            **more,
        }
    return QuantizationConfig(
        layout=layout,
        bits=8 if layout == "mxfp8" else 4,
        group_size=16 if layout == "nvfp4" else 32,
        weight_name="weight" if layout == "mxfp8" else weight_name,
        ignored=ignored,
        **{"note": _WEIGHT_ONLY, "quantizes_head": "lm_head" not in ignored, **more},
    )


def _patterns(fields: Fields, name: str) -> tuple[str, ...]:
    """Names with wildcards, as regular expressions."""
    return tuple(
        f"re:{fnmatch.translate(one)}" if "*" in one and not one.startswith("re:") else one
        for one in _ignored(fields, name)
    )


def _modelopt(fields: Fields) -> QuantizationConfig:
    algorithm = fields.text("quant_algo")
    ignored = (*_patterns(fields, "ignore"), *_patterns(fields, "exclude_modules"))
    if algorithm == "NVFP4":
        return _microscaled("nvfp4", ignored=ignored, global_scale_name="weight_scale_2")
    if algorithm == "MXFP8":
        return _microscaled("mxfp8", ignored=ignored)
    if algorithm != "FP8":
        raise _unsupported(fields.source, f"quant_algo {algorithm!r} of modelopt (FP8, NVFP4 and MXFP8 are)")
    return _float8_of("tensor", ignored)


def _float8_of(granularity: str, ignored: tuple[str, ...]) -> QuantizationConfig:
    return QuantizationConfig(
        layout="fp8",
        bits=8,
        group_size=None,
        granularity=granularity,
        ignored=ignored,
        quantizes_head="lm_head" not in ignored,
        note=_WEIGHT_ONLY,
    )


def _quark(fields: Fields) -> QuantizationConfig:
    if fields.get("layer_quant_config") or fields.get("layer_type_quant_config"):
        raise _unsupported(fields.source, "layer_quant_config (one form for all layers is)")
    everywhere = fields.get("global_quant_config")
    weight = everywhere.get("weight") if isinstance(everywhere, dict) else None
    if not isinstance(weight, dict):
        raise CheckpointError(f"{fields.source}: global_quant_config.weight must be an object, is {weight!r}")
    of = Fields(weight, f"{fields.source}.global_quant_config.weight")
    dtype, scheme, ignored = of.text("dtype"), of.text("qscheme"), _patterns(fields, "exclude")
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return _float8_of(scheme.removeprefix("per_"), ignored)
    layout = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}.get(dtype)
    if layout and scheme == "per_group" and of.get("scale_format") == "e8m0" and of.integer("group_size") == 32:
        return _microscaled(layout, ignored=ignored)
    raise _unsupported(of.source, f"dtype {dtype!r} with qscheme {scheme!r} of quark")


def _bitsandbytes(fields: Fields) -> QuantizationConfig:
    names = ("lm_head", *_ignored(fields, "llm_int8_skip_modules"))
    if fields.flag("load_in_8bit", default=False):
        return QuantizationConfig(
            layout="bitsandbytes8", bits=8, group_size=None, granularity="channel", ignored=names, note=_WEIGHT_ONLY
        )
    code = fields.text("bnb_4bit_quant_type", default="fp4")
    storage = fields.text("bnb_4bit_quant_storage", default="uint8")
    if not fields.flag("load_in_4bit", default=False) or code not in ("nf4", "fp4") or storage != "uint8":
        raise _unsupported(
            fields.source, f"bitsandbytes with {code!r} stored as {storage} (4 bits as uint8, and 8 are)"
        )
    return QuantizationConfig(
        layout="bitsandbytes4",
        bits=4,
        group_size=None,
        granularity="block",
        weight_name=code,
        scale_name="nested" if fields.flag("bnb_4bit_use_double_quant", default=False) else "absmax",
        ignored=names,
        note="widened to the compute dtype",
    )
