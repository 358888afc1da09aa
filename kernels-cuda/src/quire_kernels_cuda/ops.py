"""The Triton kernels as backends of ops, for NVIDIA GPUs; and the list of them for other vendors' packages.

What a backend supports is data here; a kernel's module is imported only where it can work. Each op is a function of its
module; one that cuts its work differently for each kind of GPU takes, besides the op's own arguments, `platform`: whose
GPUs it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from quire_interfaces import FP8_DS_MLA, ConfigError
from quire_kernels_cuda.attention_backends import attention_backends
from quire_kernels_cuda.availability import is_interpreted, unavailable, why_no_triton
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.targets import Target
from quire_ops import KernelBuilder, Op, OpBackend, OpFunction, SizeRule, ops

__all__ = ["SERVED", "Served", "backends", "op_backends"]

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One op that has a kernel, and what the kernel takes."""

    op: Op[..., Any]
    module: str
    """Module of `quire_kernels_cuda.triton` with a function of the op's name, which `implements` holds to it."""
    dtypes: frozenset[torch.dtype] = FLOATS
    sizes: Mapping[str, SizeRule] = field(default_factory=dict)
    cache_dtypes: frozenset[str] | None = None
    batch_invariant: bool = False
    device_lengths: bool = False
    device_query_lens: bool = False
    trees: bool = False
    planes: bool = False
    many_registers: bool = False
    """It has no form for targets that have few (`Target.has_few_registers`)."""
    fp8_products: bool = False
    """It multiplies 8-bit floats, which not every target does (`Target.has_fp8`)."""


_ROW = {"hidden_size": SizeRule(maximum=32768)}
_EVEN_HEAD = {"head_dim": SizeRule(minimum=2, multiple_of=2)}

SERVED = (
    Served(op=ops.linear, module="linear"),
    Served(op=ops.lm_head, module="linear"),
    Served(op=ops.gated_linear, module="gated"),
    Served(op=ops.norm_linear, module="row_linear"),
    Served(op=ops.linear_add, module="row_linear"),
    Served(op=ops.int8_linear, module="linear"),
    Served(op=ops.grouped_linear, module="linear"),
    Served(op=ops.block_linear, module="block_linear", planes=True),
    Served(op=ops.w8a8_linear, module="w8a8", batch_invariant=True),
    Served(op=ops.fp8_linear, module="fp8", fp8_products=True),
    Served(op=ops.lora_linear, module="lora", device_lengths=True),
    Served(op=ops.lm_head_argmax, module="vocabulary"),
    Served(op=ops.embedding, module="vocabulary"),
    Served(op=ops.quantized_embedding, module="block_linear", planes=True),
    Served(op=ops.rms_norm, module="norms", sizes=_ROW, batch_invariant=True),
    Served(op=ops.add_rms_norm, module="norms", sizes=_ROW, batch_invariant=True),
    Served(op=ops.add_rms_norm_quant, module="rounding", sizes=_ROW, batch_invariant=True),
    Served(op=ops.gate_quant, module="rounding", batch_invariant=True),
    Served(op=ops.layer_norm, module="norms", sizes=_ROW, batch_invariant=True),
    Served(op=ops.rotary_embedding, module="rotary", sizes=_EVEN_HEAD, batch_invariant=True),
    Served(op=ops.write_kv_cache, module="rotary", sizes=_EVEN_HEAD, batch_invariant=True),
    Served(op=ops.rope_and_write_kv, module="rotary", sizes=_EVEN_HEAD, batch_invariant=True),
    Served(op=ops.silu_and_mul, module="gates", batch_invariant=True),
    Served(op=ops.gelu_and_mul, module="gates", batch_invariant=True),
    Served(op=ops.sigmoid_and_mul, module="gates", batch_invariant=True),
    Served(op=ops.step_inputs, module="step_inputs"),
    Served(op=ops.decode_inputs, module="step_inputs"),
    Served(op=ops.sample, module="sampling", batch_invariant=True),
    Served(op=ops.sample_masked, module="sampling", batch_invariant=True),
    Served(op=ops.edit_logits, module="logit_edits", batch_invariant=True),
    Served(op=ops.penalize, module="penalties", batch_invariant=True),
    Served(op=ops.route_experts, module="routing", sizes={"experts": SizeRule(maximum=1024)}, batch_invariant=True),
    Served(op=ops.fused_moe, module="moe"),
    Served(op=ops.maxsim, module="maxsim", batch_invariant=True),
    Served(op=ops.causal_conv1d, module="recurrent", device_lengths=True),
    Served(op=ops.mamba2_scan, module="recurrent", device_lengths=True),
    Served(op=ops.selective_scan, module="recurrent", device_lengths=True),
    Served(op=ops.gated_delta_rule, module="recurrent", device_lengths=True),
    Served(op=ops.wkv, module="recurrent", device_lengths=True),
    Served(
        op=ops.paged_attention,
        module="attention",
        sizes={"head_dim": SizeRule(maximum=256), "queries_per_kv_head": SizeRule(maximum=128)},
        cache_dtypes=frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4"}),
        device_lengths=True,
        device_query_lens=True,
        trees=True,
    ),
    Served(op=ops.write_latent_cache, module="latent", batch_invariant=True),
    Served(
        op=ops.latent_attention,
        module="latent",
        cache_dtypes=frozenset({FP8_DS_MLA}),
        device_lengths=True,
        device_query_lens=True,
        trees=True,
        many_registers=True,
    ),
    Served(op=ops.index_topk, module="index", cache_dtypes=frozenset(), device_lengths=True, device_query_lens=True),
    Served(op=ops.position_slots, module="index", device_lengths=True, device_query_lens=True),
    Served(op=ops.sparse_latent_attention, module="latent", cache_dtypes=frozenset({FP8_DS_MLA}), many_registers=True),
)


