"""The text of a window while its tokens are written: as much of it as will stay."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

from quire_speech.options import TranscriptionOptions

__all__ = ["PartialText", "Telling", "compression_ratio"]

Telling = Literal["nothing", "segments", "tokens"]
"""What may be told of a window's text while it is written: nothing, as it may be thrown away; segments that have ended,
as the window's end may cut the last one off; or each token."""
_REPLACEMENT = "\ufffd"


def compression_ratio(text: str) -> float:
    """Bytes of a text divided by those that zlib makes of them: above 2.4, it mostly repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


class PartialText:
    """What can be told of a window.

    Args:
        decode: Token ids -> text.
        telling: What may be told.
        options: Nothing is told while the text looks as if the window had to be tried again.
        end_of_text: All tokens below are text.
        timestamp_begin: Token of the time 0.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        telling: Telling,
        options: TranscriptionOptions,
        end_of_text: int,
        timestamp_begin: int,
    ) -> None:
        self._decode, self._telling, self._options = decode, telling, options
        self._end_of_text, self._timestamp_begin = end_of_text, timestamp_begin
        self._ids: list[int] = []
        """Of the text so far."""
        self._num_sure = self._num_tokens = 0
        """Tokens of the text that will stay; and all tokens."""
        self._told = ""
        self.num_told = 0
        """Tokens of the text that were told."""

    def add(self, token_ids: Sequence[int], sum_logprob: float) -> str:
        """What is new of the text and can be told; \"\" for nothing.

        Args:
            token_ids: New tokens.
            sum_logprob: Of all tokens so far.
        """
        self._num_tokens += len(token_ids)
        for token in token_ids:
            if token < self._end_of_text:
                self._ids.append(token)
            if self._telling == "tokens" or token >= self._timestamp_begin:
                self._num_sure = len(self._ids)
        if self._num_sure == self.num_told or self._telling == "nothing":
            return ""
        text = self._decode(self._ids[: self._num_sure])
        if text.endswith(_REPLACEMENT) or not text.startswith(self._told) or self._is_suspect(text, sum_logprob):
            return ""
        new, self._told, self.num_told = text[len(self._told) :], text, self._num_sure
        return new

    def _is_suspect(self, text: str, sum_logprob: float) -> bool:
        options = self._options
        if options.logprob_threshold is not None and sum_logprob / self._num_tokens < options.logprob_threshold:
            return True
        bound = options.compression_ratio_threshold
        return bound is not None and bool(text.strip()) and compression_ratio(text.strip()) > bound
