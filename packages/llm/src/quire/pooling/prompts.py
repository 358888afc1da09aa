"""Prompts that are pooled: texts with the checkpoint's own instruction, pairs, token ids, media; cut to a length.

Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from quire.media import HeldMedia, MediaFront, content_sources, prompt_sources
from quire.pooling.pairs import pair_content, pair_sources, side_text
from quire.prompts import Prompt, taking
from quire_interfaces import PoolingParams, PromptMedia, RenderedPrompt, RequestError, RequestOptions
from quire_pooling import PoolerSpec
from quire_pooling.dual_encoder import DualEncoderPrompts
from quire_pooling.late_interaction import LateInteractionTexts
from quire_renderers import BoundedPrompts, ChatRenderer

if TYPE_CHECKING:
    from quire_multimodal import MediaSource

__all__ = ["PoolingPrompt", "PoolingPrompts", "PromptOptions", "as_prompts"]

_START_CHARS = 64
"""Characters of a text that show which special tokens stand before it."""
_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_KEYS = ("prompt", "prompt_token_ids", "content", "text_pair", "cache_salt", *_MEDIA_KEYS)


class PoolingPrompt(NamedTuple):
    """A prompt ready for the engine."""

    rendered: RenderedPrompt
    params: PoolingParams
    """Resolved: of the checkpoint's pooler, with the length of its instruction."""
    cache_salt: str | None = None
    """The prompt's own; None for that of its request."""
    media: HeldMedia | None = None
    """What stands in it, held until its request has ended."""

    def release(self) -> None:
        """Let go of what stands in it: its request has ended. Idempotent."""
        if self.media is not None:
            self.media.release()

    def salted(self, options: RequestOptions) -> RequestOptions:
        """The options of its request, with the prompt's own salt."""
        return options if self.cache_salt is None else dataclasses.replace(options, cache_salt=self.cache_salt)


class PromptOptions(TypedDict, total=False):
    """How texts are written before they are tokenized; none is needed."""

    prompt_name: str | None
    """Which of the checkpoint's prompts (config_sentence_transformers.json) goes before a text, or instructs the reader
    of a pair; None for the checkpoint's default, if it has one. To models of late interaction (ColBERT) a text called
    "query" is a query, and every other one a document."""
    add_special_tokens: bool
    """Whether a text gets the tokenizer's special tokens; it does where this is left out."""
    chat_template: str | None
    """Writes a pair as messages with roles "query" and "document"; None for the checkpoint's, where it speaks of these
    roles, or else for the tokenizer's own way to write pairs."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the template that writes pairs, such as `instruction`."""


