"""What a quantized checkpoint's config.json says about the form of its weights, in one record. Free of torch.

Knows `quantization_config` as compressed-tensors, GPTQ, AWQ and Transformers' fp8 write it; does not know tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.fields import Fields
from quire_models.gguf.names import COMPRESSED

__all__ = ["QuantizationConfig", "parse_quantization"]

_SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized, pack-quantized), gptq (4 or 8 bits), awq "
    "(4 bits, gemm) and fp8 are read"
)
_ADVICE = "use a checkpoint in one of these, or the unquantized one with --quantization int8 or int4"
_GROUP_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the linear layers of a checkpoint are stored."""

    layout: str
    """ "gptq", "awq", "packed" (compressed-tensors' int32), "int8" or "fp8"."""
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
    scale_name: str = "weight_scale"
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
        if self.layout == "int8" and self.granularity != "group":
            return out_features * (in_features + dtype_bytes)
        size = min(self.group_size or 128, 128)
        scales = -(-out_features // 16) * 16 * -(-in_features // size)
        elements = -(-in_features // 128) * 64 if self.bits == 4 else in_features
        return out_features * elements + scales * (4 if self.symmetric else 6)


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
    parsers: dict[str, Callable[[Fields], QuantizationConfig]] = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
    }
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None  # only experts are, and the network unpacks them as they are loaded
    if method not in parsers:
        raise _unsupported(source, f"quant_method {method!r}")
    return parsers[method](fields)


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
    if bits not in (4, 8):
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
    if layout not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise _unsupported(source, f"format {layout!r}")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source}: config_groups.{name}.weights must be an object, is {weights!r}")
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
