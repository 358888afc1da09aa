"""The device side of a step: permanent rows, inputs, forward, sampling.

Importing this package loads neither torch nor numpy: names are looked up on first use (PEP 562), so that a planning
process can read `RunnerConfig` and `quire_runner.memory` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_runner.alignment import AlignmentPooler
    from quire_runner.block_bytes import BlockBytes
    from quire_runner.config import RunnerConfig
    from quire_runner.executor import ThreadedExecutor
    from quire_runner.hidden_states import HiddenStatesRunner
    from quire_runner.kv_cache import allocate_kv_caches
    from quire_runner.memory import activation_bytes, graph_bytes, row_bytes
    from quire_runner.pipeline import PipelineRunner
    from quire_runner.pooling_runner import PoolingRunner
    from quire_runner.protocols import LogitsTap, RunnableNetwork
    from quire_runner.routed_experts import RoutedExpertsRunner
    from quire_runner.rows import Rows
    from quire_runner.runner import ModelRunner
    from quire_runner.sound_pooler import SoundPooler

__version__ = "0.1.0"

__all__ = [
    "AlignmentPooler",
    "BlockBytes",
    "HiddenStatesRunner",
    "LogitsTap",
    "ModelRunner",
    "PipelineRunner",
    "PoolingRunner",
    "RoutedExpertsRunner",
    "Rows",
    "RunnableNetwork",
    "RunnerConfig",
    "SoundPooler",
    "ThreadedExecutor",
    "activation_bytes",
    "allocate_kv_caches",
    "graph_bytes",
    "row_bytes",
]

_MODULE_OF = {
    "AlignmentPooler": "alignment",
    "BlockBytes": "block_bytes",
    "HiddenStatesRunner": "hidden_states",
    "LogitsTap": "protocols",
    "ModelRunner": "runner",
    "PipelineRunner": "pipeline",
    "PoolingRunner": "pooling_runner",
    "RoutedExpertsRunner": "routed_experts",
    "Rows": "rows",
    "RunnableNetwork": "protocols",
    "RunnerConfig": "config",
    "SoundPooler": "sound_pooler",
    "ThreadedExecutor": "executor",
    "activation_bytes": "memory",
    "allocate_kv_caches": "kv_cache",
    "graph_bytes": "memory",
    "row_bytes": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