class PoolingPrompts:
    """Renders prompts as the checkpoint's pooler wants them. Thread-safe.

    Args:
        renderer: The model's.
        spec: Its pooler.
        max_model_len: Most tokens that the model reads.
        max_embed_len: Most tokens of a text that is embedded; 0 for `max_model_len`.
        media: Prepares what stands in prompts; None where the model takes text only.
        is_prefix_lm: All tokens of a prompt see one another.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        spec: PoolerSpec,
        max_model_len: int,
        max_embed_len: int = 0,
        *,
        media: MediaFront | None = None,
        is_prefix_lm: bool = False,
    ) -> None:
        self.spec = spec
        self._media, self._is_prefix_lm = media, is_prefix_lm
        self._renderer = renderer
        self._bounded = BoundedPrompts(renderer)
        self._max_model_len = max_model_len
        self._max_text_len = min(max_model_len, spec.max_seq_length or max_model_len)
        late = spec.late_interaction
        self._late_interaction = None if late is None else LateInteractionTexts(late, renderer.tokenizer)
        dual = spec.dual_encoder
        self._dual_encoder = None if dual is None else DualEncoderPrompts(dual, renderer.tokenizer)
        self._max_embed_len = max_embed_len or max_model_len

    @property
    def takes_documents(self) -> bool:
        """Whether a prompt may be an image alone: a document (ColPali), or what has a vector of its own (CLIP)."""
        late = self.spec.late_interaction
        return self.spec.dual_encoder is not None or (late is not None and bool(late.image_document))

    def prepare_now(self, prompt: Prompt) -> HeldMedia | None:
        """The media of a prompt, for `render`; None where it has none. Blocks.

        Raises:
            RequestError: they cannot be used, or the model takes none.
        """
        sources, arguments = _media_of(prompt)
        return taking(self._media).prepare_now(sources, arguments) if sources else None

    async def prepare(self, prompt: Prompt) -> HeldMedia | None:
        """`prepare_now` while the event loop goes on."""
        sources, arguments = _media_of(prompt)
        return await taking(self._media).prepare(sources, arguments) if sources else None

    def render(
        self,
        prompt: Prompt,
        params: PoolingParams,
        media: HeldMedia | None = None,
        **options: Unpack[PromptOptions],
    ) -> PoolingPrompt:
        """A prompt ready for the engine.

        Args:
            prompt: Text, token ids, or a dictionary with `prompt` or `prompt_token_ids`; with `text_pair`, the second
                text of a pair, whose first one is `prompt`, each a text or an object with `content`; or with `content`,
                parts of a message in the chat API's form.
            params: What to pool, how, and where to cut the prompt.
            media: What `prepare` made of the prompt's media. Such a prompt is not cut; without a text it is a document,
                for models of late interaction that see.
            **options: How to write texts.

        Raises:
            RequestError: it is no prompt, the checkpoint has no such prompt name, or its pooler does not do what the
                parameters say.
        """
        if "transcribe" in self.spec.tasks:
            return self._render_sound(prompt, self.spec.resolve(params), media)
        if media is not None:
            return self._render_media(prompt, self.spec.resolve(params), media, options)
        rendered = self._render_text(prompt, params, options)
        if not self._is_prefix_lm:
            return rendered
        whole = PromptMedia(spans=()).as_prefix(rendered.rendered.token_ids)
        return rendered._replace(rendered=dataclasses.replace(rendered.rendered, media=whole))

    def _render_sound(self, prompt: Prompt, params: PoolingParams, media: HeldMedia | None) -> PoolingPrompt:
        """A prompt that is a sound. Raises RequestError where it is anything else."""
        fields: Mapping[str, Any] = {"prompt": prompt}
        if isinstance(prompt, Mapping):
            fields = _fields(prompt, may_be_media_alone=True)
        if media is None or _has_text(fields):
            raise RequestError(
                "this model reads sound and no text: give one sound, as multi_modal_data; recordings go to "
                "LLM.transcribe and /v1/audio/transcriptions",
                param="prompt",
                code="unsupported",
            )
        rendered = RenderedPrompt(token_ids=[0] * media.num_embeds, media=media.place(()))
        return PoolingPrompt(rendered, params, fields.get("cache_salt"), media)

    def _render_media(
        self, prompt: Prompt, params: PoolingParams, media: HeldMedia, options: PromptOptions
    ) -> PoolingPrompt:
        """A prompt with media, as `LLM.generate` takes it, or a pair through a chat template."""
        assert isinstance(prompt, Mapping)
        fields = _fields(prompt, may_be_media_alone=True)
        if self._dual_encoder is not None:
            rendered = self._dual_encoder.render_image(media, media.num_embeds, has_text=_has_text(fields))
            return PoolingPrompt(rendered, params, fields.get("cache_salt"), media)
        if (second := fields.get("text_pair")) is not None:
            contents = pair_content(fields.get("prompt"), "prompt"), pair_content(second, "text_pair")
            return PoolingPrompt(self._render_pair_media(contents, media, options), params, None, media)
        written = next(
            (each for name in ("prompt_token_ids", "prompt") if (each := fields.get(name)) is not None), None
        )
        if written is None:
            written = self._image_document(fields)
        rendered = self._renderer.render_prompt(written, media=media)
        return PoolingPrompt(rendered, params, fields.get("cache_salt"), media)

    def _render_pair_media(
        self, contents: tuple[str | list[Any], str | list[Any]], media: HeldMedia, options: PromptOptions
    ) -> RenderedPrompt:
        chat_template = options.get("chat_template")
        if chat_template is None and not self._renderer.has_pair_template:
            raise RequestError(
                "pairs with images, videos or sounds are written by a chat template with roles 'query' and 'document', "
                "which this model does not have: give one as chat_template",
                param="chat_template",
            )
        return self._renderer.render_pair(
            contents,
            media,
            chat_template,
            options.get("chat_template_kwargs"),
            instruction=self.instruction(options.get("prompt_name")),
        )

    def _image_document(self, fields: Mapping[str, Any]) -> str:
        """The text of a document that is an image; a text beside it stands in the place of the processor's."""
        late = self.spec.late_interaction
        if late is None or not self.takes_documents:
            raise RequestError(
                "images stand where a prompt has the model's placeholder: give a prompt, or messages", param="prompt"
            )
        if not (text := _content_text(fields)):
            return late.image_document
        if not late.image_prompt:
            raise RequestError(
                "a document of this model is a text or an image, since its processor_config.json has a prompt of its "
                "own: leave texts beside the image out",
                param="prompt",
            )
        return late.image_document.replace(late.image_prompt, text, 1)

    def _render_text(self, prompt: Prompt, params: PoolingParams, options: PromptOptions) -> PoolingPrompt:
        if (task := params.embedding_task) is not None:
            options = {**options, "prompt_name": options.get("prompt_name") or self._prompt_of_task(task)}
            if not self.spec.embedding_tasks and task in self.spec.prompts:
                params = dataclasses.replace(params, embedding_task=None)
        params = self.spec.resolve(params)
        prompt_name, add_special_tokens = options.get("prompt_name"), options.get("add_special_tokens", True)
        max_tokens, longest = params.truncate_prompt_tokens, self._longest(params)
        if max_tokens is not None:
            max_tokens = min(self._max_text_len if max_tokens == -1 else max_tokens, longest)
        salt = None
        if isinstance(prompt, Mapping):
            fields = _fields(prompt)
            salt = fields.get("cache_salt")
            pair = fields.get("text_pair")
            written = (each for name in ("prompt_token_ids", "prompt") if (each := fields.get(name)) is not None)
            prompt = next(written, _content_text(fields))
            if pair is not None:
                rendered = self._render_pair(prompt, pair, params, max_tokens, options)
                return PoolingPrompt(rendered, params, salt)
        assert not isinstance(prompt, Mapping)
        if not isinstance(prompt, str):
            rendered = self._bounded.render(prompt, max_tokens=max_tokens, truncation_side=params.truncation_side)
            return PoolingPrompt(rendered, params, salt)
        if self._late_interaction is not None and params.task == "token_embed":
            return PoolingPrompt(
                *self._render_late(self._late_interaction, prompt, params, max_tokens, prompt_name), salt
            )
        instruction = self.instruction(prompt_name)
        if instruction and not self.spec.include_prompt:
            params = dataclasses.replace(params, prompt_length=self._instruction_len(instruction, add_special_tokens))
        rendered = self._bounded.render(
            self._cased(instruction + prompt),
            max_tokens=max_tokens,
            longest=longest,
            truncation_side=params.truncation_side,
            add_special_tokens=add_special_tokens,
        )
        if self._dual_encoder is not None:
            rendered = self._dual_encoder.fill_up(rendered)
        return PoolingPrompt(rendered, params, salt)

    def _render_late(
        self,
        texts: LateInteractionTexts,
        text: str,
        params: PoolingParams,
        max_tokens: int | None,
        prompt_name: str | None,
    ) -> tuple[RenderedPrompt, PoolingParams]:
        """A query or a document of late interaction: marked, cut to its kind's length, without punctuation."""
        is_query = prompt_name == "query"
        instruction = self.spec.prompts.get(prompt_name or "", "")
        suffix = texts.query_suffix if is_query else ""
        lengths = [length for length in (max_tokens, texts.max_tokens(is_query=is_query)) if length is not None]
        rendered = self._bounded.render(
            self._cased(instruction + text) + suffix,
            max_tokens=min(lengths, default=None),
            longest=self._longest(params),
            truncation_side=params.truncation_side,
            add_special_tokens=not suffix,
        )
        tokens = texts.mark(rendered.token_ids, is_query=is_query)
        rendered = dataclasses.replace(rendered, token_ids=tokens.token_ids)
        if expansion_length := len(tokens.token_ids) - tokens.num_attended:
            params = dataclasses.replace(params, expansion_length=expansion_length)
        if not is_query and params.skip_token_ids is None and texts.skip_token_ids:
            params = dataclasses.replace(params, skip_token_ids=texts.skip_token_ids)
        return rendered, params

    def _render_pair(
        self, first: Any, second: Any, params: PoolingParams, max_tokens: int | None, options: PromptOptions
    ) -> RenderedPrompt:
        """A pair through a chat template, the request's or the checkpoint's, or as the tokenizer writes pairs. The
        instruction is a message of role "system", or stands before the first text, as sentence-transformers has it."""
        first, second = self._cased(side_text(first, "prompt")), self._cased(side_text(second, "text_pair"))
        instruction = self.instruction(options.get("prompt_name"))
        chat_template, variables = options.get("chat_template"), options.get("chat_template_kwargs")
        if chat_template is None and not self._renderer.has_pair_template:
            if variables:
                raise RequestError(
                    f"{next(iter(variables))!r} is for a chat template with roles 'query' and 'document', which this "
                    "model does not have: give one as chat_template, or leave it out",
                    param="chat_template_kwargs",
                )
            return self._bounded.render_pair(
                self._cased(instruction) + first,
                second,
                max_tokens=max_tokens,
                longest=self._longest(params),
                truncation_side=params.truncation_side,
            )
        text = self._renderer.render_pair_template(first, second, chat_template, variables, instruction=instruction)
        start = self._start_of_template(text, chat_template)
        if max_tokens is not None:
            max_tokens = max(max_tokens - len(start), 1)
        rendered = self._bounded.render(
            text,
            max_tokens=max_tokens,
            longest=self._longest(params),
            truncation_side=params.truncation_side,
            add_special_tokens=False,
        )
        token_ids = rendered.token_ids
        if len(token_ids) == max_tokens and params.truncation_side != "left":
            end = self._renderer.pair_template_end(chat_template, variables, instruction=instruction)[-max_tokens:]
            token_ids = [*token_ids[: max_tokens - len(end)], *end]
        return dataclasses.replace(rendered, token_ids=[*start, *token_ids])

    def _start_of_template(self, text: str, chat_template: str | None) -> list[int]:
        """Special tokens that the tokenizer puts before a text that a template made which did not come with the
        checkpoint, as vLLM's templates expect; none where the template writes them, or the checkpoint's own is used."""
        tokenizer = self._renderer.tokenizer
        templates = getattr(getattr(tokenizer, "files", None), "chat_templates", {})
        if chat_template is None and self._renderer.tokenizer_config.get("chat_template") == templates.get("default"):
            return []
        begin = text[:_START_CHARS]
        plain = tokenizer.encode(begin, add_special_tokens=False)
        special = tokenizer.encode(begin, add_special_tokens=True)
        places = range(len(special) - len(plain) + 1)
        num = next((place for place in places if special[place : place + len(plain)] == plain), 0)
        start = special[:num]
        return [] if plain[: len(start)] == start else start

    def _prompt_of_task(self, task: str) -> str | None:
        """Name of the prompt that texts of a task get where their request names none: the one of its own name."""
        return task if task in self.spec.prompts else None

    def head(self, text: str, max_tokens: int) -> str:
        """The beginning of a text that holds its first `max_tokens` tokens and maybe more, or all of it."""
        return self._bounded.head(text, max_tokens)

    def _longest(self, params: PoolingParams) -> int:
        """Most tokens of a prompt that is not cut."""
        return self._max_embed_len if params.task == "embed" else self._max_model_len

    def instruction(self, prompt_name: str | None) -> str:
        """The text that goes before a prompt. Raises RequestError where the checkpoint has no prompt of this name."""
        name = self.spec.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self.spec.prompts:
            names = ", ".join(map(repr, self.spec.prompts)) or "none"
            raise RequestError(f"this model has no prompt {name!r}; it has {names}", param="prompt_name")
        return self.spec.prompts[name]

    def _instruction_len(self, instruction: str, add_special_tokens: bool) -> int:
        """Number of tokens of an instruction and the special token before it, as sentence-transformers counts them: an
        end token is not of them."""
        tokenizer = self._renderer.tokenizer
        token_ids = tokenizer.encode(self._cased(instruction), add_special_tokens=add_special_tokens)
        plain_ids = tokenizer.encode(self._cased(instruction), add_special_tokens=False)
        has_end = add_special_tokens and token_ids[-1:] != plain_ids[-1:]
        return len(token_ids) - has_end

    def _cased(self, text: str) -> str:
        return text.lower() if self.spec.do_lower_case else text


