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

from quire_interfaces import ConfigError
from quire_kernels_cuda.attention_backends import attention_backends
from quire_kernels_cuda.availability import is_interpreted, unavailable, why_no_triton
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_ops import KernelBuilder, OpBackend, OpFunction, SizeRule

__all__ = ["SERVED", "Served", "backends", "op_backends"]

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One op that has a kernel, and what the kernel takes."""

    op: str
    module: str
    """Module of `quire_kernels_cuda.triton` with a function of the op's name."""
    dtypes: frozenset[torch.dtype] = FLOATS
    sizes: Mapping[str, SizeRule] = field(default_factory=dict)
    cache_dtypes: frozenset[str] | None = None
    batch_invariant: bool = False
    device_lengths: bool = False


_ROW = {"hidden_size": SizeRule(maximum=32768)}
_EVEN_HEAD = {"head_dim": SizeRule(minimum=2, multiple_of=2)}

SERVED = (
    Served(op="linear", module="linear"),
    Served(op="lm_head", module="linear"),
    Served(op="int8_linear", module="linear"),
    Served(op="grouped_linear", module="linear"),
    Served(op="lm_head_argmax", module="vocabulary"),
    Served(op="embedding", module="vocabulary"),
    Served(op="rms_norm", module="norms", sizes=_ROW, batch_invariant=True),
    Served(op="add_rms_norm", module="norms", sizes=_ROW, batch_invariant=True),
    Served(op="layer_norm", module="norms", sizes=_ROW, batch_invariant=True),
    Served(op="rotary_embedding", module="rotary", sizes=_EVEN_HEAD, batch_invariant=True),
    Served(op="write_kv_cache", module="rotary", sizes=_EVEN_HEAD, batch_invariant=True),
    Served(op="silu_and_mul", module="gates", batch_invariant=True),
    Served(op="gelu_and_mul", module="gates", batch_invariant=True),
    Served(op="sigmoid_and_mul", module="gates", batch_invariant=True),
    Served(op="step_inputs", module="step_inputs"),
    Served(op="decode_inputs", module="step_inputs"),
    Served(op="draw", module="sampling", batch_invariant=True),
    Served(op="draw_masked", module="sampling", batch_invariant=True),
    Served(op="fused_moe", module="moe"),
    Served(op="causal_conv1d", module="recurrent", device_lengths=True),
    Served(op="mamba2_scan", module="recurrent", device_lengths=True),
    Served(op="selective_scan", module="recurrent", device_lengths=True),
    Served(op="gated_delta_rule", module="recurrent", device_lengths=True),
    Served(op="wkv", module="recurrent", device_lengths=True),
    Served(
        op="paged_attention",
        module="attention",
        sizes={"head_dim": SizeRule(maximum=256), "queries_per_kv_head": SizeRule(maximum=128)},
        cache_dtypes=frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4"}),
        device_lengths=True,
    ),
)


def backends() -> list[OpBackend]:
    """The entry point of group `quire.ops`."""
    return op_backends("triton", NVIDIA, unavailable(), builder=_nvidia_builder()) + attention_backends()


@cache
def _nvidia_builder() -> KernelBuilder | None:
    from quire_kernels_cuda.builder import TritonBuilder  # which asks for these backends in its turn

    return None if why_no_triton() or is_interpreted() else TritonBuilder("triton", NVIDIA)


def op_backends(
    name: str, platform: Platform, reason: str | None, *, builder: KernelBuilder | None = None
) -> list[OpBackend]:
    """Every served op as a backend.

    Args:
        name: Of the backends.
        reason: Why nothing can work in this process, or None.
        builder: Builds their kernels ahead of time.
    """
    return [
        OpBackend(
            op=served.op,
            name=name,
            function=_function(served, platform, reason),
            # Interpreted kernels are for tests: chosen by name only.
            priority=-200 if is_interpreted() else 10,
            devices=frozenset({"cpu" if is_interpreted() else "cuda"}),
            dtypes=served.dtypes,
            sizes=served.sizes,
            cache_dtypes=served.cache_dtypes,
            batch_invariant=served.batch_invariant,
            device_lengths=served.device_lengths,
            builder=builder,
            unavailable=reason,
        )
        for served in SERVED
    ]


def _function(served: Served, platform: Platform, reason: str | None) -> OpFunction:
    if reason is not None:
        return partial(_refuse, served.op, reason)
    module = import_module(f"quire_kernels_cuda.triton.{served.module}")
    function: OpFunction = getattr(module, served.op)
    return partial(function, platform=platform) if "platform" in signature(function).parameters else function


def _refuse(op: str, reason: str, *_: Any, **__: Any) -> None:
    raise ConfigError(f"the Triton kernel of op {op!r} cannot work in this process: {reason}")
