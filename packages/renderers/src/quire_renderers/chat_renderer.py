"""Prompts and conversations to token ids: the renderer a server talks to.

Joins the chat template, the tokenizer and the segment cache; each is in its own module.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_interfaces import ContextLengthError, PreparedMedia, RenderedPrompt, RequestError, Tokenizer
from quire_renderers.chat_format import ChatFormat
from quire_renderers.chat_template import ChatTemplates, Conversation
from quire_renderers.config import RendererConfig
from quire_renderers.control_tokens import ControlTokens
from quire_renderers.fill_in_middle import FillInMiddle
from quire_renderers.messages import prepare_messages, prepare_tools
from quire_renderers.segment_cache import CachingEncoder, SegmentCacheStats
from quire_renderers.segments import SupportsLiteralText
from quire_renderers.template_content import PAIR_ROLES
from quire_renderers.template_sandbox import TemplateSandbox
from quire_renderers.token_pieces import TokenPieces
from quire_renderers.tokenizer_files import TokenizerFiles

__all__ = ["ChatRenderer"]


class ChatRenderer:
    """`quire_interfaces.Renderer`. Thread-safe: an event loop should render long texts (above about 20,000
    characters) in a worker thread, where tokenizing releases the GIL.

    Args:
        tokenizer: The model's tokenizer.
        chat_template: A template that replaces the model's own; None takes those of the checkpoint folder.
        config: Limits and cache size.
        vocab_size: The model's vocabulary (rows of its embedding), against which prompt ids are checked; None takes the
            tokenizer's.
        placeholders: Token that stands for an item in a prompt, by modality; None for a model that reads text only.

    Attributes:
        chat_format: How the model marks its thinking and its tool calls: makes the parsers of its outputs.
        tokenizer_config: What tokenizer_config.json says, tokens as their text, with the chat template that is used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        config: RendererConfig | None = None,
        *,
        vocab_size: int | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config or RendererConfig()
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._encoder = CachingEncoder(tokenizer, max_bytes=self.config.segment_cache_bytes)
        files = getattr(tokenizer, "files", None)
        named: Mapping[str, str] = {}
        special_tokens: dict[str, str] = {}
        settings: Mapping[str, Any] = {}
        if isinstance(files, TokenizerFiles):
            settings = files.settings
            named = files.chat_templates
            special_tokens = {name: spec.content for name, spec in files.named_tokens.items()}
        if chat_template is not None:
            named = {"default": chat_template}
        self.has_chat_template = bool(named)
        self.tokenizer_config = _tokenizer_config(settings, type(tokenizer).__name__, named.get("default"))
        self.chat_format = ChatFormat(
            tool_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
            chat_template="\n".join(named.values()),
            special_tokens=_special_texts(tokenizer, special_tokens.values()),
        )
        sandbox = TemplateSandbox(max_chars=self.config.max_prompt_chars, timeout_s=self.config.template_timeout_s)
        self._placeholders = dict(placeholders or {})
        self._templates = ChatTemplates(named, special_tokens, sandbox, self._placeholders)
        self._control: ControlTokens | None = None
        self._lock = threading.Lock()

    def check_templates(self) -> None:
        """Compile the chat templates and find out which orders of roles they take, before the first conversation comes.

        Raises:
            RequestError: one does not compile.
        """
        self._templates.check()
        self._control_tokens()

    @property
    def cache_stats(self) -> SegmentCacheStats:
        """How the segment cache does."""
        return self._encoder.stats

    @functools.cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How the model is told of a gap in a text; None when its tokenizer has no markers for it."""
        return FillInMiddle.of(self.tokenizer)

    def render_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, media: PreparedMedia | None = None
    ) -> RenderedPrompt:
        """A completion prompt, as text or as token ids.

        Args:
            prompt: Text with a placeholder for each item, or ids with all tokens that take embeddings.
            add_special_tokens: Of a text.
            media: What stands in it; None for text alone.

        Raises:
            ContextLengthError: the text is longer than max_prompt_chars.
            RequestError: naming "prompt": neither text nor ids of the vocabulary.
        """
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens, "prompt", media)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise RequestError(f"prompt must be text or token ids, got {type(prompt).__name__}", param="prompt")
        token_ids = self._checked_ids(prompt)
        return RenderedPrompt(token_ids=token_ids, media=None if media is None else media.place(token_ids))

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
        """A conversation (OpenAI message dictionaries) through the chat template.

        Args as for `quire_interfaces.Renderer.render_chat`.

        Raises:
            ContextLengthError: the text is longer than max_prompt_chars, or the contents of the messages are, which is
                found before they go through the template.
            RequestError: naming the message or keyword at fault; a template's own raise_exception becomes one too.
        """
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            given = type(chat_template_kwargs).__name__
            raise RequestError(f"chat_template_kwargs must be an object, got {given}", param="chat_template_kwargs")
        prepared = prepare_messages(messages, () if media is None else media.placeholders)
        self._check_length(sum(len(str(message.get("content") or "")) for message in prepared), "messages")
        control = self._control_tokens()
        conversation = Conversation(
            control.marked_messages(prepared),
            control.marked(prepare_tools(tools)),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=chat_template_kwargs,
        )
        conversation.extra = control.marked(conversation.extra)
        text = control.rendered(self._templates.render(conversation, chat_template))
        return self._encode(text, add_special_tokens, "messages", media)

    @functools.cached_property
    def has_pair_template(self) -> bool:
        """Whether the model's chat template speaks of queries and documents, as those of generative rerankers do."""
        return self._templates.names_roles(PAIR_ROLES)

    def render_pair_template(
        self,
        query: str,
        document: str,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        instruction: str = "",
    ) -> str:
        """A query and a document through a chat template, whose messages have these roles.

        Args:
            query: Content of the message with role "query".
            document: Content of the message with role "document".
            chat_template: Replaces the model's own.
            chat_template_kwargs: Further variables of the template, such as `instruction`.
            instruction: Content of a message with role "system" before the two; empty for none.

        Raises:
            RequestError: no template, or it fails.
        """
        for text in (query, document):
            self.check_text(text, "prompt")
        messages = [("system", instruction)] if instruction else []
        messages += zip(PAIR_ROLES, (query, document), strict=True)
        return self._templates.render_as_given(messages, chat_template, chat_template_kwargs)

    def render_pair(
        self,
        contents: tuple[str | list[Any], str | list[Any]],
        media: PreparedMedia,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        instruction: str = "",
    ) -> RenderedPrompt:
        """A query and a document with media through a chat template.

        Args:
            contents: Of the query and of the document, as text or as parts in the chat API's form.
            media: What stands in them, the query's first.
            chat_template: Replaces the model's own, and the others as for `render_pair_template`.

        Raises:
            RequestError: naming "messages[0]" or "messages[1]" with a part that cannot be read; or as
                `render_pair_template`.
        """
        given = [{"role": role, "content": content} for role, content in zip(PAIR_ROLES, contents, strict=True)]
        prepared = prepare_messages(given, media.placeholders)
        self._check_length(sum(len(str(message["content"])) for message in prepared), "messages")
        messages = [("system", instruction)] if instruction else []
        messages += [(message["role"], message["content"]) for message in prepared]
        text = self._templates.render_as_given(messages, chat_template, chat_template_kwargs)
        return self._encode(text, False, "prompt", media)

    def pair_template_end(
        self,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        instruction: str = "",
    ) -> list[int]:
        """Token ids that a chat template writes behind every query and document, such as the turn of a reranker's
        answer; empty where it writes none. Arguments and errors are those of `render_pair_template`."""
        ends = []
        for text in ("0", "1 2"):  # whose tokens differ, so that what both prompts end with is the template's
            prompt = self.render_pair_template(text, text, chat_template, chat_template_kwargs, instruction=instruction)
            ends.append(self.tokenizer.encode(prompt, add_special_tokens=False)[::-1])
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False))
        return [token_id for token_id, _ in alike][::-1]

    def token_offsets(self, prompt: RenderedPrompt, *, add_special_tokens: bool) -> list[tuple[int, int]] | None:
        """Per token of a rendered prompt: where it stands in the prompt's text, as (begin, end) in characters.

        Args:
            prompt: As `render_prompt` or `render_chat` gave it.
            add_special_tokens: As it was rendered.

        Returns:
            None where nobody can tell: it was given as token ids, its tokens were cut, its contents hold what looks
            like control tokens, or the tokenizer is not one of a tokenizer.json.
        """
        find = getattr(self.tokenizer, "token_offsets", None)
        if find is None or prompt.text is None or prompt.has_literal_tokens:
            return None
        offsets: list[tuple[int, int]] = find(prompt.text, add_special_tokens=add_special_tokens)
        return offsets if len(offsets) == len(prompt.token_ids) else None

    def _control_tokens(self) -> ControlTokens:
        with self._lock:
            if self._control is None:
                self._control = self._find_control_tokens()
            return self._control

    def _find_control_tokens(self) -> ControlTokens:
        """What texts of conversations must not write: the tokenizer's special tokens, and other added tokens that the
        chat template writes around turns."""
        tokenizer = self.tokenizer
        if self.config.allow_control_tokens_in_content or not isinstance(tokenizer, SupportsLiteralText):
            return ControlTokens(())
        frames = self._templates.frames()
        special = set(_special_texts(tokenizer, ()))
        contents = [
            token.content
            for token in tokenizer.matched_tokens
            if token.special
            or token.content in special
            or token.content in self._placeholders.values()
            or (token.content in frames and not self.chat_format.is_marker(token.content))
        ]
        markers = [text for text in contents if self.chat_format.is_marker(text)]
        broken = [*contents, *self._placeholders.values()]  # a placeholder need not be one token
        control = ControlTokens(broken, markers, tokenizer.literal_normalizer(contents))
        self._encoder.read_marks(control.mark, tokenizer.literal_encoder(sorted(set(contents)), control.mark))
        return control

    def _encode(
        self, text: str, add_special_tokens: bool, param: str, media: PreparedMedia | None = None
    ) -> RenderedPrompt:
        if media is not None:
            text = media.expand(text)
            add_special_tokens = add_special_tokens and not media.has_special_tokens
        self.check_text(text, param)
        encoded = self._encoder.encode(text, add_special_tokens=add_special_tokens)
        plain = text if self._control is None else self._control.unmarked(text)
        return RenderedPrompt(
            token_ids=encoded.token_ids,
            text=plain,
            has_literal_tokens=plain != text,
            media=None if media is None else media.place(encoded.token_ids),
            num_reused_tokens=encoded.num_reused_tokens,
        )

    def check_text(self, text: str, param: str) -> None:
        """Raises ContextLengthError where a text is longer than max_prompt_chars, and RequestError, both naming the
        field `param`, where it holds what is no character."""
        self._check_length(len(text), param)
        if not text.isascii():
            _check_surrogates(text, param)

    def _check_length(self, num_chars: int, param: str) -> None:
        if num_chars > self.config.max_prompt_chars:
            raise ContextLengthError(
                f"{param} has {num_chars} characters, the limit is {self.config.max_prompt_chars}; shorten it",
                param=param,
            )

    def _checked_ids(self, prompt: Sequence[Any]) -> list[int]:
        token_ids = list(prompt)
        if not token_ids:
            raise RequestError("prompt must hold at least one token id, got none", param="prompt")
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            self._complain(token_ids)
        return token_ids

    def _complain(self, token_ids: list[Any]) -> None:
        for index, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt[{index}] must be a token id from 0 to {self.vocab_size - 1}, got {token_id!r:.100}, which "
                    "is out of vocabulary",
                    param=f"prompt[{index}]",
                )


