"""Bodies of the routes that speak token ids: generate, abort and derender, in vLLM's shapes.

`sampling_params` are those of `SamplingParams`, by its names. Knows no engine.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import Field, model_validator

from quire_interfaces import Modality, PromptMedia, RequestError, SamplingParams, StructuredOutputsParams
from quire_server.config import MAX_PROMPTS
from quire_server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from quire_server.request_fields import Int, Messages, Texts, TokenId, TokenIds, Tools, at_most

__all__ = [
    "AbortRequest",
    "BatchChatCompletionRequest",
    "DerenderChatContext",
    "DerenderChatRequest",
    "DerenderChatStreamRequest",
    "DerenderCompletionContext",
    "DerenderCompletionRequest",
    "DerenderCompletionStreamRequest",
    "DerenderStreamState",
    "GenerateChunk",
    "GenerateLogProb",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateResponseChoice",
    "MediaFeatures",
    "MediaReference",
    "PlaceholderRange",
    "PromptLogProb",
    "ThinkingBounds",
    "sampling_field_names",
    "sampling_params_from",
    "sampling_params_to_json",
]

MAX_CHOICES = 128
"""Most completions of a request, as `SamplingParams.n` has it."""

Count = Annotated[int, Field(ge=0, lt=2**63)]


class BatchChatCompletionRequest(ChatCompletionRequest):
    """Body of POST /v1/chat/completions/batch: several conversations with the same parameters."""

    messages: Annotated[list[Messages], Field(fail_fast=True), at_most(MAX_PROMPTS)] = Field(min_length=1)  # type: ignore[assignment]

    def check_supported(self) -> None:
        super().check_supported()
        for name, wrong in (
            ("stream", self.stream),
            ("tools", self.tools),
            ("functions", self.functions),
            ("n", self.n not in (None, 1)),
        ):
            if wrong:
                raise RequestError(
                    f"{name} cannot be had for several conversations at once: leave it out, or send them one by one",
                    param=name,
                )


class ThinkingBounds(Body):
    """What generation must know to write into the answer: the end of the thinking, the beginning of a call."""

    budget: Int | None = None
    """Most tokens of thinking; None for no bound."""
    forced: str = ""
    """How the answer begins behind the thinking."""
    thinks: bool = True
    """Whether the thinking may come before `forced`."""
    is_open: bool = False
    """Whether the prompt ends inside the thinking."""
    tools: Tools | None = None
    """Tools whose calls are looked for, which may end the thinking."""
    skip_special_tokens: bool = True
    """Whether special tokens are no part of what is read."""


class PlaceholderRange(Body):
    """The tokens of an item."""

    offset: Count
    length: Count


class MediaFeatures(Body):
    """The items of a prompt, by modality, in vLLM's shape. Items are found by their hashes, where they were rendered or
    in a tier that both servers have; their arrays are not sent."""

    mm_hashes: dict[str, Texts] = Field(default_factory=dict)
    """Names of the items, in the order of the prompt."""
    mm_placeholders: dict[str, Annotated[list[PlaceholderRange], Field(fail_fast=True)]] = Field(default_factory=dict)
    """Where each stands."""
    kwargs_data: dict[str, Any] | None = None

    @classmethod
    def of(cls, media: PromptMedia) -> MediaFeatures:
        """What is to be told of the media of a prompt."""
        features = cls()
        for span in media.spans:
            features.mm_hashes.setdefault(span.item.modality, []).append(span.item.key)
            place = PlaceholderRange(offset=span.start, length=span.length)
            features.mm_placeholders.setdefault(span.item.modality, []).append(place)
        return features

    def items(self) -> list[MediaReference]:
        """The items in the order of the prompt.

        Raises:
            RequestError: hashes and places are not as many, or arrays come with them.
        """
        if self.kwargs_data and any(any(values or ()) for values in self.kwargs_data.values()):
            raise RequestError(
                "features.kwargs_data is not taken: items are found by their hashes, where they were rendered or in "
                "the folder of --kv-disk-path",
                param="features.kwargs_data",
                code="unsupported",
            )
        items = []
        for modality in {**self.mm_hashes, **self.mm_placeholders}:
            hashes, places = self.mm_hashes.get(modality, []), self.mm_placeholders.get(modality, [])
            if len(hashes) != len(places) or modality not in _MODALITIES:
                raise RequestError(
                    f"features must have a hash and a place for each item of {', '.join(_MODALITIES)}, got "
                    f"{len(hashes)} and {len(places)} of {modality[:64]!r}",
                    param="features",
                )
            items += [
                MediaReference(place.offset, Modality(modality), key, f"features.mm_hashes.{modality}[{index}]")
                for index, (key, place) in enumerate(zip(hashes, places, strict=True))
            ]
        return sorted(items)


_MODALITIES = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)


class MediaReference(NamedTuple):
    """An item of a prompt that was rendered before."""

    offset: int
    """First token that takes one of its embeddings."""
    modality: Modality
    key: str
    param: str
    """Its place in the request."""


class GenerateRequest(Body):
    """Body of POST /inference/v1/generate, and what the render routes answer."""

    token_ids: TokenIds = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    data_parallel_rank: int | None = Field(default=None, ge=0)
    priority: Int = 0
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    """Answer with the prompt's tokens too."""
    thinking: ThinkingBounds | None = None
    features: MediaFeatures | None = None
    """Images, videos and sounds among the tokens, as the render routes tell them."""
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        for name in ("content_parts", "ec_transfer_params"):
            if getattr(self, name):
                raise RequestError(
                    f"this server's model reads token ids only; leave {name} out", param=name, code="unsupported"
                )


