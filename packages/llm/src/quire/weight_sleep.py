"""What of an engine is on its device, given back and built again: sleep at levels 1 and 2.

Loads no torch: whatever has weights has loaded it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from quire.blueprint import Blueprint, DeviceSide
from quire.config import QuireConfig
from quire.parallel.collective_rpc import CollectiveRPC
from quire_distributed.executor import MultiprocExecutor
from quire_distributed.pipeline_executor import PipelineExecutor
from quire_engine import EngineParts
from quire_interfaces import EngineDeadError, ModelRunnerOutput, RequestError, SchedulerOutput
from quire_interfaces.platforms import platform_of
from quire_structured_output import GrammarGate

if TYPE_CHECKING:
    from quire_lora import AdapterStore
    from quire_models import Network

__all__ = ["DeviceRebuild", "KeptParts", "StartDevice", "device_fields"]


@dataclass(frozen=True, slots=True)
class KeptParts:
    """What beside the scheduler outlives a sleep at level 2."""

    gate: GrammarGate
    """With all grammars that were compiled."""
    store: AdapterStore | None
    """With the adapters in host memory."""

    def joined_store(self, network: Network) -> AdapterStore | None:
        """The store, for a network that was just built."""
        if self.store is not None and network.adapters is not None:
            self.store.join_network(network.adapters, network.parameter_tensors)
        return self.store


class StartDevice(Protocol):
    """Loads the weights, and builds what computes with them."""

    def __call__(self, *, kept: KeptParts | None = None) -> tuple[Network, DeviceSide]:
        """The network, and what computes with it and with what was kept. Raises as `build_parts`."""


def device_fields(config: QuireConfig, device: DeviceSide) -> dict[str, Any]:
    """The fields of `EngineParts` that are of what computes, as they are after each build."""
    executor, call = device.executor, CollectiveRPC(config, device.executor, device.runner)
    call.own.balancer = device.balancer
    # A tier still copies blocks that were computed. An accelerator's memory cannot be taken from under its
    # graphs: there level 1 discards what level 2 does.
    may_release = device.tiers is None and platform_of(config.runner.device).is_host
    release = partial(_release_kv_cache, device) if may_release else None
    return {"executor": executor, "release_kv_cache": release, "collective_rpc": call, "add_stats": device.add_stats}


@dataclass(frozen=True, slots=True)
class DeviceRebuild:
    """Closes the runner of every rank with its network, its drafter, its KV cache and its graphs, and builds all of
    them again (`quire_engine.core.WeightSleep`). Works on every device, since no pointer outlives it.
    """

    blueprint: Blueprint
    """What is built."""
    kept: KeptParts
    start: StartDevice
    """Builds it."""

    def discard(self, parts: EngineParts) -> int:
        """Close `parts.executor`, and let go of what it computed with.

        Returns:
            Bytes of weights and KV cache, by the plan of memory.
        """
        parts.executor.close()
        parts.executor = _NoExecutor()
        parts.release_kv_cache, parts.collective_rpc, parts.add_stats = None, _refuse_call, ()
        if self.kept.store is not None:
            self.kept.store.leave_network()
        gc.collect()  # bound methods of layers and closures over them refer to each other
        platform = platform_of(self.blueprint.config.runner.device)
        if platform.module:
            platform.runtime().empty_cache()
        if sys.platform == "linux":
            with contextlib.suppress(AttributeError):  # another C library than glibc gives back by itself
                ctypes.CDLL(None).malloc_trim(0)
        ledger = self.blueprint.plan.ledger_bytes
        return sum(size for name, size in ledger.items() if name.startswith(("weights", "KV cache")))

    def reload(self, parts: EngineParts) -> None:
        """Load the checkpoint as it is now, and give `parts` what computes with it. Raises as `build_parts`; nothing
        has changed then."""
        _, device = self.start(kept=self.kept)
        for name, value in device_fields(self.blueprint.config, device).items():
            setattr(parts, name, value)


class _NoExecutor:
    """The executor of an engine without weights."""

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """EngineDeadError: nothing computes."""
        raise EngineDeadError(f"step {output.step_id} came while the engine sleeps without its weights")

    def close(self) -> None:
        """Nothing: there is nothing left."""


def _refuse_call(method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """RequestError: no rank is there to answer."""
    raise RequestError(f"{method}: the engine sleeps without its weights; wake it first", code="sleeping")


def _release_kv_cache(device: DeviceSide) -> int:
    """Give the memory of the KV cache back on every rank; number of bytes, of this one."""
    if isinstance(device.executor, MultiprocExecutor | PipelineExecutor):
        device.executor.call("release_kv_cache")
    return device.runner.release_kv_cache()
