"""GPTQ and AWQ, as AutoGPTQ, GPTQModel, AutoAWQ, Optimum and AutoRound write them. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.quantization_config import PLAIN, QuantizationConfig
from quire_models.quantization_formats.reading import group_size, layer_names, unsupported

__all__ = ["parse_auto_round", "parse_awq", "parse_gptq"]

_BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}
"""checkpoint_format -> bits that GPTQModel and AutoGPTQ write in it."""
_MAKING = (
    "act_*", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_*", "dataset", "disable_exllama", "enable_*", "exllama_config", "gradient_accumulate_steps", "iters",
    "low_*", "lr", "lr_scheduler", "max_input_length", "meta", "minmax_lr", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse", "nsamples", "pad_token_id",
    "provider", "quant_method", "scale_dtype", "seqlen", "static_groups", "super_bits", "super_group_size",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "vllm_backend",
)  # fmt: skip
"""How a checkpoint was made, and which kernels its tool would take."""


def parse_gptq(fields: Fields) -> QuantizationConfig:
    """GPTQ; `dynamic` of GPTQModel says it layer by layer."""
    fields.skip(*_MAKING, "method")
    bits, layout = (
        fields.integer("bits"),
        fields.text("checkpoint_format", default=fields.text("format", default="gptq")),
    )
    if layout not in _BITS:
        raise unsupported(fields.source, f"checkpoint_format {layout!r} of gptq")
    _check_bits(fields.source, bits, layout)
    if fields.flag("is_marlin_format", default=False):
        raise unsupported(fields.source, "is_marlin_format of gptq")
    fields.fixed("pack_dtype", "int32")
    fields.fixed("data_type", "int")
    head, sym = fields.flag("lm_head", default=False), _flag_or_none(fields, "sym")
    form = QuantizationConfig(
        layout="gptq-planes" if layout == "gptq_p" else "gptq",
        bits=bits,
        group_size=group_size(fields),
        symmetric=sym is True,
        sym=sym,
        zero_offset=1 if layout == "gptq" else 0,
        activation_order=fields.flag("desc_act", default=False),
        targets=_inside_modules(fields),
        ignored=(*(() if head else ("lm_head",)), *layer_names(fields, "modules_to_not_convert")),
        quantizes_head=head,
    )
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"{fields.source}: dynamic must be an object of expressions, is {dynamic!r}")
    others = [_dynamic(form, rule, values, f"{fields.source}: dynamic") for rule, values in dynamic.items()]
    if any("lm_head" in rule and other.layout != PLAIN for rule, other in zip(dynamic, others, strict=True)):
        form = replace(form, quantizes_head=True, ignored=tuple(name for name in form.ignored if name != "lm_head"))
    return replace(form, others=tuple(others))


def _check_bits(source: str, bits: int, layout: str) -> None:
    if bits not in _BITS[layout]:
        wrong = f"gptq with {bits} bits in checkpoint_format {layout!r}"
        raise unsupported(source, f"{wrong} (5, 6 and 7 bits are in 'gptq_p')" if 4 < bits < 8 else wrong)


def _flag_or_none(fields: Fields, name: str) -> bool | None:
    return None if fields.get(name) is None else fields.flag(name, default=False)


def _inside_modules(fields: Fields) -> tuple[str, ...]:
    """The layers of a block that are quantized, in groups or one by one; empty for all."""
    groups = fields.get("modules_in_block_to_quantize") or fields.get("inside_layer_modules") or []
    names = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    if not isinstance(groups, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{fields.source}: modules_in_block_to_quantize must be lists of names, is {groups!r}")
    return tuple(names)


def _dynamic(form: QuantizationConfig, rule: str, values: Any, source: str) -> QuantizationConfig:
    """One rule: an expression behind "+:", nothing, or "-:" for layers that are left as they are."""
    expression = rule.removeprefix("-:").removeprefix("+:")
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{source}: {rule!r} is no regular expression: {error}") from None
    if rule.startswith("-:"):
        return replace(form, layout=PLAIN, targets=(f"re:{expression}",))
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{source}: {rule!r} must be an object of settings, is {values!r}")
    of = Fields(values, f"{source}: {rule!r}")
    layout = next(name for name, of_layout in (("gptq_p", "gptq-planes"), ("gptq", "gptq")) if of_layout == form.layout)
    bits = of.integer("bits", default=form.bits)
    _check_bits(of.source, bits, layout)
    sym = _flag_or_none(of, "sym")
    sym = form.sym if sym is None else sym
    changed = replace(
        form,
        bits=bits,
        group_size=form.group_size if of.get("group_size") is None else group_size(of),
        activation_order=of.flag("desc_act", default=form.activation_order),
        sym=sym,
        symmetric=sym is True,
        targets=(f"re:{expression}",),
    )
    of.skip(*_MAKING, "mse", "adapter")
    of.refuse_unread("use a checkpoint whose layers differ in bits, group_size, sym and desc_act only")
    return changed


def parse_awq(fields: Fields) -> QuantizationConfig:
    """AWQ; the older names of AutoAWQ's quant_config.json too."""
    fields.skip(*_MAKING, "method", "exllama_config", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    bits = fields.integer("bits" if fields.get("w_bit") is None else "w_bit")
    version = fields.text("version", default=fields.text("format", default="gemm")).lower()
    if bits != 4 or version != "gemm":
        raise unsupported(fields.source, f"awq with {bits} bits and version {version!r}")
    name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    zero_point = _flag_or_none(fields, "zero_point")
    sym = _flag_or_none(fields, "sym") if zero_point is None else not zero_point
    head = fields.flag("lm_head", default=False)
    return QuantizationConfig(
        layout="awq",
        bits=4,
        group_size=group_size(fields, name),
        symmetric=sym is True,
        sym=sym,
        ignored=(*(() if head else ("lm_head",)), *layer_names(fields, "modules_to_not_convert")),
        quantizes_head=head,
    )


_PACKINGS = {
    "auto_round": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:gptqmodel": "gptq",
    "auto_gptq": "gptq", "auto_round:auto_awq": "awq", "auto_round:awq": "awq", "auto_awq": "awq",
}  # fmt: skip
"""packing_format of AutoRound -> the layout; both of "gptq" store zero points one smaller."""


def parse_auto_round(fields: Fields) -> QuantizationConfig:
    """AutoRound, whose files have the layout of GPTQ or AWQ; `extra_config` says it layer by layer."""
    fields.skip(*_MAKING, "to_quant_block_names", "quant_block_list", "modules_in_block_to_quantize", "export_format",
                "model_free", "version", "device", "not_use_best_mse", "seed", "sampler")  # fmt: skip
    spelling = fields.text("packing_format", default=fields.text("backend", default="auto_round:auto_gptq"))
    layout = _PACKINGS.get(spelling.replace("-", "_").replace("autoround", "auto_round"))
    if layout is None:
        choices = ", ".join(_PACKINGS)
        raise unsupported(fields.source, f"packing_format {spelling!r} of auto-round ({choices} are)")
    fields.fixed("data_type", "int")
    head = fields.flag("quant_lm_head", default=False)
    bits, sym = fields.integer("bits"), _flag_or_none(fields, "sym")
    form = _rounded(fields.source, layout, bits, group_size(fields), sym)
    form = replace(
        form,
        ignored=(*(() if head else ("lm_head",)), *layer_names(fields, "modules_to_not_convert")),
        quantizes_head=head,
    )
    others = []
    for name, of in fields.objects("extra_config").items():
        of.skip(*_MAKING, "super_*", "data_type", "fixed_by_user", "in_blocks", "tmp_dtype", "imatrix", "scheme",
                "disable_opt_rtn", "packing_format")  # fmt: skip
        targets = (name, f"re:{name}$") if _is_expression(name) else (name,)
        bits_of = of.integer("bits", default=bits)
        if bits_of >= 16:
            of.skip("group_size", "sym")
            others.append(replace(form, layout=PLAIN, targets=targets))
            continue
        sym_of = _flag_or_none(of, "sym")
        size = form.group_size if of.get("group_size") is None else group_size(of)
        one = _rounded(of.source, layout, bits_of, size, sym if sym_of is None else sym_of)
        others.append(replace(one, targets=targets))
        if "lm_head" in name:
            form = replace(form, quantizes_head=True, ignored=tuple(rule for rule in form.ignored if rule != "lm_head"))
    return replace(form, others=tuple(others))


def _is_expression(name: str) -> bool:
    if not set(name) & set("*+?[]()|^$\\"):
        return False
    try:
        re.compile(name)
    except re.error:
        return False
    return True


def _rounded(source: str, layout: str, bits: int, size: int | None, sym: bool | None) -> QuantizationConfig:
    if layout == "awq":
        if bits != 4:
            raise unsupported(source, f"auto-round with {bits} bits in the layout of awq (4 are)")
    else:
        _check_bits(source, bits, layout)
    return QuantizationConfig(
        layout="awq" if layout == "awq" else "gptq",
        bits=bits,
        group_size=size,
        symmetric=sym is True,
        sym=sym,
        zero_offset=1 if layout == "gptq" else 0,
    )
