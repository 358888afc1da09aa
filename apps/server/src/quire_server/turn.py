"""One assistant's turn, whatever protocol asked for it: a conversation in, text, reasoning and tool calls out.

Chat completions, Messages and Responses are projections of it: each translates its request into a `ChatTurn` and the
events of a `RunningTurn` into its own shapes. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire import BeamSearchParams
from quire.media import HeldMedia
from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, OutputKind, RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_renderers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatFormat,
    ContentDelta,
    MessageBuilder,
    OutputEvent,
    OutputParser,
    ParsedMessage,
    ReasoningDelta,
)
from quire_server.answer_phases import AnswerPlan, phased_answer
from quire_server.beams import beam_search_outputs
from quire_server.client_tools import ClientTool
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import HTTPError
from quire_server.media import hold_media, released_after
from quire_server.request_warnings import RequestWarning
from quire_server.structured import check_grammars, thinking_first, with_calls
from quire_server.thinking_tokens import ThinkingTokens
from quire_server.tool_choice import ToolUse
from quire_server.truncation import truncated

__all__ = [
    "ChatTurn",
    "PreparedTurn",
    "RunningTurn",
    "TurnChoice",
    "check_request_template",
    "prepare_turn",
    "raise_failed",
    "reaches_past",
    "render_held",
    "render_turn",
    "run_turn",
    "start_turn",
]


@dataclass(slots=True, kw_only=True)
class ChatTurn:
    """What is asked of the model."""

    messages: Sequence[dict[str, Any]]
    """In the chat API's form."""
    params: SamplingParams
    tool_use: ToolUse = field(default_factory=ToolUse)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Arguments of the processor of media."""
    add_special_tokens: bool = False
    include_reasoning: bool = True
    """False leaves the reasoning out of the answer."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, after which it is closed for the model; None for no bound."""
    fills_context: bool = False
    """Where the context has no room for `params.max_tokens`, the answer ends with it instead of being refused."""
    options: RequestOptions = field(default_factory=RequestOptions)
    """How the engine schedules and isolates it, its adapter, and whether the answer comes as it is made."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt, -1 for as many as there is room for; None refuses one that is too long."""
    truncation_side: Literal["left", "right"] | None = None
    beams: BeamSearchParams | None = None
    """Search for the answers instead of drawing them."""

    @property
    def warnings(self) -> list[RequestWarning]:
        """What of the request was passed over."""
        return self.tool_use.offered.warnings


