"""A recording as a tree: functions of Quire, what they called, the operators of torch in them, and their times.

What a network's layers cost, whose trace has too many events to be read. Knows events of PyTorch's profiler only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["layer_tree"]

MAX_CHILDREN = 40
"""Of one function that are shown, those that take longest."""
_OWN = re.compile(r"(?:.*[/\\])?(quire[\w.]*[/\\].*)")
"""Python functions of Quire: what stands before the package is of this host."""


@dataclass(slots=True)
class _Node:
    """All calls of one function by the same caller."""

    num_calls: int = 0
    total_ns: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def layer_tree(events: Iterable[Any]) -> str:
    """The tree as text: total time, time outside of what is shown below it, calls, name.

    Args:
        events: Roots of `experimental_event_tree()`, of a recording with stacks.
    """
    root = _Node()
    waiting = [(event, root) for event in events]
    while waiting:
        event, parent = waiting.pop()
        kind = str(event.tag)
        own = _OWN.fullmatch(event.name) if kind.endswith("PyCall") else None
        is_operator = kind.endswith("TorchOp")
        node = parent
        if own is not None or is_operator:
            node = parent.children.setdefault(own[1] if own is not None else event.name, _Node())
            node.num_calls += 1
            node.total_ns += event.duration_time_ns
        if not is_operator:  # what an operator calls in turn is in the table of operators
            waiting += [(child, node) for child in event.children]
    lines = ["  total ms    self ms    calls  function or operator"]
    _write(root, 0, lines)
    return "\n".join(lines) + "\n"


def _write(parent: _Node, depth: int, lines: list[str]) -> None:
    longest = sorted(parent.children.items(), key=lambda item: -item[1].total_ns)
    for name, node in longest[:MAX_CHILDREN]:
        self_ns = node.total_ns - sum(child.total_ns for child in node.children.values())
        lines.append(f"{node.total_ns / 1e6:10.3f} {self_ns / 1e6:10.3f} {node.num_calls:8d}  {'  ' * depth}{name}")
        _write(node, depth + 1, lines)
    if len(longest) > MAX_CHILDREN:
        rest_ns = sum(node.total_ns for _, node in longest[MAX_CHILDREN:])
        lines.append(f"{rest_ns / 1e6:10.3f} {'':10} {'':8}  {'  ' * depth}({len(longest) - MAX_CHILDREN} more)")
