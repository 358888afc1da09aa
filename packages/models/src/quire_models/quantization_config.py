"""How a quantized checkpoint stores its linear layers, in one record. Free of torch.

What the configuration says is one thing, what the files hold another: where the files are known (`held`), a layer is
what they hold, and the configuration says only what they do not. Does not know how checkpoints say it
(`quantization_formats`), nor tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from quire_interfaces import CheckpointError, QuantKey
from quire_models.gguf.names import COMPRESSED
from quire_models.layer_names import names_of_layer, names_rule

__all__ = ["NO_LAYER", "PLAIN", "HeldModule", "OnlineTransform", "QuantizationConfig"]

PLAIN = "plain"
"""Layout of layers that are not quantized."""
NO_LAYER = "re:(?!)"
"""A target that is no layer's name."""


class OnlineTransform(NamedTuple):
    """A Hadamard rotation of what a layer takes or gives, done while the network runs."""

    group: str
    """Its name in the configuration."""
    location: str
    """"input" or "output"."""
    size: int | None
    """Features that are rotated together; None for all."""
    targets: tuple[str, ...]
    """As `QuantizationConfig.targets`."""
    ignored: tuple[str, ...] = ()

    @property
    def tensor(self) -> str:
        """Name behind a layer's of the matrix that files may have of it."""
        return f"{self.group}_{self.location}.weight"

    def means(self, names: tuple[str, ...]) -> bool:
        """Whether it is done around the layer of these names."""
        if any(names_rule(rule, name) for rule in self.ignored for name in names):
            return False
        of_class = "Linear" in self.targets and "embed" not in names[0]
        return of_class or any(names_rule(rule, name) for rule in self.targets for name in names)


class HeldModule(Protocol):
    """What a checkpoint's files hold of one module; `quire_models.stored_modules.StoredModule` is one."""

    @property
    def is_plain(self) -> bool:
        """Whether the module is a weight in floating point."""

    def fits(self, layout: str) -> bool:
        """Whether the files hold the module in this layout."""

    def matrix_shape(self, form: QuantizationConfig) -> tuple[int, int]:
        """[outputs, inputs] of the weight in this form."""

    def refined(self, form: QuantizationConfig) -> QuantizationConfig:
        """`form`, with what the files say more exactly."""


BLOCK_BYTES = {
    "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
    "IQ3_S": (256, 110), "IQ3_XXS": (256, 98), "IQ2_S": (256, 82), "IQ2_XS": (256, 74), "IQ2_XXS": (256, 66),
    "IQ1_M": (256, 56), "IQ1_S": (256, 50),
    "mxfp4": (32, 17), "nvfp4": (32, 18), "bitsandbytes4": (64, 36),
}  # fmt: skip
"""Type of ggml, or layout -> inputs of a block of op `block_linear`, and its bytes."""

