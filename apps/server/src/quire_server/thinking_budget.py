"""Bounds the thinking of a model: when it has thought for long enough, the thinking is closed for it and it answers.

An answer is made in two requests: the first thinks, up to the budget; the second goes on from its prompt and output
with the closing marker behind, of which the prefix cache knows all but the end. Callers see one answer. Knows no
protocol.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from quire import OutputKind
from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RenderedPrompt, SamplingParams, Tokenizer
from quire_renderers import ChatFormat, OutputParser
from quire_server.streaming import merge

__all__ = ["bounded_thinking"]

Generate = Callable[[RenderedPrompt, SamplingParams], AsyncIterator[RequestOutput]]
"""Checks a request at once and runs it when iterated, giving deltas."""


def bounded_thinking(
    generate: Generate,
    make_parser: Callable[[], OutputParser],
    tokenizer: Tokenizer,
    prompt: RenderedPrompt,
    params: SamplingParams,
    *,
    budget: int,
    form: ChatFormat,
    kind: OutputKind,
) -> AsyncIterator[RequestOutput]:
    """The outputs of a request whose thinking is bounded.

    Args:
        generate: Makes requests.
        make_parser: Makes parsers of an answer, which tell whether it thinks.
        tokenizer: For the markers.
        prompt: What the answer goes on from.
        params: As asked for, with n.
        budget: Most tokens of thinking, without the markers.
        form: Says what opens the thinking, where the prompt has not opened it, and what closes it.
        kind: Deltas, or everything at the end.

    Raises:
        RequestError, OverloadedError: at once, as `generate` does.
    """
    closing = f"\n{form.thinking_end()}\n\n"
    markers = _Markers(
        tokenizer,
        len(tokenizer.encode(form.thinking_start() or "", add_special_tokens=False)),
        closing,
        tokenizer.encode(closing, add_special_tokens=False),
    )
    answers = []
    for index in range(params.n):
        seed = None if params.seed is None else params.seed + index
        alone = dataclasses.replace(params, n=1, seed=seed)
        answer = _Answer(generate, make_parser(), markers, prompt, alone, budget)
        answers.append(answer.outputs(answer.begin()))
    return _merged(answers, kind)


@dataclass(frozen=True, slots=True)
class _Markers:
    """What stands around the thinking."""

    tokenizer: Tokenizer
    num_opening_tokens: int
    closing: str
    closing_ids: list[int]


class _Answer:
    """One of n answers."""

    def __init__(
        self,
        generate: Generate,
        parser: OutputParser,
        markers: _Markers,
        prompt: RenderedPrompt,
        params: SamplingParams,
        budget: int,
    ) -> None:
        self._generate = generate
        self._parser = parser
        self._markers = markers
        self._prompt = prompt
        self._params = params
        self._output_ids: list[int] = []
        self._output_text = ""
        self._closes_at_once = budget == 0 and parser.is_thinking
        self._limit = budget if parser.is_thinking else budget + markers.num_opening_tokens
        """Output tokens after which the thinking is closed."""
        self._may_close = not self._closes_at_once and self._has_room()

    def _has_room(self) -> bool:
        """Whether anything could still be said behind the closed thinking."""
        wanted = self._limit + len(self._markers.closing_ids) + 1
        return self._params.max_tokens is None or wanted <= self._params.max_tokens

    def begin(self) -> AsyncIterator[RequestOutput]:
        """The first request, checked; where the thinking must not go on at all, the only one."""
        return self._rest() if self._closes_at_once else self._generate(self._prompt, self._params)

    async def outputs(self, first: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of the whole answer."""
        if self._closes_at_once:
            async for output in self._with_closing(first, None):
                yield output
            return
        last: RequestOutput | None = None
        async with contextlib.aclosing(first) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                closes = self._take(output.outputs[0])
                last = self._of_whole(output, None)
                if closes:
                    last.finished, last.num_generation_tokens = False, len(self._output_ids)
                yield last
                if closes:
                    break
            else:
                return
        async for output in self._with_closing(self._rest(), last):
            yield output

    def _take(self, completion: CompletionOutput) -> bool:
        """Take in a delta; whether the thinking must be closed behind it, which is cut to the budget then."""
        room = self._limit - len(self._output_ids)
        if not self._may_close or len(completion.token_ids) < room:
            self._add(completion.token_ids, completion.text)
            return False
        self._may_close = False
        kept = completion.token_ids[:room]
        text = self._text_of(kept) if len(kept) < len(completion.token_ids) else completion.text
        self._parser.feed(text)
        if not self._parser.is_thinking or (completion.finished and len(kept) == len(completion.token_ids)):
            return False
        self._add(kept, text)
        completion.token_ids, completion.text = kept, text
        completion.finish_reason = completion.stop_reason = None
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[:room]
            completion.text_offsets = completion.text_offsets[:room]
        return True

    def _add(self, token_ids: list[int], text: str) -> None:
        if self._may_close:
            self._parser.feed(text)
        self._output_ids += token_ids
        self._output_text += text

    def _text_of(self, token_ids: list[int]) -> str:
        """What some tokens add to the text so far."""
        skips = self._params.skip_special_tokens
        whole = self._markers.tokenizer.decode([*self._output_ids, *token_ids], skip_special_tokens=skips)
        known = self._output_text
        return whole.removeprefix(known).rstrip("\ufffd") if whole.startswith(known) else ""

    def _rest(self) -> AsyncIterator[RequestOutput]:
        """The request that answers, its thinking closed."""
        token_ids = self._prompt.token_ids + self._output_ids + self._markers.closing_ids
        changes: dict[str, Any] = {"min_tokens": 0}
        if self._params.max_tokens is not None:
            spent = len(self._output_ids) + len(self._markers.closing_ids)
            changes["max_tokens"] = max(1, self._params.max_tokens - spent)
        if self._params.structured_outputs is not None:
            # The constraint waited for the end of the thinking, which is here.
            constraint = dataclasses.replace(self._params.structured_outputs, reasoning=None)
            changes["structured_outputs"] = constraint
        if self._output_ids:
            changes["prompt_logprobs"] = None  # the first request has told them
        return self._generate(RenderedPrompt(token_ids=token_ids), dataclasses.replace(self._params, **changes))

    async def _with_closing(
        self, rest: AsyncIterator[RequestOutput], before: RequestOutput | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The second request's deltas, the first of which has the closing text in front."""
        begins = True
        async with contextlib.aclosing(rest) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if begins:
                    (completion,) = output.outputs
                    completion.text = self._markers.closing + completion.text
                    completion.token_ids = [*self._markers.closing_ids, *completion.token_ids]
                    begins = False
                told = self._of_whole(output, before)
                told.num_generation_tokens += len(self._output_ids) + len(self._markers.closing_ids)
                yield told

    def _of_whole(self, output: RequestOutput, before: RequestOutput | None) -> RequestOutput:
        """A request's delta as one of the whole answer's."""
        told = dataclasses.replace(output, prompt_token_ids=self._prompt.token_ids)
        if before is not None:
            told.num_cached_tokens = before.num_cached_tokens
            told.metrics = [*before.metrics, *output.metrics]
        return told


async def _merged(
    answers: list[AsyncGenerator[RequestOutput, None]], kind: OutputKind
) -> AsyncGenerator[RequestOutput, None]:
    """The answers as the completions of one request."""
    wholes: dict[int, CompletionOutput] = {}
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(merge(answers)) as outputs:
        async for index, output in outputs:
            (completion,) = output.outputs
            completion.index = index
            latest[index] = output
            finished = len(latest) == len(answers) and all(each.finished for each in latest.values())
            total = sum(each.num_generation_tokens for each in latest.values())
            cached = max(each.num_cached_tokens for each in latest.values())
            told = dataclasses.replace(output, finished=finished, num_generation_tokens=total, num_cached_tokens=cached)
            if kind is OutputKind.DELTA:
                yield told
                continue
            _append(wholes, completion)
            if finished:
                told.outputs = [wholes[place] for place in sorted(wholes)]
                told.prompt_logprobs = next(
                    (each.prompt_logprobs for each in latest.values() if each.prompt_logprobs), None
                )
                yield told


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
    whole.error, whole.error_code, whole.error_param = delta.error, delta.error_code, delta.error_param
