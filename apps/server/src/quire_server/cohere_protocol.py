"""Body and answer of POST /v2/embed, and of its older form /v1/embed, in Cohere's shapes. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quire_interfaces import PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.input_types import prompt_of_input_type
from quire_server.pooling_protocol import PoolingFields, PoolingInput
from quire_server.protocol import SMALL_LIST, Body
from quire_server.request_fields import Int, Objects, Texts, at_most
from quire_server.vector_encoding import Buffer, base64_vector, binary_vector, float_vector, int8_vector

__all__ = ["CohereEmbedRequest", "CohereEmbeddings", "CohereMeta", "vectors_by_type"]

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereInput(Body):
    """One text, image, or mixture of both."""

    content: Annotated[Objects, Field(min_length=1)]


class CohereEmbedRequest(PoolingFields):
    """Body of POST /v2/embed."""

    texts: Annotated[Texts, at_most(MAX_PROMPTS)] | None = None
    images: Annotated[Texts, at_most(MAX_PROMPTS)] | None = None
    inputs: Annotated[list[CohereInput], Field(fail_fast=True), at_most(MAX_PROMPTS)] | None = None
    input_type: str | None = None
    """What the vectors are for: one of Cohere's names, or the name of a prompt of the checkpoint."""
    embedding_types: Annotated[list[EmbeddingType], Field(fail_fast=True)] | None = None
    output_dimension: Int | None = None
    max_tokens: Int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"

    @property
    def is_large(self) -> bool:
        return self._is_large or len(self.texts or self.images or self.inputs or ()) > SMALL_LIST

    def prompts(self) -> list[PoolingInput]:
        """What is to be read, in order.

        Raises:
            RequestError: not exactly one of `texts`, `images` and `inputs`, or an empty one.
        """
        values: dict[str, Any] = {"texts": self.texts, "images": self.images, "inputs": self.inputs}
        names = [name for name, value in values.items() if value is not None]
        if len(names) != 1:
            raise RequestError("give exactly one of texts, images and inputs", param=names[1] if names else "texts")
        (name,) = names
        if not values[name]:
            raise RequestError(f"{name} must not be empty", param=name)
        return [self._prompt(f"{name}[{index}]", each) for index, each in enumerate(values[name])]

    @property
    def has_images(self) -> bool:
        """Whether something of what is to be read is an image."""
        parts = (part for each in self.inputs or () for part in each.content)
        return self.images is not None or any(part.get("type") == "image_url" for part in parts)

    def _prompt(self, param: str, value: Any) -> PoolingInput:
        if isinstance(value, CohereInput):
            parts = value.content
            texts = [part.get("text") for part in parts if part.get("type") == "text"]
            if len(texts) == len(parts) == 1 and isinstance(texts[0], str):
                return PoolingInput(param, prompt=texts[0])
            return PoolingInput(param, messages=[{"role": "user", "content": parts}])
        if self.images is not None:
            part = {"type": "image_url", "image_url": {"url": value}}
            return PoolingInput(param, messages=[{"role": "user", "content": [part]}])
        return PoolingInput(param, prompt=value)

    def check_supported(self) -> None:
        super().check_supported()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        """As the engine takes it: texts that are too long are cut at their end, unless `truncate` says otherwise."""
        keep = None if self.truncate == "NONE" else (self.max_tokens or -1)
        return PoolingParams(
            task=task,
            dimensions=self.output_dimension,
            use_activation=self.activation(),
            truncate_prompt_tokens=keep,
            truncation_side=None if keep is None else ("left" if self.truncate == "START" else "right"),
        )

    def prompt_name(self, prompts: Mapping[str, str]) -> str | None:
        """Which of the checkpoint's prompts goes before each text; None for its default.

        Args:
            prompts: Of the checkpoint.

        Raises:
            RequestError: `input_type` is neither a name of Cohere's nor of a prompt.
        """
        return prompt_of_input_type(self.input_type, prompts)

    def check_length(self, param: str, num_tokens: int) -> None:
        """Raises RequestError for a text longer than `max_tokens` where nothing is to be cut."""
        if self.truncate == "NONE" and self.max_tokens is not None and num_tokens > self.max_tokens:
            raise RequestError(
                f"{param} has {num_tokens} tokens, more than max_tokens ({self.max_tokens}), and truncate is NONE; "
                "set truncate to START or END, or send less",
                param=param,
            )


class CohereMeta(msgspec.Struct, kw_only=True):
    """Version of the API, and what the request cost."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]

    @classmethod
    def of(
        cls, version: str, num_tokens: int, *, search_units: int | None = None, has_images: bool = False
    ) -> CohereMeta:
        """Of an answer for which `num_tokens` tokens were read, all billed as an image's where there are images."""
        if search_units is not None:
            billed = {"search_units": search_units}
        elif has_images:
            billed = {"input_tokens": 0, "image_tokens": num_tokens}
        else:
            billed = {"input_tokens": num_tokens}
        return cls(api_version={"version": version}, billed_units=billed, tokens={"input_tokens": num_tokens})


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """Answer of POST /v2/embed."""

    id: str
    embeddings: Any
    """Name of a form -> the vectors in it; in the older API without `embedding_types`, the vectors themselves."""
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"
    errors: list[Any] | UnsetType = UNSET
    """With `errors: "per_item"`: the error of each item or null."""


def vectors_by_type(vectors: Sequence[Buffer | None], types: Sequence[EmbeddingType]) -> dict[str, list[Any]]:
    """The vectors in every form.

    Args:
        vectors: float32, little-endian; None for an item that failed.
        types: Names of the forms.

    Raises:
        RequestError: bits are asked for, and the vectors' length is no multiple of 8.
    """
    forms: dict[str, list[Any]] = {}
    for name in types:
        try:
            forms[name] = [None if each is None else _FORMS[name](each) for each in vectors]
        except ValueError as error:
            raise RequestError(f"embedding_types holds {name!r}, but {error}", param="embedding_types") from None
    return forms


_FORMS: dict[EmbeddingType, Callable[[Buffer], Any]] = {
    "float": float_vector,
    "int8": lambda vector: int8_vector(vector, signed=True),
    "uint8": lambda vector: int8_vector(vector, signed=False),
    "binary": lambda vector: binary_vector(vector, signed=True),
    "ubinary": lambda vector: binary_vector(vector, signed=False),
    "base64": lambda vector: base64_vector(vector, endianness="little"),
}
