"""The one error of this package that no user of a server can cause: calling the cache out of turn."""

from __future__ import annotations

from quire_interfaces import QuireError

__all__ = ["AllocatorMisuseError"]


class AllocatorMisuseError(QuireError):
    """The caller broke the contract of `BlockAllocator` (stale prefix, unknown tokens, negative count).

    Raised before anything is changed. Going on would let two requests write into one block, so this is an error and
    not a None.
    """
