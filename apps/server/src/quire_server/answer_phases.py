"""Answers into which the server writes: the end of a thinking that has lasted long enough, the beginning of a call.

Such an answer is made in up to two requests. The first thinks. The second goes on from its prompt and output with the
written text behind, of which the prefix cache knows all but the end. Callers see one answer, in which written tokens
count like all others. Knows no protocol.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, OutputKind, RenderedPrompt, SamplingParams, Tokenizer
from quire_renderers import ChatFormat, OutputParser, ThinkingSpan
from quire_server.answer_merging import merged
from quire_server.thinking_tokens import ThinkingTokens

__all__ = ["AnswerPlan", "phased_answer"]

Generate = Callable[[RenderedPrompt, SamplingParams], AsyncGenerator[RequestOutput, None]]
"""Checks a request at once and runs it when iterated, giving deltas."""

_SECOND_STREAM = 0x5851F42D4C957F2D
"""The second request draws other random numbers than the first: its seed is that one's xor this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What is written into an answer, and when."""

    form: ChatFormat
    """Says what closes the thinking."""
    max_model_len: int
    """Most tokens of prompt and answer."""
    budget: int | None = None
    """Most tokens of thinking, without the markers; None for no bound."""
    forced: str = ""
    """How the answer begins behind the thinking: with a call; "" leaves that to the model."""
    thinks: bool = True
    """Whether the thinking may come before `forced`."""


