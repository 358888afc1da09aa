"""Prompt-lookup drafting: when the last tokens occurred before, propose what followed them then.

The idea is Saxena's prompt lookup decoding (2023): summaries, edits and code repeat their input, so the text itself is
the draft model. Knows token ids only; no tensors, no state between calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_interfaces import ConfigError

__all__ = ["NgramDrafter"]

_WIDTH = array("i").itemsize


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
        """See `quire_interfaces.Drafter`.

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
        text = _as_bytes(token_ids)
        # Where a longer suffix occurs, the shorter one does too: each search goes on where the last one stopped.
        follows = None
        end = length - 1
        for n in range(self.min_n, min(self.max_n, length - 1) + 1):
            at = _last_match(text, n, end)
            if at is None:
                break
            follows = end = at
        if follows is None:
            return []
        period = length - follows
        return [int(token_ids[follows + i % period]) for i in range(max_tokens)]


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        return array("i", token_ids).tobytes()
    return view.tobytes() if view.format == "i" else array("i", view.tolist()).tobytes()


def _last_match(text: bytes, n: int, end: int) -> int | None:
    """Where the last occurrence of the last n tokens that ends at or before token `end` ends; None if there is none."""
    suffix = text[len(text) - n * _WIDTH :]
    end *= _WIDTH
    while (at := text.rfind(suffix, 0, end)) >= 0:
        if at % _WIDTH == 0:
            return at // _WIDTH + n
        end = at + len(suffix) - 1  # found across token borders: look further left
    return None
