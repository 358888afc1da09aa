"""How a GGUF file's metadata scales rotary embeddings -> `rope_scaling` of config.json. Free of torch.

As llama.cpp has it: a factor without a type is linear, `rope.scale_linear` is the factor's older name, and an
attention factor multiplies the one that YaRN has from its factor.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader

__all__ = ["rope_scaling"]

_LLAMA3_CONTEXTS = (8192, 4096, 16384, 2048, 32768)
"""Contexts of pre-training that frequencies of llama3's kind are compared with."""
_YARN_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
_FREQUENCIES = "rope_freqs.weight"
_ADVICE = "use the model's safetensors checkpoint"


def rope_scaling(header: GgufHeader, architecture: str, context: int) -> dict[str, Any] | None:
    """What config.json would have; None for rotary embeddings that are not scaled.

    Args:
        context: The file's context length in tokens.

    Raises:
        CheckpointError: A kind of scaling that is not read, or a value that its kind does not have.
    """
    fields = header.fields
    factor = fields.number(f"{architecture}.rope.scaling.factor", default=0.0, minimum=0.0)
    older = fields.number(f"{architecture}.rope.scale_linear", default=0.0, minimum=0.0)
    factor = factor or older or 1.0
    kind = fields.text(f"{architecture}.rope.scaling.type", default="linear")
    fields.skip(f"{architecture}.rope.scaling.finetuned")
    if kind == "yarn":
        return _yarn(header, architecture, factor, context)
    attention = _product(header, architecture)
    if attention != 1.0:
        raise CheckpointError(
            f"{header.path}: an attention factor ({attention}) is read for rope scaling of type yarn only, not "
            f"{kind!r}; {_ADVICE}"
        )
    if kind not in ("linear", "none"):
        raise CheckpointError(
            f"{header.path}: rope scaling {kind!r} is not read from GGUF files; linear, yarn and none are"
        )
    is_linear = kind == "linear" and factor != 1.0
    if _FREQUENCIES in header.tensors:
        if is_linear:
            raise CheckpointError(
                f"{header.path} has {_FREQUENCIES} and a rope scaling factor ({factor}), which are not read together; "
                f"{_ADVICE}"
            )
        return _frequencies(header, architecture, context)
    return {"rope_type": "linear", "factor": factor} if is_linear else None


def _product(header: GgufHeader, architecture: str) -> float:
    numbers = (header.fields.number(f"{architecture}.{key}", default=1.0, above=0.0) for key in _YARN_FACTORS)
    return math.prod(numbers)


def _yarn(header: GgufHeader, architecture: str, factor: float, context: int) -> dict[str, Any]:
    fields, prefix = header.fields, f"{architecture}.rope.scaling"
    if _FREQUENCIES in header.tensors:
        raise CheckpointError(
            f"{header.path} has {_FREQUENCIES} and rope scaling of type yarn, which are not read together; {_ADVICE}"
        )
    fields.fixed(f"{prefix}.yarn_ext_factor", 1.0, -1.0)
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer(
            f"{prefix}.original_context_length", default=context, minimum=1
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        if (value := fields.number(f"{prefix}.yarn_{key}", default=0.0, minimum=0.0)) != 0.0:
            found[key] = value
    attention = _product(header, architecture)
    if attention != 1.0:
        found["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
    return found


def _frequencies(header: GgufHeader, architecture: str, context: int) -> dict[str, Any] | None:
    """Files keep what each frequency is divided by: as llama3's settings where these give the same numbers."""
    divisors = _divisors(header)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    theta = header.fields.number(f"{architecture}.rope.freq_base", default=10000.0, above=0.0)
    factor = max(divisors)
    for original in _LLAMA3_CONTEXTS:
        wanted = [_llama3_divisor(theta ** (-i / len(divisors)), factor, original) for i in range(len(divisors))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, wanted, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    # Divisors without a rule are what LongRoPE has; here the same ones whatever the length, and nothing else.
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "long_factor": divisors,
        "short_factor": divisors,
        "original_max_position_embeddings": context,
    }


def _divisors(header: GgufHeader) -> list[float]:
    tensor = header.tensors[_FREQUENCIES]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{header.path}: {_FREQUENCIES} must be a list of F32, is {list(tensor.shape)} of {tensor.kind}; convert "
            "the model again"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
    wrong = [divisor for divisor in divisors if not 0.0 < divisor < math.inf]
    if wrong or not divisors:
        raise CheckpointError(f"{header.path}: {_FREQUENCIES} must hold numbers above 0, holds {wrong[:1]}")
    return divisors


def _llama3_divisor(frequency: float, factor: float, context: int) -> float:
    """Of Llama 3.1: long waves by the factor, short ones by 1, smoothly between."""
    wavelength = 2 * math.pi / frequency
    if wavelength < context / 4.0:
        return 1.0
    if wavelength > context / 1.0:
        return factor
    smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
