"""The text each token stands for, as one table, so that decoding is joining.

Knows how the decoders of the `tokenizers` library turn token strings into bytes (byte-level: the GPT-2 byte alphabet;
byte fallback: `<0xNN>` tokens; metaspace: U+2581 for a space). Does not know stop strings or requests.

Invalid UTF-8 becomes U+FFFD by the rule of the Unicode standard (one per maximal subpart, section 3.9), the same as
`bytes.decode("utf-8", "replace")`, whatever the tokenizer's kind: only then can text be given out as it comes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LeadingSpace", "TokenPieces", "pieces_from_decoder"]

SPACE_MARK = "\u2581"


class LeadingSpace(enum.Enum):
    """What the decoder does with the space that encoding put before the first word."""

    KEEP = "keep"
    STRIP_ONE = "strip one"
    """One leading space of the whole text is dropped."""
    STRIP_FIRST_TOKEN = "strip first token"
    """The first token loses its spaces that were written as U+2581."""


@dataclass(slots=True)
class TokenPieces:
    """Per token id what it adds to the text.

    A piece is `str` when the token is valid UTF-8 on its own, else `bytes`.
    """

    pieces: list[str | bytes]
    special_token_ids: frozenset[int]
    leading_space: LeadingSpace = LeadingSpace.KEEP
    first_pieces: dict[int, str] | None = None
    """With STRIP_FIRST_TOKEN: ids whose piece differs at the start of a text."""
    visible_pieces: list[str | bytes] | None = None
    """`pieces` with special tokens as "": what is shown when special tokens are skipped."""

    def __post_init__(self) -> None:
        visible = list(self.pieces)
        for token_id in self.special_token_ids:
            if token_id < len(visible):
                visible[token_id] = ""
        self.visible_pieces = visible

    def table(self, *, skip_special_tokens: bool) -> list[str | bytes]:
        """The list to index with a token id (ids outside it add nothing)."""
        if skip_special_tokens and self.visible_pieces is not None:
            return self.visible_pieces
        return self.pieces

    def piece_bytes(self, token_id: int) -> bytes:
        """Bytes the token adds inside a text; empty outside the vocabulary."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        piece = self.pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def is_visible(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether the decoder sees the token at all."""
        inside = 0 <= token_id < len(self.pieces)
        return inside and not (skip_special_tokens and token_id in self.special_token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole token sequence."""
        table = self.table(skip_special_tokens=skip_special_tokens)
        size = len(table)
        parts = [table[i] for i in token_ids if 0 <= i < size]
        if self.leading_space is LeadingSpace.STRIP_FIRST_TOKEN and self.first_pieces:
            self._strip_first(parts, token_ids, skip_special_tokens)
        if all(isinstance(part, str) for part in parts):
            text = "".join(parts)  # type: ignore[arg-type]
        else:
            joined = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
            text = joined.decode("utf-8", "replace")
        if self.leading_space is LeadingSpace.STRIP_ONE and text.startswith(" "):
            return text[1:]
        return text

    def _strip_first(self, parts: list[str | bytes], token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        assert self.first_pieces is not None
        inside = [i for i in token_ids if 0 <= i < len(self.pieces)]
        for position, token_id in enumerate(inside):
            if self.is_visible(token_id, skip_special_tokens=skip_special_tokens):
                parts[position] = self.first_pieces.get(token_id, parts[position])
                return


def pieces_from_decoder(
    tokens: Sequence[str | None], special_token_ids: Iterable[int], decoder: dict[str, Any] | None
) -> TokenPieces | None:
    """Build the table for a decoder as tokenizer.json describes it.

    Args:
        tokens: Token string per id, None for holes.
        special_token_ids: Ids that skip_special_tokens leaves out.
        decoder: The `decoder` object of tokenizer.json.

    Returns:
        None when the decoder is one whose text cannot be had by joining (WordPiece, CTC, unknown ones).
    """
    steps = _flatten(decoder)
    special = frozenset(special_token_ids)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return TokenPieces([_byte_level_piece(token) for token in tokens], special)
    if [step.get("type") for step in steps] == ["Metaspace"]:
        return _metaspace_pieces(tokens, special, steps[0])
    return _replacing_pieces(tokens, special, steps)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """The GPT-2 byte alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def _piece(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level_piece(token: str | None) -> str | bytes:
    if token is None:
        return ""
    try:
        return _piece(bytes([_BYTE_OF_CHAR[char] for char in token]))
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token


def byte_fallback_value(token: str) -> int | None:
    """The byte of a `<0xNN>` token, None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _metaspace_pieces(tokens: Sequence[str | None], special: frozenset[int], step: dict[str, Any]) -> TokenPieces:
    mark = step.get("replacement", SPACE_MARK)
    pieces: list[str | bytes] = [(token or "").replace(mark, " ") for token in tokens]
    if step.get("prepend_scheme", "always") == "never":
        return TokenPieces(pieces, special)
    first = {i: token.replace(mark, "") for i, token in enumerate(tokens) if token and mark in token}
    return TokenPieces(pieces, special, LeadingSpace.STRIP_FIRST_TOKEN, first)


def _replacing_pieces(
    tokens: Sequence[str | None], special: frozenset[int], steps: list[dict[str, Any]]
) -> TokenPieces | None:
    """Decoders in the manner of Llama 2: replace, byte fallback, fuse, strip one space."""
    replacements: list[tuple[str, str]] = []
    bytes_fall_back = fused = False
    leading = LeadingSpace.KEEP
    for step in steps:
        kind = step.get("type")
        pattern = step.get("pattern", {})
        if kind == "Replace" and isinstance(pattern, dict) and "String" in pattern and not bytes_fall_back:
            replacements.append((pattern["String"], step.get("content", "")))
        elif kind == "ByteFallback":
            bytes_fall_back = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and _strips_one_leading_space(step):
            leading = LeadingSpace.STRIP_ONE
        else:
            return None
    if not fused:
        return None
    return TokenPieces([_replaced(token, replacements, bytes_fall_back) for token in tokens], special, leading)


def _strips_one_leading_space(step: dict[str, Any]) -> bool:
    return bool(step.get("content") == " " and step.get("start") == 1 and step.get("stop") == 0)


def _replaced(token: str | None, replacements: list[tuple[str, str]], bytes_fall_back: bool) -> str | bytes:
    if token is None:
        return ""
    for old, new in replacements:
        token = token.replace(old, new)
    byte = byte_fallback_value(token) if bytes_fall_back else None
    return token if byte is None else _piece(bytes([byte]))
