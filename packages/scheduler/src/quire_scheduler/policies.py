"""Orders of requests: who is admitted first, and (from the other end) who is preempted first.

A policy knows one request at a time. Ties are broken by the scheduler in the order of `add_request`.
"""

from __future__ import annotations

from quire_interfaces import Request

__all__ = ["FCFSPolicy", "PriorityPolicy"]


class FCFSPolicy:
    """First come, first served."""

    def sort_key(self, request: Request) -> tuple[float, ...]:
        """By arrival."""
        return (request.arrival_time_s,)


class PriorityPolicy:
    """Lower `priority` first; equal ones in order of arrival."""

    def sort_key(self, request: Request) -> tuple[float, ...]:
        """By priority, then by arrival."""
        return (request.options.priority, request.arrival_time_s)
