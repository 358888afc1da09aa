"""Passes a value that a model writes (JSON, or a dialect near it) on as JSON, piece by piece.

What has been given out at any time can be closed with a quote and brackets alone (`closers`): keys, commas, escapes,
numbers and words are held back until they are whole. Values are passed on as they are written: numbers digit by digit,
half of a surrogate pair as its escape, which is valid JSON and valid UTF-8. Common slips are repaired while passing:
raw control characters and unknown escapes in strings, trailing commas, Python's spelling of constants; NaN and
Infinity, which JSON has not, become strings. Everything else ends in `failed`; the relay never raises. Knows no
tool-call format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = [
    "GEMMA",
    "GEMMA4",
    "JSON",
    "PYTHON",
    "LiteralDialect",
    "LiteralRelay",
    "json_string",
    "replace_lone_surrogates",
]

_MAX_DEPTH = 64
_MAX_ATOM_CHARS = 4300  # Python's own JSON reader takes no longer whole numbers.
_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ATOM_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._")
_MAX_BARE_KEY_CHARS = 256
_BARE_KEY = re.compile(r"""[^{}\[\],:"'<]*""")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORDS |= {word: f'"{word}"' for word in ("NaN", "Infinity", "-Infinity")}
_encode = json.JSONEncoder(ensure_ascii=False).encode
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>\\u[dD][89a-fA-F]..)|\\.")
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'",
    '"': '"', "\n": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiteralDialect:
    """How values are written."""

    quotes: tuple[str, ...]
    """What strings stand between."""
    brackets: str
    """What opens a container."""
    escapes: str
    """Escapes in strings: "json", "python", or "none"."""
    bare_keys: bool = False
    """Whether the keys of objects are words without quotes."""
    triple_quotes: bool = False


JSON = LiteralDialect(quotes=('"',), brackets="{[", escapes="json")
PYTHON = LiteralDialect(quotes=('"', "'"), brackets="{[(", escapes="python", triple_quotes=True)
GEMMA = LiteralDialect(quotes=("<escape>",), brackets="{[", escapes="none", bare_keys=True)
GEMMA4 = LiteralDialect(quotes=('<|"|>',), brackets="{[", escapes="none", bare_keys=True)

