"""Output tokens to output text for one request, as they come.

Knows stop strings, withheld text and offsets; how tokens become characters is in text_streams.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_interfaces import RequestError, TextDelta, Tokenizer
from quire_renderers.stop_strings import StopMatcher
from quire_renderers.text_streams import PieceStream, TextStream, WindowStream
from quire_renderers.token_pieces import TokenPieces

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """`quire_interfaces.Detokenizer`: constant time per token, never half a character.

    With an empty prompt the whole output equals `tokenizer.decode(output_token_ids)`. After a prompt the output
    continues a text, so the space before its first word is kept where the tokenizer marks one. Ids outside the
    vocabulary add no text.

    Args:
        tokenizer: Gives the text of tokens.
        prompt_token_ids: The tokens before the output.
        skip_special_tokens: Leave special tokens out of the text.
        stop: Strings that end the output. The one completed first wins; of two completed by the same character, the
            longer one.
        include_stop_str_in_output: Keep the stop string in the text.
        min_tokens: A stop string that is completed by an earlier token than this one (counted from 1) does not stop.

    Raises:
        RequestError: an empty stop string.
    """

    __slots__ = (
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_num_chars",
        "_num_tokens",
        "_stopped",
        "_stream",
        "_withheld",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}", param="stop")
        self._stream = _stream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._withheld = ""
        self._stopped = False

    def add(self, token_ids: Sequence[int]) -> TextDelta:
        """Take in new tokens; nothing more comes after a stop string."""
        if self._matcher is not None or self._stopped:
            return self._add_watching(token_ids)
        push = self._stream.push
        if len(token_ids) == 1:
            text = push(token_ids[0])
            offset = self._num_chars
            self._num_chars = offset + len(text)
            return TextDelta(text, None, 0, [offset])
        offsets: list[int] = []
        parts: list[str] = []
        num_chars = self._num_chars
        for token_id in token_ids:
            offsets.append(num_chars)
            text = push(token_id)
            if text:
                parts.append(text)
                num_chars += len(text)
        self._num_chars = num_chars
        return TextDelta("".join(parts), None, 0, offsets)

    def finish(self) -> TextDelta:
        """Give out what was withheld. A stop string that only an unfinished character completes counts too."""
        if self._stopped:
            return TextDelta()
        text = self._stream.flush()
        stop = self._take(text, may_stop=self._num_tokens >= self._min_tokens) if text else None
        rest, self._withheld = self._withheld, ""
        self._stopped = True
        return TextDelta(rest, stop)

    def _add_watching(self, token_ids: Sequence[int]) -> TextDelta:
        delta = TextDelta()
        if self._stopped:
            return delta
        for token_id in token_ids:
            delta.text_offsets.append(self._num_chars)
            self._num_tokens += 1
            text = self._stream.push(token_id)
            stop = self._take(text, may_stop=self._num_tokens >= self._min_tokens) if text else None
            if stop is not None:
                delta.stop_string, delta.num_stop_tokens = stop, len(delta.text_offsets)
                delta.text, self._withheld, self._stopped = self._withheld, "", True
                return delta
        keep = self._matcher.num_withheld if self._matcher is not None else 0
        cut = len(self._withheld) - keep
        delta.text, self._withheld = self._withheld[:cut], self._withheld[cut:]
        return delta

    def _take(self, text: str, *, may_stop: bool) -> str | None:
        """Append to the withheld text; on a stop string cut it there and return the stop string."""
        self._num_chars += len(text)
        if self._matcher is None:
            self._withheld += text
            return None
        match = self._matcher.feed(text, may_stop=may_stop)
        if match is None:
            self._withheld += text
            return None
        whole = self._withheld + text[: match.end]
        self._withheld = whole if self._include_stop else whole[: len(whole) - len(match.stop)]
        return match.stop


def _stream(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
    pieces = getattr(tokenizer, "pieces", None)
    if isinstance(pieces, TokenPieces):
        at_start = len(prompt_token_ids) == 0
        return PieceStream(pieces, skip_special_tokens=skip_special_tokens, at_start=at_start)
    return WindowStream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
