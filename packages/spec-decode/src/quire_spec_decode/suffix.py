"""Suffix drafting: the longest run of last tokens that occurred before, in this text or in recent outputs of others,
and what mostly followed it.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): long matches are drafted further than short ones, and the
occurrences vote on each token. In the place of their suffix trees stands an index of token pairs with the most recent
places of each, whose matches are then compared backwards: it takes one look-up per token to keep, forgets its oldest
tokens exactly, and finds what a tree of the same depth finds as long as a pair has no more places than are kept.

Knows token ids only; no tensors, no requests beyond a number for each.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from quire_interfaces import ConfigError

__all__ = ["SuffixDrafter"]

NUM_PLACES = 16
"""Most recent places of a pair that are kept."""
MAX_CACHED_TOKENS = 1 << 17
"""Tokens of finished outputs that are kept at most, of all requests together."""
_WIDTH = array("i").itemsize
_END = -1


class _Text:
    """Tokens, and where each pair of them ends. Places count from the first token ever appended."""

    __slots__ = ("_bytes", "_places", "first", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._bytes = bytearray()
        self._places: dict[int, deque[int]] = {}
        self.first = 0
        """Place of the first token that is kept."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        begin = len(self.tokens)
        self.tokens.extend(token_ids)
        self._bytes += self.tokens[begin:].tobytes()
        at, places = self.first + max(begin, 1), self._places
        for before, last in pairwise(self.tokens[max(begin - 1, 0) :]):
            at += 1
            pair = before << 32 | last
            if pair in places:
                places[pair].append(at)
            else:
                places[pair] = deque((at,), NUM_PLACES)

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens."""
        end = self.first + count
        for before, last in pairwise(self.tokens[: count + 1]):
            kept = self._places.get(before << 32 | last)
            while kept and kept[0] <= end + 1:
                kept.popleft()
            if kept is not None and not kept:
                del self._places[before << 32 | last]
        del self.tokens[:count]
        del self._bytes[: count * _WIDTH]
        self.first = end

    def matches(self, suffix: bytes, pair: int, end: int) -> tuple[int, list[int]]:
        """The longest tail of `suffix` that occurs before index `end`, at least the pair.

        Returns:
            Its length in tokens and the indices behind its kept occurrences, the most recent first; (0, []) for none.
        """
        best, found = 1, []
        for place in reversed(self._places.get(pair, ())):
            behind = place - self.first
            if behind >= end:
                continue
            length = self._match(suffix, behind, best)
            if length > best:
                best, found = length, [behind]
            elif length == best:
                found.append(behind)
        return (best, found) if found else (0, [])

    def _match(self, suffix: bytes, behind: int, least: int) -> int:
        """Tokens of the common tail of `suffix` and the tokens before index `behind`; 0 for fewer than `least`."""
        text, stop = self._bytes, behind * _WIDTH
        if not text.endswith(suffix[-least * _WIDTH :], 0, stop):
            return 0
        low, high = least, min(len(suffix) // _WIDTH, behind)
        while low < high:
            middle = (low + high + 1) // 2
            if text.endswith(suffix[-middle * _WIDTH :], 0, stop):
                low = middle
            else:
                high = middle - 1
        return low


class _Finished:
    """Outputs of finished requests with one salt, the oldest forgotten first."""

    __slots__ = ("lengths", "text")

    def __init__(self) -> None:
        self.text = _Text()
        self.lengths: deque[int] = deque()


class SuffixDrafter:
    """Drafts from a request's own text and from the finished outputs of requests with the same salt.

    Args:
        max_tree_depth: Longest match that is looked for, in tokens.
        max_cached_requests: Finished outputs that are kept; 0 drafts from the request's own text only.
        max_spec_factor: Draft tokens per token of the match.
        min_token_prob: A draft ends before the token whose share of the votes, multiplied along the draft, is less.

    Raises:
        ConfigError: A value that makes no sense.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        if max_tree_depth < 2 or max_cached_requests < 0 or max_spec_factor <= 0 or not 0 <= min_token_prob <= 1:
            raise ConfigError(
                "suffix drafting needs max_tree_depth >= 2, max_cached_requests >= 0, max_spec_factor > 0 and "
                f"min_token_prob from 0 to 1, got {max_tree_depth}, {max_cached_requests}, {max_spec_factor} and "
                f"{min_token_prob}"
            )
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self._own: dict[int, tuple[_Text, int, str | None]] = {}
        self._finished: dict[str | None, _Finished] = {}
        self._order: deque[str | None] = deque()
        self._num_cached_tokens = 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of finished outputs that are kept."""
        return self._num_cached_tokens

    def begin(self, key: int, token_ids: Sequence[int], num_prompt_tokens: int, salt: str | None = None) -> None:
        """A request begins, or goes on after a preemption.

        Args:
            key: Its number until `end`; an earlier request of this number is ended.
            token_ids: Prompt, and the output so far.
            num_prompt_tokens: How many of them are the prompt.
            salt: Finished outputs are shared among requests with equal salts only.
        """
        self.end(key)
        text = _Text()
        text.extend(token_ids)
        self._own[key] = (text, num_prompt_tokens, salt)

    def end(self, key: int) -> None:
        """The request is over, or preempted; its output is kept for others. Unknown numbers are ignored."""
        text, num_prompt, salt = self._own.pop(key, (None, 0, None))
        if text is None or len(text.tokens) <= num_prompt + 2 or not self.max_cached_requests:
            return
        output = text.tokens[num_prompt:][-MAX_CACHED_TOKENS + 1 :]
        output.append(_END)
        kept = self._finished.setdefault(salt, _Finished())
        kept.text.extend(output)
        kept.lengths.append(len(output))
        self._order.append(salt)
        self._num_cached_tokens += len(output)
        while len(self._order) > self.max_cached_requests or self._num_cached_tokens > MAX_CACHED_TOKENS:
            self._forget_oldest()

    def propose(self, key: int, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that probably follow; empty when nothing like it was seen.

        Args:
            key: A request that began.
            token_ids: All of its tokens; they go on from those that were given before.
            max_tokens: Most tokens to propose.
        """
        own, _, salt = self._own[key]
        if len(token_ids) > len(own.tokens):
            own.extend(token_ids[len(own.tokens) :])
        tokens = own.tokens
        if max_tokens < 1 or len(tokens) < 3:
            return []
        suffix, pair = tokens[-self.max_tree_depth :].tobytes(), tokens[-2] << 32 | tokens[-1]
        length, behind = own.matches(suffix, pair, len(tokens))
        text = own
        finished = self._finished.get(salt)
        if finished is not None:
            others = finished.text
            other_length, other_behind = others.matches(suffix, pair, len(others.tokens))
            if other_length > length:
                length, behind, text = other_length, other_behind, others
        limit = min(max_tokens, int(length * self.max_spec_factor))
        return self._vote(text.tokens, behind, limit, copies=text is own)

    def _vote(self, tokens: array[int], behind: list[int], limit: int, *, copies: bool) -> list[int]:
        """What most of the occurrences go on with, the most recent one where they are equal. Where the text itself
        ends, copying goes on with what was just drafted, as in LZ77."""
        drafts: list[int] = []
        share, end = 1.0, len(tokens)
        while behind and len(drafts) < limit:
            counts: dict[int, int] = {}
            following = []
            for at in behind:
                token = tokens[at] if at < end else drafts[at - end] if copies else _END
                following.append(token)
                counts[token] = counts.get(token, 0) + 1
            best = max(counts, key=counts.__getitem__)  # the first of equals: that of the most recent occurrence
            share *= counts[best] / len(behind)
            if best == _END or share < self.min_token_prob:
                break
            drafts.append(best)
            behind = [at + 1 for at, token in zip(behind, following, strict=True) if token == best]
        return drafts

    def _forget_oldest(self) -> None:
        salt = self._order.popleft()
        kept = self._finished[salt]
        count = kept.lengths.popleft()
        kept.text.drop(count)
        self._num_cached_tokens -= count
        if not kept.lengths:
            del self._finished[salt]
