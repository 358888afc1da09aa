"""`quantization_config` of each method, as their projects write it, in one record. Free of torch.

A reader for each method: the object -> how layers are stored. Every key is read, known to make no difference, named in
the report at the start, or refused (`Fields.unread`). Does not know tensors; what the files hold is known to
`quire_models.stored_linears`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.gguf.names import COMPRESSED
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats.bitsandbytes import parse_bitsandbytes
from quire_models.quantization_formats.compressed_tensors import parse_compressed_tensors
from quire_models.quantization_formats.float8 import parse_fbgemm_fp8, parse_fp8, with_fp4_experts
from quire_models.quantization_formats.gptq import parse_auto_round, parse_awq, parse_gptq
from quire_models.quantization_formats.modelopt import parse_modelopt
from quire_models.quantization_formats.quark import parse_quark
from quire_models.quantization_formats.reading import WHERE_WIDENED, microscaled, unsupported, with_unread
from quire_models.quantization_formats.torchao import parse_torchao

__all__ = ["QUANTIZATION_KEYS", "parse_kv_cache", "parse_quantization", "quantization_beside", "quantization_method"]

_PARSERS: dict[str, Callable[[Fields], QuantizationConfig | None]] = {
    "gptq": parse_gptq,
    "awq": parse_awq,
    "auto-round": parse_auto_round,
    "fp8": parse_fp8,
    "fbgemm_fp8": parse_fbgemm_fp8,
    "compressed-tensors": parse_compressed_tensors,
    "modelopt": parse_modelopt,
    "quark": parse_quark,
    "bitsandbytes": parse_bitsandbytes,
    "torchao": parse_torchao,
}
_SPELLINGS = {
    "sparseml": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "mxfp8": "fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
}
"""Other spellings of `quant_method` -> today's."""
_TELLING = {
    "config_groups": "compressed-tensors",
    "quant_algo": "modelopt",
    "packing_format": "auto-round",
    "w_bit": "awq",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "global_quant_config": "quark",
    "quant_type": "torchao",
    "desc_act": "gptq",
}
"""Key -> the method whose it is, for files without `quant_method`."""
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""File beside config.json -> the method of the tool that wrote it."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json, today's first."""


def parse_quantization(config: Fields) -> QuantizationConfig | None:
    """The field `quantization_config` of config.json (or `compression_config`, as it was called before), or None when
    the checkpoint is not quantized.

    Raises:
        CheckpointError: A format that is unknown or was removed, a field that is missing or wrong, or one that would
            change the model and is not read.
    """
    fields = _object(config)
    if fields is None:
        return None
    method = _method(fields)
    if method == "gguf":
        return _gguf(fields)
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        form: QuantizationConfig | None = microscaled(
            "mxfp4", ignored=("lm_head",), targets=(r"re:.*\.mlp\.experts\.",)
        )
        fields.skip("modules_to_not_convert")
    elif method not in _PARSERS:
        raise unsupported(fields.source, f"quant_method {method!r}")
    else:
        form = _PARSERS[method](fields)
    if form is not None and method == "fp8":
        form = with_fp4_experts(form, fields, config)
    if form is None:  # there is no form whose note could name what was not read
        fields.refuse_unread("take the key away if it only says how the scales of keys and values were made")
        return None
    return with_unread(form, fields)


def quantization_method(config: Fields) -> str:
    """`quant_method` of the checkpoint, as its project spells it today; empty where it is not quantized. Of one whose
    keys and values alone have scales, too."""
    fields = _object(config)
    return "" if fields is None else _method(fields)


def _object(config: Fields) -> Fields | None:
    """What is said of the quantization."""
    key = next((name for name in QUANTIZATION_KEYS if config.get(name) is not None), None)
    if key is None:
        return None
    fields = config.object(key)
    assert fields is not None
    inner = fields.get("quantization_config")
    if isinstance(inner, dict):  # compressed-tensors, beside a sparsity_config
        return Fields({**config.get(key), "quantization_config": None, **inner}, fields.source)
    return fields


def _method(fields: Fields) -> str:
    given = fields.get("quant_method")
    if given is None:
        return next((method for name, method in _TELLING.items() if fields.get(name) is not None), "(none)")
    name = fields.text("quant_method")
    return _SPELLINGS.get(name.lower(), name)


def quantization_beside(folder: Path) -> Fields | None:
    """What a file beside config.json says of the quantization, where the tools of GPTQ, AWQ and ModelOpt wrote it, as a
    config.json that says it. None where there is no such file."""
    for name, method in _FILES.items():
        path = folder / name
        if path.is_file():
            values = read_json(path)
            nested = values.get("quantization")
            values = nested if isinstance(nested, dict) else values
            return Fields({"quantization_config": {"quant_method": method, **_given(values)}}, str(path))
    return None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def parse_kv_cache(config: Fields) -> str | None:
    """What the checkpoint has scales for, a name of `quire_interfaces.KV_CACHE_DTYPES`: `kv_cache_scheme` of
    compressed-tensors, `kv_cache_quant_algo` of ModelOpt. None where it says nothing, or asks for a format that is not
    kept with the checkpoint's scales (whole numbers, scales computed on the way): more exact is always right."""
    key = next((name for name in QUANTIZATION_KEYS if isinstance(config.get(name), dict)), None)
    if key is None:
        return None
    values = config.get(key)
    inner = values.get("quantization_config")
    values = inner if isinstance(inner, dict) else values
    if values.get("kv_cache_quant_algo") == "FP8":
        return "fp8_e4m3"
    scheme, source = values.get("kv_cache_scheme"), f"{config.source}: {key}.kv_cache_scheme"
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
    in_blocks = ", ".join(sorted({kind for kind in types.values() if COMPRESSED.get(kind) == 16}))
    notes = [f"{widened}: widened to the compute dtype when they are loaded"] if widened else []
    notes += [f"{in_blocks}: {WHERE_WIDENED}"] if in_blocks else []
    return QuantizationConfig(
        layout="gguf",
        bits=8,
        group_size=32,
        quantizes_head=True,
        ggml_types=tuple(types.items()),
        note="; ".join(notes),
    )
