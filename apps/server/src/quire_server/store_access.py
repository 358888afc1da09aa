"""How routes reach a store: in threads of its own, within a time, and with one answer to whatever goes wrong in it.

A store may be full, locked, broken, or somebody else's code. What it raises is logged when it begins to fail, not with
each request, and becomes a `StoreFailedError` that shows nothing of it to clients. Knows no store's methods.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from quire_interfaces import ConfigError
from quire_server.errors import HTTPError

__all__ = ["StoreAccess", "StoreFailedError"]

TIMEOUT_S = 20.0
"""A store that takes longer has failed. Longer than SQLite waits for another server."""
_NUM_THREADS = 4

_logger = logging.getLogger(__name__)


class Closeable(Protocol):
    def close(self) -> None: ...


Store = TypeVar("Store", bound=Closeable)
Result = TypeVar("Result")


class StoreFailedError(HTTPError):
    """A store could not do what it was asked, and nobody knows whether it did a part of it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            503,
            f"the store of {what} failed, the server's log says why; send the request again later, or one that needs "
            "nothing that is stored",
            code="store_failed",
        )


class StoreAccess(Generic[Store]):
    """One store, opened when it is first needed, and again after it could not be opened.

    Args:
        what: What it keeps, in the plural.
        make: Opens it.
    """

    def __init__(self, what: str, make: Callable[[], Store | None]) -> None:
        self._what = what
        self._make = make
        self._store: Store | None = None
        self._opening = threading.Lock()
        self._fails = False
        # Threads of its own: those that wait for a locked file keep nobody else from a thread.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"store-of-{what}")

    async def ask(self, work: Callable[[Store], Result]) -> Result:
        """Run this with the store.

        Raises:
            StoreFailedError: it failed, or took too long.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        except Exception as error:
            if not self._fails:
                _logger.error("the store of %s fails: %s", self._what, error or type(error).__name__, exc_info=error)
            self._fails = True
            raise StoreFailedError(self._what) from None
        if self._fails:
            _logger.warning("the store of %s works again", self._what)
        self._fails = False
        return result

    def _run(self, work: Callable[[Store], Result]) -> Result:
        with self._opening:
            if self._store is None:
                self._store = self._make()
            if self._store is None:
                raise ConfigError(f"no store of {self._what} was made", field="response_store")
        return work(self._store)
