"""Prompt-lookup drafting: when the last tokens occurred before, propose what followed them then.

The idea is Saxena's prompt lookup decoding (2023): summaries, edits and code repeat their input, so the text itself is
the draft model. Knows token ids only; no tensors, no state between calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire_interfaces import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["NgramDrafter"]

_BLOCK = 32_768
"""Tokens that are looked at together."""


class NgramDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the longest matching suffix.

    The longest suffix (from `max_n` down to `min_n` tokens) is the most specific evidence. Among its occurrences the
    most recent one is taken: it is the likeliest to share the present context (the same loop, the same list). When
    the copied text runs into the end of the sequence, copying goes on with what was just proposed, as in LZ77, so a
    repeating pattern is drafted in full length.

    Args:
        min_n: Shortest suffix that counts as a match, at least 1.
        max_n: Longest suffix tried.

    Raises:
        ConfigError: when the two are not 1 <= min_n <= max_n.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"n-gram lengths must satisfy 1 <= min_n <= max_n, got min_n={min_n}, max_n={max_n}")
        self.min_n = min_n
        self.max_n = max_n

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Copy what followed the last tokens when they occurred before.

        Args:
            token_ids: The sequence so far, ids below 2**31. An `array("i")` (or anything else with a buffer of
                32-bit integers, such as `numpy` of an int32 tensor) is searched without converting it first.
            max_tokens: Most tokens to propose.

        Returns:
            Exactly `max_tokens` tokens if an earlier match exists, else none.
        """
        length = len(token_ids)
        if max_tokens < 1 or length <= self.min_n:
            return []
        longest = min(self.max_n, length - 1)
        follows = _last_longest_match(_as_array(token_ids), token_ids[-longest:], self.min_n)
        if follows is None:
            return []
        period = length - follows
        return [int(token_ids[follows + i % period]) for i in range(max_tokens)]


def _as_array(token_ids: Sequence[int]) -> npt.NDArray[np.signedinteger]:
    import numpy as np  # here, so that who only reads the configuration starts without it

    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        view = memoryview(array("i", token_ids))
    return np.asarray(view)


def _last_longest_match(text: npt.NDArray[np.signedinteger], suffix: Sequence[int], match_len: int) -> int | None:
    """Where the last occurrence of the longest part of `suffix` ends; None if none of `match_len` tokens occurs.

    Compares a block of places at a time with one token after the other, from the end of the text on. Where a longer
    part occurs, the shorter one does too: further right than the last match there is nothing to look for.
    """
    follows = None
    for stop in range(len(text) - 1, 0, -_BLOCK):
        start, depth = max(stop - _BLOCK, 0), 1
        same = text[start:stop] == suffix[-1]
        while match_len <= len(suffix):
            first = max(start, match_len - 1)
            if first >= stop:
                break
            same, start = same[first - start : stop - start], first
            for i in range(depth, match_len):
                same &= text[start - i : stop - i] == suffix[-1 - i]
            place, depth = same.tobytes().rfind(1), match_len
            if place < 0:
                break
            stop = start + place
            follows = stop + 1
            while match_len < len(suffix) and stop >= match_len and text[stop - match_len] == suffix[-1 - match_len]:
                match_len += 1
            match_len += 1
        if match_len > len(suffix):
            break
    return follows
