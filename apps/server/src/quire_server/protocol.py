"""The request bodies of the text routes, as pydantic models: the OpenAI fields and vLLM's extensions, by their names.

Knows types and which fields belong together; ranges are checked by `SamplingParams`, which speaks the same names. Knows
no engine and no web framework. Unknown fields are accepted and ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    create_model,
    model_validator,
)

from quire_interfaces import RequestError, SamplingParams
from quire_interfaces.number_range import NumberField, number_fields
from quire_interfaces.sampling_bounds import MAX_CHARS, MAX_ITEMS
from quire_server.config import MAX_PROMPTS
from quire_server.request_fields import (
    Int,
    Messages,
    Metadata,
    Objects,
    PromptEmbeds,
    Prompts,
    Texts,
    TokenIds,
    Tools,
    at_most,
)
from quire_server.structured import constraint_names, structured_outputs_of

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "LenientBody",
    "SamplingFields",
    "StreamOptions",
    "ThinkingTokenBudget",
    "TokenizeRequest",
    "check_thinking_budget",
    "transfer_args",
    "with_effort",
]

ThinkingTokenBudget = Annotated[Int | None, BeforeValidator(lambda budget: None if budget == -1 else budget)]
"""Most tokens of thinking; None, or vLLM's -1, for no bound."""


SMALL_LIST = 32
"""So many texts or prompts are no reason for a worker thread."""


class Body(BaseModel):
    """Strict types ("12" is not a number), no NaN or infinity."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    prompt_field: ClassVar[str] = "prompt"
    """Name of the field that holds prompts: text, token ids, or a list of them."""
    _is_large: bool = PrivateAttr(default=False)

    @property
    def is_large(self) -> bool:
        """Whether it is so long that work on all of it belongs into a worker thread."""
        return self._is_large

    def mark_large(self) -> None:
        """Say that it is, with the bodies inside."""
        self._is_large = True
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name), Body):
                inner.mark_large()


class LenientBody(Body):
    """A body whose nulls are fields that were left out, as clients with optional arguments send them."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value is not None} if type(fields) is dict else fields


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def transfer_args(kv_transfer_params: Any, extra_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """`SamplingParams.extra_args` with what a request says of its keys and values, if it says anything.

    Raises:
        RequestError: it is no object.
    """
    if not kv_transfer_params:
        return extra_args
    if not isinstance(kv_transfer_params, dict):
        raise RequestError(
            f"kv_transfer_params must be an object, got {reprlib.repr(kv_transfer_params)}", param="kv_transfer_params"
        )
    return {**(extra_args or {}), "kv_transfer_params": kv_transfer_params}


_NUMBERS = {
    field.name: field
    for field in number_fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs")  # which are other fields in each protocol
}


def _optional_number(field: NumberField) -> tuple[Any, Any]:
    """Type and default, for pydantic, of a number that a request may leave out; its range is checked later."""
    names = AliasChoices(field.name, *field.range.aliases)
    return (Int if field.type is int else float) | None, Field(default=None, validation_alias=names)


class SamplingFields(
    create_model(  # type: ignore[misc]  # a base that is made from data
        "SamplingNumbers", __base__=Body, **{name: _optional_number(field) for name, field in _NUMBERS.items()}
    )
):
    """What chat and plain completions have in common: these, and every number of `SamplingParams`."""

    model: str | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | None = None
    dry_sequence_breakers: Texts | str | None = None
    dynatemp_low: float | None = None
    dynatemp_high: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_ITEMS["logit_bias"])] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    deterministic: bool = False
    logprob_token_ids: TokenIds | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    data_parallel_rank: int | None = Field(default=None, ge=0)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_offsets: bool | None = None
    """Read by the render routes."""
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    add_special_tokens: bool | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    user: str | None = None
    logits_processors: Texts | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def is_large(self) -> bool:
        """As of every body; short texts that must be tokenized one by one are work, too."""
        num_texts = len(self.bad_words or ()) + len(self.dry_sequence_breakers or ())
        return self._is_large or num_texts > SMALL_LIST

    def only_scores(self) -> bool:
        """Whether the prompt alone may be asked for, with a `max_tokens` of 0."""
        return False

    def max_tokens_wanted(self) -> int | None:
        """The bound on output tokens, whichever field carries it."""
        raise NotImplementedError(f"{type(self).__name__} does not say which field bounds its output")

    def logprobs_wanted(self) -> int | None:
        """How many log probabilities per token, None for none."""
        raise NotImplementedError(f"{type(self).__name__} does not say which field asks for log probabilities")

    def field_names(self) -> dict[str, str]:
        """Name the engine gives a field -> name it has in this body, where they differ."""
        beams = "n" if self.best_of is None else "best_of"
        return {"beam_width": beams, **constraint_names(self)}

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", param="stream_options")

    def to_sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """As the engine takes it.

        Args:
            defaults: Values for fields the request leaves out (from generation_config.json).

        Raises:
            RequestError: a value out of range or a contradiction, with `param` set.
        """
        values = dict(defaults)
        if self.use_beam_search:  # has neither of these, and the client asked for neither
            values = {name: value for name, value in values.items() if name not in ("bad_words_token_ids", "stop")}
        for name in _SAME_NAME:
            value = getattr(self, name)
            if value is not None:
                values[name] = tuple(value) if isinstance(value, list) else value
        values.update(self._dynamic_temperature())
        if self.dry_range is not None:
            values["dry_range"] = max(0, self.dry_range)  # llama.cpp spells "all" as -1
        if self.dry_sequence_breakers is not None:
            values["dry_sequence_breakers"] = _breakers(self.dry_sequence_breakers)
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            values["logit_bias"] = _by_token_id("logit_bias", self.logit_bias)
        if self.logits_processors is not None:
            values["extra_args"] = {"logits_processors": self.logits_processors}
        if self.kv_transfer_params:
            values["extra_args"] = transfer_args(self.kv_transfer_params, values.get("extra_args"))
        max_tokens = self.max_tokens_wanted()
        if max_tokens == 0 and not self.only_scores():
            raise RequestError("max_tokens must be at least 1, got 0", param="max_tokens")
        return SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=self._num_logprobs(),
            logprob_token_ids=tuple(self.logprob_token_ids) if self.logprob_token_ids else None,
            bad_words=tuple(self.bad_words or ()),
            structured_outputs=structured_outputs_of(self),
        )

    def _num_logprobs(self) -> int | None:
        """How many log probabilities per token; those of named tokens take the place of the most likely ones."""
        has_logprobs = self.logprobs_wanted()
        if not self.logprob_token_ids:
            return has_logprobs
        if has_logprobs is None:
            raise RequestError(
                "logprob_token_ids needs log probabilities to be asked for (logprobs); leave it out, or ask for them",
                param="logprob_token_ids",
            )
        return None

    def _dynamic_temperature(self) -> dict[str, float]:
        """`dynatemp_low` and `dynatemp_high` as a temperature with a range."""
        low, high = self.dynatemp_low, self.dynatemp_high
        if low is None and high is None:
            return {}
        if low is None or high is None or not 0 <= low <= high or self.dynatemp_range is not None:
            raise RequestError(
                f"dynatemp_low and dynatemp_high must come together, in this order and without dynatemp_range, got "
                f"{low}, {high} and {self.dynatemp_range}",
                param="dynatemp_low" if low is None else "dynatemp_high",
            )
        return {"temperature": (low + high) / 2, "dynatemp_range": (high - low) / 2}


