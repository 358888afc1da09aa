"""Texts and pairs of texts to token ids within a length: what an encoder reads.

Special tokens are counted and never cut off, as in Hugging Face's `truncation=True`. Knows tokenizers and lengths, no
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire_interfaces import ContextLengthError, RenderedPrompt, RequestError, Tokenizer
from quire_renderers.chat_renderer import ChatRenderer
from quire_renderers.pair_template import SupportsPairs
from quire_renderers.part_of_text import SupportsParts
from quire_renderers.segments import SupportsSegments

__all__ = ["BoundedPrompts", "truncated_pair_lens"]

TruncationSide = Literal["left", "right"]


class BoundedPrompts:
    """Renders prompts of at most so many tokens. Thread-safe.

    Args:
        renderer: Checks texts and token ids; its tokenizer encodes them.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        tokenizer = renderer.tokenizer
        self._tokenizer: Tokenizer = tokenizer
        # Asked once: a question to a Protocol takes longer than a short text.
        self._segments = tokenizer if isinstance(tokenizer, SupportsSegments) else None
        self._part = tokenizer.part_of_text if isinstance(tokenizer, SupportsParts) else None
        self._pair_template = tokenizer.pair_template if isinstance(tokenizer, SupportsPairs) else None
        self._num_special = 0 if self._segments is None else len(self._segments.wrap_special_tokens([]))
        side = renderer.tokenizer_config.get("truncation_side")
        self._side: TruncationSide = "left" if side == "left" else "right"

    def render(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        longest: int | None = None,
        truncation_side: TruncationSide | None = None,
        add_special_tokens: bool = True,
    ) -> RenderedPrompt:
        """A text or token ids.

        Args:
            prompt: Text, or ids, which get no special tokens.
            max_tokens: Most tokens, special ones included; None cuts nothing.
            longest: Most tokens that are read, where nothing is cut: a text that is far longer is refused without
                being tokenized; one that is a little longer is not refused here.
            truncation_side: Which end is cut off; None for the tokenizer's own.
            add_special_tokens: Whether a text gets the tokenizer's special tokens.

        Raises:
            ContextLengthError: a text is surely longer than `longest`.
            RequestError: it is neither text nor ids of the vocabulary, or `max_tokens` has no room for a token of it.
        """
        side = truncation_side or self._side
        if not isinstance(prompt, str):
            rendered = self._renderer.render_prompt(prompt)
            return RenderedPrompt(token_ids=_cut(rendered.token_ids, max_tokens, side))
        self._renderer.check_text(prompt, "prompt")
        if max_tokens is None and longest is not None:
            self._check_fits(prompt, longest)
        segments = self._segments
        if segments is None:
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return RenderedPrompt(token_ids=_cut(token_ids, max_tokens, side))
        room = _room(max_tokens, self._num_special if add_special_tokens else 0)
        token_ids = self._encode(segments, prompt, room, side)
        return RenderedPrompt(token_ids=segments.wrap_special_tokens(token_ids) if add_special_tokens else token_ids)

    def render_pair(
        self,
        first: str,
        second: str,
        *,
        max_tokens: int | None = None,
        longest: int | None = None,
        truncation_side: TruncationSide | None = None,
    ) -> RenderedPrompt:
        """Two texts as the tokenizer writes a pair, with token types where it has them. The longer one is cut first
        (Hugging Face's "longest_first").

        Args:
            first: A query, for instance.
            second: A document.
            max_tokens: Most tokens, special ones included; None cuts nothing.
            longest: As for `render`.
            truncation_side: Which end of both is cut off; None for the tokenizer's own.

        Raises:
            ContextLengthError: one of the texts is surely longer than `longest`.
            RequestError: the tokenizer takes no pairs, or `max_tokens` has no room for a token of them.
        """
        template, segments = self._pair_template, self._segments
        if template is None or segments is None:
            raise RequestError(
                "this model's tokenizer.json has no template for pairs of texts, and its chat template, if it has one, "
                "does not speak of roles 'query' and 'document': give a chat_template that does",
                param="prompt",
                code="unsupported",
            )
        for text in (first, second):
            self._renderer.check_text(text, "prompt")
            if max_tokens is None and longest is not None:
                self._check_fits(text, longest)
        room, side = _room(max_tokens, template.num_tokens), truncation_side or self._side
        most = None if room is None else room + 1
        first_ids, second_ids = self._encode(segments, first, most, side), self._encode(segments, second, most, side)
        if room is not None:
            reach = room + 1
            while room % 2 and len(first_ids) == len(second_ids) == reach:  # the longer one gets an odd token
                reach *= 2
                first_ids = self._encode(segments, first, reach, side)
                second_ids = self._encode(segments, second, reach, side)
            first_len, second_len = truncated_pair_lens(len(first_ids), len(second_ids), room)
            first_ids, second_ids = _cut(first_ids, first_len, side), _cut(second_ids, second_len, side)
        return template.join(first_ids, second_ids)

    def head(self, text: str, max_tokens: int) -> str:
        """The beginning of a text that holds its first `max_tokens` tokens and maybe more, or all of it."""
        return text if self._part is None else self._part.head(text, max_tokens)

    def _check_fits(self, text: str, longest: int) -> None:
        """Raises ContextLengthError for a text of surely more than `longest` tokens."""
        if self._part is not None and self._part.exceeds(text, longest):
            raise ContextLengthError(
                f"the prompt of {len(text)} characters is too long, but this model's context is {longest} tokens; "
                "shorten it, or have it truncated",
                max_model_len=longest,
            )

    def _encode(self, segments: SupportsSegments, text: str, max_tokens: int | None, side: TruncationSide) -> list[int]:
        """Token ids of a text, cut at `max_tokens`; what is cut off is not tokenized where the tokenizer can do
        without."""
        if max_tokens is None or self._part is None:
            return _cut(segments.encode_segment(text), max_tokens, side)
        return self._part.last(text, max_tokens) if side == "left" else self._part.first(text, max_tokens)


def truncated_pair_lens(first: int, second: int, room: int) -> tuple[int, int]:
    """Numbers of tokens of two texts when the longer one is cut first, and then both alike.

    Args:
        first: Number of tokens of the first text.
        second: Number of tokens of the second text.
        room: Most tokens of both together.
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def _room(max_tokens: int | None, num_special: int) -> int | None:
    """Number of tokens that are left beside the special ones; None for no bound."""
    if max_tokens is None:
        return None
    if max_tokens <= num_special:
        raise RequestError(
            f"truncate_prompt_tokens ({max_tokens}) has no room beside the {num_special} special tokens of a prompt; "
            f"give at least {num_special + 1}",
            param="truncate_prompt_tokens",
        )
    return max_tokens - num_special


def _cut(token_ids: list[int], max_tokens: int | None, side: TruncationSide) -> list[int]:
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    return token_ids[-max_tokens:] if side == "left" and max_tokens else token_ids[:max_tokens]
