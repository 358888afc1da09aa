"""Prompts that are pooled: texts with the checkpoint's own instruction, pairs, token ids; cut to a length.

Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

from quire.prompts import Prompt
from quire_interfaces import PoolingParams, RenderedPrompt, RequestError, RequestOptions
from quire_pooling import PoolerSpec
from quire_pooling.late_interaction import LateInteractionTexts
from quire_renderers import BoundedPrompts, ChatRenderer

__all__ = ["PoolingPrompt", "PoolingPrompts", "PromptOptions", "as_prompts"]

_KEYS = ("prompt", "prompt_token_ids", "text_pair", "cache_salt")


class PoolingPrompt(NamedTuple):
    """A prompt ready for the engine."""

    rendered: RenderedPrompt
    params: PoolingParams
    """Resolved: of the checkpoint's pooler, with the length of its instruction."""
    cache_salt: str | None = None
    """The prompt's own; None for that of its request."""

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
        max_embed_len: Most tokens of a text that is embedded in chunks; 0 where none is.
    """

    def __init__(self, renderer: ChatRenderer, spec: PoolerSpec, max_model_len: int, max_embed_len: int = 0) -> None:
        self.spec = spec
        self._renderer = renderer
        self._bounded = BoundedPrompts(renderer)
        self._max_model_len = max_model_len
        self._max_text_len = min(max_model_len, spec.max_seq_length or max_model_len)
        late = spec.late_interaction
        self._late_interaction = None if late is None else LateInteractionTexts(late, renderer.tokenizer)
        self._max_embed_len = max_embed_len

    def render(self, prompt: Prompt, params: PoolingParams, **options: Unpack[PromptOptions]) -> PoolingPrompt:
        """A prompt ready for the engine.

        Args:
            prompt: Text, token ids, or a dictionary with `prompt` or `prompt_token_ids`; with `text_pair`, the second
                text of a pair, whose first one is `prompt`.
            params: What to pool, how, and where to cut the prompt.
            **options: How to write texts.

        Raises:
            RequestError: it is no prompt, the checkpoint has no such prompt name, or its pooler does not do what the
                parameters say.
        """
        params = self.spec.resolve(params)
        prompt_name, add_special_tokens = options.get("prompt_name"), options.get("add_special_tokens", True)
        max_tokens = params.truncate_prompt_tokens
        if max_tokens is not None:
            longest = max(self._max_model_len, self._max_embed_len if params.task == "embed" else 0)
            max_tokens = self._max_text_len if max_tokens == -1 else min(max_tokens, longest)
        salt = None
        if isinstance(prompt, Mapping):
            fields = _fields(prompt)
            salt = fields.get("cache_salt")
            pair = fields.get("text_pair")
            prompt = fields["prompt"] if fields.get("prompt_token_ids") is None else fields["prompt_token_ids"]
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
        instruction = self._instruction(prompt_name)
        if instruction and not self.spec.include_prompt:
            params = dataclasses.replace(params, prompt_length=self._instruction_len(instruction, add_special_tokens))
        rendered = self._bounded.render(
            self._cased(instruction + prompt),
            max_tokens=max_tokens,
            truncation_side=params.truncation_side,
            add_special_tokens=add_special_tokens,
        )
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
        lengths = [length for length in (max_tokens, texts.max_tokens(is_query=is_query)) if length is not None]
        rendered = self._bounded.render(
            self._cased(instruction + text),
            max_tokens=min(lengths, default=None),
            truncation_side=params.truncation_side,
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
        if not isinstance(first, str) or not isinstance(second, str):
            raise RequestError("text_pair goes with a prompt that is text, and is text itself", param="text_pair")
        first, second = self._cased(first), self._cased(second)
        instruction = self._instruction(options.get("prompt_name"))
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
                truncation_side=params.truncation_side,
            )
        text = self._renderer.render_pair_template(first, second, chat_template, variables, instruction=instruction)
        rendered = self._bounded.render(
            text, max_tokens=max_tokens, truncation_side=params.truncation_side, add_special_tokens=False
        )
        if len(rendered.token_ids) != max_tokens or params.truncation_side == "left":
            return rendered
        end = self._renderer.pair_template_end(chat_template, variables, instruction=instruction)[-max_tokens:]
        return dataclasses.replace(rendered, token_ids=[*rendered.token_ids[: max_tokens - len(end)], *end])

    def _instruction(self, prompt_name: str | None) -> str:
        """The text that goes before a prompt."""
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


def _fields(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt dictionary whose keys are known. Raises RequestError."""
    for key, value in prompt.items():
        if key not in _KEYS and value is not None:
            known = ", ".join(_KEYS)
            raise RequestError(
                f"the dictionary of a prompt that is pooled has no key {key!r}; there are {known}", param=key
            )
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError("a prompt dictionary must have 'prompt' or 'prompt_token_ids'", param="prompt")
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
