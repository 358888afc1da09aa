"""Ranks of several devices and machines: their mesh and their collectives.

Importing this package loads no torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire_distributed.collectives import Collectives, PendingTensor
from quire_distributed.mesh import MESH_AXES, Mesh, MeshAxis

if TYPE_CHECKING:
    from quire_distributed.shared_memory import SharedMemoryCollectives, SharedMemoryRendezvous
    from quire_distributed.single import SingleRank
    from quire_distributed.subgroups import subgroup
    from quire_distributed.threads import ThreadCollectives, run_thread_ranks, thread_group
    from quire_distributed.torch_distributed import TorchCollectives, TorchRendezvous

__version__ = "0.1.0"

__all__ = [
    "MESH_AXES",
    "Collectives",
    "Mesh",
    "MeshAxis",
    "PendingTensor",
    "SharedMemoryCollectives",
    "SharedMemoryRendezvous",
    "SingleRank",
    "ThreadCollectives",
    "TorchCollectives",
    "TorchRendezvous",
    "run_thread_ranks",
    "subgroup",
    "thread_group",
]

_LAZY = {
    "TorchCollectives": "quire_distributed.torch_distributed",
    "TorchRendezvous": "quire_distributed.torch_distributed",
    "SharedMemoryCollectives": "quire_distributed.shared_memory",
    "SharedMemoryRendezvous": "quire_distributed.shared_memory",
    "SingleRank": "quire_distributed.single",
    "ThreadCollectives": "quire_distributed.threads",
    "run_thread_ranks": "quire_distributed.threads",
    "subgroup": "quire_distributed.subgroups",
    "thread_group": "quire_distributed.threads",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