_ID_AS_TEXT = re.compile(r"token_id:(\d{1,10})")


class AbortRequest(Body):
    """Body of POST /inference/v1/abort_requests."""

    request_ids: Texts | str


class GenerateLogProb(Body):
    """A token and its log probability. The id may be written in `token` alone, as "token_id:262"."""

    token_id: TokenId
    logprob: float
    rank: Int | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_id_of_token(cls, value: Any) -> Any:
        token = value.get("token") if isinstance(value, dict) and value.get("token_id") is None else None
        match = _ID_AS_TEXT.fullmatch(token) if isinstance(token, str) else None
        return value if match is None else {**value, "token_id": int(match[1])}


class GenerateLogProbsContent(GenerateLogProb):
    """An output token with its log probability, and the most likely ones at its place."""

    top_logprobs: Annotated[list[GenerateLogProb], Field(fail_fast=True)] = Field(default_factory=list)


class GenerateLogProbs(Body):
    """Log probabilities of an output, one entry per token."""

    content: Annotated[list[GenerateLogProbsContent], Field(fail_fast=True)] | None = None


class PromptLogProb(Body):
    """The log probability of a token of the prompt, which stands under its id."""

    logprob: float
    rank: Int | None = None
    decoded_token: str | None = None


class PromptTokensCached(Body):
    cached_tokens: Count | None = None


class GenerateUsage(Body):
    """What was counted where the output was generated."""

    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptTokensCached | None = None


class GenerateResponseChoice(Body):
    """One completion as token ids."""

    index: int = Field(default=0, ge=0, lt=MAX_CHOICES)
    token_ids: TokenIds | None = None
    logprobs: GenerateLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(Body):
    """What /inference/v1/generate answered, as the derender routes take it."""

    request_id: str | None = Field(default=None, max_length=512)
    output_mode: Literal["tokens"] = "tokens"
    """Text is not taken: it was made already, without the stop strings that its tokens have."""
    choices: Annotated[list[GenerateResponseChoice], Field(fail_fast=True), at_most(MAX_CHOICES)]
    usage: GenerateUsage | None = None
    prompt_logprobs: Annotated[list[dict[str, PromptLogProb] | None], Field(fail_fast=True)] | None = None
    prompt_token_ids: TokenIds | None = None
    kv_transfer_params: dict[str, Any] | None = None


