"""What a parsed model output consists of: text, reasoning and tool calls, as events and as a whole.

A whole message is the fold of its events (`MessageBuilder`); there is no second way to parse. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "MessageBuilder",
    "OutputEvent",
    "ParsedCall",
    "ParsedMessage",
    "ReasoningDelta",
    "fold_events",
    "merge_events",
]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its name is whole."""

    index: int
    """0 for the first call of the message."""
    name: str
    id: str | None = None
    """The id the model wrote, in formats that have one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. All of a call's pieces joined are one JSON object once its CallEnd has come; before,
    they can always be closed with a quote and brackets alone."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is over."""

    index: int
    complete: bool
    """False when the output ended or went wrong inside the arguments: they are valid JSON, but not all that was
    meant."""


OutputEvent = ContentDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class ParsedCall:
    """One whole tool call."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    complete: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """One whole output."""

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls and all of them are whole."""
        return bool(self.calls) and all(call.complete for call in self.calls)


class MessageBuilder:
    """Folds events into a message, piece by piece."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._complete: set[int] = set()

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Take in more events, in order."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self._text.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case CallStart():
                    self._calls.append((event, []))
                case CallArguments(index, json):
                    self._calls[index][1].append(json)
                case CallEnd(index, complete):
                    if complete:
                        self._complete.add(index)

    def message(self) -> ParsedMessage:
        """The message so far."""
        calls = [
            ParsedCall(start.name, "".join(parts), start.id, start.index in self._complete)
            for start, parts in self._calls
        ]
        return ParsedMessage("".join(self._text), "".join(self._reasoning), calls)


def fold_events(events: Iterable[OutputEvent]) -> ParsedMessage:
    """The whole message of a finished list of events."""
    builder = MessageBuilder()
    builder.add(events)
    return builder.message()


def merge_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The same events with neighbours of one kind joined: equal for every way the text was cut."""
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            merged[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            merged[-1] = CallArguments(event.index, last.json + event.json)
        else:
            merged.append(event)
    return merged