GRID_TYPES = frozenset(name for name in BLOCK_BYTES if name.startswith(("IQ1", "IQ2", "IQ3")))
"""Those whose numbers are entries of a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the linear layers of a checkpoint are stored, or those of some names."""

    layout: str
    """A name of `quire_models.layers.stored_layouts.LAYOUTS`, or `PLAIN`."""
    bits: int
    group_size: int | None
    """Inputs that share a scale; None when all inputs of an output do."""
    symmetric: bool = True
    """There are no zero points."""
    sym: bool | None = None
    """Of GPTQ and AWQ: what the configuration says of that, which its zero points may belie; None where it says
    nothing."""
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
    """Names of the layers that are stored in this form, or ends or parts of them; with "re:" before, a regular
    expression; all where empty, or with "Linear" among them."""
    others: tuple[QuantizationConfig, ...] = ()
    """Further forms, for layers of other `targets`. A whole name comes before an expression, that before a part, that
    before all; of those that are as close the first."""
    ignored: tuple[str, ...] = ()
    """Names of layers that are not quantized; with "re:" before, a regular expression; a suffix or a part counts."""
    inputs: QuantKey | None = None
    """What inputs are meant to be rounded to; None as they come. Whether they are depends on the kernel."""
    quantizes_head: bool = False
    """The LM head, too, where it is not the embedding."""
    transforms: tuple[OnlineTransform, ...] = ()
    """Rotations while the network runs; of a layer's form, those around it."""
    ggml_type: str = ""
    """Of a layer of a GGUF file, a name of `quire_models.gguf.names.COMPRESSED`."""
    ggml_types: tuple[tuple[str, str], ...] = ()
    """Of a GGUF file: (layer, type) of each linear layer."""
    in_blocks: frozenset[str] = frozenset()
    """Names of `BLOCK_BYTES` whose layers stay in blocks."""
    note: str = ""
    """What is done differently from how the checkpoint was meant."""
    held: Mapping[str, HeldModule] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """What the files hold, by the names there; empty where they are not known."""

    @property
    def name(self) -> str:
        """For reports: "gptq, 4 bits, groups of 128"."""
        if self.ggml_types:
            return f"gguf, {', '.join(dict.fromkeys(kind for _, kind in self.ggml_types))}"
        return " and ".join(dict.fromkeys(form.form for form in self.forms))

    @property
    def form(self) -> str:
        """As `name`, without other forms."""
        groups = f"groups of {self.group_size}" if self.group_size else self.granularity
        return f"{self.layout}, {self.bits} bits, {groups}"

    @property
    def forms(self) -> tuple[QuantizationConfig, ...]:
        """All forms in which layers may be quantized."""
        return tuple(form for form in (self, *self.others) if form.layout != PLAIN)

    @property
    def notes(self) -> str:
        """Those of all forms."""
        return "; ".join(dict.fromkeys(form.note for form in (self, *self.others) if form.note))

    def of_layer(self, layer: str) -> QuantizationConfig | None:
        """How the linear layer of this full name is stored; None as it is.

        Raises:
            CheckpointError: The files hold it in a form that the configuration does not have.
        """
        if self.layout == "gguf":
            kind = _type_of(self.ggml_types, layer)
            bits = COMPRESSED.get(kind)
            return None if bits is None else replace(self, bits=bits, ggml_type=kind, ggml_types=())
        names = names_of_layer(layer)
        module = next((self.held[name] for name in names if name in self.held), None)
        form = self._said(names) if module is None else self._found(names, module)
        return self._with_transforms(form, names) if self.transforms else form

    def _with_transforms(self, form: QuantizationConfig | None, names: tuple[str, ...]) -> QuantizationConfig | None:
        """The form with the transforms around its layer."""
        own = tuple(each for each in self.transforms if each.means(names))
        reasons = (
            (form is None, "it is not quantized"),
            (".experts." in names[0], "it is a routed expert's"),
            (len({each.location for each in own}) < len(own), "several are at one place"),
        )
        reason = next((text for applies, text in reasons if applies), "")
        if own and reason:
            places = ", ".join(f"{each.group} ({each.location})" for each in own)
            raise CheckpointError(
                f"{names[0]}: transform_config has {places} there, which is not supported: {reason}; use a checkpoint "
                "without it"
            )
        return None if form is None else replace(form, transforms=own)

    def of_head(self, name: str, *, tied: bool) -> QuantizationConfig | None:
        """As `of_layer`, of the LM head; one that is the embedding has a form of its own where the files hold one."""
        is_known = self.layout == "gguf" or any(other in self.held for other in names_of_layer(name))
        return self.of_layer(name) if is_known or (self.quantizes_head and not tied) else None

    def _found(self, names: tuple[str, ...], module: HeldModule) -> QuantizationConfig | None:
        """The form of a layer that the files hold."""
        if module.is_plain:
            return None
        fitting = [form for form in self.forms if module.fits(form.layout)]
        if not fitting:
            raise CheckpointError(
                f"{names[0]}: the files hold {module}, and quantization_config has no such form ({self.name}); use the "
                "config.json and the files of one checkpoint"
            )
        closest = min(fitting, key=lambda form: _closest(form, names)) if len(fitting) > 1 else fitting[0]
        return module.refined(closest)

    def _said(self, names: tuple[str, ...]) -> QuantizationConfig | None:
        """The form that the configuration says."""
        if any(names_rule(rule, name) for rule in self.ignored for name in names):
            return None
        ranked = [(rank, form) for form in (self, *self.others) if (rank := _closest(form, names)) < _NOT_MEANT]
        form = min(ranked, key=lambda one: one[0])[1] if ranked else None
        return None if form is None or form.layout == PLAIN else form

    def bytes_of(self, layer: str, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Bytes that the linear layer of this full name takes once it is loaded, without the bias; scales counted as
        float32."""
        return self.bytes_as(self.of_layer(layer), out_features, in_features, dtype_bytes)

    def table_bytes(self, name: str, num_tokens: int, width: int, dtype_bytes: int) -> int:
        """The same of the table of an embedding, which is plain unless the files hold another form."""
        return self.bytes_as(self.of_head(name, tied=True), num_tokens, width, dtype_bytes)

    def bytes_as(self, form: QuantizationConfig | None, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """The same of a layer in this form."""
        if form is None:
            return out_features * in_features * dtype_bytes
        return replace(form, in_blocks=self.in_blocks)._bytes(out_features, in_features, dtype_bytes)

    def _bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        form = self.ggml_type or self.layout
        inputs, num_bytes = BLOCK_BYTES.get(form, (0, 0))
        if form in self.in_blocks and in_features % inputs == 0:
            return out_features * in_features // inputs * num_bytes
        if (
            self.bits == 16
            or self.layout in ("bitsandbytes4", "torchao-int4", "torchao-int4-tiles")
            or self.group_size == 16
        ):
            return out_features * in_features * dtype_bytes  # widened
        if self.layout in ("int8", "bitsandbytes8") and self.granularity != "group":
            return out_features * (in_features + dtype_bytes)
        size = min(self.group_size or 128, 128)
        scales = -(-out_features // 16) * 16 * -(-in_features // size)
        elements = -(-in_features // 128) * 64 if self.bits <= 4 and self.layout != "mxfp4" else in_features
        powers_of_two = self.layout in ("mxfp4", "mxfp8") or self.ggml_type == "MXFP4"
        scale_bytes = dtype_bytes if powers_of_two else 4
        return out_features * elements + scales * (scale_bytes + (0 if self.symmetric else 2))


_NOT_MEANT = 4


def _closest(form: QuantizationConfig, names: tuple[str, ...]) -> int:
    """How closely a form's targets name a layer, the smallest number the closest; `_NOT_MEANT` when they do not."""
    if any(name in form.targets for name in names):
        return 0
    expressions = [rule for rule in form.targets if rule.startswith("re:")]
    if any(names_rule(rule, name) for rule in expressions for name in names):
        return 1
    if any(names_rule(rule, name) for rule in form.targets for name in names):
        return 2
    return 3 if not form.targets or "Linear" in form.targets else _NOT_MEANT


_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def _type_of(types: tuple[tuple[str, str], ...], layer: str) -> str:
    """Files keep the experts of a layer in one tensor, of one type, or each in its own."""
    names = (layer, _OF_EXPERT.sub(".experts.", layer))
    return next((kind for one, kind in types if one in names), "")