_SAME_NAME = (
    *_NUMBERS, "allowed_token_ids", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "deterministic",
    "skip_special_tokens",
)  # fmt: skip


def _breakers(value: list[str] | str) -> tuple[str, ...]:
    """A list of texts, or the same as JSON with or without its brackets, as some front ends send it."""
    if isinstance(value, list):
        return tuple(value)
    if len(value) > 4 * MAX_CHARS["dry_sequence_breakers"]:
        raise RequestError(
            f"dry_sequence_breakers has {len(value)} characters; send fewer", param="dry_sequence_breakers"
        )
    try:
        parsed = msgspec.json.decode(value if value.lstrip().startswith("[") else f"[{value}]", type=list[str])
    except msgspec.DecodeError as error:
        raise RequestError(
            f"dry_sequence_breakers must be a list of texts, got {reprlib.repr(value)}: {error}",
            param="dry_sequence_breakers",
        ) from None
    return tuple(parsed)


def _by_token_id(param: str, values: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in values if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        shown = ", ".join(map(reprlib.repr, wrong[:10]))
        raise RequestError(f"{param} keys must be token ids, got {shown}", param=param)
    return {int(key): value for key, value in values.items()}


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompts | None = None
    prompt_embeds: str | PromptEmbeds | None = None
    """What `torch.save` or `numpy.save` writes of [tokens, hidden_size], in base64; the first prompts of the answer."""
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool = False
    suffix: str | None = None
    packed_top_logprobs: bool = False

    @property
    def is_large(self) -> bool:
        return super().is_large or (isinstance(self.prompt, list) and len(self.prompt) > SMALL_LIST)

    def only_scores(self) -> bool:
        return self.echo or self.prompt_logprobs is not None

    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens

    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt of text or of token ids.

        Raises:
            RequestError: no prompt at all.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt is None and self.prompt_embeds:
            return []
        if self.prompt is None:
            raise RequestError("prompt is required", param="prompt")
        if not self.prompt:
            raise RequestError("prompt must not be empty; give text or at least one token id", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def embeds(self) -> list[str]:
        """One entry per prompt of embeddings."""
        if not self.prompt_embeds:
            return []
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds

    def check_supported(self) -> None:
        super().check_supported()
        wrong = {"echo": self.echo, "suffix": self.suffix, "prompt_logprobs": self.prompt_logprobs is not None}
        if self.prompt_embeds and any(wrong.values()):
            name = next(name for name in wrong if wrong[name])
            raise RequestError(
                f"{name} cannot be combined with prompt_embeds, which have no text; leave one of them out", param=name
            )
        if self.packed_top_logprobs and (
            (self.logprobs or 0) < 1
            or not self.return_tokens_as_token_ids
            or self.echo
            or self.use_beam_search
            or self.logprob_token_ids
        ):
            raise RequestError(
                "packed_top_logprobs needs logprobs of at least 1 and return_tokens_as_token_ids, and neither echo, "
                "use_beam_search nor logprob_token_ids",
                param="packed_top_logprobs",
            )
        if self.suffix and self.echo:
            raise RequestError("echo cannot be combined with suffix; leave one of them out", param="echo")


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1)
    prompt_embeds: Any = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Tools | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: Texts | None = None
    audio: Any = None
    prediction: dict[str, Any] | None = None
    web_search_options: Any = None
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: ThinkingTokenBudget = None
    echo: bool = False

    def echoed_text(self) -> str:
        """With `echo`, the text of the message that the answer goes on with."""
        last = self.messages[-1]
        begins_anew = self.add_generation_prompt and not self.continue_final_message
        if not self.echo or begins_anew or last.get("role") != "assistant":
            return ""
        content = last.get("content")
        if isinstance(content, list):
            return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
        return str(content or "")

    def max_tokens_wanted(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_names(self) -> dict[str, str]:
        names = {**super().field_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def check_supported(self) -> None:
        super().check_supported()
        if self.prompt_embeds is not None:
            raise RequestError(
                "this server takes no embeddings as prompts here: send them to /v1/completions",
                param="prompt_embeds",
                code="unsupported",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        check_thinking_budget(self.thinking_token_budget)
        self._check_modalities()
        self._check_functions()
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false",
                param="continue_final_message",
            )

    def _check_modalities(self) -> None:
        unserved = {
            "modalities": any(each != "text" for each in self.modalities or ()),
            "audio": self.audio is not None,
        }
        for name, is_asked in unserved.items():
            if is_asked:
                raise RequestError(
                    f"this server answers with text only; leave {name} out", param=name, code="unsupported"
                )
        if self.prediction is not None and self.prediction.get("type") != "content":
            raise RequestError(
                f"prediction.type must be 'content', got {reprlib.repr(self.prediction.get('type'))}",
                param="prediction.type",
            )

    def _check_functions(self) -> None:
        if self.functions is not None and (self.tools is not None or self.tool_choice is not None):
            raise RequestError(
                "functions is the older name of tools; give one of them, with function_call or tool_choice",
                param="functions",
            )
        if self.functions is not None and not self.functions:
            raise RequestError("functions must hold at least one function, or be left out", param="functions")
        if self.function_call is not None and self.functions is None:
            raise RequestError("function_call needs functions; for tools, use tool_choice", param="function_call")

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, with what `reasoning_effort` means to templates, `verbosity` and the `documents`."""
        kwargs = with_effort(self.chat_template_kwargs, self.reasoning_effort)
        if self.verbosity is not None:
            kwargs = {"verbosity": self.verbosity, **(kwargs or {})}
        return kwargs if self.documents is None else {"documents": self.documents, **(kwargs or {})}


def with_effort(kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any] | None:
    """Variables of the template for an effort: its name, and the switches under which models know thinking. What the
    request sets itself wins."""
    if effort is None:
        return kwargs
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **(kwargs or {})}


def check_thinking_budget(budget: int | None, param: str = "thinking_token_budget") -> None:
    """Raises RequestError when it is no count."""
    if budget is not None and budget < 0:
        raise RequestError(f"{param} must be at least 0, got {budget}; leave it out for no bound", param=param)


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or messages; or as TEI takes it, a text or several as `inputs`; or as llama.cpp
    does, a text as `content`."""

    model: str | None = None
    prompt: str | None = None
    inputs: str | Annotated[Texts, at_most(MAX_PROMPTS)] | None = None
    prompt_name: str | None = None
    """Name of a prompt of the checkpoint, which is put before each of `inputs`."""
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
