"""`quantization_config` of each method, as their projects write it, in one record. Free of torch.

Functions of one kind: the object -> how layers are stored. Does not know tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields, QuantKey
from quire_models.gguf.names import COMPRESSED
from quire_models.quantization_config import QuantizationConfig
from quire_models.torchao_format import parse_torchao

__all__ = ["parse_kv_cache", "parse_quantization"]

_SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized, pack-quantized, mxfp4-, mxfp8- and "
    "nvfp4-pack-quantized), gptq (2, 3, 4 or 8 bits; 2 to 8 as gptq_p), awq (4 bits, gemm), fp8, modelopt, quark, "
    "bitsandbytes, torchao (Int8, Float8 and Intx) and GGUF files are read"
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
        return _microscaled("mxfp4", ignored=("lm_head",), targets=(r"re:.*\.mlp\.experts\.",))
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


_GPTQ_BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}
"""checkpoint_format -> bits that GPTQModel and AutoGPTQ write in it."""


def _gptq(fields: Fields) -> QuantizationConfig:
    bits, layout = fields.integer("bits"), fields.text("checkpoint_format", default="gptq")
    if layout not in _GPTQ_BITS:
        raise _unsupported(fields.source, f"checkpoint_format {layout!r} of gptq")
    if bits not in _GPTQ_BITS[layout]:
        wrong = f"gptq with {bits} bits in checkpoint_format {layout!r}"
        raise _unsupported(fields.source, f"{wrong} (5, 6 and 7 bits are in 'gptq_p')" if 4 < bits < 8 else wrong)
    head = fields.flag("lm_head", default=False)
    return QuantizationConfig(
        layout="gptq-planes" if layout == "gptq_p" else "gptq",
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
    static = fields.text("activation_scheme", default="dynamic") == "static"
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
        block_shape=_block_shape(fields.source, block),
        scale_name="weight_scale_inv",
        ignored=ignored,
        inputs=QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="group", group_size=128),
    )


def _block_shape(source: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int for size in block):
        raise CheckpointError(f"{source}: the block of scales must be two whole numbers, is {block!r}")
    if block[0] < 1 or block[1] % 128:
        raise _unsupported(source, f"a block of {block[0]} x {block[1]} (a multiple of 128 inputs is)")
    return block[0], block[1]


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{fields.source}: config_groups must be an object of groups, is {groups!r}")
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _unsupported(fields.source, f"sparsity_config with format {sparsity['format']!r}")
    first, *others = (_config_group(fields, name, group) for name, group in groups.items())
    return _together(first, others, _ignored(fields, "ignore"))


def _together(
    first: QuantizationConfig, others: list[QuantizationConfig], ignored: tuple[str, ...]
) -> QuantizationConfig:
    """Forms for layers of different names in one record."""
    head = "lm_head" not in ignored and any(form.quantizes_head for form in (first, *others))
    return replace(first, others=tuple(others), ignored=ignored, quantizes_head=head)


def _config_group(fields: Fields, name: str, group: Any) -> QuantizationConfig:
    source, of_group = fields.source, group if isinstance(group, dict) else {}
    layout = of_group.get("format") or fields.text("format")
    weights, targets = of_group.get("weights"), _targets(of_group, f"{source}: config_groups.{name}")
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if layout not in (*known, *_MICROSCALED):
        raise _unsupported(source, f"format {layout!r}")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source}: config_groups.{name}.weights must be an object, is {weights!r}")
    if layout in _MICROSCALED:
        inputs = _inputs(of_group.get("input_activations"), f"{source}.config_groups.{name}")
        return _microscaled(_MICROSCALED[layout], weight_name="weight_packed", inputs=inputs, targets=targets)
    of = Fields(weights, f"{source}.config_groups.{name}.weights")
    bits, kind = of.integer("num_bits"), of.text("type", default="int")
    strategy = of.text("strategy", default="tensor")
    packed = layout == "pack-quantized"
    if (kind, bits) not in ([("int", 4), ("int", 8)] if packed else [("int", 8), ("float", 8)]):
        raise _unsupported(source, f"{kind}{bits} in format {layout!r}")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _unsupported(source, f"strategy {strategy!r} of weights")
    layout_name = "packed" if packed else "int8" if kind == "int" else "fp8"
    return QuantizationConfig(
        layout=layout_name,
        bits=bits,
        group_size=_group_size(of) if strategy == "group" else None,
        symmetric=of.flag("symmetric", default=True),
        activation_order=of.get("actorder") not in (None, False, "weight", "static"),
        granularity=strategy,
        block_shape=_block_shape(of.source, of.get("block_structure")) if strategy == "block" else None,
        inputs=_inputs(of_group.get("input_activations"), f"{source}.config_groups.{name}"),
        targets=targets,
        quantizes_head=True,
    )


def _targets(group: dict[str, Any], source: str) -> tuple[str, ...]:
    targets = group.get("targets", ["Linear"])
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) and one for one in targets):
        raise CheckpointError(f"{source}.targets must be a list of names, is {targets!r}")
    for one in targets:
        if one[0].isupper() and one != "Linear":
            raise _unsupported(source, f"target {one!r} (names of layers, expressions behind re: and Linear are)")
    return tuple(targets)


_INPUT_DTYPES = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8_e4m3", ("float", 4): "fp4_e2m1"}
FLOAT8_TENSOR = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="tensor", static=True)
"""Inputs in fp8 with a scale from the checkpoint."""


def _inputs(values: Any, source: str) -> QuantKey | None:
    """What inputs are meant to be rounded to, as compressed-tensors says it."""
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}.input_activations must be an object, is {values!r}")
    of = Fields(values, f"{source}.input_activations")
    kind = (of.text("type", default="int"), of.integer("num_bits"))
    if kind not in _INPUT_DTYPES:
        raise _unsupported(source, f"input_activations in {kind[0]}{kind[1]}")
    granularity, dynamic = of.text("strategy", default="tensor"), of.get("dynamic")
    if granularity not in ("tensor", "token", "group", "tensor_group", "block", "channel"):
        raise _unsupported(source, f"input_activations with strategy {granularity!r}")
    return QuantKey(
        dtype=_INPUT_DTYPES[kind],
        scale_dtype="float32",
        granularity=granularity.removeprefix("tensor_"),
        group_size=of.integer("group_size") if "group" in granularity else None,
        symmetric=of.flag("symmetric", default=True),
        static=not dynamic,
    )


def _microscaled(
    layout: str, *, weight_name: str = "weight", ignored: tuple[str, ...] = (), **more: Any
) -> QuantizationConfig:
    """FP4 or FP8 with a scale for a few inputs."""
    if layout == "nvfp4":
        more = {"global_scale_name": "weight_global_scale", "note": "widened to the compute dtype", **more}
    return QuantizationConfig(
        layout=layout,
        bits=8 if layout == "mxfp8" else 4,
        group_size=16 if layout == "nvfp4" else 32,
        weight_name="weight" if layout == "mxfp8" else weight_name,
        ignored=ignored,
        quantizes_head="lm_head" not in ignored,
        **more,
    )


def _patterns(fields: Fields, name: str) -> tuple[str, ...]:
    """Names with wildcards, as regular expressions."""
    return tuple(map(_pattern, _ignored(fields, name)))


def _pattern(name: str) -> str:
    return f"re:{fnmatch.translate(name)}" if "*" in name and not name.startswith("re:") else name


def _modelopt(fields: Fields) -> QuantizationConfig:
    algorithm = fields.text("quant_algo")
    ignored = (*_patterns(fields, "ignore"), *_patterns(fields, "exclude_modules"))
    if algorithm == "NVFP4":
        return _microscaled("nvfp4", ignored=ignored, inputs=_NVFP4_INPUTS, global_scale_name="weight_scale_2")
    if algorithm == "MXFP8":
        return _microscaled("mxfp8", ignored=ignored, inputs=_MXFP8_INPUTS)
    if algorithm != "FP8":
        raise _unsupported(fields.source, f"quant_algo {algorithm!r} of modelopt (FP8, NVFP4 and MXFP8 are)")
    return _float8_of("tensor", ignored=ignored, inputs=FLOAT8_TENSOR)


_NVFP4_INPUTS = QuantKey(dtype="fp4_e2m1", scale_dtype="fp8_e4m3", granularity="group", group_size=16, static=True)
_MXFP8_INPUTS = QuantKey(dtype="fp8_e4m3", scale_dtype="e8m0", granularity="group", group_size=32)


def _float8_of(granularity: str, *, ignored: tuple[str, ...] = (), inputs: QuantKey | None) -> QuantizationConfig:
    return QuantizationConfig(
        layout="fp8",
        bits=8,
        group_size=None,
        granularity=granularity,
        ignored=ignored,
        quantizes_head="lm_head" not in ignored,
        inputs=inputs,
    )


def _quark(fields: Fields) -> QuantizationConfig:
    """One form for all layers, others for layers of some names, and for all linear ones (which that is then)."""
    by_name, by_type = (fields.get(f"layer{kind}_quant_config") or {} for kind in ("", "_type"))
    for name, values in (("layer_quant_config", by_name), ("layer_type_quant_config", by_type)):
        if not isinstance(values, dict):
            raise CheckpointError(f"{fields.source}: {name} must be an object, is {values!r}")
    ignored = list(_patterns(fields, "exclude"))
    linear = next((kind for kind in by_type if kind.rpartition(".")[2].strip("'>") == "Linear"), None)
    if linear is None:
        everywhere = _quark_form(fields.get("global_quant_config"), f"{fields.source}.global_quant_config")
    else:
        everywhere = _quark_form(by_type[linear], f"{fields.source}.layer_type_quant_config.{linear}")
    assert everywhere is not None
    others = []
    for name, values in by_name.items():
        form = _quark_form(values, f"{fields.source}.layer_quant_config.{name}", may_be_plain=True)
        pattern = _pattern(name)
        if form is None:
            ignored.append(pattern)
        else:
            others.append(replace(form, targets=(pattern,)))
    return _together(everywhere, others, tuple(ignored))


def _quark_form(values: Any, source: str, *, may_be_plain: bool = False) -> QuantizationConfig | None:
    weight = values.get("weight") if isinstance(values, dict) else None
    if weight is None and may_be_plain:
        return None
    if not isinstance(weight, dict):
        raise CheckpointError(f"{source}.weight must be an object, is {weight!r}")
    of = Fields(weight, f"{source}.weight")
    dtype, scheme, inputs = of.text("dtype"), of.text("qscheme"), _quark_inputs(values.get("input_tensors"), source)
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return _float8_of(scheme.removeprefix("per_"), inputs=inputs)
    layout = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}.get(dtype)
    if layout and scheme == "per_group" and of.get("scale_format") == "e8m0" and of.integer("group_size") == 32:
        return _microscaled(layout, inputs=inputs)
    raise _unsupported(of.source, f"dtype {dtype!r} with qscheme {scheme!r} of quark")


def _quark_inputs(values: Any, source: str) -> QuantKey | None:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}.input_tensors must be an object, is {values!r}")
    of = Fields(values, f"{source}.input_tensors")
    dtype, scheme = of.text("dtype"), of.text("qscheme", default="per_tensor").removeprefix("per_")
    static = not of.flag("is_dynamic", default=False)
    return QuantKey(
        dtype={"fp4": "fp4_e2m1"}.get(dtype, dtype),
        scale_dtype="e8m0" if of.get("scale_format") == "e8m0" else "float32",
        granularity="token" if scheme == "channel" and not static else scheme,
        group_size=of.integer("group_size") if scheme == "group" else None,
        symmetric=of.get("symmetric") is not False,
        static=static,
    )


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
