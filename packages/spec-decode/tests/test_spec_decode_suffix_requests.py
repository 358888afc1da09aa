"""The suffix drafter under many requests at once, begun, continued, cancelled and forgotten in any order."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire_spec_decode import SuffixDrafter
from quire_spec_decode.suffix import NUM_PLACES

DEPTH = 6
MAX_REQUESTS = 3
tokens = st.lists(st.integers(0, 2), max_size=10)
keys = st.integers(0, 3)
salts = st.sampled_from([None, "a"])


def occurrences(text: list[int], suffix: list[int], end: int) -> tuple[int, list[int]]:
    """The longest tail of `suffix` that ends before `end` in the text, at least two tokens, and where it ends, the most
    recent of the places of its last pair first."""
    places = [at for at in range(2, len(text) + 1) if text[at - 2 : at] == suffix[-2:]][-NUM_PLACES:]
    lengths = {}
    for at in places:
        if at < end:
            length = 0
            while length < min(len(suffix), at) and text[at - 1 - length] == suffix[-1 - length]:
                length += 1
            lengths[at] = length
    longest = max(lengths.values(), default=0)
    return longest, [at for at in reversed(places) if lengths.get(at) == longest]


def continuation(text: list[int], ends: list[int], limit: int, *, copies: bool) -> list[int]:
    """What a majority follows with, the most recent of equals; a text that copies itself goes on where it ends."""
    text, drafts, share = list(text), list[int](), 1.0
    while ends and len(drafts) < limit:
        following = [text[at] if at < len(text) else -1 for at in ends]
        best = max(following, key=following.count)
        share *= following.count(best) / len(ends)
        if best == -1 or share < 0.1:
            break
        drafts.append(best)
        ends = [at + 1 for at, token in zip(ends, following, strict=True) if token == best]
        if copies:
            text.append(best)
    return drafts


class SuffixRequests(RuleBasedStateMachine):
    """The drafter beside plain lists of every text."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = SuffixDrafter(max_tree_depth=DEPTH, max_cached_requests=MAX_REQUESTS)
        self.running: dict[int, tuple[list[int], list[int], int, str | None]] = {}
        """Key -> tokens, those that the drafter was shown, number of prompt tokens, salt."""
        self.finished: deque[tuple[str | None, list[int]]] = deque(maxlen=MAX_REQUESTS)

    def finish(self, key: int) -> None:
        if key in self.running:
            _, shown, num_prompt, salt = self.running.pop(key)
            if len(shown) > num_prompt + 2:
                self.finished.append((salt, [*shown[num_prompt:], -1]))

    @rule(key=keys, prompt=tokens, output=tokens, salt=salts)
    def begin(self, key: int, prompt: list[int], output: list[int], salt: str | None) -> None:
        """A request comes, or comes back after a preemption with its output; another may have had the key."""
        self.finish(key)
        self.drafter.begin(key, [*prompt, *output], len(prompt), salt)
        self.running[key] = ([*prompt, *output], [*prompt, *output], len(prompt), salt)

    @rule(key=keys)
    def cancel(self, key: int) -> None:
        """It ends, or never began."""
        self.finish(key)
        self.drafter.end(key)

    @rule(key=keys, sampled=tokens)
    def sample(self, key: int, sampled: list[int]) -> None:
        """Steps without drafting: the drafter does not see them until it is asked."""
        if key in self.running:
            self.running[key][0].extend(sampled)

    @rule(key=keys, max_tokens=st.integers(0, 8))
    def propose(self, key: int, max_tokens: int) -> None:
        """It proposes what the texts say."""
        if key not in self.running:
            return
        known, shown, _, salt = self.running[key]
        shown[:] = known
        drafts = self.drafter.propose(key, list(known), max_tokens)
        if max_tokens < 1 or len(known) < 3:
            assert drafts == []
            return
        suffix = known[-DEPTH:]
        length, ends = occurrences(known, suffix, len(known))
        others = [token for other_salt, text in self.finished if other_salt == salt for token in text]
        other_length, other_ends = occurrences(others, suffix, len(others))
        is_own = other_length <= length
        text, ends = (known, ends) if is_own else (others, other_ends)
        assert drafts == continuation(text, ends, min(max_tokens, max(length, other_length)), copies=is_own)

    @invariant()
    def counts_what_it_keeps(self) -> None:
        assert self.drafter.num_cached_tokens == sum(len(text) for _, text in self.finished)


SuffixRequests.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSuffixRequests = SuffixRequests.TestCase
