"""POST /v1/completions: prompts as text, token ids or embeddings in, continuations out, whole or as a stream of
events."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from quire import BeamSearchParams
from quire.prompt_embeds import EmbedsPrompt
from quire.prompts import naming_prompt
from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, RenderedPrompt, RequestError, SamplingParams
from quire_server.beams import beam_search_outputs, beam_search_params
from quire_server.body import read_model
from quire_server.context import ServerContext, all_of, in_thread_when, unless_disconnected
from quire_server.errors import naming_fields
from quire_server.logprobs import EchoedTokens, completion_logprobs, prompt_logprobs
from quire_server.media import hold_prompt_embeds, released_after
from quire_server.protocol import CompletionRequest
from quire_server.request_ids import answer_id
from quire_server.request_timings import request_timings
from quire_server.responses import Completion, CompletionChoice, Usage, json_response, sse
from quire_server.routed_experts import experts_text
from quire_server.streaming import EventStream, after, merge
from quire_server.truncation import truncated
from quire_server.turn import raise_failed

__all__ = ["CompletionAnswer", "completion_params", "completions", "render_prompts"]


MAX_COMPLETIONS = 1 << 14
"""Of all prompts of a request together."""


async def completions(context: ServerContext, request: Request) -> Response:
    """Serve one request; errors of the tree become error bodies in the app."""
    body = await read_model(context, request, CompletionRequest)
    model = context.resolve_model(body.model)
    name = answer_id(request, "cmpl-", body.request_id)
    embeds = await hold_prompt_embeds(context, body.embeds())
    try:
        answer, sources = await in_thread_when(body.is_large, lambda: _begun(context, body, name, model, embeds))
    except BaseException:
        for prompt in embeds:
            prompt.media.release()
        raise
    if not body.stream:
        with naming_fields(body.field_names()):
            finals = await unless_disconnected(request, all_of(anext(source) for source in sources))
        return await in_thread_when(body.is_large, lambda: json_response(answer.whole(finals)))
    outputs = merge(sources)
    with naming_fields(body.field_names()):
        first = await unless_disconnected(request, anext(outputs))
    return await EventStream.begin(answer.events(first, outputs))


def _begun(
    context: ServerContext, body: CompletionRequest, name: str, model: str, embeds: Sequence[EmbedsPrompt]
) -> tuple[CompletionAnswer, list[AsyncGenerator[RequestOutput, None]]]:
    """The answer, and the outputs of its prompts. Every prompt is checked before the first one runs.

    Raises:
        RequestError: naming the field at fault.
    """
    with naming_fields(body.field_names()):
        params, only_echo = completion_params(context, body)
        beams = beam_search_params(body, params)
        _check_num_completions(body, params)
        prompts = [*(each.rendered for each in embeds), *render_prompts(context, body, params)]
        answer = CompletionAnswer(name, int(time.time()), model, body, params, prompts, context, only_echo)
        sources = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts), "prompt"):
                outputs = _outputs(context, body, prompt, params, beams)
                sources.append(released_after(outputs, embeds[index].media) if index < len(embeds) else outputs)
    return answer, sources


def _check_num_completions(body: CompletionRequest, params: SamplingParams) -> None:
    num_prompts, num_each = len(body.prompts()) + len(body.embeds()), params.best_of or params.n
    if num_prompts * num_each > MAX_COMPLETIONS:
        name = "n" if params.best_of is None else "best_of"
        raise RequestError(
            f"{num_each} completions of each of {num_prompts} prompts are more than one request may ask for "
            f"({MAX_COMPLETIONS}); send the prompts in several requests",
            param=name,
        )


def completion_params(context: ServerContext, body: CompletionRequest) -> tuple[SamplingParams, bool]:
    """Parameters of the requests to the engine, and whether only the prompts are wanted back.

    Raises:
        RequestError: naming the field at fault.
    """
    only_echo = body.max_tokens == 0
    params = context.sampling_params(body)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
    return params, only_echo


def _outputs(
    context: ServerContext,
    body: CompletionRequest,
    prompt: RenderedPrompt,
    params: SamplingParams,
    beams: BeamSearchParams | None,
) -> AsyncGenerator[RequestOutput, None]:
    options = context.request_options(body)
    if beams is not None:
        return beam_search_outputs(context, prompt, beams, params, options)
    return context.llm.engine.generate(prompt, params, options)


def render_prompts(context: ServerContext, body: CompletionRequest, params: SamplingParams) -> list[RenderedPrompt]:
    """The prompts as token ids, cut where that is asked for. Raises RequestError naming the field at fault."""
    prompts = body.prompts()
    num_prompts = len(prompts) + len(body.embeds())
    if num_prompts > context.config.max_prompts_per_request:
        raise RequestError(
            f"prompt holds {num_prompts} prompts, this server takes {context.config.max_prompts_per_request} at most "
            "(--max-prompts-per-request)",
            param="prompt",
        )
    if body.suffix:
        prompts = _with_gap(context, prompts, body.suffix)
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    renderer = context.llm.renderer

    rendered = []
    for index, prompt in enumerate(prompts):
        with naming_prompt(index, len(prompts), "prompt"):
            rendered.append(renderer.render_prompt(prompt, add_special_tokens=special))
    prompts_in = [
        truncated(context, each, body.truncate_prompt_tokens, body.truncation_side, params) for each in rendered
    ]
    # What is echoed is what the model reads.
    return [
        each if each is whole else dataclasses.replace(each, text=None)
        for each, whole in zip(prompts_in, rendered, strict=True)
    ]


def _with_gap(context: ServerContext, prompts: Sequence[str | list[int]], suffix: str) -> list[str | list[int]]:
    """Prompts that ask for what stands between each prompt and the suffix."""
    form = context.llm.renderer.fill_in_middle
    if form is None:
        raise RequestError(
            "suffix needs a model that was trained to fill gaps, and this model's tokenizer has no tokens for it "
            "(such as <|fim_middle|>); leave suffix out",
            param="suffix",
            code="unsupported",
        )
    gaps: list[str | list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise RequestError("with suffix, prompt must be text, got token ids", param="prompt")
        gaps.append(form.prompt(prompt, suffix))
    return gaps


@dataclass(slots=True)
class CompletionAnswer:
    """What all pieces of one answer have in common. Choice `index` is prompt * n + completion."""

    id: str
    created: int
    model: str
    body: CompletionRequest
    params: SamplingParams
    prompts: list[RenderedPrompt]
    context: ServerContext
    only_echo: bool
    prompt_tokens: int | None = None
    """Length of the prompts where it is another one than that of `prompts`."""
    _positions: dict[int, list[list[Logprob] | None]] = field(default_factory=dict)
    """Prompt -> log probabilities of its tokens, once they have come."""

    def whole(self, finals: list[RequestOutput]) -> Completion:
        for final in finals:
            raise_failed(final)
        choices = [
            self._choice(number, output, final, is_first=True)
            for number, final in enumerate(finals)
            for output in final.outputs
        ]
        completion = self._completion(choices, self._usage(dict(enumerate(finals))))
        completion.kv_transfer_params = next(
            (each.kv_transfer_params for each in finals if each.kv_transfer_params), None
        )
        if self.context.config.enable_per_request_metrics:
            completion.metrics = request_timings(finals)
        return completion

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            deterministic=self.context.is_deterministic(self.params, self.model),
            choices=choices,
            usage=usage,
            system_fingerprint=self.context.fingerprint,
        )

    def chunk(self, output: RequestOutput, *, is_first: bool, has_usage: bool) -> Completion:
        """One output of the first prompt as one chunk; the first one may echo the prompt."""
        choices = [self._choice(0, each, output, is_first=is_first) for each in output.outputs]
        return self._completion(choices, self._usage({0: output}) if has_usage else None)

    def _usage(self, latest: dict[int, RequestOutput]) -> Usage:
        rendered = sum(len(prompt.token_ids) for prompt in self.prompts)
        return Usage.of(
            rendered if self.prompt_tokens is None else self.prompt_tokens,
            0 if self.only_echo else sum(output.num_generation_tokens for output in latest.values()),
            sum(output.num_cached_tokens for output in latest.values()),
        )

    def _choice(
        self, number: int, output: CompletionOutput, final: RequestOutput, *, is_first: bool
    ) -> CompletionChoice:
        prompt = self.prompts[number]
        if self.only_echo:
            output = dataclasses.replace(
                output, text="", token_ids=[], logprobs=None if output.logprobs is None else [], text_offsets=[]
            )
            output.finish_reason = FinishReason.LENGTH if output.finished else None
        echoes = self.body.echo and is_first
        echoed_text = self._prompt_text(prompt) if self.body.echo else ""
        if final.prompt_logprobs is not None:
            self._positions[number] = final.prompt_logprobs
        positions = self._positions.get(number)
        choice = CompletionChoice(
            index=number * self.params.n + output.index,
            text=echoed_text + output.text if echoes else output.text,
            logprobs=completion_logprobs(
                output,
                text_offset=len(echoed_text),
                echoed=self._echoed(prompt, positions) if echoes else None,
                as_ids=self.context.names_tokens_by_id(self.body),
                num_packed=(self.body.logprobs or 0) if self.body.packed_top_logprobs else 0,
            ),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            routed_experts=experts_text(output),
        )
        if is_first and positions is not None and self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(positions)
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
            if is_first:
                choice.prompt_token_ids = None if prompt.media is not None else prompt.token_ids
        return choice

    def _prompt_text(self, prompt: RenderedPrompt) -> str:
        if prompt.text is None:
            prompt.text = self.context.llm.renderer.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return prompt.text

    def _echoed(self, prompt: RenderedPrompt, positions: list[list[Logprob] | None] | None) -> EchoedTokens | None:
        if positions is None:
            return None
        return EchoedTokens.of(
            self.context.llm.renderer.tokenizer,
            prompt.token_ids,
            self._prompt_text(prompt),
            positions,
            as_ids=self.context.names_tokens_by_id(self.body),
        )

    def _waits_for_prompt(self, number: int, output: RequestOutput) -> bool:
        """Whether the log probabilities of the prompt, which come with one of the n completions, are still to come."""
        is_known = output.prompt_logprobs is not None or self._positions.get(number) is not None
        return self.params.prompt_logprobs is not None and not is_known and not output.finished

    async def events(
        self, first: tuple[int, RequestOutput], rest: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """One element per engine step and prompt."""
        wants_usage, continuous = self.context.usage_wanted(self.body.stream_options)
        latest: dict[int, RequestOutput] = {}
        begun_choices: set[int] = set()
        deferred: dict[int, list[RequestOutput]] = {}
        async with contextlib.aclosing(after(first, rest)) as outputs:
            async for number, output in outputs:
                raise_failed(output)
                if self._waits_for_prompt(number, output):
                    deferred.setdefault(number, []).append(output)
                    continue
                events = []
                for now in (output, *deferred.pop(number, ())):
                    if number not in latest or now.num_generation_tokens >= latest[number].num_generation_tokens:
                        latest[number] = now
                    for each in now.outputs:
                        index = number * self.params.n + each.index
                        choice = self._choice(number, each, now, is_first=index not in begun_choices)
                        begun_choices.add(index)
                        events.append(sse(self._completion([choice], self._usage(latest) if continuous else None)))
                yield b"".join(events)
        if wants_usage:
            end = self._completion([], self._usage(latest))
            if self.context.config.enable_per_request_metrics:
                end.metrics = request_timings(list(latest.values()))
            yield sse(end)
