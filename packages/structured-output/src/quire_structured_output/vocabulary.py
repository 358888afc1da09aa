"""`Vocabulary`: what grammar libraries need to know of a tokenizer, read through the `Tokenizer` Protocol."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire_interfaces import ConfigError, Tokenizer

__all__ = ["Vocabulary", "read_vocabulary", "write_vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model as bytes.

    Raises:
        ConfigError: no end token among them, so no output could ever end.
    """

    tokens: tuple[bytes, ...]
    """Per id the bytes it adds to a text; b"" for ids that are no tokens."""
    special_ids: frozenset[int]
    """Control tokens: never part of a text."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output, the usual one first."""
    encode: Callable[[str], list[int]]
    """Text to token ids; what looks like a control token is text like any other."""

    def __post_init__(self) -> None:
        if not self.eos_token_ids or not all(0 <= each < len(self.tokens) for each in self.eos_token_ids):
            raise ConfigError(
                f"structured output needs end tokens with ids below {len(self.tokens)}, got "
                f"{list(self.eos_token_ids)}: add eos_token_id to the checkpoint's config.json"
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids, those that are no tokens included."""
        return len(self.tokens)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, *, vocab_size: int | None = None, eos_token_ids: Iterable[int] | None = None
    ) -> Vocabulary:
        """Read a tokenizer.

        Args:
            tokenizer: Asked for the bytes of each token, once.
            vocab_size: Width of the model's logits; None takes the tokenizer's size.
            eos_token_ids: Tokens that end an output; None takes the tokenizer's.
        """
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        special = {
            token_id
            for token_id, piece in enumerate(tokens)
            if piece and not tokenizer.decode([token_id], skip_special_tokens=True)
        }
        end_ids = tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
        return cls(
            tokens=tuple(tokens),
            special_ids=frozenset(special),
            eos_token_ids=tuple(dict.fromkeys(each for each in end_ids if 0 <= each < size)),
            encode=_PlainEncoder(tokenizer, {token_id: tokens[token_id] for token_id in special}, size),
        )


class _PlainEncoder:
    """Encodes text in which the names of control tokens mean nothing, with tokens that the network has.

    Args:
        tokenizer: Recognizes control tokens, and may have more tokens than the network.
        special: Their ids and bytes.
        size: Number of ids that the network has.
    """

    def __init__(self, tokenizer: Tokenizer, special: dict[int, bytes], size: int) -> None:
        self._tokenizer = tokenizer
        self._special = {token_id: piece.decode("utf-8", "replace") for token_id, piece in special.items()}
        self._size = size

    def __call__(self, text: str) -> list[int]:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if max(token_ids, default=0) >= self._size:
            # Shorter pieces make shorter tokens, which are the earlier ones of a vocabulary.
            half = len(text) // 2
            return self(text[:half]) + self(text[half:]) if half else []
        piece = next((self._special[each] for each in token_ids if each in self._special), None)
        if piece is None or len(piece) < 2 or piece not in text:
            return token_ids
        # Cut after its first character, the name is not recognized any more.
        at = text.index(piece) + 1
        return self(text[:at]) + self(text[at:])


def write_vocabulary(channel: socket.socket, vocabulary: Vocabulary) -> None:
    """Send what a backend needs to know, but for the tokenizer."""
    lengths = struct.pack(f"={len(vocabulary.tokens)}I", *map(len, vocabulary.tokens))
    rest = {"special": sorted(vocabulary.special_ids), "eos": vocabulary.eos_token_ids}
    for part in (lengths, b"".join(vocabulary.tokens), json.dumps(rest).encode()):
        channel.sendall(struct.pack("=Q", len(part)) + part)


def read_vocabulary(channel: socket.socket) -> Vocabulary:
    """What `write_vocabulary` sent. Text is cut into its bytes: only forced tokens depend on a tokenizer's own way, and
    nobody asks for them here."""
    packed, data, rest = (_read_part(channel) for _ in range(3))
    tokens, at = [], 0
    for length in struct.unpack(f"={len(packed) // 4}I", packed):
        tokens.append(data[at : at + length])
        at += length
    known = json.loads(rest)
    single = {piece: token_id for token_id, piece in reversed(list(enumerate(tokens))) if len(piece) == 1}
    return Vocabulary(
        tokens=tuple(tokens),
        special_ids=frozenset(known["special"]),
        eos_token_ids=tuple(known["eos"]),
        encode=lambda text: [single[bytes([byte])] for byte in text.encode() if bytes([byte]) in single],
    )


def _read_part(channel: socket.socket) -> bytes:
    [size] = struct.unpack("=Q", _read(channel, 8))
    return _read(channel, size)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the engine is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
