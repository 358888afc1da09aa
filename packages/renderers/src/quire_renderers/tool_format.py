"""What a format of tool calls is: names, markers and a table of states. Data; the formats themselves stand in
tool_formats.py and the modules that it joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_renderers.format_families import States
from quire_renderers.format_states import Go

__all__ = ["ToolFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing tool calls."""

    name: str
    models: str
    """Who writes so."""
    content: Mapping[str, Go | str]
    """Markers that begin calls inside the answer's text."""
    states: Callable[[], States]
    """Makes the states behind them; `begin`, if there is one, is where an answer begins. Made for the format that is
    used, not for all of them."""
    recover: str = "after"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `FormatTable`."""
    prefix: str
    """The beginning of a call up to its arguments, with NAME for the tool: what a forced call starts with."""
    suffix: str = ""
    """What stands behind the arguments, for formats whose arguments are one JSON object."""
    trigger: str = ""
    """The text that tells a grammar that a call begins; empty where the arguments are no JSON."""
    call_id: str = "call"
    """How ids are made: "call" (call_ and random), "alnum9" (nine letters or digits), "functions" (the model's)."""
    fingerprints: tuple[tuple[str, ...], ...] = ()
    """Texts that a chat template has all of, for one of the tuples."""
    thinks: bool = False
    """Whether the states also say how thinking is marked."""
