"""compressed-tensors, as llm-compressor writes it, under its older names too. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields, QuantKey
from quire_models.quantization_config import NO_LAYER, PLAIN, OnlineTransform, QuantizationConfig
from quire_models.quantization_formats.reading import (
    ADVICE,
    block_shape,
    check_expression,
    group_size,
    layer_names,
    microscaled,
    together,
    unsupported,
)

__all__ = ["parse_compressed_tensors"]

_MICROSCALED = {
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8",
    "nvfp4-pack-quantized": "nvfp4",
}
"""Format -> layout."""
_PLAIN_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_MERGED_LOCATIONS = ("weight_input", "weight_output")
"""Where a transform is in the weights of a checkpoint already."""
_ONLINE_LOCATIONS = ("input", "output")
_TRANSFORM_KEYS = frozenset(
    {"type", "apply", "randomize", "requires_grad", "head_dim", "precision", "targets", "location", "inverse", "ignore"}
)
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""How scales were found, and what they are stored in, which the files say."""


def parse_compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    """Any number of groups of layers, each in a form of its own; None where no group has a form for weights."""
    fields.skip("quant_method", "quantization_status", "global_compression_ratio", "version", "kv_cache_scheme",
                "run_compressed", "quantization_config", "provider", "autoround_version")  # fmt: skip
    _check_sparsity(fields)
    transforms = _transforms(fields)
    ignored = layer_names(fields, "ignore")
    groups = fields.get("config_groups")
    if not groups and fields.get("kv_cache_scheme"):
        fields.skip("format")
        return None
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{fields.source}: config_groups must be an object of groups, is {groups!r}")
    forms = [
        _config_group(fields, f"config_groups.{name}", group) for name, group in fields.objects("config_groups").items()
    ]
    quantized = [form for form in forms if form.layout != PLAIN]
    if not quantized:
        fields.skip("format")
        return None
    first, *others = [*quantized, *(form for form in forms if form.layout == PLAIN)]
    return replace(together(first, others, ignored), transforms=transforms)


def _check_sparsity(fields: Fields) -> None:
    for name in ("sparsity_config", "moe_sparsity_config"):
        sparsity = fields.get(name)
        if not sparsity:
            continue
        kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
        if kind != "dense":
            raise unsupported(fields.source, f"{name} with format {kind!r}")


def _transforms(fields: Fields) -> tuple[OnlineTransform, ...]:
    """Hadamard rotations of what linear layers take and give; those that are in the weights need nothing."""
    config = fields.get("transform_config")
    if not config:
        return ()
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    if not isinstance(groups, Mapping):
        groups = {"transform_config": config}
    found: list[OnlineTransform] = []
    for name, scheme in groups.items():
        places = scheme.get("apply") or [{}] if isinstance(scheme, Mapping) else [{}]
        for place in places:
            location = place.get("location") if isinstance(place, Mapping) else None
            if location in _MERGED_LOCATIONS:
                continue
            if location not in _ONLINE_LOCATIONS:
                targets = place.get("targets") if isinstance(place, Mapping) else None
                raise CheckpointError(
                    f"{fields.source}: transform_config has a transform at {location!r} of {targets!r}, which has to "
                    "be done to tokens while the model runs and is not supported (those at input and output of linear "
                    f"layers are, and at weight_input and weight_output they are in the weights); {ADVICE}"
                )
            found.append(_online_transform(fields, name, scheme, place))
    return tuple(found)


def _online_transform(
    fields: Fields, name: str, scheme: Mapping[str, Any], place: Mapping[str, Any]
) -> OnlineTransform:
    size, precision = scheme.get("head_dim"), str(scheme.get("precision") or "float32").removeprefix("torch.")
    odd = [key for key in (*scheme, *place) if key not in _TRANSFORM_KEYS]
    reasons = (
        (scheme.get("type") != "hadamard", f"type {scheme.get('type')!r} (only 'hadamard' is)"),
        (bool(scheme.get("randomize")), "randomize"),
        (precision != "float32", f"precision {precision!r} (only float32 is)"),
        (bool(odd), f"the keys {', '.join(odd)}"),
        (size is not None and (type(size) is not int or size < 1), f"head_dim {size!r}"),
    )
    for applies, reason in reasons:
        if applies:
            raise CheckpointError(
                f"{fields.source}: transform_config.config_groups.{name} is done while the model runs, and is not "
                f"supported with {reason}; {ADVICE}"
            )
    rules = [place.get(key) or [] for key in ("targets", "ignore")]
    targets, ignored = (tuple([rule] if isinstance(rule, str) else rule) for rule in rules)
    for rule in (*targets, *ignored):
        check_expression(rule, fields.source)
    return OnlineTransform(name, place["location"], size, targets, ignored)


