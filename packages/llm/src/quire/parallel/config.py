"""Settings of the ranks that share one model. What goes with them, `quire.parallel.tensor_parallel` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_distributed.all2all_backends import ALL2ALL_BACKENDS
from quire_interfaces import Settings, at_least, one_of, setting

__all__ = ["ParallelConfig"]


def _wrong_backend(value: Any) -> str | None:
    known = "be mp (ranks are processes), ray (ranks are actors that Ray places) or uni (one process)"
    return None if value in (None, "mp", "ray", "uni") else known


_EPLB_FIELDS = {
    "window_size": int,
    "step_interval": int,
    "num_redundant_experts": int,
    "log_balancedness": bool,
    "log_balancedness_interval": int,
}
"""Name -> type of the fields of `quire_models.layers.expert_parallel.EplbSettings`."""


def _wrong_eplb(value: Any) -> str | None:
    return None if value is None else _eplb_complaint(value)


def _eplb_complaint(value: Any) -> str | None:
    if not isinstance(value, dict) or not value.keys() <= _EPLB_FIELDS.keys():
        return f"be an object with some of {', '.join(_EPLB_FIELDS)}"
    for name, each in value.items():
        lowest = 0 if name == "num_redundant_experts" else 1
        if _EPLB_FIELDS[name] is bool and not isinstance(each, bool):
            return f"have a {name} that is true or false"
        if _EPLB_FIELDS[name] is int and (type(each) is not int or each < lowest):
            return f"have a {name} that is a whole number of at least {lowest}"
    return None


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
    enable_expert_parallel: bool = setting(
        False,
        help="Each rank of tensor_parallel_size has some of the routed experts whole, instead of all of them; the same "
        "bits come out.",
    )
    all2all_backend: str = setting(
        "allgather_reducescatter",
        help="How what experts of other ranks made of tokens comes together: allgather_reducescatter, each rank sums "
        "up its share of the tokens; naive, each sums up all. vLLM's others are libraries of GPUs: refused by name.",
        check=one_of(*ALL2ALL_BACKENDS),
    )
    enable_eplb: bool = setting(
        False,
        help="Count each expert's tokens, and move experts between ranks so that all of them have as much to do; with "
        "enable_expert_parallel.",
    )
    eplb_config: dict[str, Any] | None = setting(  # noqa: RUF009 (its default is None)
        None,
        help="When experts are moved, as JSON: window_size (1000 steps), step_interval (3000), num_redundant_experts "
        "(0), log_balancedness (false), log_balancedness_interval (1).",
        check=_wrong_eplb,
    )

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
