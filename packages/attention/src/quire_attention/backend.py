"""Attention backends: the contract, what a backend declares about itself, and those of this package.

Knows how keys and values get into the paged cache and how queries read them; does not know blocks' owners, requests or
networks. The kernels are ops (`write_kv_cache`, `paged_attention`) of `quire_ops`.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire_attention.batch import AttentionMetadata
from quire_interfaces import KV_CACHE_DTYPES
from quire_ops import OpTable, kv_cache_shape, ops

__all__ = ["AttentionAbilities", "AttentionBackend", "AttentionRequest", "OpsAttentionBackend"]

COMPUTE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that the ops of `quire_ops` compute in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """What a model and its cache need from an attention backend."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    """Compute dtype."""
    cache_dtype: str | None = None
    """What keys and values are kept in, a name of `quire_interfaces.KV_CACHE_DTYPES`; None for the compute dtype."""
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int | None = None
    """None while it is not decided yet."""
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAbilities:
    """What a backend can do, as data."""

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[torch.dtype] = COMPUTE_DTYPES
    cache_dtypes: frozenset[str] = frozenset(KV_CACHE_DTYPES)
    block_sizes: frozenset[int] | None = None
    """None for any."""
    head_dims: frozenset[int] | None = None
    """None for any."""
    sliding_window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    alibi: bool = True
    trees: bool = False
    """Whether tokens of a step may be in trees (`AttentionMetadata.paths`)."""
    device_lengths: bool = False
    """`OpBackend.device_lengths` of what attends: steps may be captured in graphs."""

    def refusal(self, request: AttentionRequest) -> str | None:
        """Why a backend of these abilities cannot serve `request`, or None when it can."""
        cache_dtype = request.cache_dtype or str(request.dtype).removeprefix("torch.")
        refusals = (
            (request.device not in self.devices, f"does not run on {request.device}"),
            (request.dtype not in self.dtypes, f"does not compute in {request.dtype}"),
            (cache_dtype not in self.cache_dtypes, f"does not read a {cache_dtype} cache"),
            (
                self.block_sizes is not None
                and request.block_size is not None
                and request.block_size not in self.block_sizes,
                f"does not take block size {request.block_size}, only {_listed(self.block_sizes)}",
            ),
            (
                self.head_dims is not None and request.head_dim not in self.head_dims,
                f"does not take head dimension {request.head_dim}, only {_listed(self.head_dims)}",
            ),
            (request.sliding_window and not self.sliding_window, "has no sliding window"),
            (request.soft_cap and not self.soft_cap, "has no soft cap"),
            (request.sinks and not self.sinks, "has no attention sinks"),
            (request.alibi and not self.alibi, "has no ALiBi slopes"),
        )
        return next((reason for refused, reason in refusals if refused), None)


class AttentionBackend(Protocol):
    """Writes keys and values of a step into a layer's paged cache and attends over it. Holds no state of any step."""

    name: str
    abilities: AttentionAbilities
    rope_and_write_kv: Callable[..., Tensor] | None
    """Function of op `rope_and_write_kv`, which does what `write` does and what comes before it; None without one."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, row_size: int) -> tuple[int, ...]:
        """Shape of a layer's cache. Its first dimension is `num_blocks`, and a block's bytes follow each other, so
        that layers of different shapes can share memory by block id.

        Args:
            row_size: Elements that one token takes for one key-value head: D, or more or fewer in the integer formats
                (`quire_ops.kv_cache_ops`).
        """

    def write(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Store the keys and values [T, Hkv, D] of this step's tokens in their slots. Changes only `kv_cache`.

        Args:
            kv_scale: [2, Hkv] float32, what the numbers of an fp8 cache are multiples of: keys, then values. None for
                ones.
        """

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attention of this step's tokens over what their sequences have in the cache, the step's own tokens included
        (`write` comes first). A sequence's result does not depend on the other sequences of the step.

        Args:
            query: [T, Hq, D].
            scale: Factor of the scores, usually D ** -0.5.
            sliding_window: A token sees itself and the `sliding_window` - 1 tokens before it.
            soft_cap: c in score -> c * tanh(score / c).
            sinks: [Hq], a score of each head that has no value: what falls on it is attention paid to nothing.
            kv_scale: As in `write`.
            alibi_slopes: [Hq], what a head's scores lose for each token of distance.

        Returns:
            [T, Hq, D], dtype of `query`.
        """


class OpsAttentionBackend:
    """An attention backend made of the ops of one op backend."""

    def __init__(self, name: str, table: OpTable, *, abilities: AttentionAbilities | None = None) -> None:
        """Args:
            name: The op backend that serves `paged_attention`, and `write_kv_cache` and `rope_and_write_kv` if it has
                them; also the name of this backend.
            table: Where the ops are found.

        Raises:
            ConfigError: There is no such op backend.
        """
        self.name = name
        self.abilities = abilities or AttentionAbilities()
        self._attend = table.named(ops.paged_attention, name).function
        # A package may bring attention alone; the cache is then written by what this device has.
        has_write = any(backend.name == name for backend in table.backends(ops.write_kv_cache))
        self._write = table.named(ops.write_kv_cache, name if has_write else "torch").function
        has_fused = any(backend.name == name for backend in table.backends(ops.rope_and_write_kv))
        self.rope_and_write_kv = table.named(ops.rope_and_write_kv, name).function if has_fused else None

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, row_size: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, row_size]."""
        return kv_cache_shape(num_blocks, block_size, num_kv_heads, row_size)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write through op `write_kv_cache`."""
        self._write(key, value, kv_cache, metadata.slot_mapping, kv_scale)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend through op `paged_attention`."""
        return self._attend(
            query,
            kv_cache,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            kv_scale=kv_scale,
            alibi_slopes=alibi_slopes,
        )


def _listed(values: frozenset[int] | None) -> str:
    return ", ".join(map(str, sorted(values or ())))
