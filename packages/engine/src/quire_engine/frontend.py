"""What both fronts do with a caller's request before it runs: check it, give it a name, and make of it the messages for
the core and the processor of what comes back.

Knows text through the `Tokenizer` and `Detokenizer` Protocols; knows no transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from quire_engine.input_processor import InputProcessor
from quire_engine.messages import AddRequest, EngineInfo
from quire_engine.output_processor import DetokenizerFactory, RequestProcessor
from quire_engine.pooling import PoolingProcessor
from quire_engine.routed_experts import RoutedExpertsProcessor
from quire_interfaces import (
    OutputKind,
    PoolingParams,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
    Tokenizer,
)

__all__ = ["Frontend", "PreparedPooling", "PreparedRequest"]


class PreparedRequest(NamedTuple):
    """A checked request that can run."""

    request_id: str
    """The caller's name for it."""
    messages: list[AddRequest]
    """For the core, one per completion."""
    processor: RequestProcessor
    """Makes the caller's outputs of the core's."""


class PreparedPooling(NamedTuple):
    """A checked request that can be pooled."""

    request_id: str
    """The caller's name for it."""
    message: AddRequest
    """For the core."""
    processor: PoolingProcessor
    """Makes the caller's output of the core's."""


class Frontend:
    """Prepares requests.

    Args:
        info: The engine's limits.
        tokenizer: For the text of logprobs and the end tokens; None for token-only use.
        make_detokenizer: None gives no text (and no stop strings).
        eos_token_ids: Tokens that end an output; None takes the tokenizer's.
        seed: Seed of the seeds that requests without one get; None for other ones each time.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        tokenizer: Tokenizer | None = None,
        make_detokenizer: DetokenizerFactory | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self._make_detokenizer = make_detokenizer
        self._input_processor = InputProcessor(info, self.eos_token_ids, tokenizer, seed)
        self._info = info
        self._auto_ids = itertools.count()

    def prepare(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str | None,
        ids_in_use: Container[str],
        default_kind: OutputKind,
    ) -> PreparedRequest:
        """Check a request and make what runs it.

        Args:
            prompt: Token ids, or a rendered prompt.
            params: How to choose tokens, how many, when to stop.
            options: How to schedule and to isolate it, its adapter, and what each output holds.
            request_id: The caller's name for it; None makes one.
            ids_in_use: Names that it cannot have.
            default_kind: What each output holds where the options do not say.

        Raises:
            ContextLengthError: prompt and output do not fit the context.
            RequestError: its name is in use, or it asks for what this engine cannot do.
        """
        if params.stop and self._make_detokenizer is None:
            raise RequestError("stop strings need text, but this engine has no detokenizer", param="stop")
        rendered = as_rendered(prompt)
        request_id = request_id if request_id is not None else f"request-{next(self._auto_ids)}"
        check_unused(request_id, ids_in_use)
        messages = self._input_processor.process(request_id, rendered, params, options)
        processor = (RoutedExpertsProcessor if self._info.returns_routed_experts else RequestProcessor)(
            request_id,
            rendered.text,
            rendered.token_ids,
            [each.request_id for each in messages],
            params,
            tokenizer=self.tokenizer,
            make_detokenizer=self._make_detokenizer,
            kind=options.output_kind or default_kind,
            continued_ids=(rendered.decoder_token_ids or []) if self._info.max_encoder_len else rendered.token_ids,
        )
        return PreparedRequest(request_id, messages, processor)

    def prepare_pooling(
        self,
        prompt: RenderedPrompt | Sequence[int],
        params: PoolingParams,
        options: RequestOptions,
        *,
        request_id: str | None,
        ids_in_use: Container[str],
    ) -> PreparedPooling:
        """Check a request that is pooled and make what runs it; arguments as for `prepare`.

        Raises:
            ContextLengthError: the prompt is longer than the model reads.
            RequestError: its name is in use, or it asks for what this engine cannot do.
        """
        request_id = request_id if request_id is not None else f"request-{next(self._auto_ids)}"
        check_unused(request_id, ids_in_use)
        message = self._input_processor.process_pooling(request_id, as_rendered(prompt), params, options)
        return PreparedPooling(request_id, message, PoolingProcessor(request_id, message))

    def check(self, prompt: RenderedPrompt, params: SamplingParams | PoolingParams, options: RequestOptions) -> None:
        """Raise what `prepare` or `prepare_pooling` would raise about the prompt and its parameters; prepares nothing,
        draws no seed."""
        self._input_processor.check(prompt, params, options)


def as_rendered(prompt: RenderedPrompt | Sequence[int]) -> RenderedPrompt:
    """The prompt, where token ids will do."""
    return prompt if isinstance(prompt, RenderedPrompt) else RenderedPrompt(token_ids=list(prompt))


def check_unused(request_id: str, ids_in_use: Container[str]) -> None:
    """Raises RequestError when the name is in use."""
    if request_id in ids_in_use:
        raise RequestError(f"request id {request_id!r} is in use", param="request_id", code="duplicate_request_id")
