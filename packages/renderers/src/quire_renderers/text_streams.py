"""Token by token to text: the two ways of decoding a growing output.

`PieceStream` joins bytes and is exact; it serves every tokenizer with a table of pieces. `WindowStream` decodes a short
window again and again, for tokenizers whose decoder does not work by joining. Neither knows stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from quire_interfaces import Tokenizer
from quire_renderers.token_pieces import LeadingSpace, TokenPieces

__all__ = ["PieceStream", "TextStream", "WindowStream"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """Text of one output as it grows."""

    def push(self, token_id: int) -> str:
        """Characters that this token finishes."""

    def flush(self) -> str:
        """The rest: an unfinished character becomes U+FFFD."""


class PieceStream:
    """Joins the pieces of a table.

    Args:
        pieces: The tokenizer's table.
        skip_special_tokens: Leave special tokens out.
        at_start: Whether the output starts a text (else it continues one, and its first space is kept).
    """

    __slots__ = ("_at_start", "_decoder", "_pending", "_pieces", "_size", "_skip", "_table")

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._pieces = pieces
        self._table = pieces.table(skip_special_tokens=skip_special_tokens)
        self._size = len(self._table)
        self._skip = skip_special_tokens
        self._decoder = _Utf8Decoder("replace")
        self._pending = False
        self._at_start = at_start and pieces.leading_space is not LeadingSpace.KEEP

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._size:
            return ""
        piece = self._table[token_id]
        if self._at_start:
            return self._push_first(token_id, piece)
        if not self._pending and type(piece) is str:
            return piece
        return self._decode(piece)

    def flush(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", True)

    def _decode(self, piece: str | bytes) -> str:
        if not piece:
            return ""
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        waiting = self._decoder.getstate()[0]
        if len(waiting) == 2 and waiting[0] == 0xED and waiting[1] >= 0xA0:
            # Half of a UTF-16 pair can never become a character, but CPython's decoder waits for its third byte.
            text += self._decoder.decode(b"", True)
            waiting = b""
        self._pending = bool(waiting)
        return text

    def _push_first(self, token_id: int, piece: str | bytes) -> str:
        """Until the first visible text has come: drop the space that encoding adds."""
        if self._pieces.leading_space is LeadingSpace.STRIP_FIRST_TOKEN:
            if not self._pieces.is_visible(token_id, skip_special_tokens=self._skip):
                return ""
            self._at_start = False
            return self._decode((self._pieces.first_pieces or {}).get(token_id, piece))
        if not piece:
            return ""
        self._at_start = False
        text = self._decode(piece)
        return text[1:] if text.startswith(" ") else text


class WindowStream:
    """Decodes the last few tokens again with each new one and gives out the difference.

    A window starts at a token where text was complete, so that a decoder that treats the first token of a text in a
    special way sees the same first token in both decodings.
    """

    # A run of invalid bytes never completes: after this many tokens it is given out as it decodes.
    _MAX_PENDING_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-self._MAX_PENDING_TOKENS :])
        self._read = len(self._token_ids)

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        before, now = self._decode_window()
        held_back = now.endswith("\ufffd") and len(self._token_ids) - self._read < self._MAX_PENDING_TOKENS
        if now == before:  # adds nothing: forget it, so that the window stays short
            del self._token_ids[-1]
        if held_back or len(now) <= len(before):
            return ""
        self._advance()
        return now[len(before) :]

    def flush(self) -> str:
        before, now = self._decode_window()
        self._advance()
        return now[len(before) :]

    def _decode_window(self) -> tuple[str, str]:
        return self._decode(self._token_ids[: self._read]), self._decode(self._token_ids)

    def _advance(self) -> None:
        self._token_ids = self._token_ids[self._read :]
        self._read = len(self._token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
