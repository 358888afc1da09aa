"""Attention by other libraries' kernels, for those who ask for it by name: torch's, FlashInfer's, FlashAttention's.

None of them is chosen by itself where our own kernels work. Each has its own module; here is what each can do, as data.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from quire_interfaces import ConfigError
from quire_kernels_cuda.availability import is_interpreted, unavailable, why_no_triton
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_ops import Op, OpBackend, OpFunction, SizeRule, ops

__all__ = ["attention_backends", "sdpa_backends"]

WRITERS: tuple[Op[..., Any], ...] = (ops.write_kv_cache, ops.rope_and_write_kv)
"""Ops that write the cache which op `paged_attention` reads."""
_HALVES = frozenset({torch.bfloat16, torch.float16})


def attention_backends() -> list[OpBackend[..., Any]]:
    """Backends of op `paged_attention`, each with the `write_kv_cache` and `rope_and_write_kv` of our own kernels."""
    found = [
        OpBackend(
            op=ops.paged_attention,
            name="flashinfer",
            function=_lazy("flashinfer_attention", _missing("flashinfer", "flashinfer-python")),
            priority=-50,
            devices=frozenset({"cuda"}),
            dtypes=_HALVES,
            sizes={"head_dim": SizeRule(one_of=frozenset({64, 128, 256}))},
            cache_dtypes=frozenset(),
            features=frozenset({"sliding_window", "soft_cap"}),
            unavailable=_missing("flashinfer", "flashinfer-python"),
        ),
        OpBackend(
            op=ops.paged_attention,
            name="flash-attn",
            function=_lazy("flash_attention", _missing("flash_attn", "flash-attn", (2, 6))),
            priority=-50,
            devices=frozenset({"cuda"}),
            dtypes=_HALVES,
            sizes={"head_dim": SizeRule(maximum=256, multiple_of=8), "block_size": SizeRule(multiple_of=256)},
            cache_dtypes=frozenset(),
            features=frozenset({"sliding_window", "soft_cap", "alibi"}),
            unavailable=_missing("flash_attn", "flash-attn", (2, 6)),
        ),
    ]
    writers = [writer for backend in found for writer in _writers(backend, unavailable())]
    return [*sdpa_backends("sdpa", NVIDIA, unavailable()), *found, *writers]


def sdpa_backends(name: str, platform: Platform, reason: str | None) -> list[OpBackend[..., Any]]:
    """torch's attention for prompts and our kernel for decodes, with the writers of our own kernels.

    Args:
        name: Of the backends.
        platform: Whose GPUs they run on.
        reason: Why our kernels cannot work in this process, or None.
    """
    function = _lazy("sdpa", reason)
    attention = OpBackend(
        op=ops.paged_attention,
        name=name,
        function=function if reason is not None else partial(function, platform=platform),
        priority=-201 if is_interpreted() else 5,
        devices=_devices(),
        dtypes=_HALVES | {torch.float32},
        sizes={"head_dim": SizeRule(maximum=256), "queries_per_kv_head": SizeRule(maximum=128)},
        cache_dtypes=frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4"}),
        device_lengths=True,
        unavailable=reason,
    )
    return [attention, *_writers(attention, reason)]


def _writers(backend: OpBackend[..., Any], reason: str | None) -> list[OpBackend[..., Any]]:
    """What writes the cache that an attention backend reads. reason: why our kernels cannot."""
    return [
        OpBackend(
            op=op, name=backend.name, function=_writer(op, reason), priority=backend.priority - 1,
            devices=backend.devices, unavailable=backend.unavailable,
        )
        for op in WRITERS
    ]  # fmt: skip


def _devices() -> frozenset[str]:
    return frozenset({"cpu" if is_interpreted() else "cuda"})


def _missing(module: str, package: str, at_least: tuple[int, int] = (0, 0)) -> str | None:
    """Why a library of another project cannot work here, or None."""
    if find_spec(module) is None:
        return f"{package} is not installed"
    try:
        found = version(package)
    except PackageNotFoundError:
        found = ""
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < at_least:
        return f"{package} {found} is older than {'.'.join(map(str, at_least))}"
    return "kernels are interpreted" if is_interpreted() else unavailable()


def _lazy(module: str, reason: str | None) -> OpFunction:
    """`paged_attention` of a module that is imported where it can work only."""
    if reason is not None:
        return partial(_refuse, reason)
    from importlib import import_module

    function: OpFunction = import_module(f"quire_kernels_cuda.{module}").paged_attention
    return function


def _writer(op: Op[..., Any], reason: str | None) -> OpFunction:
    if (reason := why_no_triton() or reason) is not None:
        return partial(_refuse, reason)
    from quire_kernels_cuda.triton import rotary

    function: OpFunction = getattr(rotary, op.name)
    return function


def _refuse(reason: str, *_: Any, **__: Any) -> None:
    raise ConfigError(f"this attention backend cannot work in this process: {reason}")
