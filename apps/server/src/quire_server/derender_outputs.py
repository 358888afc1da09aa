"""The engine's outputs, made again from what /inference/v1/generate answered: token ids, log probabilities, reasons.

Text comes from the token ids, so that the answer is what the route that was rendered would have given. Knows no route.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.async_llm import make_detokenizer_factory
from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, RequestError, SamplingParams, Tokenizer
from quire_server.context import ServerContext
from quire_server.token_protocol import (
    GenerateLogProb,
    GenerateResponse,
    GenerateResponseChoice,
    PromptLogProb,
)

__all__ = ["ChoiceOutputs", "check_ids", "check_response", "request_output"]


class ChoiceOutputs:
    """One completion, as its token ids come.

    Args:
        context: Knows the model.
        prompt_token_ids: What the output follows; the last few are enough.
        params: Of the request.
    """

    def __init__(self, context: ServerContext, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = context.llm.renderer.tokenizer
        self._detokenizer = make_detokenizer_factory(self._tokenizer)(prompt_token_ids, params)
        self._hidden: set[int] = set()
        if not params.include_stop_str_in_output:
            self._hidden = set(params.stop_token_ids)
            if not params.ignore_eos or params.structured_outputs is not None:
                self._hidden |= set(context.llm.engine.eos_token_ids)
        self._num_top = None if params.logprob_token_ids or (params.logprobs or 0) < 0 else params.logprobs
        """Likely tokens that were asked for at each place; None for all that there are."""
        self._held: list[int] = []
        self._stop_string: str | None = None
        self._num_chars = 0
        self.finished = False

    def take(self, choice: GenerateResponseChoice) -> CompletionOutput:
        """What a chunk adds, as the engine told it. Without a `finish_reason` more may come."""
        token_ids = choice.token_ids or []
        reason = None if choice.finish_reason is None else _reason(choice.finish_reason)
        shown_ids, num_held = self._held + token_ids, len(self._held)
        # An end token has no text if it was what ended the output, which may be said later.
        may_hide = reason in (None, FinishReason.STOP) and bool(shown_ids) and shown_ids[-1] in self._hidden
        self._held = shown_ids[-1:] if may_hide else []
        delta = self._detokenizer.add(shown_ids[:-1] if may_hide else shown_ids)
        text, stop_string = delta.text, delta.stop_string
        if reason is not None:
            rest = self._detokenizer.finish()
            text, stop_string = text + rest.text, stop_string or rest.stop_string
            self.finished = True
        self._stop_string = self._stop_string or stop_string
        self._num_chars += len(text)
        offsets = delta.text_offsets[num_held:]
        offsets += [self._num_chars] * (len(token_ids) - len(offsets))
        output = CompletionOutput(
            index=choice.index, text=text, token_ids=token_ids, text_offsets=offsets, finish_reason=reason
        )
        if reason is not None:
            stopped = reason is FinishReason.STOP
            output.stop_reason = self._stop_string if stopped and choice.stop_reason is None else choice.stop_reason
        if choice.logprobs is not None and choice.logprobs.content is not None:
            output.logprobs = [
                [
                    _logprob(self._tokenizer, each.token_id, each)
                    for each in (position, *position.top_logprobs[: self._num_top])
                ]
                for position in choice.logprobs.content
            ]
        return output


def request_output(
    context: ServerContext, response: GenerateResponse, outputs: list[CompletionOutput], *, num_tokens: int
) -> RequestOutput:
    """The outputs of a request as its engine gave them.

    Args:
        context: Knows the model.
        response: What was generated, whole or a chunk of it.
        outputs: Its choices, made again.
        num_tokens: Output tokens of all choices so far, where the response does not say.
    """
    usage = response.usage
    details = None if usage is None else usage.prompt_tokens_details
    num_reported = None if usage is None else usage.completion_tokens
    positions = response.prompt_logprobs
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=[],
        outputs=outputs,
        finished=all(each.finished for each in outputs),
        num_generation_tokens=num_tokens if num_reported is None else num_reported,
        num_cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        prompt_logprobs=None if positions is None else [_at_position(context, each) for each in positions],
    )


def check_response(context: ServerContext, response: GenerateResponse, at: str) -> None:
    """Whether this server's model can have generated that.

    Args:
        context: Knows the model.
        response: As it was sent.
        at: Where it stands in the body, with a dot behind, for messages.

    Raises:
        RequestError: naming the field at fault.
    """
    longest = context.llm.engine.info.max_model_len
    indices: set[int] = set()
    for place, choice in enumerate(response.choices):
        here, token_ids = f"{at}choices[{place}]", choice.token_ids or []
        if choice.index in indices:
            raise RequestError(f"{here}.index: there are two choices {choice.index}", param=f"{here}.index")
        indices.add(choice.index)
        if len(token_ids) > longest:
            raise RequestError(
                f"{here}.token_ids holds {len(token_ids)} tokens, but this model's context is {longest} tokens",
                param=f"{here}.token_ids",
            )
        check_ids(context, token_ids, f"{here}.token_ids")
        if choice.finish_reason == FinishReason.ERROR:
            raise RequestError(
                f"{here}.finish_reason is 'error': the request failed where it was generated, and there is nothing to "
                "derender",
                param=f"{here}.finish_reason",
            )
        if choice.logprobs is not None:
            _check_logprobs(context, choice, f"{here}.logprobs.content")
    for place, position in enumerate(response.prompt_logprobs or ()):
        for key in position or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise RequestError(
                    f"{at}prompt_logprobs[{place}] must have token ids as keys, got {key[:40]!r}",
                    param=f"{at}prompt_logprobs",
                )


def check_ids(context: ServerContext, token_ids: Sequence[int], at: str) -> None:
    """Raises RequestError, naming `at`, where one is outside the vocabulary."""
    vocab_size = context.llm.engine.info.vocab_size
    if token_ids and max(token_ids) >= vocab_size:
        place = next(place for place, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise RequestError(
            f"{at}[{place}] must be a token id below {vocab_size}, got {token_ids[place]}", param=f"{at}[{place}]"
        )


def _check_logprobs(context: ServerContext, choice: GenerateResponseChoice, at: str) -> None:
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    if len(content) > len(choice.token_ids or []):
        raise RequestError(
            f"{at} holds {len(content)} entries, one per token, but token_ids holds {len(choice.token_ids or [])}",
            param=at,
        )
    for place, position in enumerate(content):
        check_ids(context, [position.token_id, *(each.token_id for each in position.top_logprobs)], f"{at}[{place}]")


def _reason(name: str) -> FinishReason:
    try:
        return FinishReason(name)
    except ValueError:  # of another engine
        return FinishReason.STOP


def _logprob(tokenizer: Tokenizer, token_id: int, entry: GenerateLogProb | PromptLogProb) -> Logprob:
    text, data = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    return Logprob(token_id, entry.logprob, entry.rank or 0, text, data)


def _at_position(context: ServerContext, position: dict[str, PromptLogProb] | None) -> list[Logprob] | None:
    """The entries of one token of the prompt, which stands first."""
    if position is None:
        return None
    entries = [(int(key), entry) for key, entry in position.items()]
    return [_logprob(context.llm.renderer.tokenizer, token_id, entry) for token_id, entry in entries]