class TurnChoice:
    """One of n answers: its parser, and what was made of it so far."""

    def __init__(self, turn: ChatTurn, parser: OutputParser | None, form: ChatFormat) -> None:
        self._turn = turn
        self._parser = parser
        self._form = form
        self._tokens = None if parser is None else ThinkingTokens(parser)
        self._is_over = False
        self._logprobs: list[list[Logprob]] = []
        """Not taken yet."""
        self._num_logprobs = 0
        """Of how many tokens they were taken."""
        self._ids: dict[int, str] = {}
        self.builder = MessageBuilder()

    @property
    def parses(self) -> bool:
        """Whether anything but text is looked for."""
        return self._parser is not None

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self._turn.tool_use.is_forced

    def take(self, output: CompletionOutput) -> list[OutputEvent]:
        """The events of new text."""
        if self._parser is None:
            events: list[OutputEvent] = [ContentDelta(output.text)] if output.text else []
            self.builder.add(events)
            return events
        assert self._tokens is not None
        events = self._parser.feed(output.text)
        self._tokens.add(output.text_offsets, len(output.text))
        if output.finished:
            stopped = output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)
            self._tokens.end(by_token=stopped)
            events += self._parser.finish(stopped=stopped)
            self._is_over = True
        events = [event for event in events if self._is_wanted(event)]
        self.builder.add(events)
        return events

    def take_text_logprobs(self, output: CompletionOutput) -> list[list[Logprob]]:
        """Log probabilities of the answer's own tokens, without those of the thinking, as far as their text is settled.
        Called behind `take`, with the same output."""
        self._logprobs += output.logprobs or ()
        if self._tokens is None or self._is_over:
            settled = self._num_logprobs + len(self._logprobs)
        else:
            settled = max(self._num_logprobs, self._tokens.settled())
        thought = 0 if self._tokens is None else self._tokens.num_past_thinking()
        new_logprobs = self._logprobs[max(0, thought - self._num_logprobs) : settled - self._num_logprobs]
        del self._logprobs[: settled - self._num_logprobs]
        self._num_logprobs = settled
        return new_logprobs

    def _is_wanted(self, event: OutputEvent) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._turn.include_reasoning
        if isinstance(event, ContentDelta):
            return not self.is_forced  # half a call is no text
        if isinstance(event, (CallStart, CallArguments, CallEnd)):
            return self._turn.tool_use.parallel or event.index == 0
        return True

    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far, shown or not."""
        return 0 if self._tokens is None else self._tokens.count(is_over=self._is_over)

    def call_id(self, index: int, own: str | None) -> str:
        """The id of a call: the model's own, or a new one, always the same."""
        if index not in self._ids:
            self._ids[index] = own or self._form.new_call_id()
        return self._ids[index]

    def client_tool(self, name: str) -> ClientTool | None:
        """The client's tool that the model calls by this name."""
        return self._turn.tool_use.offered.get(name)

    def message(self) -> ParsedMessage:
        """The answer so far."""
        return self.builder.message()

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Why the answer ended, in the chat API's words: "tool_calls" when it is whole calls, else the engine's reason.
        A call that was cut short by the length keeps "length", so that nobody runs it unaware."""
        if output.finish_reason is FinishReason.STOP and self.message().calls_are_complete:
            return "tool_calls"
        return output.finish_reason


class RunningTurn:
    """A turn that was checked and handed to the engine; it runs when `outputs` is iterated."""

    def __init__(
        self,
        turn: ChatTurn,
        prompt: RenderedPrompt,
        outputs: AsyncGenerator[RequestOutput, None],
        choices: list[TurnChoice],
    ) -> None:
        self.turn = turn
        self.prompt = prompt
        self.outputs = outputs
        self.choices = choices

    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking in all answers so far."""
        return sum(choice.num_reasoning_tokens() for choice in self.choices)


@dataclass(slots=True, kw_only=True)
class PreparedTurn:
    """A turn that was rendered and checked: what the engine is to be given, and how its output will be read."""

    turn: ChatTurn
    form: ChatFormat
    prompt: RenderedPrompt
    params: SamplingParams
    """With everything that tools and reasoning add."""
    plan: AnswerPlan
    """What is written into the answer."""
    media: HeldMedia | None = None
    """What stands in the prompt, to be released when the answer has ended."""
    is_plain: bool = False
    """Nothing but text is looked for in the output."""

    @property
    def writes(self) -> bool:
        """Whether anything is written into the answer."""
        return bool(self.plan.forced) or self.plan.budget is not None

    def running(self, outputs: AsyncGenerator[RequestOutput, None]) -> RunningTurn:
        """The turn with the engine's outputs."""
        choices = [
            TurnChoice(self.turn, None if self.is_plain else self.parser(), self.form)
            for _ in range(self.turn.params.n)
        ]
        return RunningTurn(self.turn, self.prompt, outputs, choices)

    def release_media(self) -> None:
        """Nothing will be generated for this turn."""
        if self.media is not None:
            self.media.release()

    def parser(self) -> OutputParser | None:
        """A new parser of an answer; None where there is only text."""
        return _parser(self.turn, self.form, self.prompt)


async def start_turn(
    context: ServerContext, make_turn: Callable[[], ChatTurn], *, is_large: bool = False
) -> RunningTurn:
    """Render the conversation, check everything, and prepare to run.

    Args:
        context: Of the server.
        make_turn: Makes of the request what is asked of the model.
        is_large: Whether the request, or what it follows, is so long that all this belongs into a worker thread.

    Raises:
        RequestError: naming the message or field at fault.
        OverloadedError: the queue is full.
    """
    prepared = await prepare_turn(context, make_turn, is_large=is_large)
    try:
        return await asyncio.to_thread(run_turn, context, prepared) if is_large else run_turn(context, prepared)
    except BaseException:
        prepared.release_media()
        raise


