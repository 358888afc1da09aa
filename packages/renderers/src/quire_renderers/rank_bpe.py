"""Byte pair encoding by ranks (tiktoken) as a tokenizer of the library `tokenizers`.

From the ranks follow the merges: all ways to put a token together from two others, in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from quire_interfaces import CheckpointError

__all__ = ["rank_backend"]


def rank_backend(
    path: Path, ranked: Mapping[bytes, int], control: Mapping[str, int], pattern: str
) -> tokenizers.Tokenizer:
    """The tokenizer of such a file.

    Args:
        path: Of the file, for messages.
        ranked: Tokens of texts -> their ids, in the order in which pairs are merged.
        control: Control tokens -> their ids.
        pattern: Regular expression of the words that texts are cut into.

    Raises:
        CheckpointError: The tokens, or the pattern, are none.
    """
    if {bytes([byte]) for byte in range(256)} - ranked.keys():
        raise CheckpointError(f"{path}: the tokens must be different from each other, and each byte be one")
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranked}
    clash = control.keys() & set(names.values())
    if clash:
        raise CheckpointError(f"{path}: {sorted(clash)[0]!r} is a control token and a token of texts, too")
    vocab = dict(control) | {names[token]: token_id for token, token_id in ranked.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, _merges(names), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_pattern(pattern, path), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return backend


def _pattern(pattern: str, path: Path) -> Regex:
    try:
        return Regex(pattern)
    except Exception as error:  # the library has no class of its own for it
        raise CheckpointError(f"{path}: the pattern is no regular expression: {error}") from error


def _merges(names: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Of tokens in the order of their ranks, and how the library spells them."""
    order = {token: rank for rank, token in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for token in names:
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [way for way in ways if way[0] in order and way[1] in order]
        known.sort(key=lambda way: (order[way[0]], order[way[1]]))
        merges.extend((names[left], names[right]) for left, right in known)
    return merges


def _letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's tokenizers: itself if it can be seen, else one above U+00FF."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(seen)]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
