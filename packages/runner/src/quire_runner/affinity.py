"""Which cores the threads of a step stay on.

Knows Linux's lists of cores and the OpenMP runtime that torch has loaded; loads no torch itself. Only the thread that
runs the steps and its OpenMP team are bound: the rest of the process stays where the system puts it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire_interfaces import ConfigError

__all__ = ["bind_team", "choose_cores", "complaint_about", "split_cores"]

_FIELD = "cpu_affinity"
_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def complaint_about(setting: object) -> str | None:
    """What is wrong with a value of `cpu_affinity`, or None."""
    if setting in ("auto", "none"):
        return None
    try:
        cores = parse_cores(setting) if isinstance(setting, str) else []
    except ValueError:
        cores = []
    return None if cores else "be auto, none, or cores such as 0-3,8"


def parse_cores(text: str) -> list[int]:
    """The cores of a list in Linux's form: "0-3,8" is 0, 1, 2, 3 and 8, in the order given, each once.

    Raises:
        ValueError: it is no such list.
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.strip().isdigit() and (not last or last.strip().isdigit()) and (last or "-" not in part)):
            raise ValueError(f"{part!r} is no core or range of cores")
        cores += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(cores))


def choose_cores(
    setting: str,
    num_threads: int | None,
    *,
    allowed: Iterable[int] | None = None,
    system: Path = Path("/sys/devices/system"),
) -> tuple[int, ...]:
    """One core for each thread of the team, or none: then the threads are not bound.

    Args:
        setting: "none"; a list, whose first cores are taken; or "auto", which binds on machines with several NUMA
            nodes, one thread per physical core first, node after node, and leaves the others alone.
        num_threads: Size of the team; None takes every core of a list, or every physical core.
        allowed: Cores this process may use; None asks the system.
        system: Where Linux describes cores and nodes.

    Raises:
        ConfigError: a listed core may not be used, or there are fewer than threads.
    """
    if setting == "none":
        return ()
    usable = set(_allowed() if allowed is None else allowed)
    if setting == "auto":
        nodes = [cores for cores in _nodes(system) if usable.intersection(cores)]
        if len(nodes) < 2:
            return ()
        ordered = [core for node in nodes for core in node if core in usable]
        first = [core for core in ordered if core == _siblings(core, usable, system)[0]]
        others = [core for core in ordered if core not in first]
        count = len(first) if num_threads is None else num_threads
        return tuple([*first, *others][:count]) if count <= len(ordered) else ()
    cores = parse_cores(setting)
    if missing := [core for core in cores if core not in usable]:
        raise ConfigError(
            f"{_FIELD} {setting!r} names core {missing[0]}, which this process may not use; it may use "
            f"{', '.join(map(str, sorted(usable))) or 'none that can be bound'}",
            field=_FIELD,
        )
    if num_threads is not None and num_threads > len(cores):
        raise ConfigError(
            f"{_FIELD} {setting!r} has {len(cores)} cores for {num_threads} threads; name more cores or lower "
            "num_threads",
            field=_FIELD,
        )
    return tuple(cores[:num_threads])


def split_cores(
    setting: str,
    num_parts: int,
    *,
    allowed: Iterable[int] | None = None,
    system: Path = Path("/sys/devices/system"),
) -> list[tuple[tuple[int, ...], int]]:
    """Cores for each of several engines of this host: no core twice, a physical core's threads and a NUMA node's cores
    together where they fit.

    Args:
        setting: As for `choose_cores`; a list is split, "auto" takes all cores that may be used.
        num_parts: Number of engines.
        allowed: Cores this process may use; None asks the system.
        system: Where Linux describes cores and nodes.

    Returns:
        For each engine its cores, one thread of each physical core first, and the number of physical cores. No cores
        where none shall be bound, or there are fewer than engines.
    """
    usable = set(_allowed() if allowed is None else allowed)
    if setting == "none":
        ordered: list[int] = []
    elif setting == "auto":
        nodes = [core for node in _nodes(system) for core in node if core in usable] or sorted(usable)
        ordered = list(dict.fromkeys(each for core in nodes for each in _siblings(core, usable, system)))
    else:
        ordered = parse_cores(setting)
    size = len(ordered) // num_parts
    if not size:
        return [((), 0)] * num_parts
    parts = []
    for place in range(num_parts):
        cores = ordered[place * size : (place + 1) * size]
        first = [core for core in cores if _siblings(core, set(cores), system)[0] == core]
        parts.append(((*first, *(core for core in cores if core not in first)), len(first)))
    return parts


def bind_team(cores: Sequence[int]) -> None:
    """Bind the calling thread to the first core and the other threads of its OpenMP team to the others, for good.

    Threads that the calling thread makes later begin on its core.

    Raises:
        ConfigError: no OpenMP runtime is loaded that can be asked (torch brings one on Linux).
        OSError: the system refuses.
    """
    loaded = ctypes.CDLL(None)
    failures: list[OSError] = []

    def bind(_: object) -> None:
        try:
            os.sched_setaffinity(0, {cores[loaded.omp_get_thread_num()]})
        except OSError as error:
            failures.append(error)

    try:
        loaded.omp_set_num_threads(len(cores))
        loaded.GOMP_parallel(_Task(bind), None, ctypes.c_uint(len(cores)), ctypes.c_uint(0))
    except AttributeError as error:
        raise ConfigError(f"{_FIELD} needs the OpenMP runtime of torch for Linux: {error}", field=_FIELD) from error
    if failures:
        raise failures[0]


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _nodes(system: Path) -> list[list[int]]:
    folders = sorted(system.glob("node/node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    lists = [(folder / "cpulist").read_text().strip() for folder in folders]
    return [parse_cores(text) for text in lists if text]  # a node may have memory only


def _siblings(core: int, usable: set[int], system: Path) -> list[int]:
    """The usable threads of the core's physical core, the first one first."""
    path = system / f"cpu/cpu{core}/topology/thread_siblings_list"
    listed = parse_cores(path.read_text()) if path.is_file() else [core]
    return sorted(usable.intersection(listed)) or [core]
