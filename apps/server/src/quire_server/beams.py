"""`use_beam_search` of the text routes, under vLLM's names: n sequences by beam search instead of n drawn ones."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

from quire import BeamSearchParams
from quire.logprob_bound import resolved_max_logprobs
from quire_engine import RequestOutput
from quire_interfaces import RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_interfaces.number_range import number_fields
from quire_server.context import ServerContext
from quire_server.protocol import SamplingFields

__all__ = ["beam_search_outputs", "beam_search_params"]

_PLAIN = SamplingParams()
_NOT_TOGETHER = (
    "stop", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "logprobs", "prompt_logprobs",
    "structured_outputs", "extra_args", "deterministic",
    *(field.name for field in number_fields(SamplingParams) if field.range.edits_logits),
)  # fmt: skip
"""What would change which sequences are likely, or is not computed. What only matters to a draw is ignored."""


def beam_search_params(body: SamplingFields, params: SamplingParams) -> BeamSearchParams | None:
    """The search that a request asks for; None when it asks for none. `best_of` beams, or n.

    Raises:
        RequestError: naming the field that cannot be had together with a search.
    """
    if not body.use_beam_search:
        return None
    together = [name for name in _NOT_TOGETHER if getattr(params, name) != getattr(_PLAIN, name)]
    if body.stream:
        together.append("stream")
    if body.repetition_penalty not in (None, 1):
        together.append("repetition_penalty")
    if together:
        raise RequestError(
            f"use_beam_search cannot be combined with {together[0]}; leave one of them out",
            param=together[0],
            code="unsupported_combination",
        )
    return BeamSearchParams(
        beam_width=params.best_of or params.n,
        max_tokens=params.max_tokens or 1,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )


async def beam_search_outputs(
    context: ServerContext,
    prompt: RenderedPrompt,
    beams: BeamSearchParams,
    params: SamplingParams,
    options: RequestOptions,
) -> AsyncGenerator[RequestOutput, None]:
    """One output with the n best sequences."""
    engine = context.llm.engine
    if params.max_tokens is None:
        room = engine.info.max_model_len - len(prompt.token_ids)
        beams = dataclasses.replace(beams, max_tokens=max(1, room))
    max_logprobs = resolved_max_logprobs(context.llm.config.model.max_logprobs, engine.info.vocab_size)
    output = await engine.beam_search(prompt, beams, options, max_logprobs=max_logprobs)
    output.outputs = output.outputs[: params.n]
    yield output