def _config_group(fields: Fields, at: str, group: Fields) -> QuantizationConfig:
    weights = group.object("weights")
    targets = _targets(group, f"{fields.source}: {at}", any_class=weights is None)
    inputs = _inputs(group.object("input_activations"))
    note = _outputs_note(group.object("output_activations"))
    if weights is None:
        group.skip("format")
        said = "inputs of attention that are meant to be rounded stay as they are" if inputs is not None else ""
        note = "; ".join(filter(None, (said, note)))
        return QuantizationConfig(layout=PLAIN, bits=16, group_size=None, targets=targets, note=note)
    layout = group.text("format", default=fields.text("format"))
    if layout not in (*_PLAIN_FORMATS, *_MICROSCALED):
        raise unsupported(fields.source, f"format {layout!r}")
    weights.skip(*_OBSERVED, "dynamic")
    if layout in _MICROSCALED:
        weights.skip("num_bits", "type", "strategy", "symmetric", "actorder", "block_structure")
        kind = _MICROSCALED[layout]
        size = 16 if kind == "nvfp4" else 32
        weights.fixed("group_size", size)
        form = microscaled(kind, weight_name="weight_packed", inputs=inputs, targets=targets)
        return _noted(form, note)
    return _noted(_plain_group(weights, layout, targets, inputs), note)


def _plain_group(weights: Fields, layout: str, targets: tuple[str, ...], inputs: QuantKey | None) -> QuantizationConfig:
    """Whole numbers or fp8, packed or not."""
    bits, kind = weights.integer("num_bits"), weights.text("type", default="int")
    size = weights.get("group_size")
    strategy = weights.text("strategy", default="group" if size and size != -1 else "tensor")
    packed = layout == "pack-quantized"
    if (kind, bits) not in ([("int", 4), ("int", 8)] if packed else [("int", 8), ("float", 8)]):
        raise unsupported(weights.source, f"{kind}{bits} in format {layout!r}")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise unsupported(weights.source, f"strategy {strategy!r} of weights")
    block = weights.get("block_structure")
    if isinstance(block, str) and all(part.isdigit() for part in block.split("x")):
        block = [int(part) for part in block.split("x")]
    return QuantizationConfig(
        layout="packed" if packed else "int8" if kind == "int" else "fp8",
        bits=bits,
        group_size=group_size(weights) if strategy == "group" else None,
        symmetric=weights.flag("symmetric", default=True),
        activation_order=weights.get("actorder") not in (None, False, "weight", "static"),
        granularity=strategy,
        block_shape=block_shape(weights.source, block) if strategy == "block" else None,
        inputs=inputs,
        targets=targets,
        quantizes_head=True,
    )


def _noted(form: QuantizationConfig, note: str) -> QuantizationConfig:
    return replace(form, note="; ".join(filter(None, (form.note, note)))) if note else form


def _targets(group: Fields, source: str, *, any_class: bool) -> tuple[str, ...]:
    """Names of layers; with `any_class` classes other than Linear, too, none of whose weights are quantized."""
    targets = group.get("targets")
    if targets is None:
        return ("Linear",)
    if not isinstance(targets, list) or not all(isinstance(one, str) and one for one in targets):
        raise CheckpointError(f"{source}.targets must be a list of names, is {targets!r}")
    for one in targets:
        if one[0].isupper() and one != "Linear" and not any_class:
            raise unsupported(source, f"target {one!r} (names of layers, expressions behind re: and Linear are)")
        check_expression(one, f"{source}.targets")
    return tuple(targets) or (NO_LAYER,)


_INPUT_DTYPES = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8_e4m3", ("float", 4): "fp4_e2m1"}


def _inputs(of: Fields | None) -> QuantKey | None:
    """What inputs are meant to be rounded to."""
    if of is None:
        return None
    of.skip(*_OBSERVED, "actorder", "block_structure")
    kind = (of.text("type", default="int"), of.integer("num_bits"))
    if kind not in _INPUT_DTYPES:
        raise unsupported(of.source, f"input_activations in {kind[0]}{kind[1]}")
    granularity, dynamic = of.text("strategy", default="tensor"), of.get("dynamic")
    if granularity not in ("tensor", "token", "group", "tensor_group", "block", "channel"):
        raise unsupported(of.source, f"input_activations with strategy {granularity!r}")
    if "group" not in granularity:
        of.skip("group_size")
    return QuantKey(
        dtype=_INPUT_DTYPES[kind],
        scale_dtype="float32",
        granularity=granularity.removeprefix("tensor_"),
        group_size=of.integer("group_size") if "group" in granularity else None,
        symmetric=of.flag("symmetric", default=True),
        static=not dynamic,
    )


def _outputs_note(of: Fields | None) -> str:
    """Outputs are never rounded. Older files say so of keys and values, whose scales are the KV cache's."""
    if of is None:
        return ""
    of.skip("*")
    return "outputs that are meant to be rounded stay as they are"
