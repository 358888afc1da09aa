"""What is built ahead of time: every kernel that networks of some shapes launch, found by recording the launches.

Each module of `quire_kernels_cuda.triton` that is named in FAMILIES has a function
`calls(shape: NetworkShape, platform: Platform)`, which yields (label, call) for each way in which its ops are used: the
call runs the op on tensors of device "meta", which have shapes and no memory. Nothing is said twice: what is built is
what the ops launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.recording import Build, recording
from quire_kernels_cuda.targets import Target

__all__ = ["FAMILIES", "SHAPES", "Calls", "NetworkShape", "list_builds"]

FAMILIES = (
    "attention",
    "block_linear",
    "fp8",
    "gated",
    "gates",
    "index",
    "latent",
    "linear",
    "logit_edits",
    "lora",
    "maxsim",
    "moe",
    "norms",
    "penalties",
    "recurrent",
    "rotary",
    "rounding",
    "routing",
    "row_linear",
    "sampling",
    "step_inputs",
    "vocabulary",
    "w8a8",
)
"""Modules of `quire_kernels_cuda.triton` that hold ops."""

Calls = Iterator[tuple[str, Callable[[], object]]]
"""(what is special about the call, the call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The facts about a network and its cache that kernels are specialized for."""

    name: str
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    """A name of `quire_interfaces.KV_CACHE_DTYPES`; None for `dtype`."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int = 16
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    weights: str = "plain"
    """Form of the weights of linear layers and experts: "plain", "int8", "int4" (groups of 128), "fp8" (blocks),
    "blocks" (each format of op `block_linear`)."""
    num_experts: int = 0
    recurrent: bool = False
    """Whether it has recurrent layers."""
    latent_rank: int = 0
    """Numbers of a latent, if its attention is over latents, with 64 more for positions."""
    trees: bool = False
    """Whether drafts are verified in trees."""
    adapters: bool = False
    """Whether requests may have adapters."""
    large_cache: bool = False
    """Whether a layer's cache takes more than 2 GiB, of which AMD's GPUs are told."""

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return 1 << 20 if self.large_cache else 64

    @property
    def cache_label(self) -> str:
        """What is special about the cache's size."""
        return " large cache" if self.large_cache else ""


_LLAMA_8B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8,
                             "head_dim": 128, "vocab_size": 128256}  # fmt: skip

_SHAPES: tuple[NetworkShape, ...] = (
    NetworkShape(name="llama-8b", trees=True, adapters=True, **_LLAMA_8B),
    NetworkShape(name="llama-8b, int8 cache", cache_dtype="int8", **_LLAMA_8B),
    NetworkShape(name="gpt-oss-20b, fp8 cache", hidden_size=2880, intermediate_size=2880, num_heads=64, num_kv_heads=8,
                 head_dim=64, vocab_size=201088, sinks=True, sliding_window=True, cache_dtype="fp8_e4m3"),
    NetworkShape(name="llama-8b int8", weights="int8", **_LLAMA_8B),
    NetworkShape(name="llama-8b int4", weights="int4", recurrent=True, **_LLAMA_8B),
    NetworkShape(name="llama-8b fp8", weights="fp8", **_LLAMA_8B),
    NetworkShape(name="llama-8b in blocks", weights="blocks", **_LLAMA_8B),
    NetworkShape(name="experts", num_experts=128, **_LLAMA_8B | {"intermediate_size": 768}),
    NetworkShape(name="experts int8", num_experts=128, weights="int8", **_LLAMA_8B | {"intermediate_size": 768}),
    NetworkShape(name="experts int4", num_experts=128, weights="int4", **_LLAMA_8B | {"intermediate_size": 768}),
    NetworkShape(name="experts in blocks", num_experts=128, weights="blocks",
                 **_LLAMA_8B | {"intermediate_size": 768}),
    NetworkShape(name="deepseek-v3", latent_rank=512, **_LLAMA_8B | {"num_heads": 128}),
    NetworkShape(name="gemma2-9b", hidden_size=3584, intermediate_size=14336, num_heads=16, num_kv_heads=8,
                 head_dim=256, vocab_size=256000, soft_cap=True, sliding_window=True),
    NetworkShape(name="tiny, float32, int4 cache", dtype="float32", hidden_size=256, intermediate_size=688, num_heads=4,
                 num_kv_heads=2, head_dim=64, vocab_size=32000, alibi=True, cache_dtype="int4"),
)  # fmt: skip
SHAPES = _SHAPES + tuple(
    replace(shape, name=f"{shape.name}, large cache", large_cache=True)
    for shape in _SHAPES
    if shape.name in ("llama-8b", "gpt-oss-20b, fp8 cache", "deepseek-v3")
)
"""Networks whose kernels are in the table of resources: one for each thing that kernels are specialized for."""


def list_builds(shape: NetworkShape, platform: Platform, target: Target) -> list[Build]:
    """Everything that a network of this shape launches on `target`. Needs Triton, and that it does not interpret."""
    pinned = replace(platform, target_of=lambda _: target)
    found = []
    for name in FAMILIES:
        family = import_module(f"quire_kernels_cuda.triton.{name}")
        for label, call in family.calls(shape, pinned):
            with recording(label, target.vendor) as builds:
                call()
            found += builds
    return found
