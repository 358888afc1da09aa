"""A tokenizer.tok.json, xAI's own file of a tokenizer (Grok 2), as a tokenizer of the library `tokenizers`.

The file has the bytes and the id of each token: ids of regular tokens are the order in which pairs are merged. Its
special tokens are matched wherever a text holds them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from quire_interfaces import CheckpointError
from quire_renderers.rank_bpe import rank_backend

__all__ = ["GROK_NAMED", "GROK_TURN_END", "grok_backend"]

GROK_TURN_END = "<|separator|>"
"""Ends each turn of a conversation, the model's answers too."""
GROK_NAMED = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_PATTERNS = {
    "V1": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
}
"""Name of a way to cut texts into words (`word_split`) -> its regular expression."""


def grok_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.tok.json. Nothing comes around a text.

    Raises:
        CheckpointError: The file is not understood.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be an object with regular_tokens and special_tokens")
    regular, special = (_tokens(content, name, path) for name in ("regular_tokens", "special_tokens"))
    if clash := set(regular.values()) & set(special.values()):
        raise CheckpointError(f"{path}: the id {min(clash)} is that of a regular and of a special token")
    try:
        control = {token.decode(): token_id for token, token_id in special.items()}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: a special token is no text in UTF-8: {error}") from error
    if missing := {GROK_TURN_END, GROK_NAMED["eos_token"]} - control.keys():
        raise CheckpointError(f"{path}: special_tokens must hold {' and '.join(sorted(missing))}")
    pattern, split = content.get("pat_str"), content.get("word_split")
    if pattern is None:
        pattern = _PATTERNS.get(split) if isinstance(split, str) else None
    if not isinstance(pattern, str):
        raise CheckpointError(
            f"{path}: word_split must be {' or '.join(_PATTERNS)} where pat_str is no regular expression, is {split!r}"
        )
    return rank_backend(path, regular, control, pattern)


def _tokens(content: dict[str, Any], name: str, path: Path) -> dict[bytes, int]:
    """The tokens of a list -> their ids, in the order of these."""
    try:
        pairs = sorted((int(entry["token"]), bytes(entry["bytes"])) for entry in content[name])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} must have bytes and a token, its id, each: {error!r}") from error
    found = {token: token_id for token_id, token in pairs}
    if len(found) != len(pairs) or len(set(found.values())) != len(pairs) or (pairs and pairs[0][0] < 0):
        raise CheckpointError(f"{path}: {name} must have different tokens with different ids from 0 on")
    return found