def run_turn(context: ServerContext, prepared: PreparedTurn) -> RunningTurn:
    """Hand a prepared turn to the engine. Its media are released with its outputs.

    Raises:
        RequestError: the engine cannot run it.
        OverloadedError: the queue is full.
    """
    outputs = _generate(context, prepared)
    return prepared.running(outputs if prepared.media is None else released_after(outputs, prepared.media))


async def prepare_turn(
    context: ServerContext, make_turn: Callable[[], ChatTurn], *, is_large: bool = False
) -> PreparedTurn:
    """Render the conversation and check everything. Arguments as for `start_turn`.

    Raises:
        RequestError: naming the message or field at fault.
    """
    turn = await in_thread_when(is_large, make_turn)
    form = context.llm.renderer.chat_format
    if turn.tool_use.mode == "auto" and not context.config.enable_auto_tool_choice:
        turn = dataclasses.replace(turn, tool_use=dataclasses.replace(turn.tool_use, mode="shown"))
    use = turn.tool_use
    if use.is_forced and form.tools is None:
        raise RequestError(
            "this model has no known way of calling tools, so it cannot be made to; use tool_choice 'auto', or start "
            "the server with --tool-call-parser",
            param="tool_choice",
        )
    await check_grammars(use, form, has_backend=bool(context.llm.engine.info.structured_output_backend))
    held = await hold_media(context, turn.messages, turn.mm_processor_kwargs)
    try:
        return await in_thread_when(is_large, lambda: _prepared(context, turn, form, held))
    except BaseException:
        if held is not None:
            held.release()
        raise


def _prepared(context: ServerContext, turn: ChatTurn, form: ChatFormat, held: HeldMedia | None) -> PreparedTurn:
    prompt, use = render_held(context, turn, held), turn.tool_use
    params = turn.params
    if turn.fills_context and reaches_past(context, prompt, params):
        params = dataclasses.replace(params, max_tokens=None)
    if use.is_forced and params.structured_outputs is not None:
        # The form is that of a text answer, and this one is a call.
        params = dataclasses.replace(params, structured_outputs=None)
    if context.llm.engine.info.structured_output_backend:
        params = with_calls(params, form, use)
    if not use.is_forced:
        params = thinking_first(
            params,
            form,
            context.llm.renderer.tokenizer,
            prompt,
            continued=_continued(turn),
            template_kwargs=turn.chat_template_kwargs,
        )
    if params.skip_special_tokens and form.keeps_special_tokens(tools=use.is_on):
        params = dataclasses.replace(params, skip_special_tokens=False)
    prompt = truncated(context, prompt, turn.truncate_prompt_tokens, turn.truncation_side, params)
    plan = AnswerPlan(
        form=form,
        max_model_len=context.llm.engine.info.max_model_len,
        budget=turn.thinking_token_budget if form.thinking_end() is not None else None,
        forced=(form.forced_call(use.name) or "") if use.is_forced else "",
        thinks=form.may_think(prompt.text, _continued(turn), turn.chat_template_kwargs),
    )
    return PreparedTurn(turn=turn, form=form, prompt=prompt, params=params, plan=plan, media=held)


def reaches_past(context: ServerContext, prompt: RenderedPrompt, params: SamplingParams) -> bool:
    """Whether so many tokens do not fit behind the prompt. Prompts that an encoder reads take no room."""
    info = context.llm.engine.info
    used = 0 if info.max_encoder_len else len(prompt.token_ids)
    return params.max_tokens is not None and used + params.max_tokens > info.max_model_len


