"""Tables of what was measured to be fastest: one JSON file for each GPU, by its canonical name.

A kernel meets a *problem*: traits, which must be the same for a configuration to be right or sensible (dtypes, head
dimension), and sizes, which may be near (rows, inputs, outputs). A problem that is in no table takes the configuration
of the nearest one with its traits; one that is far from all takes what the kernel works out from the limits of the GPU.

Tables that are committed are in `tables/` beside this module; `quire tune` writes further ones into a folder of the
user's, whose entries come first. Several processes may write to one table. Knows no kernel and no device.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire_interfaces import ConfigError

__all__ = ["BLOCK_NAMES", "Entry", "LaunchConfig", "Problem", "Tables", "canonical_gpu_name", "read_table", "save"]

FORMAT = 2
SHIPPED = Path(__file__).with_name("tables")
FARTHEST = 2.0
"""Doublings, of all sizes together, up to which another problem's configuration is taken."""
BLOCK_NAMES = {
    "decode_attention": ("BLOCK_N",),
    "prefill_attention": ("BLOCK_M", "BLOCK_N"),
    "matmul": ("BM", "BN", "BK", "SPLITS"),
    "skinny_matmul": ("BM", "BN", "BK", "SPLITS"),
    "gated_matmul": ("BM", "BN", "BK"),
    "byte_matmul": ("BM", "BN", "BK"),
    "fused_moe": ("BM", "BN"),
}
"""Kernels that are tuned, and the blocks that a configuration of each says."""
_LIMITS = {"num_warps": 32, "num_stages": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How the work of a kernel is cut, and with what it is launched."""

    blocks: Mapping[str, int]
    """Sizes of a program's piece by the kernel's names for them, powers of two: {"BLOCK_N": 64}."""
    num_warps: int
    num_stages: int


class Problem(NamedTuple):
    """What a kernel is launched for."""

    kernel: str
    """A name of BLOCK_NAMES."""
    sizes: tuple[tuple[str, int], ...]
    traits: tuple[tuple[str, str | int], ...]

    @classmethod
    def of(cls, kernel: str, sizes: Mapping[str, int], traits: Mapping[str, Any]) -> Problem:
        """Dtypes are traits by name, truth by 0 and 1."""
        return cls(kernel, tuple(sizes.items()), tuple((name, _plain(value)) for name, value in traits.items()))

    @property
    def family(self) -> tuple[str, frozenset[tuple[str, str | int]]]:
        """What must be the same for another problem's configuration to be taken."""
        return self.kernel, frozenset(self.traits)

    def distance(self, other: Problem) -> float:
        """Doublings between the sizes of two problems of one family; infinite where they have others."""
        mine, its = dict(self.sizes), dict(other.sizes)
        if mine.keys() != its.keys():
            return float("inf")
        return sum(abs(log2(max(mine[name], 1) / max(its[name], 1))) for name in mine)

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in (*self.sizes, *self.traits))])


class Entry(NamedTuple):
    """One line of a table."""

    problem: Problem
    config: LaunchConfig
    median_us: float
    default_us: float
    """Of what would be launched if it were in no table."""
    triton: str
    """Version of Triton that it was measured with."""


def _plain(value: Any) -> str | int:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else int(value)


def canonical_gpu_name(name: str, *, arch: str = "") -> str:
    """What a table of this GPU is called: "NVIDIA H200" -> "h200", "AMD Instinct MI300X" -> "instinct-mi300x".

    Args:
        arch: Its architecture, which names the table where the name does not say which GPU it is: ROCm calls those that
            it has no name for "AMD Radeon Graphics", or nothing.
    """
    words = re.sub(r"\((R|TM|C)\)", " ", name, flags=re.IGNORECASE)
    found = re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\b(NVIDIA|AMD|Graphics)\b", " ", words).strip().lower()).strip("-")
    return arch or found if found in ("", "radeon") else found


