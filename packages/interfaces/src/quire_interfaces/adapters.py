"""Seams of adapters: who keeps them, as the engine and the scheduler see it. Free of tensors.

A *version* names the content of an adapter: a name may stand for another version later.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AdapterInfo", "AdapterStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter."""

    name: str
    """What requests choose it by."""
    path: str
    """Where it was read from, as given."""
    version: str
    rank: int = 0
    """Largest rank of its layers."""
    num_bytes: int = 0
    """In host memory."""


class AdapterStore(Protocol):
    """Adapters by name and version. Thread-safe; nothing here waits for files."""

    def load(self, name: str, path: str, *, replace: bool = False) -> Future[AdapterInfo]:
        """Read an adapter and give it a name.

        Args:
            replace: Another adapter of this name gives way: requests that come from then on get the new one.

        Raises:
            RequestError: (by the future) the name is taken.
            CheckpointError: (by the future) the files are missing, broken, or do not fit the network.
        """

    def unload(self, name: str) -> None:
        """Forget a name; requests that have the adapter keep it until they end.

        Raises:
            ModelNotFoundError: there is none.
        """

    def loaded(self) -> list[AdapterInfo]:
        """Every named adapter."""

    def resolve(self, name: str) -> str:
        """The version that the name stands for now.

        Raises:
            ModelNotFoundError: no adapter has this name.
        """

    def hold(self, version: str) -> None:
        """Somebody needs this version: keep it until as many calls of `drop`."""

    def drop(self, version: str) -> None:
        """The opposite of `hold`."""

    def fetch(self, version: str) -> Future[None]:
        """Done once the version is in host memory, where it stays while it is held; the future raises why it cannot."""

    def close(self) -> None:
        """Stop reading. Idempotent."""
