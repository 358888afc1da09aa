"""How a quantized checkpoint stores its linear layers, in one record. Free of torch.

Does not know how checkpoints say it (`quantization_formats.py`), nor tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from quire_interfaces import QuantKey
from quire_models.gguf.names import COMPRESSED

__all__ = ["QuantizationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the linear layers of a checkpoint are stored, or those of some names."""

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
    targets: tuple[str, ...] = ()
    """Names of the layers that are stored in this form; with "re:" before, a regular expression; all where empty, or
    with "Linear" among them."""
    others: tuple[QuantizationConfig, ...] = ()
    """Further forms, for layers of other `targets`. A name comes before an expression, that before all."""
    ignored: tuple[str, ...] = ()
    """Names of layers that are not quantized; with "re:" before, a regular expression; a suffix or a part counts."""
    inputs: QuantKey | None = None
    """What inputs are meant to be rounded to; None as they come. Whether they are depends on the kernel."""
    quantizes_head: bool = False
    """The LM head, too, where it is not the embedding."""
    ggml_type: str = ""
    """Of a layer of a GGUF file, a name of `quire_models.gguf.names.COMPRESSED`."""
    ggml_types: tuple[tuple[str, str], ...] = ()
    """Of a GGUF file: (layer, type) of each linear layer."""
    note: str = ""
    """What is done differently from how the checkpoint was meant."""

    @property
    def name(self) -> str:
        """For reports: "gptq, 4 bits, groups of 128"."""
        if self.ggml_types:
            return f"gguf, {', '.join(dict.fromkeys(kind for _, kind in self.ggml_types))}"
        forms = []
        for form in (self, *self.others):
            groups = f"groups of {form.group_size}" if form.group_size else form.granularity
            forms.append(f"{form.layout}, {form.bits} bits, {groups}")
        return " and ".join(dict.fromkeys(forms))

    @property
    def notes(self) -> str:
        """Those of all forms."""
        return "; ".join(dict.fromkeys(form.note for form in (self, *self.others) if form.note))

    def of_layer(self, layer: str) -> QuantizationConfig | None:
        """How the linear layer of this full name is stored; None as it is."""
        if self.layout == "gguf":
            kind = _type_of(self.ggml_types, layer)
            bits = COMPRESSED.get(kind)
            return None if bits is None else replace(self, bits=bits, ggml_type=kind, ggml_types=())
        if self._ignores(layer):
            return None
        forms = [(rank, form) for form in (self, *self.others) if (rank := form._rank(layer)) is not None]
        return min(forms, key=lambda one: one[0])[1] if forms else None

    def _ignores(self, layer: str) -> bool:
        for name in self.ignored:
            if name.startswith("re:"):
                if re.match(name[3:], layer):
                    return True
            elif layer == name or layer.startswith(f"{name}.") or f".{name}." in f".{layer}.":
                return True
        return False

    def _rank(self, layer: str) -> int | None:
        """How closely the targets name a layer, the smallest number the closest; None when they do not."""
        if layer in self.targets:
            return 0
        if any(re.match(name[3:], layer) for name in self.targets if name.startswith("re:")):
            return 1
        return 2 if not self.targets or "Linear" in self.targets else None

    def bytes_of(self, layer: str, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Bytes that the linear layer of this full name takes once it is loaded, without the bias; scales counted as
        float32."""
        form = self.of_layer(layer)
        if form is None:
            return out_features * in_features * dtype_bytes
        return form._bytes(out_features, in_features, dtype_bytes)

    def _bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        if self.layout in ("bitsandbytes4", "torchao-int4", "torchao-int4-tiles") or self.group_size == 16:
            return out_features * in_features * dtype_bytes  # widened
        if self.layout in ("int8", "bitsandbytes8") and self.granularity != "group":
            return out_features * (in_features + dtype_bytes)
        size = min(self.group_size or 128, 128)
        scales = -(-out_features // 16) * 16 * -(-in_features // size)
        elements = -(-in_features // 128) * 64 if self.bits <= 4 and self.layout != "mxfp4" else in_features
        powers_of_two = self.layout in ("mxfp4", "mxfp8") or self.ggml_type == "MXFP4"
        scale_bytes = dtype_bytes if powers_of_two else 4
        return out_features * elements + scales * (scale_bytes + (0 if self.symmetric else 2))


_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def _type_of(types: tuple[tuple[str, str], ...], layer: str) -> str:
    """Files keep the experts of a layer in one tensor, of one type, or each in its own."""
    names = (layer, _OF_EXPERT.sub(".experts.", layer))
    return next((kind for one, kind in types if one in names), "")
