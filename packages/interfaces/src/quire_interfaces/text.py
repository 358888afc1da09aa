"""Seams between text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire_interfaces.media import PreparedMedia, PromptMedia

__all__ = ["Detokenizer", "RenderedPrompt", "Renderer", "TextDelta", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe."""

    vocab_size: int
    """Ids the tokenizer knows, added tokens included; a model's embedding may be larger."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token as shown in logprobs; invalid UTF-8 as U+FFFD. "" for ids outside the vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token adds to the text; b"" for ids outside the vocabulary."""

    def id_to_token(self, token_id: int) -> str:
        """The token as the vocabulary spells it ("Ġhello", "▁hello", "<0x0A>"); "" for ids outside the vocabulary."""


@dataclass(slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt ready for the engine."""

    token_ids: list[int]
    text: str | None = None
    """The rendered text, None when the prompt was given as token ids."""
    has_literal_tokens: bool = False
    """Whether contents hold what looks like control tokens and was tokenized as letters: tokenizing `text` anew would
    give other ids."""
    decoder_token_ids: list[int] | None = None
    """For networks that read the prompt with an encoder: what the decoder begins with; None as the checkpoint says."""
    media: PromptMedia | None = None
    """Images, videos and sounds among the tokens; None without any."""
    second_segment_start: int = 0
    """Position of the first token of the second text, where the prompt is a pair of texts and the tokenizer gives them
    token types (Devlin et al., "BERT", 2019, section 3: segments A and B); 0 elsewhere."""
    num_reused_tokens: int = 0
    """Leading tokens that were taken from an earlier rendering instead of being tokenized again."""


class Renderer(Protocol):
    """Messages to tokens. Work is proportional to what is new in a conversation."""

    tokenizer: Tokenizer

    def render_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, media: PreparedMedia | None = None
    ) -> RenderedPrompt:
        """A completion prompt, as text or as token ids (checked against the vocabulary), with its media.

        Raises:
            RequestError: naming the field.
        """

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
        media: PreparedMedia | None = None,
    ) -> RenderedPrompt:
        """A conversation (OpenAI message dictionaries) through the chat template, with its media: parts of contents
        whose type `media.placeholders` names, in the order of the items. Without `media`, they are lines of text.

        Raises:
            RequestError: naming the message or keyword at fault; a template's own raise_exception becomes one too.
        """


@dataclass(slots=True)
class TextDelta:
    """What a detokenizer has to say after some tokens."""

    text: str = ""
    """New text. Never half a character; never text that may still become part of a stop string."""
    stop_string: str | None = None
    """The stop string that ended the output; tokens after it are to be ignored."""
    num_stop_tokens: int = 0
    """With stop_string: how many of the tokens just given belong to the output (the last one completes the string)."""
    text_offsets: list[int] = field(default_factory=list)
    """Per given token: offset of its text in the whole output so far."""


class Detokenizer(Protocol):
    """Tokens to text for one request, incrementally. Not thread-safe; one per request."""

    def add(self, token_ids: Sequence[int]) -> TextDelta:
        """Take in new tokens."""

    def finish(self) -> TextDelta:
        """No more tokens: give out what was withheld (an unfinished character becomes U+FFFD)."""
