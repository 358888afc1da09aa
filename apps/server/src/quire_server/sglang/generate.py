"""POST /generate and /abort_request: texts or token ids to continuations, whole or as events, as SGLang gives them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.media import HeldMedia
from quire.prompts import naming_prompt, parse_prompt_async
from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_server.body import check_fields, read_model
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.logprobs import LOWEST
from quire_server.media import released_after
from quire_server.protocol import CompletionRequest
from quire_server.responses import json_response, sse
from quire_server.sglang.protocol import GenerateItem, SGLangAbortRequest, SGLangGenerateRequest
from quire_server.streaming import EventStream, after, merge
from quire_server.token_routes import abortable
from quire_server.turn import raise_failed

__all__ = ["abort_request", "generate"]


async def generate(context: ServerContext, request: Request) -> Response:
    """POST /generate: one prompt or several."""
    body = await read_model(context, request, SGLangGenerateRequest, any_content_type=True)
    body.check_supported()
    items, is_several = body.items()
    most = context.config.max_prompts_per_request
    if len(items) > most:
        raise RequestError(
            f"{len(items)} prompts are more than this server takes in a request, {most} (--max-prompts-per-request)",
            param="text",
        )
    names = items[0].names
    with naming_fields(names):
        results: list[_Result] = []
        try:
            for index, item in enumerate(items):  # all are checked before the first one runs
                results.append(await _checked(context, body, item, index, len(items)))
            sources = await in_thread_when(body.is_large, lambda: [each.begin(context) for each in results])
        except BaseException:
            for each in results:
                each.release()
            raise
        if not body.stream:
            finals = await unless_disconnected(request, all_of(anext(source) for source in sources))
            answers = [answer for each, final in zip(results, finals, strict=True) for answer in each.take(final)]
            is_list = is_several or any(each.params.n > 1 for each in results)
            return json_response(answers if is_list else answers[0])
        outputs = merge(sources)
        first = await unless_disconnected(request, anext(outputs))
    has_index = is_several or any(each.params.n > 1 for each in results)
    return await EventStream.begin(_events(results, first, outputs, has_index=has_index))


async def _events(
    results: Sequence[_Result],
    first: tuple[int, RequestOutput],
    rest: AsyncGenerator[tuple[int, RequestOutput], None],
    *,
    has_index: bool,
) -> AsyncGenerator[bytes, None]:
    """An event for each step and prompt, each with all that was made so far."""
    begins = [0]
    for each in results:
        begins.append(begins[-1] + each.params.n)
    async with contextlib.aclosing(after(first, rest)) as outputs:
        async for number, output in outputs:
            raise_failed(output)
            answers = results[number].take(output)
            for completion, answer in zip(output.outputs, answers, strict=True):
                if has_index:
                    answer["index"] = begins[number] + completion.index
            yield b"".join(map(sse, answers))


async def abort_request(context: ServerContext, request: Request) -> Response:
    """POST /abort_request: end what /generate runs of the caller's under this `rid`, or all of it. A name that nothing
    runs under is ignored."""
    body = await read_model(context, request, SGLangAbortRequest, any_content_type=True)
    owner = context.caller.owner
    running = [
        engine_id
        for (whose, name), engine_ids in context.generating.items()
        if whose == owner and (body.abort_all or name == body.rid)
        for engine_id in engine_ids
    ]
    context.llm.engine.abort(running)
    return Response()


async def _checked(
    context: ServerContext, body: SGLangGenerateRequest, item: GenerateItem, index: int, count: int
) -> _Result:
    """One prompt, rendered and checked. Raises RequestError naming the field at fault."""
    fields = check_fields(item.fields, CompletionRequest)
    context.resolve_model(fields.model)
    params = context.sampling_params(fields)
    if item.has_logprobs:
        params = _with_logprobs(params, item)
        context.check_request(params, body.priority)
    with naming_prompt(index, count, "text"), naming_fields({"prompt": item.place}):
        media = None
        if item.media:
            fed: dict[str, Any] = {"multi_modal_data": item.media}
            fed["prompt" if isinstance(item.prompt, str) else "prompt_token_ids"] = item.prompt
            parsed = await parse_prompt_async(fed, context.llm.renderer, context.llm.media)
            prompt, media = parsed.rendered, parsed.media
        else:
            prompt = await in_thread_when(body.is_large, lambda: context.llm.renderer.render_prompt(item.prompt))
    options = context.request_options(fields)
    name = item.rid or secrets.token_hex(16)
    return _Result(name, prompt, params, options, item, body.return_text_in_logprobs, media)


def _with_logprobs(params: SamplingParams, item: GenerateItem) -> SamplingParams:
    """With log probabilities of the output, and of the prompt where it begins within it."""
    if item.logprob_token_ids and item.num_top_logprobs:
        raise RequestError(
            "token_ids_logprob and top_logprobs_num exclude each other here; leave one of them out",
            param="token_ids_logprob",
            code="unsupported_combination",
        )
    changes: dict[str, Any] = {"logprobs": item.num_top_logprobs}
    if item.logprob_token_ids:
        changes = {"logprobs": None, "logprob_token_ids": tuple(item.logprob_token_ids)}
    if item.logprob_start_len >= 0:
        changes["prompt_logprobs"] = item.num_top_logprobs
    return dataclasses.replace(params, **changes)


@dataclass(slots=True)
class _Completion:
    """What was made of one completion so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Logprob]] = field(default_factory=list)


