"""The words in which an output format is declared: a table of named states that one machine runs (output_parser.py).

A state says what may come: text up to one of some markers (`Until`), one of some markers at once (`Expect`), or a value
(`Literal`). A marker says where to go and what it ends (`Go`). A format is data; it has no code of its own.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quire_interfaces import ConfigError
from quire_renderers.literal_relay import JSON, LiteralDialect
from quire_renderers.tag_tree_relay import TagTree

__all__ = [
    "CLOSING_RANKS",
    "CompiledExits",
    "Expect",
    "FormatTable",
    "Go",
    "Literal",
    "Role",
    "Sink",
    "State",
    "Tag",
    "Until",
    "ValueTags",
]


class Sink(enum.Enum):
    """Where text goes."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"
    """The name of a tool."""
    NAME_AGAIN = "name_again"
    """The name of the tool once more."""
    ID = "id"
    """The id of a call."""
    KEY = "key"
    """The name of a parameter."""
    IDENTIFIER = "identifier"
    """The name of a parameter that is a word."""
    VALUE = "value"
    """A parameter's value as plain text; its type is that of the tool's schema."""
    VALUE_TEXT = "value_text"
    """A parameter's value that the format itself says is text."""
    VALUE_JSON = "value_json"
    """A parameter's value that the format itself says is JSON."""


class Role(enum.Enum):
    """What a literal value is."""

    ARGUMENTS = "arguments"
    """All arguments: an object."""
    PARAMETER = "parameter"
    """The value of the parameter just named."""
    IGNORED = "ignored"
    """Something beside the call."""


class Tag(enum.Enum):
    """What a tag does in a call that is written with tags."""

    END = "end"
    """Ends a value."""
    PARAMETER = "parameter"
    """Begins a parameter."""
    CALL = "call"
    """Stands before the name of a tool."""
    CALL_END = "call_end"
    OPENER = "opener"
    """Stands before calls."""
    CLOSER = "closer"
    """Stands behind calls."""


CLOSING_RANKS = {Tag.END: 0, Tag.CALL_END: 1, Tag.CLOSER: 2}
"""Tags that end something, from the inside out."""


class ValueTags:
    """The tags among which a value stands (tagged_values.py).

    Args:
        kinds: Tag -> what it does.
        key_ends: What stands behind the name of a parameter.
        name_ends: What stands behind the name of a tool.
    """

    def __init__(self, kinds: Mapping[str, Tag], key_ends: Iterable[str], name_ends: Iterable[str]) -> None:
        self.kinds = dict(kinds)
        self.key_ends = tuple(key_ends)
        self.name_ends = tuple(name_ends)
        ends = "|".join(map(re.escape, self.key_ends))
        self.key = re.compile(rf"(?P<key>[^\n<>]{{1,256}}?)(?:{ends})")
        self.last_rank = max(CLOSING_RANKS.get(kind, 0) for kind in self.kinds.values())


@dataclass(frozen=True, slots=True)
class Go:
    """What a marker does."""

    state: str
    ends_call: bool = False
    keeps_marker: bool = False
    """The marker is not taken: the next state reads it."""
    commits: bool = False
    """What was read has done its work, whatever comes: it is not given back as text when the next part is wrong. A
    marker inside the thinking that commits to nothing only begins what may be a call."""
    continues: bool = False
    """From one state of a parameter's value to another: the value goes on there."""


Exits = Mapping[str, "Go | str"]


@dataclass(frozen=True, slots=True)
class Until:
    """Text up to one of the markers, of which none may begin another."""

    sink: Sink
    exits: Exits = field(default_factory=dict)
    key: str = ""
    """The parameter that a value is, where the format gives it no name: the only one of its call, whose end may be that
    of the output."""
    tags: ValueTags | None = None
    """Of a value that may hold its own format's tags: what they mean there."""


@dataclass(frozen=True, slots=True)
class Expect:
    """White space, then one of the markers (the longest that fits); else the state `otherwise`, or the call is
    malformed."""

    exits: Exits
    otherwise: str | None = None
    is_whole: bool = False
    """Whether a call that has arguments is whole here when something else follows: only its end is missing."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A value, which ends by itself."""

    role: Role
    then: str
    dialect: LiteralDialect = JSON
    ends_call: bool = False
    tree: TagTree | None = None
    """How arguments are written that are tags named after their parameters."""


State = Until | Expect | Literal


