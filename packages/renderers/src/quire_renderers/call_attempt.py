"""`CallAttempt`: what begins like a call inside the thinking, until it is known whether it is one. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallAttempt"]


@dataclass(slots=True)
class CallAttempt:
    """What begins like a call inside the thinking."""

    state: str
    """Where it began."""
    marker: str
    """With what it began."""
    parts: list[str]
    """All text from the marker on."""
    space: str
    """White space before the marker."""
    is_fresh: bool
    num_calls: int
    num_events: int
    """Events that were there before it: the others are kept back."""
    begin: int
    """Where its marker begins in the text that was fed."""
