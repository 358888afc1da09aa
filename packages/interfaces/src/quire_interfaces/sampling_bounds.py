"""How much a request may put into the lists of its sampling parameters.

Lists are tokenized, checked, sent to the engine and laid out as tensors between two steps, while all other requests
wait: these bounds keep that within milliseconds. They are far above what clients send. Ranges of single values are the
business of `sampling_params.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Sized
from operator import attrgetter
from typing import Any

from quire_interfaces.errors import RequestError

__all__ = [
    "MAX_BAD_WORD_TOKENS",
    "MAX_CHARS",
    "MAX_ITEMS",
    "MAX_TOKEN_ID",
    "are_biases",
    "are_token_ids",
    "check_bounds",
]

MAX_ITEMS: dict[str, int] = {
    "stop": 256,
    "stop_token_ids": 1024,
    "bad_words": 1024,
    "bad_words_token_ids": 1 << 14,
    "dry_sequence_breakers": 1024,
    "logit_bias": 1 << 15,
    "allowed_token_ids": 1 << 18,
}
"""Most entries of a list."""
MAX_CHARS: dict[str, int] = {"stop": 1 << 14, "bad_words": 1 << 16, "dry_sequence_breakers": 1 << 14}
"""Most characters of all texts of a list together."""
MAX_BAD_WORD_TOKENS = 64
"""Most tokens of one bad word."""
MAX_TOKEN_ID = 2**31


_lists = attrgetter(*MAX_ITEMS)
_NO_LISTS = ((), (), (), (), ("\n", ":", '"', "*"), None, None)
"""What almost every request has; a test holds it to the fields' defaults."""


def check_bounds(params: Any) -> None:
    """Have no list of some sampling parameters exceed its bounds.

    Raises:
        RequestError: One does; the message says how many entries or characters are allowed.
    """
    lists: tuple[Sized | None, ...] = _lists(params)
    if lists == _NO_LISTS:
        return
    for (name, most), values in zip(MAX_ITEMS.items(), lists, strict=True):
        if values is not None and len(values) > most:
            raise RequestError(f"{name} holds {len(values)} entries, at most {most} are allowed", param=name)
    for name, most in MAX_CHARS.items():
        num_chars = sum(len(text) for text in getattr(params, name) if isinstance(text, str))
        if num_chars > most:
            raise RequestError(f"{name} holds {num_chars} characters in all, at most {most} are allowed", param=name)
    longest = max((len(word) for word in params.bad_words_token_ids if isinstance(word, Sized)), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words_token_ids holds a sequence of {longest} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
            param="bad_words_token_ids",
        )


def are_token_ids(ids: Sequence[Any] | Mapping[Any, Any]) -> bool:
    """Whether all of them are whole numbers from 0 to `MAX_TOKEN_ID`: quickly, without naming a wrong one."""
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID)


def are_biases(values: Collection[Any]) -> bool:
    """Whether all values are numbers from -100 to 100: quickly, without naming a wrong one."""
    if not set(map(type, values)) <= {int, float}:
        return False
    return not values or (min(values) >= -100 and max(values) <= 100 and math.isfinite(sum(values)))
