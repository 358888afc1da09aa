"""Answers into which the server writes, for every format: exact budgets, calls behind the thinking, no half calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.async_llm import make_detokenizer_factory
from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import FinishReason, OutputKind, RenderedPrompt, SamplingParams
from quire_renderers import ChatFormat, MessageBuilder, load_tokenizer
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS
from quire_server.answer_phases import AnswerPlan, phased_answer
from quire_server.thinking_tokens import ThinkingTokens

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
PROMPT = [5, 6, 7]
THOUGHT = "one two, three é four 🚀 five"
OF_ONE_MODEL = ("gpt_oss", "inkling", "muse")
"""Formats whose calls and thinking share markers."""
UNCOUNTED = ("gemma4", "k2_horizon", "kimi", "minimax_m2_append_think")
"""Thinking in markers that the tokenizer of these tests cuts in the midst of a word or of a character, so that tokens
of markers count, too; and thinking that is left in the text."""
FORMATS = [
    (tools, reasoning)
    for tools in TOOL_FORMATS
    for reasoning in REASONING_FORMATS
    if reasoning not in UNCOUNTED
    if tools == reasoning or not {tools, reasoning} & set(OF_ONE_MODEL)
    if tools == "hermes" or reasoning in ("qwen3", *OF_ONE_MODEL)
]


class Script:
    """Makes requests whose output is a text for the first of them, and another one for those that go on from it."""

    def __init__(self, tokenizer: Any, first: str, then: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._texts = (first, then)
        self._random = random.Random(seed)

    async def generate(self, prompt: RenderedPrompt, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        text = self._texts[len(prompt.token_ids) > len(PROMPT)]
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, 0]
        most = len(ids) if params.max_tokens is None else params.max_tokens
        detokenizer = make_detokenizer_factory(self._tokenizer)(prompt.token_ids, params)
        place, positions = 0, None
        if params.prompt_logprobs is not None:
            positions = [None, *([Logprob(each, -1.0, 1)] for each in prompt.token_ids[1:])]
        while place < min(most, len(ids)):
            new = ids[place : min(most, place + self._random.choice([1, 1, 2, 5, 30]))]
            place += len(new)
            ended = new[-1] == 0
            delta = detokenizer.add(new[:-1] if ended else new)
            if ended or place == most:
                delta.text += detokenizer.finish().text
            if ended:
                delta.text_offsets.append(len(text))
            reason = FinishReason.STOP if ended else FinishReason.LENGTH if place == most else None
            completion = CompletionOutput(
                index=0, text=delta.text, token_ids=new, text_offsets=delta.text_offsets, finish_reason=reason
            )
            if params.logprobs is not None:
                completion.logprobs = [[Logprob(each, -2.0, 1)] for each in new]
            yield RequestOutput(
                request_id="r",
                prompt=None,
                prompt_token_ids=prompt.token_ids,
                outputs=[completion],
                finished=reason is not None,
                prompt_logprobs=positions,
                num_generation_tokens=place,
            )
            positions = None


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


def run(tokenizer: Any, form: ChatFormat, script: Script, plan: dict[str, Any], **params: Any) -> dict[str, Any]:
    """The whole answer, read as the server reads it."""

    def make_parser() -> Any:
        return form.parser([NOW], must_call=bool(plan.get("forced")))

    async def collect() -> list[RequestOutput]:
        outputs = phased_answer(
            script.generate,
            make_parser,
            tokenizer,
            RenderedPrompt(token_ids=PROMPT),
            SamplingParams(**{"max_tokens": None, **params}),
            plan=AnswerPlan(form=form, max_model_len=2000, **plan),
            kind=OutputKind.DELTA,
        )
        return [output async for output in outputs]

    parser, builder, told = make_parser(), MessageBuilder(), asyncio.run(collect())
    tokens, ids, offsets, logprobs = ThinkingTokens(parser), [], [], []
    for output in told:
        [completion] = output.outputs
        builder.add(parser.feed(completion.text))
        tokens.add(completion.text_offsets, len(completion.text))
        ids += completion.token_ids
        offsets += completion.text_offsets
        logprobs += completion.logprobs or []
    [last] = told[-1].outputs
    stopped = last.finish_reason is FinishReason.STOP
    tokens.end(by_token=stopped)
    builder.add(parser.finish(stopped=stopped))
    assert told[-1].num_generation_tokens == len(ids) == len(offsets)
    assert offsets == sorted(offsets)
    assert [output.finished for output in told] == [False] * (len(told) - 1) + [True]
    assert "max_tokens" not in params or len(ids) <= params["max_tokens"]
    if "logprobs" in params:
        assert [chosen.token_id for [chosen] in logprobs] == ids
    message = builder.message()
    return {"message": message, "thinking": tokens.count(is_over=True), "ids": ids, "reason": last.finish_reason}


def opened(form: ChatFormat) -> str:
    """What opens the thinking in the output itself."""
    if form.reasoning_parser == "gpt_oss":
        return "<|channel|>analysis<|message|>"
    return "" if form.opens_thinking("") else form.thinking_start() or ""


def calls_of(forced: str) -> list[str]:
    """What becomes of a call that goes on with nonsense: nothing where that makes another name of it."""
    return [] if forced.rstrip("\n").endswith("now") else ["now"]


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_budgets_and_forced_calls(tokenizer: Any, tools: str, reasoning: str) -> None:
    form = ChatFormat(tool_parser=tools, reasoning_parser=reasoning)
    full = len(tokenizer.encode(THOUGHT, add_special_tokens=False))
    first = f"{opened(form)}{THOUGHT}{form.thinking_end()}"
    forced = form.forced_call("now") or ""
    for seed, budget in enumerate((None, 0, 1, 3, full - 1, full, full + 1)):
        expected = full if budget is None else min(budget, full)
        script = Script(tokenizer, f"{first}{form.behind_thinking(calls=False)}Done.", "Then.", seed)
        if budget is not None:
            made = run(tokenizer, form, script, {"budget": budget}, logprobs=0)
            assert made["thinking"] == expected
            assert made["message"].text == ("Done." if budget >= full else "Then.")
            assert THOUGHT.startswith(made["message"].reasoning)
        called = run(tokenizer, form, script, {"budget": budget, "forced": forced}, logprobs=0)
        assert called["thinking"] == expected
        assert [call.name for call in called["message"].calls] == calls_of(forced)
        for max_tokens in range(1, len(called["ids"]), 3):
            plan = {"budget": budget, "forced": forced}
            cut = run(tokenizer, form, script, plan, max_tokens=max_tokens, logprobs=0)
            assert (cut["ids"], cut["reason"]) == (called["ids"][:max_tokens], FinishReason.LENGTH)
            assert cut["thinking"] <= expected


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@pytest.mark.parametrize("text", ["No thought.", "", "<think", "{thought}", "{opened}{thought}"])
def test_the_call_comes_whatever_the_model_does(tokenizer: Any, tools: str, reasoning: str, text: str) -> None:
    form = ChatFormat(tool_parser=tools, reasoning_parser=reasoning)
    first = text.format(opened=opened(form), thought=THOUGHT)
    for seed in range(3):
        script = Script(tokenizer, first, "?", seed)
        forced = form.forced_call("now") or ""
        made = run(tokenizer, form, script, {"forced": forced}, logprobs=0)
        assert [call.name for call in made["message"].calls] == calls_of(forced)
        assert made["message"].reasoning in ("", THOUGHT, first)
