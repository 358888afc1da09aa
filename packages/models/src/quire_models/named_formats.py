"""Names of quantized checkpoints and of files, as commands that were written for vLLM have them. Free of torch.

A checkpoint says itself what it is. Who says it again is right or wrong; a name is never asked to convert one form into
another. Knows names and configurations; does not know files.
"""

from __future__ import annotations

from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.ledger import WEIGHT_BYTES
from quire_models.load_formats import LoadFormat
from quire_models.quantization_config import QuantizationConfig

__all__ = ["CHECKPOINT_METHODS", "check_load_format", "resolved_linear_method"]

CHECKPOINT_METHODS: dict[str, tuple[str, ...]] = {
    "auto-round": ("auto-round",),
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "cpu_awq": ("awq",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "fp8": ("fp8",),
    "gguf": ("gguf",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "gptq": ("gptq",),
    "gptq_bitblas": ("gptq",),
    "gptq_marlin": ("gptq",),
    "inc": ("auto-round",),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
    "moe_wna16": ("gptq", "awq"),
    "mxfp4": ("mxfp4",),
    "petit_nvfp4": ("modelopt",),
    "quark": ("quark",),
    "torchao": ("torchao",),
}
"""Name -> `quant_method` of the checkpoints whose name it is; kernels have names of their own there."""
_LAYOUTS = {"modelopt_fp4": "nvfp4", "petit_nvfp4": "nvfp4", "modelopt_mxfp8": "mxfp8"}
"""Name -> layout that layers must have besides."""

_NOT_READ = (
    "checkpoints in it are not read: use one in compressed-tensors, gptq or awq, or the unquantized one with int4"
)
_AS_IT_IS = "checkpoints that it served are read as they are: leave the setting out"
_INSTEAD = {
    "aqlm": _NOT_READ,
    "bitblas": _NOT_READ,
    "deepgemm_fp8": _AS_IT_IS,
    "deepspeedfp": "use fp8, which quantizes the unquantized checkpoint while it is loaded",
    "eetq": "use int8, which quantizes the unquantized checkpoint while it is loaded",
    "experts_int8": "use int8, which holds experts and all other linear layers in 8 bits",
    "fp8_per_block": "use fp8, which has a scale for each output",
    "fp8_per_tensor": "use fp8, which has a scale for each output",
    "fp_quant": _NOT_READ,
    "gptq_marlin_24": _NOT_READ,
    "hqq": _NOT_READ,
    "int8_per_channel_weight_only": "use int8, which is the same",
    "ipex": _AS_IT_IS,
    "marlin": _NOT_READ,
    "neuron_quant": "use int8 or fp8, which quantize the unquantized checkpoint while it is loaded",
    "qqq": _NOT_READ,
    "quip": _NOT_READ,
    "rtn": "use int8 or int4, which round to the nearest step while the unquantized checkpoint is loaded",
    "spqr": _NOT_READ,
    "squeezellm": _NOT_READ,
    "tpu_int8": "use int8, which quantizes the unquantized checkpoint while it is loaded",
    "vptq": _NOT_READ,
}
"""Names that other engines have, or had -> what to do instead."""

_OF_FILES = ("gguf", "safetensors", "pt", "bitsandbytes", "runai_streamer", "mistral")
"""Formats that are right or wrong about a GGUF file."""

_OF_ENCODERS = ("w8a8-g64",)
"""Linear methods of networks whose layers run in one call, op `encoder_stack`."""


def resolved_linear_method(asked: str | None, model: ModelConfig, *, field: str = "quantization") -> str:
    """The linear method that layers of a model are held by: what the checkpoint says is "plain", whoever says it.

    Args:
        asked: One of `WEIGHT_BYTES`, or the name of what the checkpoint is; None for the checkpoint as it is.
        field: Of the setting, for messages.

    Raises:
        ConfigError: The checkpoint is something else, or there is no such name; the message says what to do.
    """
    if not asked or asked == "plain" or _is_name_of(asked, model):
        return "plain"
    if asked in WEIGHT_BYTES and model.quantization is None and (model.is_encoder or asked not in _OF_ENCODERS):
        return asked
    raise _refusal(asked, model, field)


def _refusal(asked: str, model: ModelConfig, field: str) -> ConfigError:
    """Why a model cannot be held by a linear method, and what to do. Arguments as those of `resolved_linear_method`."""
    given, what = asked.lower(), _described(model)
    if asked in WEIGHT_BYTES and model.quantization is None:
        return ConfigError(
            f"{field} {asked!r} is for encoders alone, and {model.architecture} is none; use w8a8, which rounds tokens "
            "with one scale each, or int8, which leaves them as they are",
            field=field,
        )
    if asked in WEIGHT_BYTES:
        return ConfigError(
            f"{field} {asked!r} was asked for, but the checkpoint is quantized already ({what}); leave the setting "
            "out, or use the unquantized checkpoint",
            field=field,
        )
    if given in CHECKPOINT_METHODS:
        remedy = "it is read as it is: leave the setting out"
        if not model.quantization_method:
            remedy = f"leave the setting out, or quantize it while it is loaded ({', '.join(list(WEIGHT_BYTES)[1:])})"
        return ConfigError(
            f"{field} {asked!r} is for checkpoints of {' or '.join(CHECKPOINT_METHODS[given])}, and this one is "
            f"{what}; {remedy}",
            field=field,
        )
    if given in _INSTEAD:
        return ConfigError(f"{field} {asked!r} is not supported: {_INSTEAD[given]}", field=field)
    return ConfigError(
        f"there is no {field} {asked!r}; choose one of {', '.join(list(WEIGHT_BYTES)[1:])} for an unquantized "
        "checkpoint, or leave the setting out: a quantized one is recognised",
        field=field,
    )


def _is_name_of(asked: str, model: ModelConfig) -> bool:
    """Whether the checkpoint is what is asked for."""
    name, stored = asked.lower(), model.quantization
    if model.quantization_method not in CHECKPOINT_METHODS.get(name, ()):
        return False
    return name not in _LAYOUTS or any(form.layout == _LAYOUTS[name] for form in _forms(stored))


def _forms(stored: QuantizationConfig | None) -> tuple[QuantizationConfig, ...]:
    return () if stored is None else stored.forms


def _described(model: ModelConfig) -> str:
    if not model.quantization_method:
        return "not quantized"
    return model.quantization_method if model.quantization is None else (
        f"{model.quantization_method}: {model.quantization.name}"
    )  # fmt: skip


def check_load_format(asked: str, model: ModelConfig) -> None:
    """Have the files be what is asked for.

    Raises:
        ConfigError: They are not, or there is no such format.
    """
    if (complaint := LoadFormat()(asked)) is not None:
        raise ConfigError(f"load_format must {complaint}, got {asked!r}", field="load_format")
    is_gguf = model.quantization_method == "gguf"
    if (asked == "gguf") != is_gguf and asked in _OF_FILES:
        found = "is a GGUF file" if is_gguf else "is no GGUF file"
        raise ConfigError(
            f"load_format is {asked!r}, but the model {found}; leave the setting out (auto takes what there is)",
            field="load_format",
        )
    if asked == "bitsandbytes" and model.quantization_method != "bitsandbytes":
        raise ConfigError(
            "load_format is 'bitsandbytes', but the checkpoint was not quantized by it "
            f"({_described(model)}); leave the setting out, or hold the weights with quantization int4 or int8",
            field="load_format",
        )
