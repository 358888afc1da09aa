"""Bodies of SGLang's native routes, and what they mean in the words of the OpenAI routes. Knows no engine.

Source of the names: SGLang's public documentation (sampling parameters, native APIs).
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from quire_interfaces import PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.pooling_protocol import CommonFields, PoolingInput
from quire_server.protocol import SMALL_LIST, LenientBody
from quire_server.request_fields import Int, Prompts, Texts, at_most

__all__ = ["GenerateItem", "SGLangAbortRequest", "SGLangEncodeRequest", "SGLangGenerateRequest", "SGLangPauseRequest"]

DEFAULT_MAX_NEW_TOKENS = 128
_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias",
)  # fmt: skip
_OTHER_NAME = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}  # fmt: skip
"""SGLang's field -> the OpenAI routes'."""
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_UNSERVED = {
    "input_embeds": "send embeddings as prompt_embeds to /v1/completions",
    "custom_logit_processor": "start the server with --logits-processors",
    "return_hidden_states": "hidden states are pooled by POST /pooling of a server with --runner pooling",
    "session_params": "send the whole conversation each time; its prefix is cached",
    "return_routed_experts": "this server does not tell experts",
}
"""Field -> what to do instead."""
_MEDIA = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


@dataclass(slots=True)
class GenerateItem:
    """One prompt of a request, with all that is said of it."""

    prompt: str | list[int]
    place: str
    rid: str | None
    fields: dict[str, Any]
    """Fields of a completion, but for its prompt."""
    names: dict[str, str]
    """The engine's name of a field -> SGLang's."""
    has_logprobs: bool
    logprob_start_len: int
    num_top_logprobs: int
    logprob_token_ids: list[int] | None
    media: dict[str, list[str]]
    """Modality -> URLs."""


class SGLangGenerateRequest(LenientBody):
    """Body of POST /generate. Most fields are one value for all prompts, or a list with one for each."""

    text: str | Annotated[Texts, at_most(MAX_PROMPTS)] | None = None
    input_ids: Prompts | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | Texts | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: Int | list[Int] = -1
    top_logprobs_num: Int | list[Int] = 0
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool = False
    lora_path: str | list[str | None] | None = None
    model: str | None = None
    image_data: str | list[Any] | None = None
    video_data: str | list[Any] | None = None
    audio_data: str | list[Any] | None = None
    priority: Int = 0
    extra_key: str | None = Field(default=None, min_length=1, max_length=1024)
    data_parallel_rank: int | None = Field(
        default=None, ge=0, validation_alias=AliasChoices("data_parallel_rank", "routed_dp_rank")
    )
    input_embeds: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    return_routed_experts: Any = None

    @property
    def is_large(self) -> bool:
        return self._is_large or (isinstance(self.text, list) and len(self.text) > SMALL_LIST)

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        for name, remedy in _UNSERVED.items():
            if getattr(self, name) not in (None, False, []):
                raise RequestError(f"{name} is not served here: {remedy}", param=name, code="unsupported")

    def items(self) -> tuple[list[GenerateItem], bool]:
        """Each prompt, and whether there were several, so that the answer is a list.

        Raises:
            RequestError: naming the field at fault.
        """
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", param="text" if self.text is None else "input_ids")
        name = "text" if self.input_ids is None else "input_ids"
        value: Any = self.text if self.input_ids is None else self.input_ids
        if name == "input_ids" and (isinstance(value, str) or any(isinstance(each, str) for each in value)):
            raise RequestError("input_ids must be token ids or lists of them; send texts as text", param="input_ids")
        is_several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        prompts = value if is_several else [value]
        if not value:
            raise RequestError(f"{name} must not be empty", param=name)
        count = len(prompts)
        return [self._item(prompt, name, index, count, is_several) for index, prompt in enumerate(prompts)], is_several

    def _item(self, prompt: Any, name: str, index: int, count: int, is_several: bool) -> GenerateItem:
        place = f"{name}[{index}]" if is_several else name
        given = self._of("sampling_params", index, count, is_several) or {}
        has_logprobs = self._of("return_logprob", index, count, is_several)
        fields = _completion_fields(given)
        adapter = self._of("lora_path", index, count, is_several) or self.model
        fields |= {
            "stream": self.stream,
            "priority": self.priority,
            **({} if adapter is None else {"model": adapter}),
            **({} if self.extra_key is None else {"cache_salt": self.extra_key}),
            **({} if self.data_parallel_rank is None else {"data_parallel_rank": self.data_parallel_rank}),
        }
        rid = self.rid
        if isinstance(rid, list):
            rid = self._of("rid", index, count, is_several)
        elif rid is not None and is_several:
            rid = f"{rid}_{index}"
        wanted = self.token_ids_logprob
        if wanted and is_several and isinstance(wanted[0], list):
            wanted = self._of("token_ids_logprob", index, count, is_several)
        return GenerateItem(
            prompt=prompt,
            place=place,
            rid=rid,
            fields=fields,
            names=_field_names(given),
            has_logprobs=bool(has_logprobs),
            logprob_start_len=self._of("logprob_start_len", index, count, is_several),
            num_top_logprobs=self._of("top_logprobs_num", index, count, is_several),
            logprob_token_ids=wanted or None,
            media=self._media(index, count, is_several),
        )

    def _of(self, name: str, index: int, count: int, is_several: bool) -> Any:
        """A field's value for one prompt."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return value
        if len(value) != count:
            raise RequestError(f"{name} has {len(value)} values for {count} prompts", param=name)
        return value[index]

    def _media(self, index: int, count: int, is_several: bool) -> dict[str, list[str]]:
        result = {}
        for name, modality in _MEDIA.items():
            value = getattr(self, name)
            if value is None:
                continue
            own = self._of(name, index, count, is_several) if is_several and isinstance(value, list) else value
            urls = [] if own is None else own if isinstance(own, list) else [own]
            result[modality] = [_url(each, modality, name) for each in urls]
        return {modality: urls for modality, urls in result.items() if urls}


