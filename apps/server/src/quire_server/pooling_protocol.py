"""Bodies of the pooling routes in OpenAI's and vLLM's shapes: embeddings, classification, scores, reranking, pooling.

Knows types and which fields belong together. Knows no engine and no web framework.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from quire.pooling.prompts import PromptOptions
from quire_interfaces import POOLING_TASKS, PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.protocol import SMALL_LIST, LenientBody
from quire_server.request_fields import Int, Messages, Objects, Prompts, Texts, at_most
from quire_server.vector_encoding import EmbedDType, EncodingFormat, Endianness

__all__ = [
    "ClassificationRequest",
    "CommonFields",
    "EmbeddingRequest",
    "PoolingFields",
    "PoolingInput",
    "PoolingRequest",
    "PromptFields",
    "RerankRequest",
    "ScoreRequest",
    "ScoringFields",
    "VectorFields",
    "pairs_of",
]

Conversations = Annotated[list[Messages], Field(fail_fast=True), at_most(MAX_PROMPTS)]
Documents = Annotated[list[str | dict[str, Any]], Field(fail_fast=True), at_most(MAX_PROMPTS)]


@dataclass(slots=True)
class PoolingInput:
    """One text to read: a prompt or a conversation."""

    param: str
    """Its place in the body, e.g. "input[3]"."""
    prompt: str | list[int] | None = None
    """Text or token ids."""
    messages: list[dict[str, Any]] | None = None


class CommonFields(LenientBody):
    """Fields of all pooling routes, in any protocol."""

    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    data_parallel_rank: int | None = Field(default=None, ge=0)
    stream: bool | None = None

    @property
    def per_item(self) -> bool:
        """Whether one wrong item is answered with its own error beside the other items, instead of refusing all."""
        return False

    def check_supported(self) -> None:
        """Refuse what is understood but not served.

        Raises:
            RequestError: naming the field and what to do instead.
        """
        if self.stream:
            raise RequestError("answers of this route come whole; leave stream out", param="stream")

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        """What to pool, as the engine takes it. Raises RequestError naming the field at fault."""
        return PoolingParams(task=task)

    def prompt_options(self) -> PromptOptions:
        """How texts are written."""
        return {}

    def chat_options(self) -> dict[str, Any]:
        """How conversations are written: arguments of `ChatTurn`."""
        return {"add_generation_prompt": False}


class PoolingFields(CommonFields):
    """Fields of pooling routes in the shapes of OpenAI, vLLM and Cohere."""

    user: str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    """Another name of `use_activation`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    errors: Literal["fail", "per_item"] = "fail"
    """Whether one wrong item refuses the whole request, or is answered with its own error beside the other items."""

    @property
    def per_item(self) -> bool:
        return self.errors == "per_item"

    def check_supported(self) -> None:
        super().check_supported()
        if self.padding == "max_length":
            raise RequestError("this server pads no prompts; leave padding out", param="padding", code="unsupported")

    def activation(self) -> bool | None:
        """`use_activation`, under whichever name it was sent.

        Raises:
            RequestError: the two names say different things.
        """
        names = (self.use_activation, self.normalize)
        if None not in names and names[0] != names[1]:
            raise RequestError(
                "use_activation and normalize are two names of one thing and contradict each other; leave one out",
                param="normalize",
            )
        return self.use_activation if self.use_activation is not None else self.normalize

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(
            task=task,
            use_activation=self.activation(),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


class ChatFields(PoolingFields):
    """Fields of what makes a prompt of a conversation."""

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """None for True with texts, and for False with conversations, whose template has them."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                param="continue_final_message",
            )

    def chat_options(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "add_special_tokens": bool(self.add_special_tokens),
        }


class PromptFields(ChatFields):
    """Fields of routes that read texts, token ids or conversations."""

    prompt_field: ClassVar[str] = "input"
    input: Prompts | Messages | Conversations | None = None
    messages: Messages | Conversations | None = None
    prompt_name: str | None = None
    """Name of a prompt of the checkpoint, which is put before each text; None for its default."""
    input_type: str | None = None
    """What texts are, in Cohere's words ("search_query"), or the name of a prompt: another way to say `prompt_name`."""

    @property
    def is_large(self) -> bool:
        return self._is_large or any(
            isinstance(value, list) and len(value) > SMALL_LIST for value in (self.input, self.messages)
        )

    def check_supported(self) -> None:
        super().check_supported()
        if None not in (self.prompt_name, self.input_type):
            raise RequestError("prompt_name and input_type say the same thing; leave one out", param="input_type")

    def prompt_options(self) -> PromptOptions:
        return {"prompt_name": self.prompt_name, "add_special_tokens": self.add_special_tokens is not False}

    def inputs(self) -> list[PoolingInput]:
        """What is to be read, in order.

        Raises:
            RequestError: neither or both of `input` and `messages`, or an empty one.
        """
        if (self.input is None) == (self.messages is None):
            raise RequestError("give either input or messages", param="input" if self.input is None else "messages")
        name, value = ("input", self.input) if self.messages is None else ("messages", self.messages)
        if not value:
            raise RequestError(f"{name} must not be empty", param=name)
        if isinstance(value, str):
            return [PoolingInput(name, prompt=value)]
        first: Any = value[0]
        if isinstance(first, int):
            return [PoolingInput(name, prompt=value)]  # type: ignore[arg-type]  # the ids of one prompt
        if isinstance(first, dict):
            return [PoolingInput(name, messages=value)]  # type: ignore[arg-type]  # one conversation
        return [_input(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _input(param: str, value: Any) -> PoolingInput:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return PoolingInput(param, messages=value)
    return PoolingInput(param, prompt=value)


class VectorFields(PromptFields):
    """Fields of routes that answer with vectors."""

    dimensions: Int | None = None
    encoding_format: EncodingFormat = "float"
    embed_dtype: EmbedDType = "float32"
    endianness: Endianness = "native"

    def check_supported(self) -> None:
        super().check_supported()
        if self.errors == "per_item" and self.encoding_format in ("bytes", "bytes_only"):
            raise RequestError(
                f"errors cannot be per_item with encoding_format {self.encoding_format!r}, which has no place for them",
                param="errors",
            )

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(
            task=task,
            dimensions=self.dimensions,
            use_activation=self.activation(),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


class EmbeddingRequest(VectorFields):
    """Body of POST /v1/embeddings."""

    task: str | None = None
    """What texts are embedded for, as in Jina's API: an adapter of the checkpoint and a prompt of this name. "embed" is
    what the route does anyway: /invocations and /pooling choose by it."""
    late_chunking: bool | None = None
    """Texts are parts of one, which is read whole; each gets the mean of its own tokens (Jina's API)."""

    def check_supported(self) -> None:
        super().check_supported()
        if self.late_chunking and (self.messages is not None or self.truncate_prompt_tokens is not None):
            name = "messages" if self.messages is not None else "truncate_prompt_tokens"
            raise RequestError(f"late_chunking takes texts, which it does not cut: leave {name} out", param=name)

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        params = super().pooling_params(task)
        return params if self.task in (None, "embed") else dataclasses.replace(params, embedding_task=self.task)


class ClassificationRequest(PromptFields):
    """Body of POST /classify."""


def _known_task(task: Any) -> Any:
    if isinstance(task, str) and task not in POOLING_TASKS:
        raise RequestError(
            f"Unsupported task: {reprlib.repr(task)}; tasks are {', '.join(POOLING_TASKS)}", param="task"
        )
    return task


class PoolingRequest(VectorFields):
    """Body of POST /pooling."""

    task: Annotated[PoolingTask | None, BeforeValidator(_known_task)] = None
    data: Any = None
    """What an IO-processor plug-in reads, instead of `input` and `messages`."""
    step_tag_id: Int | None = None
    returned_token_ids: list[Int] | None = None

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        params = super().pooling_params(task)
        if self.step_tag_id is None and self.returned_token_ids is None:
            return params
        ids = None if self.returned_token_ids is None else tuple(self.returned_token_ids)
        return dataclasses.replace(params, step_tag_id=self.step_tag_id, returned_token_ids=ids)


class ScoringFields(PoolingFields):
    """Fields of routes that compare queries with documents."""

    instruction: str | None = None
    """Variable of the chat template that writes pairs, as in `chat_template_kwargs`, which goes before it."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_query: Int | None = None
    """Tokens of a query that are kept, special ones not counted; None or 0 for all."""
    max_tokens_per_doc: Int | None = None
    """Tokens of a document that are kept, special ones not counted; None or 0 for all."""

    def check_supported(self) -> None:
        super().check_supported()
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            most: int | None = getattr(self, name)
            if most is not None and most < 0:
                raise RequestError(f"{name} must be at least 1, or 0 for all tokens, got {most}", param=name)

    def prompt_options(self) -> PromptOptions:
        variables = {} if self.instruction is None else {"instruction": self.instruction}
        return {
            "chat_template": self.chat_template,
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})},
        }

    def sides(self) -> tuple[list[PoolingInput], list[PoolingInput]]:
        """Queries and documents. Raises RequestError where they are not given in one of the ways that there are."""
        raise NotImplementedError


class ScoreRequest(ScoringFields):
    """Body of POST /score: two texts, a text and several, or as many as many others."""

    queries: str | Texts | dict[str, Any] | Objects | None = None
    documents: str | dict[str, Any] | Documents | None = None
    items: str | dict[str, Any] | Documents | None = None
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    data_1: str | dict[str, Any] | Documents | None = None
    data_2: str | dict[str, Any] | Documents | None = None

    def sides(self) -> tuple[list[PoolingInput], list[PoolingInput]]:
        """Queries and documents.

        Raises:
            RequestError: not both of a pair of names, several pairs, or an empty list.
        """
        pairs = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
        complete = [pair for pair in pairs if all(getattr(self, name) is not None for name in pair)]
        if len(complete) != 1:
            raise RequestError(
                "give one pair of queries and documents (or items), text_1 and text_2, or data_1 and data_2",
                param="queries" if not complete else complete[1][0],
            )
        first, second = complete[0]
        return _texts(first, getattr(self, first)), _texts(second, getattr(self, second))


class RerankRequest(ScoringFields):
    """Body of the rerank routes, in the words of vLLM, Jina, Cohere (v1 and v2) and, with `texts`, of TEI."""

    query: str | dict[str, Any]
    documents: str | dict[str, Any] | Documents | None = None
    texts: Annotated[Texts, at_most(MAX_PROMPTS)] | None = None
    top_n: Int | None = None
    top_k: Int | None = None
    return_documents: bool = True
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    raw_scores: bool = False
    return_text: bool = False

    @property
    def is_tei(self) -> bool:
        """Whether it is written, and to be answered, as text-embeddings-inference does."""
        return self.texts is not None

    def sides(self) -> tuple[list[PoolingInput], list[PoolingInput]]:
        """The query, alone, and the documents.

        Raises:
            RequestError: no documents, or under two names.
        """
        if (self.documents is None) == (self.texts is None):
            raise RequestError(
                "give either documents or texts", param="documents" if self.documents is None else "texts"
            )
        name, documents = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        (query,) = _texts("query", self.query)
        return [query], _texts(name, documents)

    def num_results(self, num_documents: int) -> int:
        """How many of the best are answered. Raises RequestError when it is less than 1."""
        for name in ("top_n", "top_k"):
            most: int | None = getattr(self, name)
            if most is not None and most < 0:
                raise RequestError(f"{name} must be at least 1, got {most}; leave it out for all", param=name)
            if most:
                return min(most, num_documents)
        return num_documents

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        side, keep = self.truncation_side, self.truncate_prompt_tokens
        if self.truncation_direction is not None and side is None:
            side = "left" if self.truncation_direction.lower() == "left" else "right"
        if keep is None and self.truncate:
            keep = -1
        activation = not self.raw_scores if self.is_tei else self.activation()
        return PoolingParams(task=task, use_activation=activation, truncate_prompt_tokens=keep, truncation_side=side)


def _texts(name: str, value: Any) -> list[PoolingInput]:
    """One side of scores: texts, objects with a `text`, or objects with a `content` of parts, as in a message."""
    if not isinstance(value, list):
        return [_side(name, value)]
    if not value:
        raise RequestError(f"{name} must not be empty", param=name)
    return [_side(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _side(param: str, value: Any) -> PoolingInput:
    if isinstance(value, str):
        return PoolingInput(param, prompt=value)
    text, content = value.get("text"), value.get("content")
    if isinstance(text, str):
        return PoolingInput(param, prompt=text)
    if isinstance(content, str):
        return PoolingInput(param, prompt=content)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content) and content:
        texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
        if len(texts) == len(content) and all(isinstance(each, str) for each in texts):
            return PoolingInput(param, prompt="\n".join(map(str, texts)))
        return PoolingInput(param, messages=[{"role": "user", "content": content}])
    raise RequestError(
        f"{param} must be text, or an object with text or with content, got {reprlib.repr(value)}", param=param
    )


def pairs_of(
    queries: Sequence[PoolingInput], documents: Sequence[PoolingInput]
) -> Iterator[tuple[PoolingInput, PoolingInput]]:
    """Each document with its query: one query goes with all documents, several with one each.

    Raises:
        RequestError: several queries, and another number of documents.
    """
    if len(queries) == 1:
        return ((queries[0], document) for document in documents)
    if len(queries) != len(documents):
        name = queries[0].param.split("[")[0]
        raise RequestError(
            f"{len(queries)} queries cannot be paired with {len(documents)} documents: give one query, or as many as "
            "documents",
            param=name,
        )
    return zip(queries, documents, strict=True)