class GenerateChunk(GenerateResponse):
    """One event of its stream; the last one may hold only usage, or an error."""

    choices: Annotated[list[GenerateResponseChoice], Field(fail_fast=True), at_most(MAX_CHOICES)] = Field(
        default_factory=list
    )
    error: dict[str, Any] | None = None


class DerenderStreamState(Body):
    """What a client brings from chunk to chunk of one choice, as it came."""

    output_token_ids: TokenIds = Field(default_factory=list)
    """All tokens of the chunks before."""
    output_chunk_lens: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(fail_fast=True)] = Field(
        default_factory=list
    )
    """How many tokens each of these chunks had."""
    role_sent: bool = False
    """Whether a chunk was told, which begins the answer."""


class DerenderChatContext(Body):
    """What POST /v1/chat/completions/derender knows of the request; also the first event of a body of events, which
    the chunks come behind."""

    model: str | None = None
    chat_request: ChatCompletionRequest | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None


class DerenderChatRequest(DerenderChatContext):
    """Body of POST /v1/chat/completions/derender, for a whole output."""

    generate_response: GenerateResponse
    stream: Literal[False] | None = False


class DerenderChatStreamRequest(DerenderChatContext):
    """Body of /v1/chat/completions/derender for one chunk of a stream."""

    stream: Literal[True]
    generate_chunk: GenerateChunk
    stream_state: DerenderStreamState | None = None


class DerenderCompletionContext(Body):
    """What POST /v1/completions/derender knows of a request with one prompt; also the first event of a body of
    events."""

    model: str | None = None
    completion_request: CompletionRequest | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None


class DerenderCompletionRequest(Body):
    """Body of POST /v1/completions/derender, for whole outputs, one per prompt."""

    generate_responses: Annotated[list[GenerateResponse], Field(fail_fast=True), at_most(MAX_PROMPTS)] = Field(
        min_length=1
    )
    model: str | None = None
    completion_request: CompletionRequest | None = None
    prompt_tokens: Annotated[list[Count], Field(fail_fast=True)] | Count | None = None
    prompt_token_ids: Annotated[list[TokenIds | None], Field(fail_fast=True)] | None = None
    stream: Literal[False] | None = False


class DerenderCompletionStreamRequest(DerenderCompletionContext):
    """Body of /v1/completions/derender for one chunk of a stream."""

    stream: Literal[True]
    generate_chunk: GenerateChunk
    stream_state: DerenderStreamState | None = None


def sampling_params_from(values: dict[str, Any]) -> SamplingParams:
    """Parameters from JSON.

    Raises:
        RequestError: naming `sampling_params.FIELD`.
    """
    if isinstance(values.get("stop"), str):
        values = {**values, "stop": [values["stop"]]}
    values_set = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(values_set, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        name = f"sampling_params{path.rstrip('`')}"
        raise RequestError(f"{name}: {message[:1].lower()}{message[1:]}", param=name) from None
    except RequestError as error:
        error.param = f"sampling_params.{error.param}"
        raise


_DEFAULTS = SamplingParams()


def sampling_params_to_json(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, so that `sampling_params_from` gives the same again."""
    changes = {
        spec.name: getattr(params, spec.name)
        for spec in fields(params)
        if spec.name == "max_tokens" or getattr(params, spec.name) != getattr(_DEFAULTS, spec.name)
    }
    result: dict[str, Any] = msgspec.to_builtins(changes, str_keys=True)
    return result


def sampling_field_names() -> dict[str, str]:
    """Name the engine gives a field -> name it has in a `GenerateRequest`."""
    names = {spec.name: f"sampling_params.{spec.name}" for spec in fields(SamplingParams)}
    kinds = {f"structured_outputs.{spec.name}" for spec in fields(StructuredOutputsParams)}
    return {**names, **{kind: f"sampling_params.{kind}" for kind in kinds}, "prompt": "token_ids"}