@dataclass(slots=True)
class _Result:
    """One prompt and its completions."""

    name: str
    prompt: RenderedPrompt
    params: SamplingParams
    options: RequestOptions
    item: GenerateItem
    has_texts: bool
    """Whether log probabilities come with the texts of their tokens."""
    media: HeldMedia | None
    begin_s: float = field(default_factory=time.monotonic)
    completions: dict[int, _Completion] = field(default_factory=dict)
    prompt_logprobs: list[list[Logprob] | None] | None = None

    def begin(self, context: ServerContext) -> AsyncGenerator[RequestOutput, None]:
        """The outputs, once the engine has checked the request."""
        engine_id = f"{self.name}/{secrets.token_hex(8)}"
        outputs = context.llm.engine.generate(self.prompt, self.params, self.options, request_id=engine_id)
        outputs = abortable(context, self.name, engine_id, outputs)
        return outputs if self.media is None else released_after(outputs, self.media)

    def release(self) -> None:
        """Nothing will be generated."""
        if self.media is not None:
            self.media.release()

    def take(self, output: RequestOutput) -> list[dict[str, Any]]:
        """All that is known of the completions of an output, whole or with what is new."""
        raise_failed(output)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        answers = []
        for each in output.outputs:
            so_far = self.completions.setdefault(each.index, _Completion())
            so_far.text += each.text
            so_far.token_ids += each.token_ids
            so_far.logprobs += each.logprobs or []
            answers.append(
                {
                    "text": so_far.text,
                    "output_ids": list(so_far.token_ids),
                    "meta_info": self._meta_info(each, so_far, output),
                }
            )
        return answers

    def _meta_info(self, each: CompletionOutput, so_far: _Completion, output: RequestOutput) -> dict[str, Any]:
        info: dict[str, Any] = {
            "id": self.name,
            "finish_reason": _finish_reason(each, so_far.token_ids),
            "prompt_tokens": len(self.prompt.token_ids),
            "weight_version": "default",
            "completion_tokens": len(so_far.token_ids),
            "cached_tokens": output.num_cached_tokens,
        }
        if each.finished:
            info["e2e_latency"] = time.monotonic() - self.begin_s
        if self.item.has_logprobs:
            info |= self._logprobs(so_far)
        return info

    def _logprobs(self, so_far: _Completion) -> dict[str, Any]:
        start, token_ids = self.item.logprob_start_len, self.prompt.token_ids
        rest = list(zip(token_ids, self.prompt_logprobs or [], strict=False))[start:] if start >= 0 else []
        told: dict[str, list[Any]] = {
            "input_token_logprobs": [
                [None, token_id, None] if found is None else self._entry(found[0]) for token_id, found in rest
            ],
            "output_token_logprobs": [self._entry(chosen) for chosen, *_ in so_far.logprobs],
        }
        if self.item.num_top_logprobs > 0:
            tops = [None if found is None else [self._entry(top) for top in found[1:]] for _, found in rest]
            told |= {"input_top_logprobs": tops, "output_top_logprobs": self._tops(so_far)}
        if self.item.logprob_token_ids:
            told |= {"input_token_ids_logprobs": [], "output_token_ids_logprobs": self._tops(so_far)}
        return told

    def _tops(self, so_far: _Completion) -> list[Any]:
        return [[self._entry(top) for top in tops] for _, *tops in so_far.logprobs]

    def _entry(self, token: Logprob) -> list[Any]:
        """Log probability, id, and text where it is wanted."""
        logprob = token.logprob if math.isfinite(token.logprob) else LOWEST
        return [logprob, token.token_id, token.decoded_token if self.has_texts else None]


def _finish_reason(output: CompletionOutput, token_ids: Sequence[int]) -> dict[str, Any] | None:
    """Why a completion ended; None while it goes on."""
    reason = output.finish_reason
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(token_ids)}
    if reason is FinishReason.ABORT:
        return {"type": "abort", "message": "the request was aborted"}
    matched = output.stop_reason
    if matched is None:
        matched = token_ids[-1] if token_ids else None
    return {"type": "stop", "matched": matched}