def _generate(context: ServerContext, prepared: PreparedTurn) -> AsyncGenerator[RequestOutput, None]:
    turn, prompt, params = prepared.turn, prepared.prompt, prepared.params
    if turn.beams is not None:
        if params.structured_outputs is not None or prepared.writes:
            raise RequestError(
                "use_beam_search cannot be combined with outputs of a given form, calls that are forced or strict, or "
                "a thinking_token_budget",
                param="use_beam_search",
                code="unsupported_combination",
            )
        beams = dataclasses.replace(turn.beams, skip_special_tokens=params.skip_special_tokens)
        return beam_search_outputs(context, prompt, beams, params, turn.options)
    engine = context.llm.engine
    parser = prepared.parser()
    if parser is None or not prepared.writes:
        return engine.generate(prompt, params, turn.options)
    phase_options = dataclasses.replace(turn.options, output_kind=OutputKind.DELTA)
    return phased_answer(
        lambda prompt, params: engine.generate(prompt, params, phase_options),
        lambda: prepared.parser() or parser,
        context.llm.renderer.tokenizer,
        prompt,
        params,
        plan=prepared.plan,
        kind=turn.options.output_kind or OutputKind.FINAL_ONLY,
    )


def _parser(turn: ChatTurn, form: ChatFormat, prompt: RenderedPrompt) -> OutputParser | None:
    if form.is_plain(tools=turn.tool_use.is_on):
        return None
    return form.parser(
        turn.tool_use.tools if turn.tool_use.is_on else None,
        prompt=prompt.text or "",
        continued=_continued(turn),
        chat_template_kwargs=turn.chat_template_kwargs,
        skip_special_tokens=turn.params.skip_special_tokens,
        must_call=turn.tool_use.is_forced,
    )


def _continued(turn: ChatTurn) -> str | None:
    """The text of the answer that the model goes on with."""
    return str(turn.messages[-1].get("content") or "") if turn.continue_final_message else None


async def render_turn(
    context: ServerContext, make_turn: Callable[[], ChatTurn], *, is_large: bool = False
) -> RenderedPrompt:
    """The conversation as token ids, for routes that generate nothing. Arguments as for `start_turn`.

    Raises:
        RequestError: naming the message or field at fault.
    """
    turn = await in_thread_when(is_large, make_turn)
    held = await hold_media(context, turn.messages, turn.mm_processor_kwargs)
    try:
        return await in_thread_when(is_large, lambda: render_held(context, turn, held))
    finally:
        if held is not None:
            held.release()


def render_held(context: ServerContext, turn: ChatTurn, held: HeldMedia | None) -> RenderedPrompt:
    """The conversation of a turn as token ids, with its media, which the caller releases.

    Raises:
        RequestError: naming the message or field at fault.
    """
    if turn.chat_template is not None:
        check_request_template(context)
    return context.llm.renderer.render_chat(
        turn.messages,
        tools=turn.tool_use.shown,
        add_generation_prompt=turn.add_generation_prompt and not turn.continue_final_message,
        continue_final_message=turn.continue_final_message,
        chat_template=turn.chat_template,
        chat_template_kwargs=turn.chat_template_kwargs,
        add_special_tokens=turn.add_special_tokens,
        media=held,
    )


def check_request_template(context: ServerContext) -> None:
    """Raises RequestError where chat templates of requests are not taken."""
    if not context.config.trust_request_chat_template:
        raise RequestError(
            "this server does not take chat templates from requests; start it with --trust-request-chat-template",
            param="chat_template",
        )


def raise_failed(output: RequestOutput) -> None:
    """Raise when the engine could not compute the request: 400 where its runner refused what was asked for."""
    for completion in output.outputs:
        if completion.finish_reason is FinishReason.ERROR:
            message = completion.error or "the request failed in the engine"
            if completion.error_code is not None:
                # In bodies, fields for logits processors stand beside the others.
                param = (completion.error_param or "").removeprefix("extra_args.") or None
                raise RequestError(message, param=param, code=completion.error_code)
            raise HTTPError(500, message, code="generation_failed", signal=completion.error_signal)
