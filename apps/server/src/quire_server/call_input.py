"""The text of a custom tool's call, out of the arguments that the model writes: a JSON object with the key `input`.

The text is given out while it comes, with escapes and surrogate pairs whole. Models that call the parameter something
else, or write the text alone, are understood at the end of the call.
"""

from __future__ import annotations

import json
import re

from quire_server.client_tools import INPUT

__all__ = ["CallInput", "input_of"]

_HEAD = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:\s*(\S)', re.DOTALL)
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


def input_of(arguments: str) -> str:
    """The text of a whole call."""
    reading = CallInput()
    return reading.feed(arguments) + reading.finish()


class CallInput:
    """Reads the arguments of one call.

    Args:
        key: What the text stands under.
    """

    def __init__(self, key: str = INPUT) -> None:
        self._key = key
        self._raw = ""
        self._place: int | None = None
        """Of what is not given out yet; None until the text has begun."""
        self._is_other = False
        self._is_over = False

    def feed(self, piece: str) -> str:
        """More of the arguments; the text in it that is certain."""
        self._raw += piece
        if self._place is None and not self._is_other:
            self._look_at_head()
        if self._place is None or self._is_over:
            return ""
        return self._text()

    def finish(self) -> str:
        """What is left of the text when there are no more arguments."""
        if self._place is not None:
            return ""
        try:
            value = json.loads(self._raw)
        except (ValueError, RecursionError):
            return self._raw
        if isinstance(value, dict):
            text = (
                value.get(self._key)
                if self._key in value
                else next(iter(value.values()), "")
                if len(value) < 2
                else None
            )
            value = text
        return _plain(value) if isinstance(value, str) else self._raw

    def _look_at_head(self) -> None:
        head = _HEAD.match(self._raw)
        if head is None:
            return
        if head[1] == self._key and head[2] == '"':
            self._raw, self._place = self._raw[head.end() :], 0
        else:
            self._is_other = True

    def _text(self) -> str:
        raw, place, parts = self._raw, 0, []
        while place < len(raw):
            plain = _PLAIN.match(raw, place)
            assert plain is not None
            parts.append(plain[0])
            place = plain.end()
            if place == len(raw):
                break
            if raw[place] == '"':
                self._is_over = True
                break
            piece, place_after = _escaped(raw, place)
            if piece is None:
                break
            parts.append(piece)
            place = place_after
        self._raw = "" if self._is_over else raw[place:]
        return "".join(parts)


def _escaped(raw: str, place: int) -> tuple[str | None, int]:
    """The characters of the escape at this place and where it ends; None for one that is not there as a whole."""
    match = _ESCAPE.match(raw, place)
    if match is None:
        is_short = len(raw) - place < 6
        return (None, place) if is_short else (raw[place : place + 2], place + 2)
    if match[0][1] != "u":
        try:
            return json.loads(f'"{match[0]}"'), match.end()
        except ValueError:
            return match[0], match.end()
    code = int(match[0][2:], 16)
    if code in _HIGH:
        rest = raw[match.end() : match.end() + 6]
        if len(rest) < 6 and "\\u".startswith(rest[:2]) and '"' not in rest:
            return None, place
        low = _ESCAPE.match(rest)
        if low is not None and low[0][1] == "u" and int(low[0][2:], 16) in _LOW:
            pair = 0x10000 + ((code - 0xD800) << 10) + (int(low[0][2:], 16) - 0xDC00)
            return chr(pair), match.end() + 6
    return _plain(chr(code)), match.end()


def _plain(text: str) -> str:
    """Without halves of surrogate pairs, which no encoding has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