def _url(value: Any, modality: str, param: str) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise RequestError(f"{param} must hold URLs or data in base64, got {reprlib.repr(value)}", param=param)
    has_scheme = url.startswith(("http://", "https://", "data:", "file:"))
    return url if has_scheme else f"data:{modality}/*;base64,{url}"


def _completion_fields(given: dict[str, Any]) -> dict[str, Any]:
    """`sampling_params` as fields of a completion. Raises RequestError naming the field at fault."""
    if given.get("stop_regex"):
        raise RequestError(
            "stop_regex is not served here: send stop, or a regex that the whole output has",
            param="sampling_params.stop_regex",
            code="unsupported",
        )
    constraints = {ours: given[theirs] for theirs, ours in _CONSTRAINTS.items() if given.get(theirs)}
    if len(constraints) > 1:
        raise RequestError(
            f"sampling_params may have one of {', '.join(_CONSTRAINTS)}", param="sampling_params", code="unsupported"
        )
    fields = {name: given[name] for name in _SAME_NAME if given.get(name) is not None}
    fields |= {ours: given[theirs] for theirs, ours in _OTHER_NAME.items() if given.get(theirs) is not None}
    fields["max_tokens"] = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if fields["max_tokens"] == 0:
        fields["echo"] = True  # the prompt alone may be asked for
    if constraints:
        fields["structured_outputs"] = constraints
    return fields


def _field_names(given: dict[str, Any]) -> dict[str, str]:
    names = {name: name for name in _SAME_NAME} | {ours: theirs for theirs, ours in _OTHER_NAME.items()}
    names |= {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}
    inside = {ours: f"sampling_params.{theirs}" for ours, theirs in names.items() if "logprobs" not in ours}
    constraint = next((name for name in _CONSTRAINTS if given.get(name)), "json_schema")
    kinds = ("structured_outputs", *(f"structured_outputs.{kind}" for kind in _CONSTRAINTS.values()))
    return {**names, **inside, **dict.fromkeys(kinds, f"sampling_params.{constraint}")}


class SGLangEncodeRequest(CommonFields):
    """Body of POST /encode."""

    prompt_field: ClassVar[str] = "text"
    text: Prompts | None = None
    input_ids: Prompts | None = None
    rid: str | Texts | None = None
    image_data: Any = None

    @property
    def is_large(self) -> bool:
        value = self.text if self.input_ids is None else self.input_ids
        return self._is_large or (isinstance(value, list) and len(value) > SMALL_LIST)

    def check_supported(self) -> None:
        super().check_supported()
        if self.image_data is not None:
            raise RequestError(
                "image_data is not read here: send messages with images to /v1/embeddings",
                param="image_data",
                code="unsupported",
            )

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(task=task)

    @property
    def is_several(self) -> bool:
        """Whether the answer is a list."""
        value: Any = self.text if self.input_ids is None else self.input_ids
        return isinstance(value, list) and bool(value) and not isinstance(value[0], int)

    def inputs(self) -> list[PoolingInput]:
        """What is to be read. Raises RequestError when there is nothing, or too much."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", param="text" if self.text is None else "input_ids")
        name = "text" if self.input_ids is None else "input_ids"
        value: Any = self.text if self.input_ids is None else self.input_ids
        if not value:
            raise RequestError(f"{name} must not be empty", param=name)
        if self.is_several:
            return [PoolingInput(f"{name}[{index}]", prompt=each) for index, each in enumerate(value)]
        return [PoolingInput(name, prompt=value)]

    def rids(self) -> list[str] | None:
        """Names of the texts, where the client gave some."""
        return [self.rid] if isinstance(self.rid, str) else self.rid


class SGLangAbortRequest(LenientBody):
    """Body of POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class SGLangPauseRequest(LenientBody):
    """Body of POST /pause_generation."""

    mode: str = "abort"
