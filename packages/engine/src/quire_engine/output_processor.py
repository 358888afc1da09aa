"""From the core's outputs to what a caller reads: text, stop strings, logprobs with token text, n completions merged.

Knows one request at a time, through the `Detokenizer` and `Tokenizer` Protocols; knows no transport. What must be told
to the core (a stop string ended a completion early) is left in `RequestProcessor.take_aborts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from quire_engine.metrics import RequestMetrics
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import (
    Detokenizer,
    EngineCoreOutput,
    FinishReason,
    OutputKind,
    RequestError,
    SamplingParams,
    TextDelta,
    Tokenizer,
    TokenLogprobs,
)

__all__ = ["DetokenizerFactory", "RequestProcessor"]

DetokenizerFactory = Callable[[Sequence[int], SamplingParams], Detokenizer]
"""Makes the detokenizer of one completion from (prompt token ids, sampling parameters)."""


class CompletionProcessor:
    """One completion: turns core outputs into deltas."""

    def __init__(
        self, index: int, params: SamplingParams, detokenizer: Detokenizer | None, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self.cumulative_logprob: float | None = None
        self._num_chars = 0
        self._params = params
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer

    def process(self, output: EngineCoreOutput) -> CompletionOutput:
        """The delta. When it is finished although `output` is not, a stop string ended it."""
        token_ids = output.new_token_ids
        reason, failure = output.finish_reason, output.failure
        stop_reason: int | str | None = None
        text, offsets = "", []
        if self._detokenizer is not None:
            delta = self._detokenize(token_ids, output)
            text, offsets = delta.text, delta.text_offsets
            if delta.stop_string is not None:
                token_ids = token_ids[: delta.num_stop_tokens]
                reason, stop_reason = FinishReason.STOP, delta.stop_string
        if reason is FinishReason.STOP and stop_reason is None and output.stop_token_id in self._params.stop_token_ids:
            stop_reason = output.stop_token_id
        self.num_tokens += len(token_ids)
        self.finished = reason is not None
        for position in (output.logprobs or ())[: len(token_ids)]:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + position.logprobs[0]
        result = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            cumulative_logprob=self.cumulative_logprob,
            text_offsets=offsets,
        )
        if failure is not None:
            result.error, result.error_code, result.error_param, result.error_signal = failure
        if self._params.logprobs is not None:
            positions = (output.logprobs or [])[: len(token_ids)]
            is_ranked = self._params.logprob_token_ids is None
            result.logprobs = [with_text(each, self._tokenizer, is_ranked=is_ranked) for each in positions]
        return result

    def _detokenize(self, token_ids: list[int], output: EngineCoreOutput) -> TextDelta:
        assert self._detokenizer is not None
        hides_last = (
            output.stop_token_id is not None
            and bool(token_ids)
            and token_ids[-1] == output.stop_token_id
            and not self._params.include_stop_str_in_output
        )
        delta = self._detokenizer.add(token_ids[:-1] if hides_last else token_ids)
        if delta.stop_string is None and output.finish_reason is not None:
            rest = self._detokenizer.finish()
            delta.text += rest.text
            if rest.stop_string is not None:
                delta.stop_string = rest.stop_string
                delta.num_stop_tokens = len(token_ids) - hides_last
        self._num_chars += len(delta.text)
        if hides_last and len(delta.text_offsets) == len(token_ids) - 1:
            delta.text_offsets.append(self._num_chars)
        return delta


def with_text(position: TokenLogprobs, tokenizer: Tokenizer | None, *, is_ranked: bool = True) -> list[Logprob]:
    """Log probabilities of one position, with the text of each token when there is a tokenizer. Behind the first token
    come the most likely ones, best first, if it `is_ranked`."""
    entries: list[Logprob] = []
    for place, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
        rank = place if is_ranked else None
        entry = Logprob(token_id, logprob, position.rank if place == 0 else rank)
        if tokenizer is not None:
            entry.decoded_token = tokenizer.token_text(token_id)
            entry.token_bytes = tokenizer.token_bytes(token_id)
        entries.append(entry)
    return entries


class RequestProcessor:
    """One request with its n completions.

    Args:
        request_id: The caller's name for it.
        prompt: The prompt's text, if there is one.
        prompt_token_ids: The prompt.
        core_ids: The core's request id of each completion, by index.
        params: The caller's.
        tokenizer: For the text of logprobs; None leaves it empty.
        make_detokenizer: None gives no text.
        kind: What each output holds.
        continued_ids: Tokens that the output continues, for making text of it; None for the prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        core_ids: Sequence[str],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        make_detokenizer: DetokenizerFactory | None = None,
        kind: OutputKind = OutputKind.DELTA,
        continued_ids: list[int] | None = None,
    ) -> None:
        continued_ids = prompt_token_ids if continued_ids is None else continued_ids
        self.metrics: list[RequestMetrics] = []
        self._request_id = request_id
        self._prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._params = params
        self._tokenizer = tokenizer
        self._kind = kind
        if params.best_of is not None and kind is not OutputKind.FINAL_ONLY:
            raise RequestError(
                f"best_of ({params.best_of}) cannot be streamed: which completions are the best is known at the end",
                param="best_of",
                code="unsupported_combination",
            )
        self.aborts: list[str] = []
        """Core ids whose completion ended here (by a stop string) while the core goes on; see `take_aborts`."""
        self._num_cached_tokens = 0
        self._kv_transfer_params: dict[str, Any] | None = None
        self._prompt_logprobs: list[list[Logprob] | None] = [None]
        self._has_prompt_logprobs = False
        detokenizes = params.detokenize and make_detokenizer is not None
        self._completions = {
            core_id: CompletionProcessor(
                index,
                params,
                make_detokenizer(continued_ids, params) if detokenizes and make_detokenizer else None,
                tokenizer,
            )
            for index, core_id in enumerate(core_ids)
        }
        self._whole = [_empty(index, params) for index in range(len(core_ids))]
        # Who reads an output at its end only, and looks for nothing in it before, gets its text then, in one piece.
        is_deferred = kind is OutputKind.FINAL_ONLY and not params.stop and params.best_of is None
        is_deferred = is_deferred and params.logprobs is None and params.prompt_logprobs is None
        self._held: dict[str, list[int]] | None = {core_id: [] for core_id in core_ids} if is_deferred else None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(each.finished for each in self._completions.values())

    def take_aborts(self) -> list[str]:
        """The aborts so far, once; the core must be told."""
        aborts, self.aborts = self.aborts, []
        return aborts

    def process(self, output: EngineCoreOutput) -> RequestOutput | None:
        """Process an output of one completion. Returns None while the caller has nothing to get yet."""
        if output.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = output.num_cached_tokens
        if self._params.max_tokens == 0:
            output = _scored(output)
        if self._held is not None:
            token_ids = self._held[output.request_id]
            token_ids += output.new_token_ids
            if output.finish_reason is None:
                return None
            output = output._replace(new_token_ids=token_ids)
        self._kv_transfer_params = output.kv_transfer_params or self._kv_transfer_params
        completion = self._completions[output.request_id]
        if completion.finished:
            return None
        new_prompt_logprobs = self._take_prompt_logprobs(output)
        delta = completion.process(output)
        if delta.finished and output.finish_reason is None:
            self.aborts.append(output.request_id)
        if self._kind is OutputKind.DELTA:
            if not (delta.token_ids or delta.text or delta.finished or new_prompt_logprobs):
                return None
            return self._output([delta], new_prompt_logprobs)
        _append(self._whole[delta.index], delta)
        if self._kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        prompt_logprobs = self._prompt_logprobs if self._has_prompt_logprobs else None
        return self._output(self._best(), prompt_logprobs)

    def _best(self) -> list[CompletionOutput]:
        """All completions, or the n best of `best_of`, the best one first."""
        best_of = self._params.best_of
        if best_of is None or best_of == self._params.n:
            return [_copy(each) for each in self._whole]
        ranked = sorted(self._whole, key=_badness)
        best = [_copy(each) for each in ranked[: self._params.n]]
        for index, completion in enumerate(best):
            completion.index = index
        return best

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[list[Logprob] | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            num_generation_tokens=sum(each.num_tokens for each in self._completions.values()),
            metrics=self.metrics,
            kv_transfer_params=self._kv_transfer_params,
        )

    def _take_prompt_logprobs(self, output: EngineCoreOutput) -> list[list[Logprob] | None] | None:
        """New ones, once the prompt is complete: callers get them in one piece."""
        if self._params.prompt_logprobs is None or self._has_prompt_logprobs:
            return None
        self._prompt_logprobs.extend(with_text(each, self._tokenizer) for each in output.prompt_logprobs or ())
        self._has_prompt_logprobs = len(self._prompt_logprobs) >= len(self.prompt_token_ids)
        return self._prompt_logprobs if self._has_prompt_logprobs else None