def _media_of(prompt: Prompt) -> tuple[list[MediaSource], Mapping[str, Any] | None]:
    """The media of a prompt, and arguments of the processor. Raises RequestError."""
    if not isinstance(prompt, Mapping):
        return [], None
    fields: Mapping[str, Any] = prompt
    sources = [*content_sources(fields.get("content"), "content"), *prompt_sources(fields), *pair_sources(fields)]
    return sources, fields.get("mm_processor_kwargs")


def _has_text(fields: Mapping[str, Any]) -> bool:
    """Whether a prompt with media has a text beside them."""
    return any(fields.get(name) for name in ("prompt", "prompt_token_ids", "text_pair")) or bool(_content_text(fields))


def _content_text(fields: Mapping[str, Any]) -> str:
    """The texts among the parts of a prompt's `content`, a line each."""
    content = fields.get("content") or ()
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)


def _fields(prompt: Mapping[str, Any], *, may_be_media_alone: bool = False) -> Mapping[str, Any]:
    """A prompt dictionary whose keys are known. Raises RequestError."""
    for key, value in prompt.items():
        if key not in _KEYS and value is not None:
            known = ", ".join(_KEYS)
            raise RequestError(
                f"the dictionary of a prompt that is pooled has no key {key!r}; there are {known}", param=key
            )
    has_text = any(prompt.get(name) is not None for name in ("prompt", "prompt_token_ids", "content"))
    if not has_text and not may_be_media_alone:
        raise RequestError("a prompt dictionary must have 'prompt', 'prompt_token_ids' or 'content'", param="prompt")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a non-empty text, got {salt!r}", param="cache_salt")
    return prompt


def as_prompts(prompts: Any, name: str = "prompts") -> Sequence[Any]:
    """One prompt or several, as a sequence of prompts.

    Raises:
        RequestError: what is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence):
        return [prompts] if len(prompts) > 0 and isinstance(prompts[0], int) else prompts
    try:
        return list(prompts)
    except TypeError:
        raise RequestError(
            f"{name} must be a text, token ids, a dictionary, or several of these, got {type(prompts).__name__}",
            param=name,
        ) from None
