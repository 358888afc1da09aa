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

__all__ = ["MAX_STEP_S", "follow", "probe"]

MAX_STEP_S = 0.004
"""A mask may take so long when its states are known already, in seconds of processor time. Usual ones take a hundredth
of it; whatever they take, everybody else's tokens wait for it."""

_NUM_TOKENS = 24
_LONG_WALK_S = 0.5
_NUM_REPETITIONS = 8
"""A mask that took too long is computed again as often: processor time is charged for what neighbours do as well (cold
caches, a host that takes the processor away), and only the shortest time says what the grammar takes."""


def probe(matcher: GrammarMatcher, vocab_size: int, eos_token_ids: Collection[int], spec: GrammarSpec) -> list[int]:
    """Walk some random tokens into the grammar and back, twice the same way.

    Args:
        matcher: At the beginning; it is there again afterwards.
        vocab_size: Number of token ids.
        eos_token_ids: Where a walk ends.
        spec: For the message.

    Returns:
        The tokens of the walk.

    Raises:
        RequestError: no token can follow at some place, or masks take too long even where the walk has been before.
    """
    words = memoryview(bytearray(-(-vocab_size // 32) * 4)).cast("I")
    slowest_s, walk = _walk(matcher, words, eos_token_ids, spec, _LONG_WALK_S, is_known=False)
    if slowest_s < MAX_STEP_S:
        return walk
    slowest_s, _ = _walk(matcher, words, eos_token_ids, spec, MAX_STEP_S, is_known=True)
    if slowest_s > MAX_STEP_S:
        raise RequestError(
            f"structured_outputs.{spec.kind} is too complex: one step takes {slowest_s * 1000:.0f} ms; the largest "
            f"part is {largest_part(spec)}",
            param=f"structured_outputs.{spec.kind}",
            code="grammar_too_large",
        )
    return walk


def follow(matcher: GrammarMatcher, vocab_size: int, walk: Collection[int]) -> None:
    """Go the way of a walk and back, for what that teaches the lexer.

    Args:
        matcher: At the beginning; it is there again afterwards.
        vocab_size: Number of token ids.
        walk: As `probe` gave it.
    """
    words = memoryview(bytearray(-(-vocab_size // 32) * 4)).cast("I")
    num_accepted = 0
    for token_id in walk:
        matcher.fill_bitmask(words)
        if not matcher.accept(token_id):
            break
        num_accepted += 1
    matcher.rollback(num_accepted)


def _walk(
    matcher: GrammarMatcher,
    words: memoryview,
    eos_token_ids: Collection[int],
    spec: GrammarSpec,
    enough_s: float,
    *,
    is_known: bool,
) -> tuple[float, list[int]]:
    """Go some tokens into the grammar, always the same way, and back. Ends early when steps took long together, or one
    of them took `enough_s`. Where the way `is_known`, slow steps are measured again. The time of the slowest step, and
    the tokens."""
    rng = random.Random(0)
    walk: list[int] = []
    total_s = slowest_s = 0.0
    while len(walk) < _NUM_TOKENS and slowest_s <= enough_s and total_s < _LONG_WALK_S:
        seconds = first_s = _mask_s(matcher, words)
        for _ in range(_NUM_REPETITIONS if is_known else 0):
            if seconds <= MAX_STEP_S:
                break
            seconds = min(seconds, _mask_s(matcher, words))
        total_s, slowest_s = total_s + first_s, max(slowest_s, seconds)
        token_id = _any_token(words, rng)
        if token_id is None:
            raise RequestError(
                f"structured_outputs.{spec.kind} cannot be followed: after {len(walk)} tokens no token of this "
                "model's vocabulary can come next",
                param=f"structured_outputs.{spec.kind}",
                code="invalid_grammar",
            )
        if token_id in eos_token_ids or not matcher.accept(token_id):
            break
        walk.append(token_id)
    matcher.rollback(len(walk))
    return slowest_s, walk


def _mask_s(matcher: GrammarMatcher, words: memoryview) -> float:
    """Processor time that the mask of this place takes, in seconds."""
    start_s = time.thread_time()
    matcher.fill_bitmask(words)
    return time.thread_time() - start_s


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
