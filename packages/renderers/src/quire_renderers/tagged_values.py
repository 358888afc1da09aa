"""Where a value ends that stands between tags, when it may hold the same tags and its own end may be missing.

A value ends at its own tag when structure of the call follows (the next parameter, the call's end, the output's end),
or at the next structure without it. What is nested in it (another call, a parameter that the tool does not have) is
text, and so is an end tag that ordinary text follows. Where that leaves no end at all, the first place that could have
been one is it. What is not decided yet is held back, and nothing else. Knows the tags of a format, and no parser.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire_renderers.format_states import CLOSING_RANKS, CompiledExits, Tag, ValueTags

__all__ = ["TaggedValue"]

_GAP = re.compile(r"\s{0,1000}")
_SPACE = re.compile(r"\s{0,100}")
_OPENED_BY = {Tag.END: Tag.PARAMETER, Tag.CALL_END: Tag.CALL, Tag.CLOSER: Tag.OPENER}
"""What a closing tag closes."""
_NAME = re.compile(r"\s{0,100}(?P<name>[\w.:/\-]{0,256})\s{0,100}")
_KEY = re.compile(r"[^\n<>]{0,256}")


class _Verdict(enum.Enum):
    """What a tag inside a value is."""

    END = enum.auto()
    TEXT = enum.auto()
    MAYBE = enum.auto()
    """The end, if no other is found."""
    MAYBE_LINE = enum.auto()
    """The same, and it looks like one: it is a line of its own."""
    WAIT = enum.auto()
    """More text will tell."""


@dataclass(slots=True)
class _Candidate:
    position: int
    """In the whole value."""
    marker: str
    is_line: bool


class TaggedValue:
    """Finds the end of one value.

    Args:
        tags: The format's.
        exits: The tags as markers.
        has_parameter: Whether the tool being called may have a parameter of this name.
        has_tool: Whether there is a tool of this name.

    Attributes:
        in_doubt: Whether the end that was found is only the likeliest, in an output that may have been cut inside the
            value.
    """

    def __init__(
        self,
        tags: ValueTags,
        exits: CompiledExits,
        has_parameter: Callable[[str], bool],
        has_tool: Callable[[str], bool],
    ) -> None:
        self._tags = tags
        self._exits = exits
        self._has_parameter = has_parameter
        self._has_tool = has_tool
        self.in_doubt = False
        self._position = 0
        self._num_dropped = 0
        self._stack: list[Tag] = []
        self._first: _Candidate | None = None
        """The first tag that may be the end."""
        self._first_line: _Candidate | None = None
        self._next_call: _Candidate | None = None
        """The first call of a tool inside the value, on a line of its own."""
        self._follows_newline = False

    def find(self, text: str, *, final: bool, stopped: bool = False) -> tuple[int, str | None]:
        """(where the value ends, the tag that ends it), or (up to where the text surely belongs to it, None).

        Args:
            text: All of the value but what was found to belong to it, which is left out the next time.
            final: No more will come.
            stopped: The model ended the output by itself.
        """
        while True:
            position, marker = self._exits.find(text, start=self._position, final=final)
            self._position = position
            if marker is None:
                break
            verdict = self._judge(text, position, marker, final=final)
            if verdict is _Verdict.END:
                return position, marker
            if verdict is _Verdict.WAIT:
                break
            if verdict is not _Verdict.TEXT:
                self._remember(_Candidate(self._num_dropped + position, marker, verdict is _Verdict.MAYBE_LINE))
            self._position = position + len(marker)
        if final:
            return self._likeliest_end(text, stopped=stopped)
        safe = self._position
        for candidate in (self._first, self._next_call):
            if candidate is not None:
                safe = min(safe, candidate.position - self._num_dropped)
        if safe:
            self._follows_newline = text[safe - 1] == "\n"
            self._position -= safe
            self._num_dropped += safe
        return safe, None

    def _remember(self, candidate: _Candidate) -> None:
        self._first = self._first or candidate
        if candidate.is_line:
            self._first_line = self._first_line or candidate

    def _likeliest_end(self, text: str, *, stopped: bool) -> tuple[int, str | None]:
        end = self._first_line or self._first
        call = self._next_call if stopped or not self._stack else None
        if call is not None and (end is None or call.position < end.position):
            end = call
        if end is None:
            return len(text), None
        is_call_end = end.is_line and self._tags.kinds[end.marker] in (Tag.CALL_END, Tag.CLOSER)
        self.in_doubt = not stopped and not is_call_end
        return end.position - self._num_dropped, end.marker

    def _is_line_begin(self, text: str, position: int) -> bool:
        """Whether a line begins there: models do not indent the tags of a call."""
        return text[position - 1] == "\n" if position else self._follows_newline

    # Judging a tag.

    def _judge(self, text: str, position: int, marker: str, *, final: bool) -> _Verdict:
        kind, behind = self._tags.kinds[marker], position + len(marker)
        if kind is Tag.PARAMETER:
            return self._parameter(text, behind, final=final)
        if kind in (Tag.OPENER, Tag.CALL):
            return self._nested_call(text, position, marker, kind, final=final)
        opened, verdict = _OPENED_BY[kind], None
        if opened not in self._stack or (kind is Tag.END and Tag.CALL not in self._stack):
            # Its own end, perhaps: what seemed to be nested was only spoken of, if the call goes on behind it.
            verdict = self._closing(text, position, behind, kind, final=final)
        if opened in self._stack and verdict not in (_Verdict.END, _Verdict.WAIT):
            while self._stack.pop() is not opened:
                pass
            return _Verdict.TEXT
        return verdict or _Verdict.TEXT

    def _parameter(self, text: str, behind: int, *, final: bool) -> _Verdict:
        """The beginning of the next parameter ends a value that has no end of its own."""
        key = self._key(text, behind, final=final)
        if key is None:
            return _Verdict.WAIT
        if key and not self._stack and self._has_parameter(key):
            return _Verdict.END
        if key:
            self._stack.append(Tag.PARAMETER)
        return _Verdict.TEXT

    def _key(self, text: str, behind: int, *, final: bool) -> str | None:
        """The name of a parameter that stands at a place; empty when none does, None when one may."""
        whole = self._tags.key.match(text, behind)
        if whole is not None:
            return whole["key"].strip()
        begun = _KEY.match(text, behind)
        assert begun is not None
        places = [place for place in range(behind, min(begun.end() + 1, len(text))) if len(text) - place <= 100]
        ends = (end.startswith(text[place : place + 100]) for end in self._tags.key_ends for place in places)
        may_come = begun.end() == len(text) or any(ends)
        return None if may_come and not final and len(begun[0]) < 256 else ""

    def _nested_call(self, text: str, position: int, marker: str, kind: Tag, *, final: bool) -> _Verdict:
        name = self._name_of_call(text, position, marker, final=final)
        if name is None:
            return _Verdict.WAIT
        is_next = name and self._has_tool(name) and not self._stack and self._is_line_begin(text, position)
        if is_next and self._next_call is None:
            self._next_call = _Candidate(self._num_dropped + position, marker, is_line=True)
        self._stack.append(kind)
        return _Verdict.TEXT

    def _name_of_call(self, text: str, position: int, marker: str, *, final: bool) -> str | None:
        """The name of the tool in a call that begins at a place; empty when none begins there, None when it may."""
        position += len(marker)
        while self._tags.kinds[marker] is Tag.OPENER:
            space = _SPACE.match(text, position)
            position = space.end() if space is not None else position
            if not final and (position == len(text) or self._exits.may_begin_at(text, position)):
                return None
            inner = self._exits.at(text, position)
            if inner is None or self._tags.kinds[inner] not in (Tag.OPENER, Tag.CALL):
                return ""
            marker, position = inner, position + len(inner)
        name = _NAME.match(text, position)
        assert name is not None
        rest = text[name.end() : name.end() + 100]
        if any(rest.startswith(end) for end in self._tags.name_ends):
            return name["name"]
        is_cut = not final and len(name[0]) < 256 and any(end.startswith(rest) for end in self._tags.name_ends)
        return None if is_cut else ""

    def _closing(self, text: str, position: int, behind: int, kind: Tag, *, final: bool) -> _Verdict:
        """An end tag, by what follows it: the other tags that end the call, from the inside out, and then?"""
        rank = first = CLOSING_RANKS[kind]
        is_line = self._is_line_begin(text, position)
        while True:
            gap = _GAP.match(text, behind)
            assert gap is not None
            behind, ends_line = gap.end(), "\n" in gap[0]
            if first == 0 and rank > 0 and (ends_line or rank == self._tags.last_rank):
                return _Verdict.END
            if behind == len(text) and final:
                is_end = first == 0 or is_line or rank == self._tags.last_rank
                return _Verdict.END if is_end else _Verdict.MAYBE
            if not final and (behind == len(text) or self._exits.may_begin_at(text, behind)):
                return _Verdict.WAIT
            marker = self._exits.at(text, behind)
            next_kind = self._tags.kinds[marker] if marker is not None else None
            if marker is None or next_kind is None:
                break
            if next_kind in (Tag.PARAMETER, Tag.OPENER, Tag.CALL):
                goes_on = self._goes_on(text, behind, marker, rank, final=final)
                if goes_on is None:
                    return _Verdict.WAIT
                if goes_on:
                    return _Verdict.END
                break
            if next_kind is not Tag.CLOSER and CLOSING_RANKS[next_kind] <= rank:
                break
            rank, behind = CLOSING_RANKS[next_kind], behind + len(marker)
        return _Verdict.MAYBE_LINE if is_line and ends_line else _Verdict.MAYBE

    def _goes_on(self, text: str, position: int, marker: str, rank: int, *, final: bool) -> bool | None:
        """Whether the next parameter or call stands at a place behind end tags; None while that is not known."""
        if self._tags.kinds[marker] is not Tag.PARAMETER:
            name = self._name_of_call(text, position, marker, final=final)
            return None if name is None else bool(name)
        if rank > 0:
            return False
        key = self._key(text, position + len(marker), final=final)
        return None if key is None else bool(key) and (not self._stack or self._has_parameter(key))