# What stands in a string for itself, in the dialect and in JSON.
_ORDINARY = {
    dialect: re.compile(
        r'[^\\\x00-\x1f\ud800-\udfff"' + re.escape("".join(quote[0] for quote in dialect.quotes)) + "]+"
    )
    for dialect in (JSON, PYTHON, GEMMA, GEMMA4)
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
# Modes
_VALUE, _FIRST, _KEY, _COLON, _COMMA, _STRING, _ATOM, _OPENING, _DONE = range(9)


def json_string(text: str) -> str:
    """Text as a JSON string that can be encoded as UTF-8, whatever stands in it."""
    quoted = _encode(text)
    return quoted if quoted.isascii() else _SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def replace_lone_surrogates(text: str) -> str:
    """JSON with U+FFFD for escapes that are half of a surrogate pair: they are valid JSON, but many strict readers
    refuse a whole document for one. Takes any JSON, also a piece of one that was cut between two escapes."""
    return _ESCAPES.sub(lambda match: "\ufffd" if match["lone"] else match[0], text)


class LiteralRelay:
    """Relays one value.

    Args:
        dialect: How the value is written.
        needs_object: Fail when the value is no object.
        takes_text: With needs_object, take a string for an object written as JSON text.
    """

    def __init__(self, dialect: LiteralDialect = JSON, *, needs_object: bool = False, takes_text: bool = True) -> None:
        self.dialect = dialect
        self.failed = False
        self.has_started = False
        """Whether anything was given out."""
        self._needs_object = needs_object
        self._takes_text = takes_text
        self._mode = _VALUE
        self._stack: list[str] = []
        self._held = ""
        self._atom = ""
        self._is_key = False
        self._after_comma = False
        self._delimiter = ""
        self._escape = ""
        self._surrogate = ""
        self._inner: LiteralRelay | None = None
        self._out: list[str] = []
        self._safe = 0
        self._ordinary = _ORDINARY[dialect]

    @property
    def done(self) -> bool:
        """Whether the value is whole."""
        return self._mode == _DONE

    @property
    def has_begun(self) -> bool:
        """Whether anything but white space was read."""
        return self._mode != _VALUE or bool(self._stack)

    @property
    def closers(self) -> str:
        """What makes valid JSON of all that was given out; empty before anything was."""
        if not self.has_started or self.done:
            return ""
        if self._inner is not None:
            return self._inner.closers
        quote = '"' if self._mode == _STRING and not self._is_key else ""
        return quote + "".join("}" if close == "}" else "]" for close in reversed(self._stack))

    def feed(self, text: str, start: int = 0) -> tuple[str, int, int]:
        """Take in text from `start`.

        Returns:
            What can be given out; where reading stopped (the end of the text, behind the value's end, or at the
            character that is wrong); and up to where the text is represented by what was given out (`start` if nothing
            was).
        """
        self._out, self._safe = [], start
        position = start
        while position < len(text) and not self.failed and self._mode != _DONE:
            position = self._step(text, position)
        if self._out:
            self.has_started = True
        return "".join(self._out), position, self._safe

    def _give(self, text: str, position: int) -> None:
        """Give out what was held, and `text`; everything before `position` is represented by it."""
        self._out.append(self._held + text)
        self._held = ""
        self._safe = position

    def _step(self, text: str, position: int) -> int:
        mode = self._mode
        if mode == _STRING:
            return self._string(text, position)
        if mode == _ATOM:
            return self._read_atom(text, position)
        if mode == _OPENING:
            return self._opening(text, position)
        char = text[position]
        if char in _SPACE:
            self._held += char
            return position + 1
        if mode == _VALUE:
            return self._value(char, position)
        if mode == _COLON:
            if char != ":":
                return self._fail(position)
            self._held += ":"
            self._mode = _VALUE
            return position + 1
        if mode == _COMMA:
            return self._comma(char, position)
        if char == self._stack[-1]:  # _FIRST or _KEY: an end, perhaps behind a trailing comma
            return self._close(position)
        if mode == _FIRST and self._stack[-1] != "}":
            return self._value(char, position)
        return self._key(char, position)

    def _fail(self, position: int) -> int:
        self.failed = True
        return position

    def _value(self, char: str, position: int) -> int:
        dialect = self.dialect
        self._is_key = False
        if char in dialect.brackets:
            self._after_comma = False
            if len(self._stack) >= _MAX_DEPTH or (self._needs_object and not self._stack and char != "{"):
                return self._fail(position)
            if not self._stack:
                self._held = ""  # white space before the value is not its own
            self._stack.append(_CLOSING[char])
            self._mode = _FIRST
            self._give("{" if char == "{" else "[", position + 1)
            return position + 1
        if any(quote[0] == char for quote in dialect.quotes):
            self._mode, self._atom = _OPENING, ""
            return position
        if char in _ATOM_CHARS:
            self._mode, self._atom = _ATOM, ""
            return position
        return self._fail(position)

    def _key(self, char: str, position: int) -> int:
        self._is_key = True
        if any(quote[0] == char for quote in self.dialect.quotes):
            self._mode, self._atom = _OPENING, ""
            return position
        is_bare = self.dialect.bare_keys and _BARE_KEY.fullmatch(char) is not None
        if is_bare or (char in _ATOM_CHARS and self.dialect is not JSON):
            self._mode, self._atom = _ATOM, ""
            return position
        return self._fail(position)

    def _comma(self, char: str, position: int) -> int:
        if char == self._stack[-1]:
            return self._close(position)
        if char != ",":
            return self._fail(position)
        self._held += ","
        self._after_comma = True
        self._mode = _KEY if self._stack[-1] == "}" else _FIRST
        return position + 1

    def _close(self, position: int) -> int:
        if self._after_comma:
            self._held = self._held.replace(",", "", 1)
        closing = self._stack.pop()
        self._after_comma = False
        self._give("}" if closing == "}" else "]", position + 1)
        self._mode = _COMMA if self._stack else _DONE
        return position + 1

    def _opening(self, text: str, position: int) -> int:
        """The delimiter of a string, which may be long."""
        self._atom += text[position]
        dialect, got = self.dialect, self._atom
        if dialect.triple_quotes and len(got) > 1:
            quote = got[0]
            if got == quote * 2:  # an empty string, or two thirds of a triple quote
                return position + 1
            if got == quote * 3:
                self._begin_string(got, position + 1)
                return position + 1
            self._begin_string(quote, position)
            if got[1] == quote:  # it was an empty string, and what comes now is behind it
                self._end_string(position)
                return position
            return self._string(text, position)
        if dialect.triple_quotes:
            return position + 1
        if got in dialect.quotes:
            if self._needs_object and not self._stack:
                return self._begin_inner(position + 1) if self._takes_text else self._fail(position)
            self._begin_string(got, position + 1)
        elif not any(quote.startswith(got) for quote in dialect.quotes):
            return self._fail(position)
        return position + 1

    def _begin_string(self, delimiter: str, position: int) -> None:
        self._mode, self._delimiter, self._atom = _STRING, delimiter, ""
        self._after_comma = False
        if self._is_key:
            self._held += '"'
        else:
            if not self._stack:
                self._held = ""
            self._give('"', position)

    def _end_string(self, position: int) -> None:
        if self._is_key:
            self._held += '"'
            self._mode = _COLON
        else:
            self._give('"', position)
            self._mode = _COMMA if self._stack else _DONE

    def _begin_inner(self, position: int) -> int:
        """Arguments as JSON text in a string: what the string says is the value."""
        self._held = ""
        self._inner = LiteralRelay(JSON, needs_object=True, takes_text=False)
        self._mode, self._delimiter, self._atom, self._is_key = _STRING, '"', "", False
        return position

    def _end_inner(self, position: int) -> int:
        assert self._inner is not None
        if not self._inner.done:
            if self._inner.has_begun:
                return self._fail(position)
            self._out.append("{}")  # an empty string: no arguments
        self._mode = _DONE
        self._safe = position + 1
        return position + 1

    def _string(self, text: str, position: int) -> int:
        if self._escape or self._surrogate:
            return self._read_escape(text, position)
        ordinary = self._ordinary.match(text, position) if not self._atom else None
        if ordinary is not None:
            if self._inner is not None:
                return self._feed_inner(ordinary[0], position)
            self._put(ordinary[0], ordinary[0], ordinary.end())
            return ordinary.end()
        char = text[position]
        if self._delimiter.startswith(self._atom + char):
            self._atom += char
            if self._atom != self._delimiter:
                return position + 1
            self._atom = ""
            if self._inner is not None:
                return self._end_inner(position)
            self._end_string(position + 1)
            return position + 1
        if self._atom:  # the beginning of a delimiter that was none
            begun, self._atom = self._atom, ""
            self._put(begun, json_string(begun)[1:-1], position)
            return position
        if char == "\\" and self.dialect.escapes != "none":
            self._escape = char
            return position + 1
        if self._inner is not None:
            return self._feed_inner(char, position)
        self._put(char, json_string(char)[1:-1], position + 1)
        return position + 1

    def _feed_inner(self, plain: str, begin: int) -> int:
        """Text that stands for itself goes to the inner value; how far that can take it."""
        inner = self._inner
        assert inner is not None
        given, stop, safe = inner.feed(plain)
        if given:
            self._out.append(given)
        if given or safe:
            self._safe = begin + safe
        if inner.done:  # white space may still stand behind the value
            while stop < len(plain) and plain[stop] in _SPACE:
                stop += 1
        self.failed = inner.failed or stop < len(plain)
        return begin + stop

    def _put(self, plain: str, encoded: str, position: int) -> None:
        """Text of a string, as it is meant and as JSON writes it."""
        if self._inner is not None:
            num_given, before = len(self._out), self._safe
            self._feed_inner(plain, 0)
            self._safe = position if len(self._out) > num_given else before
        elif self._is_key:
            self._held += encoded
        else:
            self._give(encoded, position)

    def _read_escape(self, text: str, position: int) -> int:
        """Inside an escape, or behind the first half of a surrogate pair."""
        char = text[position]
        if not self._escape:
            if char == "\\":
                self._escape = char
                return position + 1
            self._flush_surrogate(position)
            return position
        self._escape += char
        kind = self._escape[1]
        if self.dialect.escapes == "python" and kind not in "uUx":
            plain = _PYTHON_ESCAPES.get(kind, self._escape)
            return self._end_escape(plain, None, position + 1)
        length = {"u": 6, "U": 10, "x": 4}.get(kind) if self.dialect.escapes == "python" else {"u": 6}.get(kind)
        if length is None:
            self._flush_surrogate(position)
            if kind in _JSON_ESCAPES:
                return self._end_escape(json.loads(f'"{self._escape}"'), self._escape, position + 1)
            return self._end_escape(self._escape, None, position + 1)
        if len(self._escape) > 2 and char not in "0123456789abcdefABCDEF":
            begun, self._escape = self._escape[:-1], ""
            self._flush_surrogate(position)
            self._put(begun, json_string(begun)[1:-1], position)
            return position
        if len(self._escape) < length:
            return position + 1
        return self._code_point(int(self._escape[2:], 16), position + 1)

    def _code_point(self, code: int, position: int) -> int:
        escape, self._escape = self._escape, ""
        if 0xDC00 <= code < 0xE000 and self._surrogate:
            whole, self._surrogate = self._surrogate + escape, ""
            high = int(whole[2:6], 16)
            plain = chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00))
            self._put(plain, whole, position)
            return position
        self._flush_surrogate(position)
        if 0xD800 <= code < 0xDC00 and len(escape) == 6:
            self._surrogate = escape
        elif 0xD800 <= code < 0xE000:
            self._put(chr(code), f"\\u{code:04x}" if len(escape) > 6 else escape, position)
        elif code > 0x10FFFF:
            self._put("\ufffd", "\ufffd", position)
        else:
            plain = chr(code)
            encoded = escape if self.dialect.escapes == "json" else json_string(plain)[1:-1]
            self._put(plain, encoded, position)
        return position

    def _end_escape(self, plain: str, encoded: str | None, position: int) -> int:
        self._escape = ""
        self._flush_surrogate(position)
        self._put(plain, json_string(plain)[1:-1] if encoded is None else encoded, position)
        return position

    def _flush_surrogate(self, position: int) -> None:
        """Half of a pair alone is no character, but JSON can say it."""
        if self._surrogate:
            escape, self._surrogate = self._surrogate, ""
            self._put(chr(int(escape[2:], 16)), escape, position)

    def _read_atom(self, text: str, position: int) -> int:
        """A number or a word, known to be whole only by what follows."""
        if self._is_key and self.dialect.bare_keys:
            return self._read_bare_key(text, position)
        begin, limit = position, position + _MAX_ATOM_CHARS - len(self._atom)
        while position < len(text) and text[position] in _ATOM_CHARS:
            if position == limit:
                return self._fail(position)
            position += 1
        self._atom += text[begin:position]
        if position < len(text):
            self._end_atom(position)
        return position

    def _read_bare_key(self, text: str, position: int) -> int:
        """A key without quotes, up to the colon."""
        limit = position + _MAX_BARE_KEY_CHARS - len(self._atom)
        match = _BARE_KEY.match(text, position)
        end = match.end() if match is not None else position
        if end > limit:
            return self._fail(limit)
        self._atom += text[position:end]
        if end < len(text):
            self._end_atom(end)
        return end

    def _end_atom(self, position: int) -> None:
        atom, self._atom = self._atom, ""
        if self._is_key:
            if not self.dialect.bare_keys and not _NUMBER.fullmatch(atom):
                self._fail(position)
            self._after_comma = False
            self._held += json_string(atom.rstrip(_SPACE))
            self._mode = _COLON
            return
        written = _WORDS.get(atom)
        if written is None:
            cleaned = atom.replace("_", "").removeprefix("+") if self.dialect is PYTHON else atom
            written = cleaned if _NUMBER.fullmatch(cleaned) else None
        if written is None or (self._needs_object and not self._stack and written != "null"):
            self._fail(position)
            return
        if self._needs_object and not self._stack:
            written = "{}"
        if not self._stack:
            self._held = ""
        self._after_comma = False
        self._give(written, position)
        self._mode = _COMMA if self._stack else _DONE

    def finish(self) -> str:
        """No more text: a number, a word or an empty string at the top is whole now. Returns what it adds."""
        self._out = []
        if not self._stack and not self.failed:
            if self._mode == _ATOM:
                self._end_atom(0)
            elif self._mode == _OPENING and len(self._atom) == 2 and self.dialect.triple_quotes:
                self._begin_string(self._atom[0], 0)
                self._end_string(0)
        if self._out:
            self.has_started = True
        return "".join(self._out)
