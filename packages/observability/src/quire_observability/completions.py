"""`CompletionGroups`: which completions were asked for together (n), and how long the longest of them became.

An engine runs the n completions of a prompt as requests of their own; only who hears of all of them can say what the
prompt as a whole took.
"""

from __future__ import annotations

from quire_observability.request_log import RequestTimes

__all__ = ["CompletionGroups"]


class _Group:
    """The completions of one prompt."""

    __slots__ = ("client_request_id", "max_num_tokens", "num_running", "num_to_come")

    def __init__(self, client_request_id: str | None, num_completions: int) -> None:
        self.client_request_id = client_request_id
        self.num_to_come = num_completions
        self.num_running = 0
        self.max_num_tokens = 0


class CompletionGroups:
    """Completions in flight that were asked for together. They are added one right after the other."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        """Request id of a completion in flight -> its group."""
        self._last: _Group | None = None

    def added(self, metrics: RequestTimes) -> None:
        """A completion of several was handed to an engine."""
        group = self._last
        if group is None or group.num_to_come == 0 or group.client_request_id != metrics.client_request_id:
            if group is not None:
                group.num_to_come = 0  # the rest was not sent
            group = self._last = _Group(metrics.client_request_id, metrics.n)
        group.num_to_come -= 1
        group.num_running += 1
        self._groups[metrics.request_id] = group

    def ended(self, metrics: RequestTimes) -> int | None:
        """A completion of several ended, or was refused.

        Returns:
            Number of tokens of the longest of them if it was the last one of its prompt, else None.
        """
        group = self._groups.pop(metrics.request_id, None)
        if group is None:
            return None
        group.num_running -= 1
        group.max_num_tokens = max(group.max_num_tokens, metrics.num_generation_tokens)
        return None if group.num_running or group.num_to_come else group.max_num_tokens
