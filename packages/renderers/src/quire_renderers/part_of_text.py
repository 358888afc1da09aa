"""The first or the last tokens of a long text, without tokenizing all of it.

A text may be cut where its tokenizer splits it before it looks for tokens: what is on one side is then tokenized alike
with and without the other side. Which places these are, samples say; of words without an end `EndlessWords` knows more.
Knows the `tokenizers` library; knows no lengths of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import tokenizers

from quire_renderers.endless_words import EndlessWords
from quire_renderers.fewest_tokens import FewestTokens

__all__ = ["PartOfText", "SupportsParts"]

CHARS_PER_TOKEN = 6
"""Characters of a text that are read first, per token that is wanted: English has 4 to 5."""
OTHER_CHARS_PER_TOKEN = 2
"""The same of a text in other scripts, Chinese among them."""
MIN_CHARS = 256
FARTHEST_CUT = 2000
"""Characters in which a place to cut is looked for."""


class _Border(NamedTuple):
    """A kind of place where texts may be cut."""

    pattern: str
    """Matches the place, which has no length. No character of it changes with what is beyond the place under any
    Unicode normalization."""
    sample: str
    """A text with such places. No pattern of a pre-tokenizer that splits this one looks across others."""


_MARKS = '!"#$%&()*+,-./:;=?@\\^`{}~'
"""Without those of which special tokens are made."""
_BORDERS = (
    _Border(r"(?<=[^\W\d_])(?= [^\W\d_])", "ab cd Ef gh"),
    _Border(
        r"(?<=[0-9.,;:!?])(?= (?:[^\W\d_]|[0-9]))|(?<=[^\W\d_])(?= [0-9])",
        "ab. cd 12 Ef! 3 45 gh: 6? ij, kl; m",
    ),
    _Border(r"(?<=[^\W\d_])(?=\n[^\W\d_])", "ab\ncd\nEf\ngh"),
    _Border(
        rf"(?<=[^\W\d_]|[0-9])(?=[{re.escape(_MARKS)}])", "".join(f"ab{mark}Cd{mark} 12{mark}3" for mark in _MARKS)
    ),
    _Border(r"(?<=[!-/:-@\[-`{-~])(?=[!-/:-@\[-`{-~])", "ab.,cd()[];'!?`~ef<|>&#\"$%*+-=@^{_}gh"),
    _Border(r"(?<=[\u4e00-\u9fff])(?=[\u4e00-\u9fff])", "ab\u4e2d\u6587\u5b57\u4e2d cd\u6587\u5b57\u4e2d\u6587"),
)


@runtime_checkable
class SupportsParts(Protocol):
    """A tokenizer that finds tokens at an end of a text."""

    @property
    def part_of_text(self) -> PartOfText: ...


class PartOfText:
    """Finds tokens at an end of a text.

    Args:
        backend: Whose normalizer and pre-tokenizer are asked where texts can be cut.
        encode: Token ids of a whole text.
        added_contents: Texts of all added tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, encode: Callable[[str], list[int]], added_contents: Iterable[str]
    ) -> None:
        self._backend, self._added_contents = backend, list(added_contents)
        self._encode = encode

    @cached_property
    def _border(self) -> re.Pattern[str] | None:
        return _border_of(self._backend, self._added_contents)

    @cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self._backend, self._added_contents)

    @cached_property
    def _words(self) -> EndlessWords:
        return EndlessWords(self._backend, self._added_contents)

    def first(self, text: str, max_tokens: int) -> list[int]:
        """The first `max_tokens` token ids of a text, or all that there are."""
        return self._head(text, max_tokens)[1][:max_tokens]

    def head(self, text: str, max_tokens: int) -> str:
        """The beginning of a text that holds its first `max_tokens` tokens and maybe more, or all of it."""
        return self._head(text, max_tokens)[0]

    def last(self, text: str, max_tokens: int) -> list[int]:
        """The last `max_tokens` token ids of a text, or all that there are."""
        size, border = _first_size(text[-MIN_CHARS:], max_tokens), self._border
        while size < len(text):
            match = border and border.search(text, len(text) - size, len(text) - size + FARTHEST_CUT)
            follower = match and border and border.search(text, match.end() + 1, match.end() + FARTHEST_CUT)
            if match is not None and follower is not None:
                token_ids = self._encode(text[match.start() :])
                # A text may begin otherwise than it goes on: what is before the second border is not taken.
                if len(token_ids) - len(self._encode(text[match.start() : follower.start()])) >= max_tokens:
                    return token_ids[len(token_ids) - max_tokens :]
            elif max_tokens and match is None and self._words.is_worth_it(size, text):
                places = self._words.begins(text, len(text) - size)
                token_ids = self._alike([text[place:] for place in places], slice(-max_tokens, None), max_tokens)
                if token_ids:
                    return token_ids
            size *= 2
        token_ids = self._encode(self._words.squeezed(text))
        return token_ids[max(0, len(token_ids) - max_tokens) :]

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text surely has more than `max_tokens` tokens; what is not sure is not said, and costs little."""
        if len(text) <= max(MIN_CHARS, CHARS_PER_TOKEN * max_tokens):
            return False
        if self._fewest.of(text, max_tokens) > max_tokens:
            return True
        head, token_ids = self._head(text, max_tokens + 1, whole=False)
        return bool(head) and len(token_ids) > max_tokens

    def _head(self, text: str, max_tokens: int, *, whole: bool = True) -> tuple[str, list[int]]:
        """`head`, and its token ids; both empty where only the whole text would do and `whole` is false."""
        size = _first_size(text[:MIN_CHARS], max_tokens)
        while size < len(text):
            cut = self._border and _last_border(self._border, text, max(0, size - FARTHEST_CUT), size)
            if cut:
                token_ids = self._encode(self._words.squeezed(text[:cut]))
                if len(token_ids) >= max_tokens:
                    return text[:cut], token_ids
            elif self._words.is_worth_it(size, text):
                heads = [text[:place] for place in self._words.ends(text, size)]
                token_ids = self._alike(heads, slice(max_tokens), max_tokens)
                if token_ids:
                    return heads[-1], token_ids
            size *= 2
        return (text, self._encode(self._words.squeezed(text))) if whole else ("", [])

    def _alike(self, texts: list[str], part: slice, num_tokens: int) -> list[int]:
        """The part of its token ids that all texts have in common; none where they differ, or have fewer of them."""
        common: list[int] = []
        for text in texts:
            token_ids = self._encode(text)[part]
            if len(token_ids) < num_tokens or (common and token_ids != common):
                return []
            common = token_ids
        return common


def _first_size(sample: str, max_tokens: int) -> int:
    """Number of characters to read first."""
    return max(MIN_CHARS, (CHARS_PER_TOKEN if sample.isascii() else OTHER_CHARS_PER_TOKEN) * max_tokens)


def _last_border(border: re.Pattern[str], text: str, begin: int, end: int) -> int | None:
    """The last place in a part of a text where it may be cut."""
    for start in range(end, begin, -100):
        places = [match.start() for match in border.finditer(text, max(begin, start - 100), min(start + 2, len(text)))]
        if places:
            return places[-1]
    return None


def _border_of(backend: tokenizers.Tokenizer, added_contents: Iterable[str]) -> re.Pattern[str] | None:
    """Where texts of a tokenizer may be cut; None for nowhere."""
    if backend.pre_tokenizer is None:
        return None
    contents = list(added_contents)
    kinds = [
        kind.pattern
        for kind in _BORDERS
        if not any(_is_cut(kind.pattern, content) for content in contents) and _splits(backend, kind)
    ]
    return re.compile("|".join(kinds)) if kinds else None


def _is_cut(pattern: str, content: str) -> bool:
    """Whether there is a place inside of an added token, alone or between others."""
    return any(
        0 < match.start() - 1 < len(content)
        for letter in "a1,\u4e2d"
        for match in re.finditer(pattern, letter + content + letter)
    )


def _splits(backend: tokenizers.Tokenizer, kind: _Border) -> bool:
    """Whether the tokenizer splits texts at places of a kind: the sample's pieces are those of its parts."""
    places = [match.start() for match in re.finditer(kind.pattern, kind.sample)]
    whole = _pieces(backend, kind.sample)
    for place, follower in zip(places, [*places[1:], len(kind.sample)], strict=True):
        before, behind = _pieces(backend, kind.sample[:place]), _pieces(backend, kind.sample[place:])
        if whole[: len(before)] != before:
            return False
        # What begins a text may be another piece than within it: what is up to the next place is not compared.
        num_first = len(_pieces(backend, kind.sample[place:follower]))
        if len(before) + len(behind) != len(whole) or whole[len(before) + num_first :] != behind[num_first:]:
            return False
    return True


def _pieces(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """What the model looks for tokens in."""
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    assert backend.pre_tokenizer is not None
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