def phased_answer(
    generate: Generate,
    make_parser: Callable[[], OutputParser],
    tokenizer: Tokenizer,
    prompt: RenderedPrompt,
    params: SamplingParams,
    *,
    plan: AnswerPlan,
    kind: OutputKind,
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request into whose answers the server writes.

    Args:
        generate: Makes requests.
        make_parser: Makes parsers of an answer, which tell where it thinks.
        tokenizer: For what is written.
        prompt: What the answer goes on from.
        params: As asked for, with n or best_of.
        plan: What is written.
        kind: Deltas, or everything at the end.

    Raises:
        RequestError, OverloadedError: at once, as `generate` does.
    """
    num_answers = params.best_of or params.n
    answers = []
    for index in range(num_answers):
        alone: dict[str, Any] = {"n": 1, "best_of": None}
        if params.seed is not None:
            alone["seed"] = params.seed + index
        if params.best_of is not None and params.logprobs is None:
            alone["logprobs"] = 0  # by which the best are chosen
        answer = _Answer(generate, make_parser(), tokenizer, prompt, dataclasses.replace(params, **alone), plan)
        answers.append(answer.outputs(answer.begin()))
    return merged(answers, kind, params)


@dataclass(slots=True)
class _HeldTokens:
    """Tokens that were made and not told yet: whether they stay in the answer is not settled."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    """Of each token, in the whole output."""
    logprobs: list[list[Logprob]] = field(default_factory=list)
    begin: int = 0
    """Where `text` begins in the whole output."""

    def add(self, delta: CompletionOutput) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.offsets += delta.text_offsets
        self.logprobs += delta.logprobs or ()

    def take(self, num_tokens: int, num_chars: int | None = None) -> CompletionOutput:
        """The first of them, as a delta.

        Args:
            num_tokens: How many.
            num_chars: Where their text ends in the whole output; None for where the next token's begins.
        """
        if num_chars is None:
            num_chars = self.offsets[num_tokens] if num_tokens < len(self.offsets) else self.begin + len(self.text)
        length = min(max(0, num_chars - self.begin), len(self.text))
        delta = CompletionOutput(
            index=0,
            text=self.text[:length],
            token_ids=self.token_ids[:num_tokens],
            text_offsets=self.offsets[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
        )
        self.token_ids, self.offsets = self.token_ids[num_tokens:], self.offsets[num_tokens:]
        self.logprobs, self.text = self.logprobs[num_tokens:], self.text[length:]
        self.begin += length
        return delta


@dataclass(slots=True)
class _Insertion:
    """Text that the server puts into the answer."""

    token_ids: list[int]
    text: str
    offsets: list[int]
    is_cut: bool = False
    """The answer ends within it."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the first request's output ends."""

    num_tokens: int
    """Of the whole output, as many as stay."""
    num_chars: int | None
    is_closed: bool
    """The model has closed its thinking, or has not thought."""


class _Answer:
    """One answer."""

    def __init__(
        self,
        generate: Generate,
        parser: OutputParser,
        tokenizer: Tokenizer,
        prompt: RenderedPrompt,
        params: SamplingParams,
        plan: AnswerPlan,
    ) -> None:
        self._generate = generate
        self._parser = parser
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._params = params
        self._plan = plan
        self._tokens = ThinkingTokens(parser)
        self._held = _HeldTokens()
        self._text = ""
        """Of the first request's output."""
        self._output_ids: list[int] = []
        """Told so far."""
        self._num_chars = 0
        self._insertion: _Insertion | None = None
        self._is_at_once = (bool(plan.forced) and not plan.thinks) or (plan.budget == 0 and parser.is_thinking)

    def begin(self) -> AsyncGenerator[RequestOutput, None]:
        """The first request, checked; where the server writes before the model, the only one."""
        if self._is_at_once:
            return self._rest(is_closed=not self._parser.is_thinking)
        params = self._params
        if self._plan.forced:
            params = dataclasses.replace(params, structured_outputs=None)  # it is the call that has a form
        return self._generate(self._prompt, params)

    async def outputs(self, first: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of the whole answer."""
        last: RequestOutput | None = None
        if not self._is_at_once:
            end: _Cut | None = None
            async with contextlib.aclosing(first) as outputs:
                async for output in outputs:
                    end = self._take(output)
                    last = self._settled_output(output, end)
                    if last.outputs[0].token_ids or last.outputs[0].text or last.finished or last.prompt_logprobs:
                        yield last
                    if end is not None:
                        break
            if end is None or last is None:
                return
            first = self._rest(is_closed=end.is_closed)
        async for output in self._behind_insertion(first, last):
            yield output

    # The first request: what of it stays.

    def _take(self, output: RequestOutput) -> _Cut | None:
        """Take in a delta; where the output must end, once that is settled."""
        (delta,) = output.outputs
        self._held.add(delta)
        self._text += delta.text
        self._parser.feed(delta.text)
        self._tokens.add(delta.text_offsets, len(delta.text))
        end = self._cut_at_budget(delta)
        return self._cut_before_call(delta) if end is None and self._plan.forced else end

    def _cut_at_budget(self, delta: CompletionOutput) -> _Cut | None:
        budget, spans = self._plan.budget, self._parser.thinking_spans
        if budget is None or not spans:
            return None
        num_left = budget - sum(self._tokens.behind(span) - self._tokens.first(span) for span in spans[:-1])
        limit = self._tokens.first(spans[-1]) + max(0, num_left)
        settled, total = self._tokens.settled(), len(self._tokens.offsets)
        if spans[-1].end is not None:
            return _Cut(limit, None, False) if self._tokens.behind(spans[-1]) > limit else None
        is_at_limit = total == limit and self._parser.num_read == self._tokens.num_chars
        goes_on = not delta.finished or total > limit
        return _Cut(limit, None, False) if (settled > limit or is_at_limit) and goes_on else None

    def _cut_before_call(self, delta: CompletionOutput) -> _Cut | None:
        """Where the call is begun for the model: behind the thinking, or at once where it does not think."""
        spans = self._parser.thinking_spans
        if spans and spans[-1].end is not None:
            return self._cut_behind(spans[-1])
        is_over = delta.finish_reason is FinishReason.STOP and delta.stop_reason is None
        if not spans:
            return _Cut(0, 0, True) if self._parser.has_begun or is_over else None
        # The model would end within its thinking: it is closed, and the end token left out.
        return _Cut(len(self._tokens.offsets) - 1, None, False) if is_over else None

    def _cut_behind(self, span: ThinkingSpan) -> _Cut:
        """Behind the marker that closed the thinking; before a call that did so."""
        assert span.end is not None
        assert span.after is not None
        if self._text[span.end : span.after] not in self._plan.form.thinking_ends():
            return _Cut(self._tokens.behind(span), span.end, False)
        return _Cut(bisect_left(self._tokens.offsets, span.after), span.after, True)

    def _settled_output(self, output: RequestOutput, end: _Cut | None) -> RequestOutput:
        """What of the held tokens can be told now."""
        (delta,) = output.outputs
        finished = output.finished and end is None
        if end is not None:
            piece = self._held.take(max(0, end.num_tokens - len(self._output_ids)), end.num_chars)
        elif finished or not (self._parser.is_thinking or not self._parser.has_begun):
            piece = self._held.take(len(self._held.token_ids))
        else:
            piece = self._held.take(self._num_safe() - len(self._output_ids))
        if end is None:
            piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
            piece.take_error(delta)
            piece.routed_experts = delta.routed_experts
        return self._add(output, piece, finished=finished)

    def _num_safe(self) -> int:
        """Tokens that stay whatever comes."""
        spans = self._parser.thinking_spans
        if self._plan.forced and not spans:
            return 0
        settled = self._tokens.settled()
        if self._plan.budget is None or not spans:
            return max(settled, len(self._output_ids))
        num_thought = sum(self._tokens.behind(span) - self._tokens.first(span) for span in spans[:-1])
        limit = self._tokens.first(spans[-1]) + max(0, self._plan.budget - num_thought)
        return max(min(settled, limit), len(self._output_ids))

    def _add(self, output: RequestOutput, piece: CompletionOutput, *, finished: bool) -> RequestOutput:
        if self._params.logprobs is None:
            piece.logprobs = None
        self._output_ids += piece.token_ids
        self._num_chars += len(piece.text)
        return dataclasses.replace(
            output,
            outputs=[piece],
            prompt_token_ids=self._prompt.token_ids,
            finished=finished,
            num_generation_tokens=len(self._output_ids),
        )

    # The second request.

    def _write(self, *, is_closed: bool) -> _Insertion:
        """What is written, cut to the room there is."""
        form, forced = self._plan.form, self._plan.forced
        pieces = [] if is_closed else [form.thinking_end() or ""]
        if pieces or self._output_ids:
            pieces.append(form.behind_thinking(calls=bool(forced)))
        pieces.append(forced)
        insertion = _Insertion([], "", [])
        most = self._most_tokens()
        for text in pieces:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            room = max(0, most - len(self._output_ids) - len(insertion.token_ids))
            begin = len(insertion.text)
            for place in range(min(room, len(ids))):
                before = self._tokenizer.decode(ids[:place], skip_special_tokens=False)
                insertion.offsets.append(self._num_chars + begin + min(len(before), len(text)))
            insertion.token_ids += ids[:room]
            if room < len(ids):
                # Half a marker is read as the whole, for nothing of it is thinking; half a call is one.
                is_call = text == self._plan.forced
                insertion.text += self._tokenizer.decode(ids[:room], skip_special_tokens=False) if is_call else text
                insertion.is_cut = True
                break
            insertion.text += text
        insertion.is_cut = insertion.is_cut or len(self._output_ids) + len(insertion.token_ids) >= most
        return insertion

    def _most_tokens(self) -> int:
        """Most tokens of the answer."""
        # One more is computed behind what is written, if only for its log probabilities.
        room = self._plan.max_model_len - len(self._prompt.token_ids) - 1
        return room if self._params.max_tokens is None else min(room, self._params.max_tokens)

    def _rest(self, *, is_closed: bool) -> AsyncGenerator[RequestOutput, None]:
        """The request that goes on behind what is written."""
        self._insertion = insertion = self._write(is_closed=is_closed)
        answer = self._output_ids + insertion.token_ids
        changes: dict[str, Any] = {"min_tokens": max(0, self._params.min_tokens - len(answer))}
        if self._params.max_tokens is not None:
            changes["max_tokens"] = max(1, self._params.max_tokens - len(answer))
        if insertion.is_cut:
            changes |= {"max_tokens": 1, "min_tokens": 0, "structured_outputs": None}
        elif self._params.structured_outputs is not None:
            # The constraint waited for the end of the thinking, which is here.
            constraint = dataclasses.replace(self._params.structured_outputs, reasoning=None)
            changes |= {"structured_outputs": constraint, "min_tokens": 0}
        if self._params.seed is not None and self._output_ids:
            changes["seed"] = self._params.seed ^ _SECOND_STREAM
        # The first request has told the prompt's log probabilities; those of written tokens are a prompt's, too.
        num_of_prompt = self._params.prompt_logprobs if not self._output_ids else None
        counts = [each for each in (num_of_prompt, self._params.logprobs) if each is not None]
        changes["prompt_logprobs"] = max(counts) if counts else None
        prompt = dataclasses.replace(self._prompt, text=None, token_ids=self._prompt.token_ids + answer)
        return self._generate(prompt, dataclasses.replace(self._params, **changes))

    async def _behind_insertion(
        self, rest: AsyncGenerator[RequestOutput, None], before: RequestOutput | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The second request's deltas, the first of which has the written text in front."""
        assert self._insertion is not None
        insertion, positions = self._insertion, None
        has_begun = False
        base = self._num_chars + len(insertion.text)
        async with contextlib.aclosing(rest) as outputs:
            async for output in outputs:
                (delta,) = output.outputs
                positions = positions or output.prompt_logprobs
                if delta.error is None and not (has_begun or delta.token_ids or delta.finished):
                    continue
                piece = dataclasses.replace(delta, text_offsets=[base + offset for offset in delta.text_offsets])
                if insertion.is_cut and delta.error is None:
                    piece = CompletionOutput(index=0, logprobs=[], finish_reason=FinishReason.LENGTH)
                if not has_begun:
                    piece = self._with_insertion(piece, insertion, positions)
                result = self._add(output, piece, finished=piece.finished)
                result.prompt_logprobs = None if has_begun else self._of_prompt(positions, before)
                if before is not None:
                    result.num_cached_tokens = before.num_cached_tokens
                    result.metrics = [*before.metrics, *output.metrics]
                result.num_cached_tokens = min(result.num_cached_tokens, len(self._prompt.token_ids))
                has_begun = True
                yield result
                if piece.finished:
                    return

    def _with_insertion(
        self, piece: CompletionOutput, insertion: _Insertion, positions: Sequence[list[Logprob] | None] | None
    ) -> CompletionOutput:
        logprobs = None
        if self._params.logprobs is not None:
            behind = len(self._prompt.token_ids) + len(self._output_ids)
            own_positions = (positions or [])[behind : behind + len(insertion.token_ids)]
            inserted = [each[: 1 + self._params.logprobs] for each in own_positions if each is not None]
            logprobs = [*inserted, *(piece.logprobs or ())]
        return dataclasses.replace(
            piece,
            text=insertion.text + piece.text,
            token_ids=[*insertion.token_ids, *piece.token_ids],
            text_offsets=[*insertion.offsets, *piece.text_offsets],
            logprobs=logprobs,
        )

    def _of_prompt(
        self, positions: Sequence[list[Logprob] | None] | None, before: RequestOutput | None
    ) -> list[list[Logprob] | None] | None:
        """The prompt's own log probabilities, where the request asked for them and they were not told."""
        count = self._params.prompt_logprobs
        if count is None or before is not None or positions is None:
            return None
        own = positions[: len(self._prompt.token_ids)]
        return [None if each is None else each[: 1 + count] for each in own]