def backends() -> list[OpBackend[..., Any]]:
    """The entry point of group `quire.ops`."""
    reason = unavailable()
    target = None if reason is not None or is_interpreted() else NVIDIA.target_of(torch.device("cuda", 0))
    return op_backends("triton", NVIDIA, reason, target=target, builder=_nvidia_builder()) + attention_backends()


@cache
def _nvidia_builder() -> KernelBuilder | None:
    if why_no_triton() or is_interpreted():
        return None
    from quire_kernels_cuda.builder import TritonBuilder

    return TritonBuilder(
        "triton", NVIDIA, unavailable, lambda target: op_backends("triton", NVIDIA, None, target=target)
    )


def op_backends(
    name: str,
    platform: Platform,
    reason: str | None,
    *,
    target: Target | None = None,
    builder: KernelBuilder | None = None,
) -> list[OpBackend[..., Any]]:
    """Every served op as a backend.

    Args:
        name: Of the backends.
        reason: Why nothing can work in this process, or None.
        target: What the GPU of this process is, where that decides which ops are served.
        builder: Builds their kernels ahead of time.
    """
    reasons = {served.op.name: reason or _why_not_on(served, target) for served in SERVED}
    return [
        OpBackend(
            op=served.op,
            name=name,
            function=_function(served, platform, reasons[served.op.name]),
            # Interpreted kernels are for tests: chosen by name only.
            priority=-200 if is_interpreted() else 10,
            devices=frozenset({"cpu" if is_interpreted() else "cuda"}),
            dtypes=served.dtypes,
            sizes=served.sizes,
            cache_dtypes=served.cache_dtypes,
            batch_invariant=served.batch_invariant,
            device_lengths=served.device_lengths,
            device_query_lens=served.device_query_lens,
            trees=served.trees,
            planes=served.planes,
            builder=builder,
            unavailable=reasons[served.op.name],
        )
        for served in SERVED
    ]


def _why_not_on(served: Served, target: Target | None) -> str | None:
    if target is not None and target.has_few_registers and served.many_registers:
        return f"its rows do not fit into the registers of {target.name}"
    if target is not None and served.fp8_products and not target.has_fp8:
        return f"{target.name} does not multiply 8-bit floats of this kind"
    return None


def _function(served: Served, platform: Platform, reason: str | None) -> OpFunction:
    if reason is not None:
        return partial(_refuse, served.op.name, reason)
    module = import_module(f"quire_kernels_cuda.triton.{served.module}")
    function: OpFunction = getattr(module, served.op.name)
    return partial(function, platform=platform) if "platform" in signature(function).parameters else function


def _refuse(op: str, reason: str, *_: Any, **__: Any) -> None:
    raise ConfigError(f"the Triton kernel of op {op!r} cannot work in this process: {reason}")
