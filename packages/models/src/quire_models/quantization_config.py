"""How a quantized checkpoint stores its linear layers, in one record. Free of torch.

Does not know how checkpoints say it (`quantization_formats.py`), nor tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from quire_models.gguf.names import COMPRESSED

__all__ = ["QuantizationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the linear layers of a checkpoint are stored."""

    layout: str
    """A name of `quire_models.layers.stored_layouts.LAYOUTS`."""
    bits: int
    group_size: int | None
    """Inputs that share a scale; None when all inputs of an output do."""
    symmetric: bool = True
    """There are no zero points."""
    zero_offset: int = 0
    """What stored zero points lack (gptq's first version stores them one smaller)."""
    activation_order: bool = False
    """Each input says which group it is in."""
    granularity: str = "group"
    """Of the scales of fp8 and int8 weights: "tensor", "channel", "group" or "block"."""
    weight_name: str = "weight"
    """Of the packed elements of FP4; of bitsandbytes' 4 bits the code, "nf4" or "fp4"."""
    scale_name: str = "weight_scale"
    global_scale_name: str = ""
    """Of the scale of a tensor's scales (NVFP4)."""
    block_shape: tuple[int, int] | None = None
    """(outputs, inputs) that share a scale."""
    ignored: tuple[str, ...] = ()
    """Names of layers that are not quantized; with "re:" before, a regular expression; a suffix or a part counts."""
    activations: str | None = None
    """What int8 weights take as inputs: int8 with a "dynamic" scale per token, or a "static" one; None as they come."""
    quantizes_head: bool = False
    """The LM head, too, where it is not the embedding."""
    ggml_type: str = ""
    """Of a layer of a GGUF file, a name of `quire_models.gguf.names.COMPRESSED`."""
    ggml_types: tuple[tuple[str, str], ...] = ()
    """Of a GGUF file: (layer, type) of each linear layer."""
    plain_share: float = 0.0
    """Of a GGUF file: share of the linear layers' weights that are widened to the compute dtype."""
    bytes_per_weight: float = 0.0
    """Of a GGUF file: what the others take in memory."""
    note: str = ""
    """What is done differently from how the checkpoint was meant."""

    @property
    def name(self) -> str:
        """For reports: "gptq, 4 bits, groups of 128"."""
        if self.ggml_types:
            return f"gguf, {', '.join(dict.fromkeys(kind for _, kind in self.ggml_types))}"
        groups = f"groups of {self.group_size}" if self.group_size else self.granularity
        return f"{self.layout}, {self.bits} bits, {groups}"

    def of_layer(self, layer: str) -> QuantizationConfig | None:
        """How the linear layer of this full name is stored; None as it is."""
        if self.layout == "gguf":
            kind = dict(self.ggml_types).get(layer, "")
            bits = COMPRESSED.get(kind)
            return None if bits is None else replace(self, bits=bits, ggml_type=kind, ggml_types=())
        return self if self.quantizes(layer) else None

    def quantizes(self, layer: str) -> bool:
        """Whether the linear layer of this full name is stored in this form."""
        for name in self.ignored:
            if name.startswith("re:"):
                if re.match(name[3:], layer):
                    return False
            elif layer == name or layer.startswith(f"{name}.") or f".{name}." in f".{layer}.":
                return False
        return True

    def weight_bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Bytes that a layer takes once it is loaded, without the bias; scales counted as float32."""
        if self.layout == "gguf":
            per_weight = self.plain_share * dtype_bytes + (1 - self.plain_share) * self.bytes_per_weight
            return round(out_features * in_features * per_weight)
        if self.layout in ("bitsandbytes4", "torchao-int4", "torchao-int4-tiles") or self.group_size == 16:
            return out_features * in_features * dtype_bytes  # widened
        if self.layout in ("int8", "bitsandbytes8") and self.granularity != "group":
            return out_features * (in_features + dtype_bytes)
        size = min(self.group_size or 128, 128)
        scales = -(-out_features // 16) * 16 * -(-in_features // size)
        elements = -(-in_features // 128) * 64 if self.bits <= 4 and self.layout != "mxfp4" else in_features
        return out_features * elements + scales * (4 if self.symmetric else 6)