_FILE_NAMES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


def _tokenizer_config(settings: Mapping[str, Any], class_name: str, chat_template: str | None) -> dict[str, Any]:
    config = {name: _without_flags(value) for name, value in settings.items() if name not in _FILE_NAMES}
    config["tokenizer_class"] = str(settings.get("tokenizer_class") or class_name)
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def _without_flags(value: Any) -> Any:
    """Tokens that are spelled as objects, as their text."""
    if isinstance(value, dict):
        text = value.get("content")
        return text if isinstance(text, str) else {key: _without_flags(each) for key, each in value.items()}
    return [_without_flags(each) for each in value] if isinstance(value, list) else value


def _special_texts(tokenizer: Tokenizer, named: Iterable[str]) -> list[str]:
    """Texts of the tokens that a detokenizer leaves out, as far as the tokenizer tells."""
    pieces = getattr(tokenizer, "pieces", None)
    if not isinstance(pieces, TokenPieces):
        return list(named)
    return [tokenizer.token_text(token_id) for token_id in sorted(pieces.special_token_ids)]


def _check_surrogates(text: str, param: str) -> None:
    """JSON can spell half of a surrogate pair (an escape alone); the tokenizer libraries fail on it in other ways."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise RequestError(
            f"{param} holds {found!r} at character {error.start}: half of a surrogate pair is no text", param=param
        ) from error
