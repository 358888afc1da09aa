"""Bodies of the routes of text-embeddings-inference (TEI): /embed, /embed_all, /embed_sparse, /predict, /similarity.

Knows no engine. TEI's /rerank is the one of `pooling_protocol` with `texts`.
"""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.pooling.prompts import PromptOptions
from quire_interfaces import PoolingParams, PoolingTask, RequestError
from quire_server.config import MAX_PROMPTS
from quire_server.pooling_protocol import CommonFields, PoolingInput
from quire_server.protocol import SMALL_LIST, LenientBody
from quire_server.request_fields import Int, Prompts, Texts, at_most

__all__ = [
    "TEIEmbedAllRequest",
    "TEIEmbedRequest",
    "TEIFields",
    "TEIPredictRequest",
    "TEIPromptRequest",
    "TEISimilarityRequest",
]


class TEIFields(CommonFields):
    """Fields that all of them have in common."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    prompt_name: str | None = None
    """Name of a prompt of the checkpoint, which is put before each text."""

    def prompt_options(self) -> PromptOptions:
        return {"prompt_name": self.prompt_name}

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        """What to pool; what is too long is refused unless `truncate` is set."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=-1 if self.truncate else None,
            truncation_side="left" if self.truncation_direction.lower() == "left" else "right",
        )


class TEIPromptRequest(TEIFields):
    """Body of POST /embed_sparse, and what those of /embed and /embed_all have in common with it."""

    prompt_field: ClassVar[str] = "inputs"
    inputs: Prompts

    @property
    def is_large(self) -> bool:
        return self._is_large or (isinstance(self.inputs, list) and len(self.inputs) > SMALL_LIST)

    def prompts(self) -> list[PoolingInput]:
        """What is to be read, in order. Raises RequestError when there is nothing."""
        value: Any = self.inputs
        if isinstance(value, str):
            return [PoolingInput("inputs", prompt=value)]
        if not value:
            raise RequestError("inputs must not be empty", param="inputs")
        if isinstance(value[0], int):
            return [PoolingInput("inputs", prompt=value)]
        return [PoolingInput(f"inputs[{index}]", prompt=each) for index, each in enumerate(value)]


class TEIEmbedRequest(TEIPromptRequest):
    """Body of POST /embed."""

    normalize: bool | None = None
    dimensions: Int | None = None

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        normalize = self.normalize is not False
        return dataclasses.replace(super().pooling_params(task), use_activation=normalize, dimensions=self.dimensions)


class TEIEmbedAllRequest(TEIPromptRequest):
    """Body of POST /embed_all."""

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return dataclasses.replace(super().pooling_params(task), use_activation=False)


class TEIPredictRequest(TEIFields):
    """Body of POST /predict: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: str | Texts | Annotated[list[str | Texts], Field(fail_fast=True), at_most(MAX_PROMPTS)]
    raw_scores: bool = False

    def pooling_params(self, task: PoolingTask | None) -> PoolingParams:
        return dataclasses.replace(super().pooling_params(task), use_activation=not self.raw_scores)

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list of lists."""
        return isinstance(self.inputs, list) and any(isinstance(each, list) for each in self.inputs)

    def prompts(self) -> list[tuple[PoolingInput, PoolingInput | None]]:
        """Each text, with the second of its pair or None.

        Raises:
            RequestError: something that is neither one text nor two.
        """
        if isinstance(self.inputs, str):
            return [(PoolingInput("inputs", prompt=self.inputs), None)]
        if self.is_batch:
            return [_pair(f"inputs[{index}]", each) for index, each in enumerate(self.inputs)]
        return [_pair("inputs", self.inputs)]


def _pair(param: str, value: Any) -> tuple[PoolingInput, PoolingInput | None]:
    texts = [value] if isinstance(value, str) else value
    if len(texts) == 1:
        return PoolingInput(param, prompt=texts[0]), None
    if len(texts) == 2:
        return PoolingInput(f"{param}[0]", prompt=texts[0]), PoolingInput(f"{param}[1]", prompt=texts[1])
    raise RequestError(f"{param} must be one text or two, got {reprlib.repr(value)}", param=param)


class SimilarityInputs(LenientBody):
    source_sentence: str
    sentences: Annotated[Texts, Field(min_length=1), at_most(MAX_PROMPTS)]


class SimilarityParameters(LenientBody):
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    prompt_name: str | None = None


class TEISimilarityRequest(TEIFields):
    """Body of POST /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    """Fields that stand beside the texts in the other bodies."""

    @property
    def is_large(self) -> bool:
        return self._is_large or len(self.inputs.sentences) > SMALL_LIST

    def model_post_init(self, context: Any) -> None:
        for name, value in ({} if self.parameters is None else dict(self.parameters)).items():
            setattr(self, name, value)

    def prompts(self) -> list[PoolingInput]:
        """The source sentence, then those that it is compared with."""
        first = PoolingInput("inputs.source_sentence", prompt=self.inputs.source_sentence)
        rest = enumerate(self.inputs.sentences)
        return [first, *(PoolingInput(f"inputs.sentences[{index}]", prompt=text) for index, text in rest)]