class CompiledExits:
    """Markers made fast: finds the first one in a text, and how much of its end may still become one."""

    __slots__ = ("_first_chars", "_longest", "_pattern", "_prefixes", "begin_lines", "go")

    def __init__(self, exits: Exits) -> None:
        self.go = {marker: Go(go) if isinstance(go, str) else go for marker, go in exits.items()}
        alternatives = "|".join(re.escape(marker) for marker in sorted(self.go, key=len, reverse=True))
        self._pattern = re.compile(alternatives) if self.go else None
        self._prefixes = frozenset(marker[:size] for marker in self.go for size in range(1, len(marker)))
        self._first_chars = frozenset(marker[0] for marker in self.go)
        self._longest = max(map(len, self.go), default=0)
        self.begin_lines = "\n" in self._first_chars
        """Whether one of them stands at the beginning of a line only."""

    def find(self, text: str, *, start: int = 0, final: bool) -> tuple[int, str | None]:
        """(where the first marker stands, the marker), or (how far surely none stands, None)."""
        if self._pattern is None:
            return len(text), None
        match = self._pattern.search(text, start)
        if match is None:
            return len(text) if final else self._held_from(text, start), None
        held = len(text) if final else self._held_from(text, start)
        return (match.start(), match[0]) if match.start() < held else (held, None)

    def at(self, text: str, position: int) -> str | None:
        """The marker at a place."""
        match = self._pattern.match(text, position) if self._pattern is not None else None
        return match[0] if match is not None else None

    def may_begin_at(self, text: str, position: int) -> bool:
        """Whether all text from a place on is the beginning of a marker."""
        return len(text) - position < self._longest and text[position:] in self._prefixes

    def _held_from(self, text: str, start: int) -> int:
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_chars and text[position:] in self._prefixes:
                return position
        return len(text)


class FormatTable:
    """The states of a format, checked and compiled.

    Args:
        states: Name -> state; must hold `start`, `recover` and everything that is gone to.
        start: Where an output begins.
        start_thinking: Where it begins when the prompt has opened the thinking.
        recover: Where to go on after a malformed call.
        recover_thinking: The same inside the thinking, behind a call that stood there.
        known_names_only: Whether a name that no offered tool has makes the call malformed (for formats whose calls
            look like ordinary text).
        name_pattern: What a name looks like: the group `name`, and perhaps a group `id`, with which the whole is the
            call's id.
        strips_newline: Whether a newline right after the beginning and right before the end of a plain-text value
            belongs to the format.
        untyped_values: What values without a schema are: "text", or "json" when they parse as it.

    Raises:
        ConfigError: a state that is missing, or markers that begin one another.
    """

    def __init__(
        self,
        states: Mapping[str, State],
        *,
        start: str = "start",
        start_thinking: str | None = None,
        recover: str = "content",
        recover_thinking: str | None = None,
        known_names_only: bool = False,
        name_pattern: str = r"(?P<name>[\w.:/\-]{1,256})",
        strips_newline: bool = False,
        untyped_values: str = "text",
    ) -> None:
        self.states = dict(states)
        self.start = start
        self.start_thinking = start_thinking
        self.recover = recover
        self.recover_thinking = recover_thinking or recover
        self.known_names_only = known_names_only
        self.name_pattern = re.compile(name_pattern)
        self.strips_newline = strips_newline
        self.untyped_values = untyped_values
        self.exits = {
            name: CompiledExits(state.exits)
            for name, state in self.states.items()
            if isinstance(state, (Until, Expect))
        }
        self._check()
        self.opening = self._opening()

    def _opening(self) -> frozenset[str]:
        """States that an output passes before it thinks, if it does: those that expect markers, up to the thinking."""
        names: set[str] = set()
        reachable = {self.start}
        while reachable - names:
            names |= reachable
            expecting = [self.states[name] for name in names]
            reachable = {
                go.state
                for name, state in zip(names, expecting, strict=True)
                if isinstance(state, Expect)
                for go in self.exits[name].go.values()
                if isinstance(self.states[go.state], Expect)
            }
        return frozenset(name for name in names if self._leads_to_thinking(name, frozenset()))

    def _leads_to_thinking(self, name: str, passed: frozenset[str]) -> bool:
        state = self.states[name]
        if isinstance(state, Until):
            return state.sink is Sink.REASONING
        if not isinstance(state, Expect) or name in passed:
            return False
        return any(self._leads_to_thinking(go.state, passed | {name}) for go in self.exits[name].go.values())

    def is_text(self, name: str) -> bool:
        """Whether what is read in a state is text or reasoning."""
        state = self.states[name]
        return isinstance(state, Until) and state.sink in (Sink.CONTENT, Sink.REASONING)

    @property
    def is_plain(self) -> bool:
        """Whether all output is text."""
        state = self.states[self.start]
        return isinstance(state, Until) and not state.exits and self.start_thinking is None

    def _check(self) -> None:
        targets = {self.start, self.recover, self.recover_thinking, self.start_thinking or self.start}
        for name, state in self.states.items():
            if isinstance(state, Literal):
                targets.add(state.then)
                continue
            if isinstance(state, Expect) and state.otherwise is not None:
                targets.add(state.otherwise)
            exits = self.exits[name].go
            targets |= {go.state for go in exits.values()}
            for marker in exits:
                clash = [other for other in exits if other != marker and other.startswith(marker)]
                if not marker or (isinstance(state, Expect) and marker[0].isspace()):
                    raise ConfigError(f"state {name!r}: the marker {marker!r} is empty or begins with white space")
                if clash and isinstance(state, Until):
                    raise ConfigError(f"state {name!r}: the marker {marker!r} begins {clash}")
        missing = targets - self.states.keys()
        if missing:
            raise ConfigError(f"the format goes to states it does not have: {sorted(missing)}")
        recover = self.states[self.recover]
        if not (isinstance(recover, Until) and recover.sink is Sink.CONTENT):
            raise ConfigError(f"a format must recover in a state of text, {self.recover!r} is none")