def read_table(path: Path) -> list[Entry]:
    """The entries of a table.

    Raises:
        ConfigError: it cannot be read, or says something that no table says; the message has the entry and the reason.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise _damaged(path, error.strerror or "cannot be read") from None
    except ValueError as error:
        raise _damaged(path, f"is no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("entries"), list):
        raise _damaged(path, f"is no table of format {FORMAT} with a list of entries")
    entries = []
    for number, entry in enumerate(content["entries"]):
        try:
            entries.append(_entry(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise _damaged(path, f"entry {number}: {what}") from None
    return entries


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"table of kernel configurations {path}: {what}; repair it, or delete it and run quire tune anew",
        field="kernel_tables",
    )


def _entry(entry: Mapping[str, Any]) -> Entry:
    kernel, blocks = entry["kernel"], entry["blocks"]
    if kernel not in BLOCK_NAMES:
        raise ValueError(f"no kernel {kernel!r} is tuned; the kernels are {', '.join(BLOCK_NAMES)}")
    if set(blocks) != set(BLOCK_NAMES[kernel]):
        raise ValueError(f"{kernel} has the blocks {', '.join(BLOCK_NAMES[kernel])}, not {', '.join(blocks)}")
    numbers = {**blocks, "num_warps": entry["num_warps"], "num_stages": entry["num_stages"]}
    for name, value in numbers.items():
        limit = _LIMITS.get(name, 1024)
        if type(value) is not int or not 1 <= value <= limit or (name != "num_stages" and value & (value - 1)):
            kind = "a whole number" if name == "num_stages" else "a power of two"
            raise ValueError(f"{name} must be {kind} from 1 to {limit}, is {value!r}")
    for name, size in entry["sizes"].items():
        if type(size) is not int or size < 1:
            raise ValueError(f"size {name} must be a whole number from 1 on, is {size!r}")
    for name, trait in entry["traits"].items():
        if type(trait) not in (int, str):
            raise ValueError(f"trait {name} must be a text or a whole number, is {trait!r}")
    config = LaunchConfig(blocks=dict(blocks), num_warps=entry["num_warps"], num_stages=entry["num_stages"])
    return Entry(
        Problem.of(kernel, entry["sizes"], entry["traits"]), config, float(entry["median_us"]),
        float(entry["default_us"]), str(entry["triton"]),
    )  # fmt: skip


def save(folder: Path, gpu: str, entries: Iterable[Entry], *, dropped: Iterable[Problem] = ()) -> Path:
    """Put entries into a GPU's table, in the place of those of the same problems; the others stay.

    Another process that writes at the same time waits; one that reads sees the table before or after, never a part.

    Args:
        dropped: Problems whose entries, if there are any, are taken out.

    Raises:
        ConfigError: the table that is there cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{gpu}.json"
    with _locked(folder / f".{gpu}.lock"):
        known = {_key(entry.problem): entry for entry in (read_table(path) if path.exists() else [])}
        for problem in dropped:
            known.pop(_key(problem), None)
        known |= {_key(entry.problem): entry for entry in entries}
        lines = [json.dumps(_as_json(known[key])) for key in sorted(known, key=str)]
        text = f'{{"format": {FORMAT}, "gpu": {json.dumps(gpu)}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"
        temporary = path.with_name(f".{gpu}.{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, path)
    return path


def _key(problem: Problem) -> tuple[Any, ...]:
    return problem.kernel, tuple(sorted(problem.traits)), tuple(sorted(problem.sizes))


def _as_json(entry: Entry) -> dict[str, Any]:
    problem, config = entry.problem, entry.config
    return {
        "kernel": problem.kernel, "sizes": dict(problem.sizes), "traits": dict(problem.traits),
        "blocks": dict(config.blocks), "num_warps": config.num_warps, "num_stages": config.num_stages,
        "median_us": round(entry.median_us, 2), "default_us": round(entry.default_us, 2), "triton": entry.triton,
    }  # fmt: skip


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Tables:
    """The tables of a process, looked up by GPU and problem."""

    def __init__(self, *folders: Path) -> None:
        """folders: The first that has a problem wins; none for the committed tables."""
        self._folders = list(folders) or [SHIPPED]
        self._entries: dict[str, list[Entry]] = {}
        self._found: dict[Any, LaunchConfig | None] = {}

    def use(self, folder: Path) -> None:
        """Look into this folder first, from now on.

        Raises:
            ConfigError: there is no such folder, or a table in it cannot be read.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder of tables; quire tune makes one", field="kernel_tables")
        for path in folder.glob("*.json"):
            read_table(path)
        self._folders = [folder, *(other for other in self._folders if other != folder)]
        self._entries.clear()
        self._found.clear()

    def entries(self, gpu: str) -> list[Entry]:
        """Everything known about a GPU, what counts more first."""
        if gpu not in self._entries:
            paths = [folder / f"{gpu}.json" for folder in self._folders]
            self._entries[gpu] = [entry for path in paths if path.exists() for entry in read_table(path)]
        return self._entries[gpu]

    def find(
        self, gpu: str, kernel: str, sizes: Mapping[str, int], traits: Mapping[str, Any], *, exact: bool = False
    ) -> LaunchConfig | None:
        """The configuration of the same problem, else of the nearest one that is not far away, else None.

        Args:
            exact: Only of the same problem.
        """
        if not self.entries(gpu):
            return None
        key = (gpu, kernel, exact, *sizes.values(), *traits.values())
        if key not in self._found:
            wanted = Problem.of(kernel, sizes, traits)
            near = [
                (wanted.distance(entry.problem), number, entry.config)
                for number, entry in enumerate(self.entries(gpu))
                if entry.problem.family == wanted.family
            ]
            distance, _, config = min(near, default=(float("inf"), 0, None))
            self._found[key] = config if distance <= (0 if exact else FARTHEST) else None
        return self._found[key]

    def describe(self, gpu: str) -> str:
        """For the start-up report."""
        entries = self.entries(gpu)
        if not entries:
            return f"from a model of the limits of {gpu}, for which there is no table (quire tune makes one)"
        versions = ", ".join(sorted({entry.triton for entry in entries}))
        return f"{len(entries)} measured on {gpu} with Triton {versions}; the others from a model of its limits"