def _scored(output: EngineCoreOutput) -> EngineCoreOutput:
    """The output of a request that generates nothing: its sampled token is the prompt's last one."""
    positions = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
    return output._replace(new_token_ids=[], logprobs=None, prompt_logprobs=positions or None)


def _badness(completion: CompletionOutput) -> tuple[bool, float]:
    """Sorts the most likely completion first, and one that failed last."""
    return completion.error is not None, -(completion.cumulative_logprob or 0.0)


def _empty(index: int, params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])


def _append(whole: CompletionOutput, delta: CompletionOutput) -> None:
    whole.text += delta.text
    whole.token_ids.extend(delta.token_ids)
    whole.text_offsets.extend(delta.text_offsets)
    if whole.logprobs is not None and delta.logprobs is not None:
        whole.logprobs.extend(delta.logprobs)
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.error is not None:
        whole.take_error(delta)
    whole.cumulative_logprob = delta.cumulative_logprob


def _copy(whole: CompletionOutput) -> CompletionOutput:
    token_ids, text_offsets = list(whole.token_ids), list(whole.text_offsets)
    logprobs = None if whole.logprobs is None else list(whole.logprobs)
    return dataclasses.replace(whole, token_ids=token_ids, logprobs=logprobs, text_offsets=text_offsets)
