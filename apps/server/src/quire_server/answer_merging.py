"""Several answers, each made by requests of its own, as the completions of one request. Knows no protocol."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import OutputKind, RequestError, SamplingParams
from quire_server.streaming import merge

__all__ = ["merged"]


def merged(
    answers: list[AsyncGenerator[RequestOutput, None]], kind: OutputKind, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """The answers' deltas as outputs of one request; with `best_of`, the best of them at the end.

    Raises:
        RequestError: `best_of` is to be streamed.
    """
    if params.best_of is not None and kind is OutputKind.DELTA:
        raise RequestError(
            f"best_of ({params.best_of}) cannot be streamed: which completions are the best is known at the end",
            param="best_of",
            code="unsupported_combination",
        )
    return _merged(answers, kind, params)


async def _merged(
    answers: list[AsyncGenerator[RequestOutput, None]], kind: OutputKind, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    wholes: dict[int, CompletionOutput] = {}
    latest: dict[int, RequestOutput] = {}
    has_told_prompt = False
    async with contextlib.aclosing(merge(answers)) as outputs:
        async for index, output in outputs:
            (completion,) = output.outputs
            completion.index = index
            latest[index] = output
            merged_output = dataclasses.replace(
                output,
                finished=len(latest) == len(answers) and all(each.finished for each in latest.values()),
                num_generation_tokens=sum(each.num_generation_tokens for each in latest.values()),
                num_cached_tokens=max(each.num_cached_tokens for each in latest.values()),
            )
            if kind is OutputKind.DELTA:
                merged_output.prompt_logprobs = None if has_told_prompt else output.prompt_logprobs
                has_told_prompt = has_told_prompt or output.prompt_logprobs is not None
                yield merged_output
                continue
            if output.prompt_logprobs is not None:
                prompt_logprobs = output.prompt_logprobs
                has_told_prompt = True
            _append(wholes, completion)
            if merged_output.finished:
                merged_output.outputs = _best([wholes[place] for place in sorted(wholes)], params)
                merged_output.prompt_logprobs = prompt_logprobs if has_told_prompt else None
                yield merged_output


def _best(wholes: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """All of them, or the most likely ones of `best_of`, the best one first."""
    if params.best_of is None:
        return wholes
    ranked = sorted(wholes, key=_badness)[: params.n]
    for index, each in enumerate(ranked):
        each.index = index
        if params.logprobs is None:
            each.logprobs = None
    return ranked


def _badness(completion: CompletionOutput) -> tuple[bool, float]:
    """Sorts the most likely completion first, and one that failed last."""
    return completion.error is not None, -sum(chosen.logprob for chosen, *_ in completion.logprobs or ())


def _append(wholes: dict[int, CompletionOutput], delta: CompletionOutput) -> None:
    whole = wholes.get(delta.index)
    if whole is None:
        wholes[delta.index] = delta
        return
    whole.text += delta.text
    whole.token_ids = [*whole.token_ids, *delta.token_ids]
    whole.text_offsets = [*whole.text_offsets, *delta.text_offsets]
    if delta.logprobs is not None:
        whole.logprobs = [*(whole.logprobs or []), *delta.logprobs]
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    whole.take_error(delta)
    whole.routed_experts = delta.routed_experts
