"""Settings of the ranks that share one model. What goes with them, `quire.tensor_parallel` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Settings, at_least, setting

__all__ = ["ParallelConfig"]


def _wrong_backend(value: Any) -> str | None:
    known = "be mp (ranks are processes), ray (ranks are actors that Ray places) or uni (one process)"
    return None if value in (None, "mp", "ray", "uni") else known


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Settings):
    """Ranks that share one model. Names and defaults are vLLM's."""

    tensor_parallel_size: int = setting(
        1,
        help="Processes that share the model: each has some of the heads and of the outputs of every matrix, and the "
        "same bits come out as of one.",
        unit="ranks",
        check=at_least(1),
    )
    decode_context_parallel_size: int = setting(
        1,
        help="Of the tensor-parallel ranks, neighbours that have the same key-value heads and other tokens of the KV "
        "cache: it holds as many times more tokens. Divides tensor_parallel_size and block_size.",
        unit="ranks",
        check=at_least(1),
    )
    pipeline_parallel_size: int = setting(
        1,
        help="Stages that the model's layers are cut into, each for a process, or for as many as share its tensors: "
        "several requests' steps are on their way through them at once, and the same bits come out as of one.",
        unit="stages",
        check=at_least(1),
    )
    distributed_executor_backend: str | None = setting(
        None,
        help="What runs the ranks: mp, processes; ray, actors that Ray places; uni, the engine's process alone, for "
        "one rank. Empty: what the number of ranks asks for.",
        check=_wrong_backend,
    )

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
