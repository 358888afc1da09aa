"""The shape every skill produces: one exchange, a few messages with an answer to learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
REMARKS = ("{}", "{}", "{}", "{}", "Hi! {}", "Hello. {}", "{} Thanks!", "Please tell me: {}", "Quick question: {}")
"""What stands around a question; most often nothing."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One user request and what follows, without system prompt.

    Attributes:
        task: the name of the skill, for the evaluation table.
        messages: messages in the chat API's form; the last one is the assistant's answer.
        thought: what the assistant thinks before its first answer when thinking is on.
        short: the first answer's text when the thought already holds the working, else ``None``.
        tools: function schemas that must be offered for this exchange.
    """

    task: str
    messages: list[Message]
    thought: str
    short: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


def ask(task: str, question: str, answer: str, thought: str, short: str | None = None) -> Exchange:
    """An exchange of one question and one plain answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Exchange(task=task, messages=messages, thought=thought, short=short)
