"""A trial walk through a grammar that was just compiled, so that the first outputs do not pay for what it finds.

Lexers are built while they are used: a walk fills their tables with the states that any output begins with. And a
grammar whose every step is slow is found here, off the engine's loop, before it slows down anybody else's tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection

from quire_interfaces import GrammarMatcher, GrammarSpec, RequestError
from quire_structured_output.blame import largest_part

__all__ = ["MAX_STEP_S", "probe"]

MAX_STEP_S = 0.02
"""A mask may take so long when its states are known already, in seconds."""

_NUM_TOKENS = 24
_NUM_WALKS = 2


def probe(matcher: GrammarMatcher, vocab_size: int, eos_token_ids: Collection[int], spec: GrammarSpec) -> None:
    """Walk some random tokens into the grammar and back, twice the same way.

    Args:
        matcher: At the beginning; it is there again afterwards.
        vocab_size: Number of token ids.
        eos_token_ids: Where a walk ends.
        spec: For the message.

    Raises:
        RequestError: no token can follow at some place, or masks take too long even where the walk has been before.
    """
    words = memoryview(bytearray(-(-vocab_size // 32) * 4)).cast("I")
    slowest_s = 0.0
    for walk in range(_NUM_WALKS):
        rng = random.Random(0)
        num_accepted = 0
        slowest_s = 0.0
        for _ in range(_NUM_TOKENS):
            start_s = time.perf_counter()
            matcher.fill_bitmask(words)
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
            token_id = _any_token(words, rng)
            if token_id is None:
                raise RequestError(
                    f"structured_outputs.{spec.kind} cannot be followed: after {num_accepted} tokens no token of this "
                    "model's vocabulary can come next",
                    param=f"structured_outputs.{spec.kind}",
                    code="invalid_grammar",
                )
            if token_id in eos_token_ids or not matcher.accept(token_id):
                break
            num_accepted += 1
        matcher.rollback(num_accepted)
        if walk == 0 and slowest_s < MAX_STEP_S:
            return
    if slowest_s > MAX_STEP_S:
        raise RequestError(
            f"structured_outputs.{spec.kind} is too complex: one step takes {slowest_s * 1000:.0f} ms; the largest "
            f"part is {largest_part(spec)}",
            param=f"structured_outputs.{spec.kind}",
            code="grammar_too_large",
        )


def _any_token(words: memoryview, rng: random.Random) -> int | None:
    """A token whose bit is set, from a random place on; None when there is none."""
    num_words = len(words)
    begin = rng.randrange(num_words)
    for place in range(num_words):
        index = (begin + place) % num_words
        word = words[index]
        if word:
            bits = [bit for bit in range(32) if word >> bit & 1]
            return index * 32 + rng.choice(bits)
    return None
