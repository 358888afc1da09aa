"""Conversations about pictures, in the chat API's form. Draws nothing."""

from __future__ import annotations

from typing import Any

from corpus.mix import PLAIN, TASKS
from corpus.words import Source

from pictures.questions import Viewing


def messages(viewing: Viewing) -> list[dict[str, Any]]:
    """The pictures and the first question in one message, its answer, then the other questions with theirs."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in viewing.scenes]
    turns: list[dict[str, Any]] = []
    for question in viewing.questions:
        text = {"type": "text", "text": question.text}
        turns.append({"role": "user", "content": question.text if turns else [*parts, text]})
        turns.append({"role": "assistant", "content": question.answer})
    return turns


def mixed(source: Source, viewing: Viewing) -> list[dict[str, Any]]:
    """`messages`, every sixth time with an exchange before or behind them that has nothing to do with the pictures."""
    turns = messages(viewing)
    rng = source.rng
    if rng.random() < 1 / 6:
        other: list[dict[str, Any]] = [dict(each) for each in TASKS[rng.choice(PLAIN)](source).messages]
        turns = turns + other if rng.random() < 0.7 else other + turns
    return turns
