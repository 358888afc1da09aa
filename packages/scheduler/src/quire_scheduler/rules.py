"""Admission rules: one object per resource that a waiting request needs before it may run.

The token budget and the KV blocks are not rules: a request takes a share of them in every step, so the loop itself
deals with both. What is taken once, at admission, and given back when the row is left, is a rule.
"""

from __future__ import annotations

from collections import OrderedDict

from quire_interfaces import ConfigError, Request
from quire_scheduler.rows import RowPool

__all__ = ["FreeRowRule", "MaxRunningPerTenantRule", "SharedPromptRule"]

_NUM_COMPUTED_GROUPS = 64


class FreeRowRule:
    """A free row of the runner; always the first rule of a scheduler.

    Args:
        rows: The pool; the scheduler itself takes and gives back the rows, as it needs their numbers.
    """

    name = "max_num_seqs"
    holds_queue = True

    def __init__(self, rows: RowPool) -> None:
        self._rows = rows

    def admits(self, request: Request) -> bool:
        """Whether any row is free."""
        return self._rows.num_free > 0

    def admitted(self, request: Request) -> None:
        """Nothing to do: the scheduler took the row."""

    def released(self, request: Request) -> None:
        """Nothing to do: the scheduler gave the row back."""


class MaxRunningPerTenantRule:
    """Each tenant may hold at most so many rows; requests of other tenants pass. No tenant is a tenant too.

    Args:
        max_running: Rows per tenant, at least 1.

    Raises:
        ConfigError: `max_running` is below 1.
    """

    name = "tenant_share"
    holds_queue = False

    def __init__(self, max_running: int) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {max_running!r}", field="max_running")
        self._max_running = max_running
        self._num_running: dict[str | None, int] = {}

    def admits(self, request: Request) -> bool:
        """Whether the tenant holds fewer rows than it may."""
        return self._num_running.get(request.options.tenant, 0) < self._max_running

    def admitted(self, request: Request) -> None:
        """Count the row."""
        self._num_running[request.options.tenant] = self._num_running.get(request.options.tenant, 0) + 1

    def released(self, request: Request) -> None:
        """Forget the row, and the tenant with its last row (tenants come and go)."""
        left = self._num_running[request.options.tenant] - 1
        if left:
            self._num_running[request.options.tenant] = left
        else:
            del self._num_running[request.options.tenant]


class SharedPromptRule:
    """Of requests with the same prompt (`Request.prompt_group`) the first one computes it, and the others wait until
    its blocks are in the prefix cache, instead of computing the same beside it. For caches that share prefixes."""

    name = "shared_prompt"
    holds_queue = False

    def __init__(self) -> None:
        self._computing: dict[str, Request] = {}
        self._computed: OrderedDict[str, None] = OrderedDict()
        """Groups whose prompt was computed, the latest ones: forgetting one costs waiting once more, nothing else."""

    def admits(self, request: Request) -> bool:
        """Whether nobody of the group is busy with the prompt. A first token says that it is done."""
        group = request.prompt_group
        if group is None or group in self._computed:
            return True
        first = self._computing.get(group)
        return first is None or bool(first.output_token_ids)

    def admitted(self, request: Request) -> None:
        """The first of its group is who computes."""
        if request.prompt_group is not None:
            self._computing.setdefault(request.prompt_group, request)

    def released(self, request: Request) -> None:
        """The first has left: with a token it has done its work, without one the next in line does it."""
        group = request.prompt_group
        if group is None or self._computing.get(group) is not request:
            return
        del self._computing[group]
        if request.output_token_ids:
            self._computed[group] = None
            if len(self._computed) > _NUM_COMPUTED_GROUPS:
                self._computed.popitem(last=False)
