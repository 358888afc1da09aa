"""A second, tiny implementation of the text Protocols: each token id is one letter, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire_interfaces import SamplingParams, TextDelta


def letter(token_id: int) -> str:
    """Token 0 has no text, the others are letters a to z, in turn."""
    return "" if token_id == 0 else chr(97 + token_id % 26)


class LetterTokenizer:
    vocab_size = 1000
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(each) - 97 + 26 for each in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(letter, token_ids))

    def token_text(self, token_id: int) -> str:
        return letter(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return letter(token_id).encode()

    def id_to_token(self, token_id: int) -> str:
        return letter(token_id)


class LetterDetokenizer:
    """Withholds as many letters as a stop string may still need."""

    def __init__(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._params = params
        self._text = ""
        self._num_given = 0

    def add(self, token_ids: Sequence[int]) -> TextDelta:
        offsets: list[int] = []
        for count, token_id in enumerate(token_ids, 1):
            offsets.append(len(self._text))
            self._text += letter(token_id)
            for stop in self._params.stop:
                if self._text.endswith(stop):
                    end = len(self._text) - (0 if self._params.include_stop_str_in_output else len(stop))
                    return TextDelta(self._take(end), stop, count, offsets)
        longest = max((len(stop) - 1 for stop in self._params.stop), default=0)
        return TextDelta(self._take(max(self._num_given, len(self._text) - longest)), text_offsets=offsets)

    def finish(self) -> TextDelta:
        return TextDelta(self._take(len(self._text)))

    def _take(self, end: int) -> str:
        text, self._num_given = self._text[self._num_given : end], end
        return text


@pytest.fixture
def tokenizer() -> LetterTokenizer:
    return LetterTokenizer()


@pytest.fixture
def make_detokenizer() -> type[LetterDetokenizer]:
    return LetterDetokenizer
