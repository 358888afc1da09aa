"""`AdapterStore`: adapters by name and version, read beside the engine's loop and kept in host memory.

A *version* is the hash of an adapter's files: the same name may stand for another version later, while requests that
began with the former one keep it. Knows files and bookkeeping; does not know slots in use, rows or requests beyond that
somebody holds a version.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quire_interfaces import AdapterInfo, CheckpointError, ModelNotFoundError, RequestError
from quire_lora.adapter import Adapter
from quire_lora.peft import WEIGHTS, Rename, read_adapter
from quire_lora.slots import AdapterSlots

__all__ = ["AdapterStore"]

_PAUSE_S = 0.001
"""Between two pieces of an adapter. A thread that computes keeps the interpreter for 5 ms at a time, and a step asks
for it several times: without pauses requests would wait for as long as many steps take."""


@dataclass(slots=True, eq=False)
class _Version:
    folder: Path
    adapter: Adapter | None = None
    """None while it is not in host memory."""
    num_holds: int = 0
    reading: Future[None] | None = None


class AdapterStore:
    """Implements `quire_interfaces.AdapterStore`. Thread-safe.

    Args:
        slots: The network's layers, which adapters have to fit.
        rename: How the network calls what its checkpoint brings.
        max_adapters: Most adapters in host memory, those that are held aside.
        resolve: What was given as an adapter's place -> its folder.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        rename: Rename,
        *,
        max_adapters: int,
        resolve: Callable[[str], Path] = Path,
    ) -> None:
        self._slots, self._rename, self._resolve = slots, rename, resolve
        self._max_adapters = max_adapters
        self._lock = threading.RLock()
        self._named: dict[str, AdapterInfo] = {}
        self._versions: OrderedDict[str, _Version] = OrderedDict()
        """The least recently used first."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")
        self.num_loads_total = 0
        """Adapters read from files."""

    # By name.

    def load(self, name: str, path: str, *, replace: bool = False) -> Future[AdapterInfo]:
        """Read an adapter's files beside the loop and name it. The future raises RequestError and CheckpointError."""
        return self._reader.submit(self._load, name, path, replace)

    def _load(self, name: str, path: str, replace: bool) -> AdapterInfo:
        with self._lock:
            known = self._named.get(name)
        if known is not None and not replace:
            raise RequestError(
                f"an adapter {name!r} is loaded already (from {known.path!r}); unload it, or set load_inplace to put "
                "another in its place",
                param="lora_name",
                code="adapter_exists",
            )
        folder = self._resolve(path)
        version = _version_of(folder)
        with self._lock:
            entry = self._versions.get(version)
            adapter = None if entry is None else entry.adapter
        if adapter is None:
            adapter = self._read(folder)
        info = AdapterInfo(name=name, path=path, version=version, rank=adapter.rank, num_bytes=adapter.num_bytes)
        with self._lock:
            entry = self._versions.setdefault(version, _Version(folder))
            entry.folder, entry.adapter = folder, adapter
            self._named[name] = info
            self._versions.move_to_end(version)
            self._drop_unused(keep=version)
        return info

    def unload(self, name: str) -> None:
        """Take a name away; requests that hold its version go on. Raises ModelNotFoundError."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise ModelNotFoundError(f"no adapter {name!r} is loaded; loaded: {self._names()}")
            self._drop_unused()

    def loaded(self) -> list[AdapterInfo]:
        """Adapters that have a name now."""
        with self._lock:
            return list(self._named.values())

    def resolve(self, name: str) -> str:
        """The version that a name stands for now. Raises ModelNotFoundError."""
        with self._lock:
            info = self._named.get(name)
            if info is None:
                raise ModelNotFoundError(f"no adapter {name!r} is loaded; loaded: {self._names()}")
            return info.version

    def _names(self) -> str:
        return ", ".join(map(repr, self._named)) or "none"

    # By version.

    def hold(self, version: str) -> None:
        """Keep a version until `drop` has been called as often as this."""
        with self._lock:
            self._versions[version].num_holds += 1

    def drop(self, version: str) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._versions[version].num_holds -= 1
            self._drop_unused()

    def fetch(self, version: str) -> Future[None]:
        """Read a version that is held into host memory, if it is not there. The future raises RequestError."""
        with self._lock:
            entry = self._versions[version]
            self._versions.move_to_end(version)
            if entry.reading is None or (entry.adapter is None and entry.reading.done()):
                if entry.adapter is None:
                    entry.reading = self._reader.submit(self._read_again, version)
                else:
                    entry.reading = Future()
                    entry.reading.set_result(None)
            return entry.reading

    def adapter(self, version: str) -> Adapter:
        """The adapter, which must be in host memory."""
        with self._lock:
            entry = self._versions.get(version)
        if entry is None or entry.adapter is None:
            raise RuntimeError(f"adapter version {version[:12]} is not in host memory")
        return entry.adapter

    def folder(self, version: str) -> Path:
        """Where the files of a version were."""
        with self._lock:
            return self._versions[version].folder

    @property
    def num_in_memory(self) -> int:
        """Adapters in host memory."""
        with self._lock:
            return sum(entry.adapter is not None for entry in self._versions.values())

    def leave_network(self) -> None:
        """Let go of the network, which is to leave memory; reading raises RequestError until `join_network`."""
        slots = AdapterSlots(0, 0, self._slots.dtype, self._slots.device)
        slots.is_elsewhere = _refuse_module
        self.join_network(slots, lambda name, tensor: [(name, tensor)])

    def join_network(self, slots: AdapterSlots, rename: Rename) -> None:
        """Read adapters for another build of the same network. Arguments as those of the store."""
        self._slots, self._rename = slots, rename

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, folder: Path) -> Adapter:
        self.num_loads_total += 1
        with torch.inference_mode():
            return read_adapter(folder, self._slots, self._rename, pause=lambda: time.sleep(_PAUSE_S))

    def _read_again(self, version: str) -> None:
        with self._lock:
            folder = self._versions[version].folder
        if _version_of(folder) != version:
            raise RequestError(
                f"the files of the adapter in {str(folder)!r} have changed since it was loaded; load it again with "
                "load_inplace",
                param="model",
                code="adapter_changed",
            )
        adapter = self._read(folder)
        with self._lock:
            self._versions[version].adapter = adapter
            self._drop_unused(keep=version)

    def _drop_unused(self, keep: str | None = None) -> None:
        """Forget versions that nobody holds: those without a name altogether, then from memory the least recently used
        beyond the bound."""
        named = {info.version for info in self._named.values()}
        for version, entry in list(self._versions.items()):
            if entry.num_holds == 0 and version not in named:
                del self._versions[version]
        in_memory = [version for version, entry in self._versions.items() if entry.adapter is not None]
        for version in in_memory[: max(0, len(in_memory) - self._max_adapters)]:
            if self._versions[version].num_holds == 0 and version != keep:
                self._versions[version].adapter = None


def _refuse_module(name: str) -> bool:
    raise RequestError("the engine sleeps without its weights: wake it first", code="sleeping")


def _version_of(folder: Path) -> str:
    """Hash of the files that make the adapter."""
    digest = hashlib.sha256()
    for name in ("adapter_config.json", WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise CheckpointError(
                f"{str(folder)!r} is no adapter in PEFT's format: {name} cannot be read ({error.strerror or error})"
            ) from None
    return digest.hexdigest()
