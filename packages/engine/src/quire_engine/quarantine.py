"""Finding the request that makes a step raise: groups of suspects, halved until one stands alone.

Knows request ids and token positions; runs nothing itself. A step that raised is discarded and its requests are
computed again, so a suspect is cleared when a later step has brought it as far as the failed one would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire_interfaces import SchedulerOutput

__all__ = ["Quarantine"]


class Quarantine:
    """The requests of failed steps, in groups that are tried apart from each other and from everybody else."""

    def __init__(self) -> None:
        self._groups: deque[list[str]] = deque()
        self._targets: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def group(self) -> frozenset[str]:
        """The group to try next."""
        return frozenset(self._groups[0])

    @property
    def suspects(self) -> frozenset[str]:
        """All requests in quarantine."""
        return frozenset(self._targets)

    def step_failed(self, output: SchedulerOutput) -> str | None:
        """A step raised: split its requests into two groups, or name the one that was alone in it.

        Returns:
            The culprit's id (no longer in quarantine), or None when there are several suspects.
        """
        request_ids = list(output.request_ids)
        if len(request_ids) == 1:
            self.clear(request_ids)
            return request_ids[0]
        for entry, request_id in enumerate(request_ids):
            num_drafts = len(output.draft_token_ids.get(output.rows[entry], ()))
            end = output.num_computed_tokens[entry] + output.num_scheduled_tokens[entry] - num_drafts
            self._targets[request_id] = max(end, self._targets.get(request_id, 0))
        self._remove(set(request_ids))
        middle = len(request_ids) // 2
        self._groups.appendleft(request_ids[middle:])
        self._groups.appendleft(request_ids[:middle])
        return None

    def step_succeeded(self, output: SchedulerOutput) -> None:
        """Clear the suspects that came as far as their failed step would have brought them."""
        targets = self._targets
        cleared = [
            request_id
            for entry, request_id in enumerate(output.request_ids)
            if request_id in targets
            and output.num_computed_tokens[entry] + output.num_scheduled_tokens[entry] >= targets[request_id]
        ]
        self.clear(cleared)

    def clear(self, request_ids: Iterable[str]) -> None:
        """These are no longer suspected (cleared, finished, aborted)."""
        cleared = {request_id for request_id in request_ids if self._targets.pop(request_id, None) is not None}
        if cleared:
            self._remove(cleared)

    def _remove(self, request_ids: set[str]) -> None:
        groups = ([each for each in group if each not in request_ids] for group in self._groups)
        self._groups = deque(group for group in groups if group)
