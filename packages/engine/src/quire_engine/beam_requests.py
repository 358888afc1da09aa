"""Beam search over an engine: each step of each beam is a request for one token, whose prefix is in the prefix cache.

The search itself is `BeamSearch`; `AsyncEngine.beam_search` and `quire.LLM.beam_search` drive it with what is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from quire_engine.beam_search import Beam, BeamSearch, BeamSearchParams
from quire_engine.messages import EngineInfo
from quire_engine.outputs import CompletionOutput, RequestOutput
from quire_interfaces import ContextLengthError, FinishReason, QuireError, RenderedPrompt, RequestError, Tokenizer

__all__ = ["beam_prompt", "beams_output", "continuations", "start_search"]


def start_search(
    prompt: RenderedPrompt,
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
    info: EngineInfo,
    max_logprobs: int,
) -> BeamSearch:
    """A search that fits the engine, and ends where a sound does that is added to tokens.

    Raises:
        ContextLengthError: prompt and output do not fit the context.
        RequestError: the beams are more than the engine gives log probabilities for.
    """
    stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    start_ids = info.decoder_prompt(prompt.decoder_token_ids) if info.max_encoder_len else prompt.token_ids
    most = None if prompt.media is None else prompt.media.num_output_tokens(len(start_ids))
    if most is not None:
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, most))
    search = BeamSearch(start_ids, params, stop_token_ids)
    if search.num_candidates > max_logprobs:
        raise RequestError(
            f"{params.beam_width} beams and {len(stop_token_ids)} end tokens take the {search.num_candidates} most "
            f"likely tokens of each step, and this engine gives {max_logprobs}: take fewer beams, or set max_logprobs",
            param="beam_width",
        )
    total = len(start_ids) + params.max_tokens
    if total > info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(start_ids)} tokens and max_tokens is {params.max_tokens}, together {total}, "
            f"but this model's context is {info.max_model_len} tokens",
            param="max_tokens",
            num_prompt_tokens=len(start_ids),
            max_model_len=info.max_model_len,
            max_tokens=params.max_tokens,
        )
    return search


def beam_prompt(prompt: RenderedPrompt, token_ids: list[int], info: EngineInfo) -> RenderedPrompt:
    """What the next token of a beam is computed from.

    Args:
        prompt: Of the search.
        token_ids: One of `BeamSearch.prompts`.
    """
    if info.max_encoder_len:
        return RenderedPrompt(token_ids=prompt.token_ids, decoder_token_ids=token_ids, media=prompt.media)
    return RenderedPrompt(token_ids=token_ids, media=prompt.media)


def continuations(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, float]]]:
    """What `BeamSearch.advance` takes, from the outputs of one step.

    Raises:
        QuireError: the engine could not compute a beam.
    """
    result = []
    for output in outputs:
        completion = output.outputs[0]
        if completion.error is not None or not completion.logprobs:
            raise QuireError(f"a beam could not be computed: {completion.error}")
        _, *best = completion.logprobs[0]  # the first is the token that was taken, which is among the best again
        result.append([(each.token_id, each.logprob) for each in best])
    return result


def beams_output(
    request_id: str,
    prompt: RenderedPrompt,
    params: BeamSearchParams,
    search: BeamSearch,
    tokenizer: Tokenizer,
    num_cached_tokens: int,
) -> RequestOutput:
    """The sequences that were found, the best one first."""
    outputs = [_completion(i, beam, params, tokenizer) for i, beam in enumerate(search.best())]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=outputs,
        finished=True,
        num_cached_tokens=num_cached_tokens,
        num_generation_tokens=sum(len(each.token_ids) for each in outputs),
    )


def _completion(index: int, beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer) -> CompletionOutput:
    token_ids = list(beam.token_ids)
    hides_last = beam.is_stopped and not params.include_stop_str_in_output
    shown_ids = token_ids[:-1] if hides_last else token_ids
    return CompletionOutput(
        index=index,
        text=tokenizer.decode(shown_ids, skip_special_tokens=params.skip_special_tokens),
        token_ids=token_ids,
        cumulative_logprob=beam.logprob,
        finish_reason=FinishReason.STOP if beam.is_stopped else FinishReason.LENGTH,
        stop_reason=token_ids[-1] if beam.is_stopped and token_ids[-1] in params.stop_token_ids else None,
    )
