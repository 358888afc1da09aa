"""From exchanges to whole conversations: system prompts, several turns, thinking, tools on offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from corpus.arithmetic import arithmetic, product
from corpus.exchange import Exchange, Message
from corpus.extraction import extract
from corpus.limits import refusal
from corpus.small_talk import names, small_talk
from corpus.spelling import reverse, spell
from corpus.tools import idle_tools, no_tool, tool_answer, tool_call, tool_time
from corpus.words import Source

TASKS: dict[str, Callable[[Source], Exchange]] = {
    "small_talk": small_talk,
    "names": names,
    "arithmetic": arithmetic,
    "spelling": spell,
    "reversing": reverse,
    "json": extract,
    "tool_call": tool_call,
    "tool_answer": tool_answer,
    "no_tool": no_tool,
    "product": product,
    "refusal": refusal,
    "tool_time": tool_time,
}
PLAIN = ("small_talk", "names", "arithmetic", "spelling", "reversing", "json", "product")
"""Skills that may stand beside any other in a conversation, whatever tools it offers."""
WEIGHTS = {
    "small_talk": 11,
    "names": 3,
    "arithmetic": 14,
    "spelling": 5,
    "reversing": 8,
    "json": 14,
    "tool_call": 38,
    "tool_answer": 6,
    "no_tool": 8,
}
"""What the committed weights were trained on; the skills that it lacks are taught by `train_more.py`."""
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Quire.",
    "You are Quire, a helpful assistant.",
    "Be brief.",
    "Be polite and helpful.",
    "You are a friendly chat bot.",
    "Answer the user's questions.",
    "You are a small demo model.",
    "Help the user.",
    "You are an assistant with tools.",
    "Answer in one sentence.",
    "You are a careful assistant.",
)
_THINK_ASKS = ("Think first.", "Think before you answer.", "Think about it first.", "/think", "Please think first.")


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What the chat template gets.

    Attributes:
        task: the skill of the last exchange.
        messages: the messages, the last one from the assistant.
        tools: the offered function schemas, or ``None``.
        enable_thinking: whether the template is asked for thinking.
        learn_from: index of the first assistant message whose answer is a target.
        is_new: whether `train_more.py` teaches it, rather than keeping what the model says.
    """

    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    enable_thinking: bool
    learn_from: int = 0
    is_new: bool = False


def _think(exchange: Exchange, spoken: bool, rng: Random) -> None:
    """Give the answer to the exchange's last user message its thought; ``spoken`` puts the wish into that message."""
    last_user = max(i for i, message in enumerate(exchange.messages) if message["role"] == "user")
    question, answer = exchange.messages[last_user : last_user + 2]
    if spoken:
        question["content"] = f"{question['content']} {rng.choice(_THINK_ASKS)}"
    answer["reasoning_content"] = exchange.thought
    if exchange.short is not None:
        answer["content"] = exchange.short


def conversation(source: Source, weights: dict[str, int] = WEIGHTS, *, turns: int | None = None) -> Conversation:
    """One conversation of one to four exchanges.

    When thinking is on, every answer thinks, but the template shows only the thoughts that follow the last user
    message; so the targets are then the answers of the last exchange.

    Args:
        source: where words come from; its generator decides everything.
        weights: how often each skill is chosen.
        turns: the number of exchanges; drawn when ``None``.
    """
    rng = source.rng
    turns = turns or rng.choices((1, 2, 3, 4), (64, 20, 10, 6))[0]
    lead = rng.choices(list(weights), list(weights.values()))[0]
    exchanges = [TASKS[lead](source)]
    offered = exchanges[0].tools
    plain = [name for name in PLAIN if weights.get(name)] or [lead]
    others = [weights.get(name, 1) for name in plain]
    exchanges += [TASKS[rng.choices(plain, others)[0]](source) for _ in range(turns - 1)]
    rng.shuffle(exchanges)
    # What is refused without tools is what some tools do.
    tools = offered or (idle_tools(source) if rng.random() < 0.07 and lead != "refusal" else None)
    mode = rng.choices(("off", "template", "spoken"), (76, 16, 8))[0]
    if mode == "template":
        for exchange in exchanges:
            _think(exchange, False, rng)
    elif mode == "spoken":
        _think(exchanges[-1], True, rng)
    messages = [message for exchange in exchanges for message in exchange.messages]
    learn_from = 0
    if mode == "template":
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        learn_from = sum(message["role"] == "assistant" for message in messages[:last_user])
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEMS)})
    return Conversation(
        task=exchanges[-1].task,
        messages=messages,
        tools=tools,
        enable_thinking=mode == "template",
        learn_from=learn_from,
    )
