"""What the readers of all quantization methods share: checks, names, and refusals that say what to do.

Free of torch.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields, QuantKey
from quire_models.quantization_config import QuantizationConfig

__all__ = [
    "ADVICE",
    "FLOAT8_TENSOR",
    "FLOAT8_TOKEN",
    "MXFP8_INPUTS",
    "WHERE_WIDENED",
    "block_shape",
    "check_expression",
    "float8_of",
    "group_size",
    "layer_names",
    "microscaled",
    "name_patterns",
    "pattern",
    "refuse_online",
    "together",
    "unsupported",
    "with_unread",
]

WHERE_WIDENED = "widened to the compute dtype where op block_linear does not serve"
"""What becomes of weights that are multiplied in blocks or not at all."""
SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized, pack-quantized, mxfp4-, mxfp8- and "
    "nvfp4-pack-quantized), gptq (2, 3, 4 or 8 bits; 2 to 8 as gptq_p), awq (4 bits, gemm), auto-round (in the layouts "
    "of gptq and awq), fp8, fbgemm_fp8, modelopt, quark, bitsandbytes, torchao (Int8, Float8 and Intx) and GGUF files "
    "are read"
)
ADVICE = "use a checkpoint in one of these, or the unquantized one with --quantization int8 or int4"
_ONLINE = re.compile(r"rotat|hadamard|transform|smooth|spin|quarot|sparsity|low_rank|lora", re.IGNORECASE)
"""Of keys that name what may be done with tokens while the model runs, or to weights beyond their rounding."""
_GROUP_STEP = 32
FLOAT8_TENSOR = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="tensor", static=True)
"""Inputs in fp8 with a scale from the checkpoint."""
FLOAT8_TOKEN = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="token")
"""The same with a scale for each token, computed on the way."""
MXFP8_INPUTS = QuantKey(dtype="fp8_e4m3", scale_dtype="e8m0", granularity="group", group_size=32)
"""The same with a power of two for 32 numbers of a token."""


def unsupported(source: str, what: str) -> CheckpointError:
    """A form that is not read."""
    return CheckpointError(f"{source}: {what} is not supported; {SUPPORTED}: {ADVICE}")


def refuse_online(fields: Fields, unread: dict[str, Any]) -> None:
    """Have nothing unread that may change the arithmetic of layers.

    Raises:
        CheckpointError: There is such a key.
    """
    found = {name: value for name, value in unread.items() if _ONLINE.search(name)}
    if found:
        listed = ", ".join(f"{name} ({str(value)[:100]})" for name, value in found.items())
        raise unsupported(fields.source, f"{listed}, which may change what layers compute,")


def with_unread(form: QuantizationConfig, fields: Fields) -> QuantizationConfig:
    """The form with a note of the keys that are set and were not read.

    Raises:
        CheckpointError: One of them may change the arithmetic of layers.
    """
    unread = fields.unread()
    refuse_online(fields, unread)
    said = f"not read of quantization_config: {', '.join(unread)}" if unread else ""
    return replace(form, note="; ".join(filter(None, (form.note, said))))


def group_size(fields: Fields, name: str = "group_size") -> int | None:
    """Inputs of a group; None for all of an output (-1, or not given)."""
    size = fields.integer(name, default=-1)
    if size == -1:
        return None
    if size < _GROUP_STEP or size % _GROUP_STEP or (size > 128 and size % 128) or size == 96:
        raise unsupported(fields.source, f"{name} {size} (groups of 32, 64, 128 or a multiple of 128 are)")
    return size


def layer_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of names of layers; empty when missing or null."""
    names = fields.get(name) or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise CheckpointError(f"{fields.source}: {name} must be a list of names, is {names!r}")
    for one in names:
        check_expression(one, f"{fields.source}: {name}")
    return tuple(names)


def check_expression(name: str, source: str) -> None:
    """Raises CheckpointError where what is behind "re:" is no regular expression."""
    if name.startswith("re:"):
        try:
            re.compile(name[3:])
        except re.error as error:
            raise CheckpointError(f"{source}: {name!r} is no regular expression: {error}") from None


def name_patterns(fields: Fields, name: str) -> tuple[str, ...]:
    """Names with wildcards, as regular expressions."""
    return tuple(map(pattern, layer_names(fields, name)))


def pattern(name: str) -> str:
    """A name that may have wildcards, as a rule of `QuantizationConfig`."""
    return f"re:{fnmatch.translate(name)}" if "*" in name and not name.startswith("re:") else name


def block_shape(source: str, block: Any) -> tuple[int, int]:
    """(outputs, inputs) that share a scale."""
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int for size in block):
        raise CheckpointError(f"{source}: the block of scales must be two whole numbers, is {block!r}")
    if block[0] < 1 or block[1] < 1 or block[1] % 128:
        raise unsupported(source, f"a block of {block[0]} x {block[1]} (a multiple of 128 inputs is)")
    return block[0], block[1]


def together(
    first: QuantizationConfig, others: list[QuantizationConfig], ignored: tuple[str, ...]
) -> QuantizationConfig:
    """Forms for layers of different names in one record."""
    head = "lm_head" not in ignored and any(form.quantizes_head for form in (first, *others))
    return replace(first, others=tuple(others), ignored=ignored, quantizes_head=head)


def float8_of(
    granularity: str, *, ignored: tuple[str, ...] = (), inputs: QuantKey | None, **more: Any
) -> QuantizationConfig:
    """FP8 with a scale for a tensor or an output."""
    return QuantizationConfig(
        layout="fp8",
        bits=8,
        group_size=None,
        granularity=granularity,
        ignored=ignored,
        quantizes_head="lm_head" not in ignored,
        inputs=inputs,
        **more,
    )


def microscaled(
    layout: str, *, weight_name: str = "weight", ignored: tuple[str, ...] = (), **more: Any
) -> QuantizationConfig:
    """FP4 or FP8 with a scale for a few inputs."""
    if layout == "nvfp4":
        more = {"global_scale_name": "weight_global_scale", "note": WHERE_WIDENED, **more}
    return QuantizationConfig(
        layout=layout,
        bits=8 if layout == "mxfp8" else 4,
        group_size=16 if layout == "nvfp4" else 32,
        weight_name="weight" if layout == "mxfp8" else weight_name,
        ignored=ignored,
        quantizes_head="lm_head" not in ignored,
        **more,
    )
