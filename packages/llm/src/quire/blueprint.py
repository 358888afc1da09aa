"""What an engine is on its way from settings to parts: decided, loaded, built. Data only, which `assemble.py` makes.
Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire.kv_tier import EngineTiers
from quire.plan import MemoryPlan
from quire.pooling.poolers import PoolingChoice
from quire_interfaces import Executor, SchedulerStats
from quire_models.config import ModelConfig
from quire_pooling import PoolerSpec
from quire_structured_output import GrammarGate

if TYPE_CHECKING:
    from quire.parallel.rank_groups import RankGroups
    from quire_lora import AdapterStore
    from quire_models import Network
    from quire_models.layers.expert_parallel import ExpertBalancer
    from quire_runner import ModelRunner

__all__ = ["Blueprint", "DeviceSide", "LoadedNetworks", "Report"]

Report = Callable[[str, float], None]
"""Called with (stage, fraction of the stage that is done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What is to be built, decided before anything is allocated."""

    config: QuireConfig
    """Settings, with drafts as the plan has them."""
    folder: Path
    media_folder: Path
    """Folder of towers, processor and tokenizer; `folder`, unless towers come from a file of their own."""
    model: ModelConfig
    """The network, its context cut to the plan's."""
    plan: MemoryPlan
    compilation: str | None
    """Backend of torch.compile that the network is compiled by; None for none."""
    choice: PoolingChoice
    """What the engine is for."""
    pooler: PoolerSpec | None
    """How it pools; None where it only generates."""
    offered: dict[str, str]
    """Name -> folder of adapters that are there from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNetworks:
    """The networks, on their device."""

    target: Network
    draft: Network | None
    digest: Future[str] | None
    """Of the checkpoint, for tiers that outlive the engine; None without one. Of several ranks, on the first."""
    groups: RankGroups | None
    """Of several ranks, those of this one."""
    timings_s: dict[str, float]
    """Stage of the start -> seconds."""
    loaded_at_s: float
    """When the weights were there, by `time.perf_counter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """All that computes."""

    runner: ModelRunner
    executor: Executor
    gate: GrammarGate
    """Makes the matchers of the runner, and lets requests wait for them."""
    store: AdapterStore | None
    tiers: EngineTiers | None
    add_stats: tuple[Callable[[SchedulerStats], None], ...]
    """Each adds its numbers to a step's statistics."""
    balancer: ExpertBalancer | None
    """Moves experts between ranks; None where they stay where they are."""
    timings_s: dict[str, float]
    """Stage of the start -> seconds."""
