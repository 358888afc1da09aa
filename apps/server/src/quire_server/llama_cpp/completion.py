"""POST /completion, /completions and /infill: prompts to continuations, whole or as events, as llama.cpp gives them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.prompts import naming_prompt
from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.body import check_fields, read_model
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.llama_cpp.answers import (
    LlamaCompletion,
    Timings,
    generation_settings,
    selected,
    stop_of,
    token_probs,
)
from quire_server.llama_cpp.protocol import LlamaCompletionRequest, LlamaInfillRequest
from quire_server.protocol import CompletionRequest
from quire_server.responses import json_response, sse
from quire_server.streaming import EventStream, after, merge
from quire_server.turn import raise_failed, reaches_past

__all__ = ["completion", "infill"]


async def completion(context: ServerContext, request: Request) -> Response:
    """POST /completion: one prompt or several."""
    body = await read_model(context, request, LlamaCompletionRequest, any_content_type=True)
    prompts, is_several = body.prompts()
    return await _complete(context, request, body, prompts, is_several=is_several)


async def infill(context: ServerContext, request: Request) -> Response:
    """POST /infill: what stands between a prefix and a suffix."""
    body = await read_model(context, request, LlamaInfillRequest, any_content_type=True)
    return await _complete(context, request, body, [_gap(context, body)], is_several=False)


REPOSITORY, FILE = "<|repo_name|>", "<|file_sep|>"
"""Tokens by which models are shown several files of a repository (Qwen2.5-Coder, arXiv 2409.12186, section 3.2.1)."""


def _gap(context: ServerContext, body: LlamaInfillRequest) -> str:
    """The prompt that asks for what stands in a gap, behind further files."""
    renderer = context.llm.renderer
    form = renderer.fill_in_middle
    if form is None:
        raise RequestError(
            "this model was not trained to fill gaps: its tokenizer has no tokens for it (such as <|fim_middle|>)",
            param="input_suffix",
            code="unsupported",
        )
    if body.prompt is not None and not isinstance(body.prompt, str):
        raise RequestError("with input_prefix and input_suffix, prompt must be text", param="prompt")
    with naming_fields({"prompt": "input_prefix", "suffix": "input_suffix"}):
        asked = form.prompt(body.input_prefix, body.input_suffix)
    chunks = body.chunks()
    encode = renderer.tokenizer.encode
    knows_files = all(len(encode(each, add_special_tokens=False)) == 1 for each in (REPOSITORY, FILE))
    if chunks and knows_files:
        files = "".join(f"{FILE}{name}\n{text}\n" for name, text in chunks)
        asked = f"{REPOSITORY}project\n{files}{FILE}filename\n{asked}"
    elif chunks:
        asked = "".join(f"{text}\n" for _, text in chunks) + asked
    return asked + (body.prompt or "")


async def _complete(
    context: ServerContext, request: Request, body: LlamaCompletionRequest, prompts: list[Any], *, is_several: bool
) -> Response:
    body.check_supported()
    most = context.config.max_prompts_per_request
    if len(prompts) > most:
        raise RequestError(
            f"prompt holds {len(prompts)} prompts, this server takes {most} at most (--max-prompts-per-request)",
            param="prompt",
        )
    context.resolve_model(body.model)
    adapter = body.chosen_adapter(list(context.adapters))
    with naming_fields(body.field_names()):
        fields = check_fields(body.completion_fields(adapter), CompletionRequest)
        model = context.resolve_model(fields.model)
        answer = await in_thread_when(body.is_large, lambda: _begun(context, body, fields, prompts, model))
        if not body.stream:
            finals = await unless_disconnected(request, all_of(anext(source) for source in answer.sources))
            whole = await in_thread_when(body.is_large, lambda: answer.whole(finals))
            is_list = is_several or answer.params.n > 1
            return json_response(whole if is_list else whole[0])
        outputs = merge(answer.sources)
        first = await unless_disconnected(request, anext(outputs))
    return await EventStream.begin(answer.events(first, outputs), end=b"")


def _begun(
    context: ServerContext, body: LlamaCompletionRequest, fields: CompletionRequest, prompts: list[Any], model: str
) -> _Answer:
    """The answer with its outputs. Every prompt is checked before the first one runs."""
    params = dataclasses.replace(context.sampling_params(fields), logit_bias=_biases(context, body))
    options = context.request_options(fields)
    answer = _Answer(context, body, params, model)
    for index, prompt in enumerate(prompts):
        with naming_prompt(index, len(prompts), "prompt"):
            rendered = _rendered(context, prompt)
            own = params
            if reaches_past(context, rendered, params):
                own = dataclasses.replace(params, max_tokens=None)
            answer.prompts.append(rendered)
            answer.sources.append(context.llm.engine.generate(rendered, own, options))
    return answer


def _rendered(context: ServerContext, prompt: Any) -> RenderedPrompt:
    """A prompt as token ids; of a mixture, its texts are tokenized one by one, the first one with special tokens."""
    renderer = context.llm.renderer
    if isinstance(prompt, str):
        return renderer.render_prompt(prompt)
    token_ids: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, str):
            token_ids += renderer.tokenizer.encode(part, add_special_tokens=place == 0)
        else:
            token_ids.append(part)
    return renderer.render_prompt(token_ids)


def _biases(context: ServerContext, body: LlamaCompletionRequest) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for token, bias in body.bias_entries():
        is_text = isinstance(token, str)
        ids = context.llm.renderer.tokenizer.encode(token, add_special_tokens=False) if is_text else [token]
        biases |= dict.fromkeys(ids, bias)
    return biases or None


@dataclass(slots=True)
class _Answer:
    """What all pieces of one answer have in common. Result `index` is prompt * n + completion."""

    context: ServerContext
    body: LlamaCompletionRequest
    params: SamplingParams
    model: str
    prompts: list[RenderedPrompt] = field(default_factory=list)
    sources: list[AsyncGenerator[RequestOutput, None]] = field(default_factory=list)
    _texts: dict[int, bool] = field(default_factory=dict)
    """Index of a result -> whether a line has ended in it."""
    _num_tokens: dict[int, int] = field(default_factory=dict)

    def whole(self, finals: list[RequestOutput]) -> list[Any]:
        """All results, in order."""
        results = []
        for number, final in enumerate(finals):
            raise_failed(final)
            for output in final.outputs:
                result = self._piece(number, output)
                self._end(result, number, output, final)
                results.append(self._chosen(result))
        return results

    async def events(
        self, first: tuple[int, RequestOutput], rest: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """An event for each step and completion; the last one of each says how it ended."""
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for number, output in outputs:
                raise_failed(output)
                events = []
                for each in output.outputs:
                    result = self._piece(number, each)
                    if self.body.timings_per_token:
                        result.timings = Timings.of(output, each.index)
                    if each.finished and (result.content or result.tokens):
                        events.append(sse(result))
                        result = self._piece(number, dataclasses.replace(each, text="", token_ids=[], logprobs=None))
                    if each.finished:
                        self._end(result, number, each, output)
                        events.append(sse(self._chosen(result)))
                    else:
                        events.append(sse(result))
                yield b"".join(events)

    def _chosen(self, result: LlamaCompletion) -> Any:
        """What of a result was asked for."""
        return selected(result, self.body.response_fields) if self.body.response_fields else result

    def _piece(self, number: int, output: CompletionOutput) -> LlamaCompletion:
        index = number * self.params.n + output.index
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(output.token_ids)
        self._texts[index] = self._texts.get(index, False) or "\n" in output.text
        return LlamaCompletion(
            index=index,
            content=output.text,
            tokens=output.token_ids if self.body.return_tokens or self.body.stream else [],
            stop=False,
            tokens_predicted=self._num_tokens[index],
            tokens_evaluated=len(self.prompts[number].token_ids),
            completion_probabilities=token_probs(output),
        )

    def _end(self, result: LlamaCompletion, number: int, output: CompletionOutput, final: RequestOutput) -> None:
        """Say how a completion ended, and with what it was computed."""
        prompt, info = self.prompts[number], self.context.llm.engine.info
        if prompt.text is None:
            prompt.text = self.context.llm.renderer.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        result.stop, result.model, result.prompt = True, self.model, prompt.text
        result.generation_settings = generation_settings(
            self.params, n_ctx=info.max_model_len, model=self.model, stream=self.body.stream
        )
        result.has_new_line = self._texts[result.index]
        result.stop_type, result.stopping_word = stop_of(output)
        num_tokens = len(prompt.token_ids) + result.tokens_predicted
        result.truncated = result.stop_type == "limit" and num_tokens >= info.max_model_len
        result.tokens_cached = final.num_cached_tokens
        result.timings = Timings.of(final, output.index)
