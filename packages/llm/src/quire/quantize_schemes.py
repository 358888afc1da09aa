"""The forms in which `quire.quantize` writes linear layers: how they are rounded, and kept by compressed-tensors.

Knows matrices and the names behind a layer's; does not know files or networks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_ops import OpRequest
from quire_ops.grouped import unblock_groups, unpack_int4
from quire_quantization import linear_method
from quire_quantization.stored import pack_int32

__all__ = ["KV_CACHE_SCHEMES", "NO_WEIGHTS", "SCHEMES", "Rounded", "Scheme", "quantization_config"]


class Rounded(NamedTuple):
    """A weight: value[o, i] = scale[o, group of i] * element[o, i]."""

    elements: Tensor
    """[O, I] int8, or fp8 e4m3."""
    scale: Tensor
    """[O, G] float."""

    def dequantized(self) -> Tensor:
        """[O, I] float32."""
        repeats = self.elements.shape[1] // self.scale.shape[1]
        return self.elements.float() * self.scale.float().repeat_interleave(repeats, dim=1)


class Scheme(NamedTuple):
    """A form that is written."""

    method: str
    """Of `quire_quantization.linear_method`: it finds the scales."""
    format: str
    """Of compressed-tensors."""
    weights: dict[str, Any]
    """What its `config_groups` say."""
    limits: tuple[int, int] | None = None
    """Least and largest element; None for fp8."""
    static_inputs: bool = False
    """There is a scale for inputs, which needs calibration."""

    def fits(self, inputs: int) -> bool:
        """Whether inputs are whole groups."""
        group: int = self.weights.get("group_size", 1)
        return inputs % group == 0

    def round(self, weight: Tensor) -> Rounded:
        """weight [O, I] float -> the same to the nearest step, as `--quantization` rounds it."""
        weights = linear_method(self.method, OpRequest()).make_weights(weight, None)
        outputs, inputs = weight.shape
        if self.method == "int8":
            return Rounded(weights["weight"], weights["scale"][:, None])
        scale = unblock_groups(weights["scale"], outputs)
        if self.method == "fp8":
            return Rounded(weights["weight"], scale[:, :1])
        return Rounded(unpack_int4(weights["weight"], inputs), scale)

    def tensors(self, rounded: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a layer has in the checkpoint, by the names behind its own; scales in `dtype`."""
        scale = rounded.scale.to(dtype).contiguous()
        if self.format != "pack-quantized":
            return {"weight": rounded.elements.contiguous(), "weight_scale": scale}
        return {
            "weight_packed": pack_int32(rounded.elements.int() + 8, 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor(rounded.elements.shape),
        }


def _int4(method: str, size: int) -> Scheme:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    return Scheme(method, "pack-quantized", weights, (-8, 7))


_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_FLOAT8 = {**_CHANNEL, "type": "float"}
SCHEMES: dict[str, Scheme] = {
    "int8": Scheme("int8", "int-quantized", {**_CHANNEL, "type": "int"}, (-127, 127)),
    "fp8": Scheme("fp8", "float-quantized", _FLOAT8),
    "fp8-static": Scheme("fp8", "float-quantized", _FLOAT8, static_inputs=True),
    "int4-g128": _int4("int4", 128),
    "int4-g64": _int4("int4-g64", 64),
    "int4-g32": _int4("int4-g32", 32),
}
"""Name -> form; all of them weight-only, but for fp8-static."""
NO_WEIGHTS = "none"
"""The scheme that leaves weights as they are, for scales of the KV cache alone."""
KV_CACHE_SCHEMES = {"fp8": "tensor", "fp8-per-head": "attn_head"}
"""Scheme of an fp8 KV cache -> what shares a scale, as compressed-tensors names it: a layer's keys (and its values), or
those of one key-value head."""


def quantization_config(
    scheme: Scheme | None, ignored: list[str], *, kv_cache_scheme: str | None = None
) -> dict[str, Any]:
    """For config.json.

    Args:
        scheme: Of the weights; None where they are plain.
        ignored: Names of the matrices that stay as they are.
        kv_cache_scheme: A key of `KV_CACHE_SCHEMES`; None where keys and values have no scales.
    """
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": ignored}
    if scheme is not None:
        config |= _weights_config(scheme)
    if kv_cache_scheme is not None:
        config["kv_cache_scheme"] = {
            "num_bits": 8, "type": "float", "strategy": KV_CACHE_SCHEMES[kv_cache_scheme], "dynamic": False,
            "symmetric": True, "observer": "minmax",
        }  # fmt: skip
    return config


def _weights_config(scheme: Scheme) -> dict[str, Any]:
    weights = {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", **scheme.weights}
    inputs = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "minmax",
    }  # fmt: skip
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if scheme.static_inputs else None,
        "output_activations": None,
    }
    return {
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": scheme.format}},
    }
