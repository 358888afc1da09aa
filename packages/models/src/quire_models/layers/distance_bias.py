"""Biases of attention scores by distance between tokens, as ops `encoder_attention` and `biased_paged_attention` take
them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_models.shards import HeadShard

__all__ = ["DistanceBias", "bucket"]


def bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of a distance in one direction, 0 or more: half of the buckets are for one distance each, the others
    grow with its logarithm (Raffel et al. 2020, sec. 2.1, and the code that came with it).

    Args:
        distance: int64.
    """
    num_exact = num_buckets // 2
    # In float32, as networks were trained: a distance at a border falls on the same side.
    share = torch.log(distance.float().clamp_min(1.0) / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (share * (num_buckets - num_exact)).to(torch.int64)
    return torch.where(distance < num_exact, distance, far.clamp_max(num_buckets - 1))


class DistanceBias:
    """The biases of one stack, or of one layer: heads by distance."""

    def __init__(
        self,
        scope: Scope,
        num_buckets: int,
        num_heads: int,
        max_distance: int,
        *,
        is_causal: bool = False,
        heads: HeadShard | None = None,
    ) -> None:
        """Args:
        scope: Scope of the table.
        max_distance: From here on all distances are in one bucket.
        is_causal: Keys are never behind their queries; else one half of the buckets is for such keys.
        heads: Those of this rank; None for all.
        """
        self._own = slice(None) if heads is None else heads.query_heads
        self._parameter = scope.parameter("weight", num_buckets, num_heads)
        self._num_buckets, self._max_distance, self._is_causal = num_buckets, max_distance, is_causal
        self.by_distance: Tensor
        """[heads of this rank, distances]: from `max_distance` before the query to as many behind it, or from 0 to
        `max_distance` before it."""
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        weight = self._parameter.take()  # [buckets, H]
        most, num = self._max_distance, self._num_buckets
        if self._is_causal:
            buckets = bucket(torch.arange(most + 1), num, most)
        else:
            distance = torch.arange(-most, most + 1)
            buckets = bucket(distance.abs(), num // 2, most) + (distance > 0) * (num // 2)
        self.by_distance = weight[buckets.to(weight.device)].T[self._own].contiguous()
