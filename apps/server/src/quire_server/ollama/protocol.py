"""Bodies of Ollama's API, and what they mean in the words of the OpenAI routes. Knows no engine.

Source of the names: Ollama's public API reference (docs/api.md) and the types of its Python client.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from quire_interfaces import PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.pooling_protocol import CommonFields, PoolingInput
from quire_server.protocol import SMALL_LIST, LenientBody
from quire_server.request_fields import Int, Messages, Texts, TokenIds, Tools, at_most

__all__ = [
    "FOREVER",
    "OllamaChatRequest",
    "OllamaEmbedRequest",
    "OllamaEmbeddingsRequest",
    "OllamaGenerateRequest",
    "OllamaOptions",
    "OllamaPullRequest",
    "OllamaRequest",
    "OllamaShowRequest",
    "OllamaStoreRequest",
    "keep_alive_s",
]

FOREVER = float("inf")
"""A `keep_alive` that never ends."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def _whole(value: Any) -> Any:
    """40.0 as 40: clients in languages with one kind of number send it so."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[Int, BeforeValidator(_whole)]


def keep_alive_s(value: float | str | None) -> float | None:
    """How long a model stays loaded after a request, in seconds; `FOREVER` for a negative one, None where the request
    leaves that to the server.

    Args:
        value: Seconds, or a duration such as "5m" or "1h30m".

    Raises:
        RequestError: it is no duration.
    """
    if isinstance(value, str):
        text = value.strip()
        parts = re.findall(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h|$)", text.lstrip("+-"))
        if not parts or "".join(map("".join, parts)) != text.lstrip("+-"):
            raise RequestError(
                f"keep_alive must be seconds or a duration such as '5m', got {reprlib.repr(value)}", param="keep_alive"
            )
        value = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if text.startswith("-") else 1)
    return FOREVER if value is not None and value < 0 else value


class OllamaOptions(LenientBody):
    """`options`: how tokens are chosen. Those that say how a model is loaded (num_ctx, num_gpu, num_thread, ...) are
    the server's settings here, and are passed over, as names are that nobody knows."""

    num_predict: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Whole | None = None
    stop: str | Texts | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """As the OpenAI routes take them."""
        fields = {ours: value for theirs, ours in _OPTIONS.items() if (value := getattr(self, theirs)) is not None}
        if self.num_predict is not None and self.num_predict <= 0:
            fields["max_tokens"] = None  # -1 is no bound, -2 fills the context
        if self.repeat_last_n == 0:  # looks at nothing
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                fields.pop(name, None)
        return fields


_OPTIONS = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "mirostat": "mirostat_mode",
    "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip
"""Ollama's option -> the OpenAI routes' field."""


class OllamaRequest(LenientBody):
    """What chat and generate have in common."""

    model: str | None = None
    stream: bool = True
    format: dict[str, Any] | str | None = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None

    def response_format(self) -> dict[str, Any] | None:
        """`format` as the OpenAI routes take it.

        Raises:
            RequestError: it is neither "json" nor a schema.
        """
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if isinstance(self.format, str):
            raise RequestError(
                f"format must be 'json' or a JSON schema, an object, got {reprlib.repr(self.format)}", param="format"
            )
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}

    def template_kwargs(self) -> dict[str, Any] | None:
        """What `think` means to templates: a switch, or how much.

        Raises:
            RequestError: it is neither.
        """
        if self.think is None:
            return None
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think, "thinking": self.think}
        if self.think not in ("low", "medium", "high", "max"):
            raise RequestError(
                f"think must be true, false, 'low', 'medium', 'high' or 'max', got {reprlib.repr(self.think)}",
                param="think",
            )
        return {"enable_thinking": True, "thinking": True, "reasoning_effort": self.think}

    def common_fields(self) -> dict[str, Any]:
        """Fields of a chat completion or of a completion."""
        return {
            "stream": self.stream,
            "response_format": self.response_format(),
            "max_tokens": None,
            **self.options.sampling_fields(),
        }

    def field_names(self) -> dict[str, str]:
        """The engine's name of a field -> Ollama's."""
        names = {ours: f"options.{theirs}" for theirs, ours in _OPTIONS.items()}
        constraint = dict.fromkeys(("structured_outputs", "structured_outputs.json"), "format")
        return {**names, **constraint, "response_format.json_schema.schema": "format", "logprobs": "top_logprobs"}


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Messages = Field(default_factory=list)
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: TokenIds | None = None
    raw: bool = False
    images: Texts | None = None

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        if self.template:
            raise RequestError(
                "template is written in Go's language, which this server does not read: send the whole prompt with "
                "raw=true, or start the server with --chat-template",
                param="template",
                code="unsupported",
            )
        is_plain = self.raw or bool(self.suffix)
        wrong = {"images": bool(self.images), "context": bool(self.context), "system": bool(self.system)}
        if is_plain and any(wrong.values()):
            name = next(name for name in wrong if wrong[name])
            raise RequestError(
                f"{name} belongs to prompts that go through the model's template; leave it out, or "
                f"{'raw' if self.raw else 'suffix'}",
                param=name,
                code="unsupported_combination",
            )


class OllamaEmbedRequest(CommonFields):
    """Body of POST /api/embed."""

    input: str | Annotated[Texts, at_most(MAX_PROMPTS)]
    truncate: bool = True
    dimensions: Whole | None = None
    options: Mapping[str, Any] | None = None
    keep_alive: float | str | None = None

    @property
    def is_large(self) -> bool:
        return self._is_large or (isinstance(self.input, list) and len(self.input) > SMALL_LIST)

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        keep = -1 if self.truncate else None
        return PoolingParams(
            task=task, use_activation=True, dimensions=self.dimensions, truncate_prompt_tokens=keep,
            truncation_side="right",
        )  # fmt: skip

    def inputs(self) -> list[PoolingInput]:
        """The texts, in order."""
        if isinstance(self.input, str):
            return [PoolingInput("input", prompt=self.input)]
        return [PoolingInput(f"input[{index}]", prompt=text) for index, text in enumerate(self.input)]


class OllamaEmbeddingsRequest(CommonFields):
    """Body of POST /api/embeddings, the older route: one text, whose vector is not normalized."""

    prompt: str = ""
    options: Mapping[str, Any] | None = None
    keep_alive: float | str | None = None

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(task=task, use_activation=False, truncate_prompt_tokens=-1, truncation_side="right")


class OllamaNamed(LenientBody):
    """Names a model, also by its older field."""

    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """The model's name.

        Raises:
            RequestError: there is none.
        """
        if not (name := self.model or self.name):
            raise RequestError("model is required", param="model")
        return name


class OllamaShowRequest(OllamaNamed):
    """Body of POST /api/show."""

    verbose: bool = False


class OllamaPullRequest(OllamaNamed):
    """Body of POST /api/pull."""

    stream: bool = True
    insecure: bool = False


class OllamaStoreRequest(OllamaNamed):
    """Bodies of POST /api/create, /api/copy and /api/push and of DELETE /api/delete, as far as they are read."""

    source: str | None = None
    destination: str | None = None
