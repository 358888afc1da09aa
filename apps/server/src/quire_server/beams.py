"""`use_beam_search` of the text routes, under vLLM's names: n sequences by beam search instead of n drawn ones."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from quire import BeamSearchParams
from quire_engine import RequestOutput
from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.context import ServerContext
from quire_server.protocol import SamplingFields

__all__ = ["beam_search_outputs", "beam_search_params"]

_PLAIN = SamplingParams()
_NOT_TOGETHER = (
    "stop", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "presence_penalty",
    "frequency_penalty", "logprobs", "prompt_logprobs", "structured_outputs", "extra_args", "dry_multiplier",
    "deterministic",
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
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> AsyncIterator[RequestOutput]:
    """One output with the n best sequences."""
    if params.max_tokens is None:
        room = context.llm.engine_info.max_model_len - len(prompt.token_ids)
        beams = dataclasses.replace(beams, max_tokens=max(1, room))
    output = await context.beam_search(prompt, beams, priority=priority, cache_salt=cache_salt, adapter=adapter)
    output.outputs = output.outputs[: params.n]
    yield output
