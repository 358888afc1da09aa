"""What is asked of a checkpoint's numbers while its weights are made; and what is said where there are none.

Which kernels multiply with a weight follows from its form, and in a few details from its numbers: whether the compute
dtype holds its scales exactly, whether zero points are all zero. Who only wants to know the kernels has tensors without
memory (`in_every_case`): there every answer is given once, and what a damaged file would have is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

__all__ = [
    "BLOCK_CONSTANTS",
    "EXACT_SCALES",
    "INPUT_SCALES",
    "KV_SCALES",
    "OPTIONAL_TENSORS",
    "ZERO_POINTS",
    "are_absent",
    "ask",
    "assumed_answers",
    "in_every_case",
    "once",
]

BLOCK_CONSTANTS = "layers in blocks that take the same inputs have the same constants"
EXACT_SCALES = "the compute dtype holds the scales exactly"
ZERO_POINTS = "a zero point is not zero"
INPUT_SCALES = "layers that take the same inputs have the same scale of inputs"
KV_SCALES = "there are scales for the KV cache"
OPTIONAL_TENSORS = "layers have the tensors that they need not have"

T = TypeVar("T")


class _Case:
    """Answers in the place of numbers."""

    def __init__(self, answers: dict[str, bool]) -> None:
        self.answers, self.made = answers, dict[Hashable, Any]()


_cases: list[_Case] = []


def in_every_case(run: Callable[[], object]) -> None:
    """Call `run` as often as there are ways to answer what it asks, and not of numbers: files differ in that, and their
    layers too. Of n questions that it always asks, 2^n times; the first time every answer is no."""
    waiting: list[dict[str, bool]] = [{}]
    while waiting:
        known = waiting.pop(0)
        with assumed_answers(known) as answers:
            run()
        for question in list(answers)[len(known) :]:  # those that came up now, whose answer was no
            waiting.append({**known, question: True})
            known = {**known, question: False}


@contextmanager
def assumed_answers(answers: dict[str, bool]) -> Iterator[dict[str, bool]]:
    """Within it tensors have no numbers, and these answers are given in their place; to other questions, which are
    added to the dictionary that is yielded, no."""
    case = _Case(dict(answers))
    _cases.append(case)
    try:
        yield case.answers
    finally:
        _cases.pop()


def are_absent() -> bool:
    """Whether tensors have no numbers."""
    return bool(_cases)


def ask(question: str, answer: Tensor | bool) -> bool:
    """The answer that the numbers give; without them that of the case. question: one of those above."""
    return _cases[-1].answers.setdefault(question, False) if _cases else bool(answer)


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes; without numbers made once for a key, since nothing else can tell two results apart."""
    if not _cases:
        return make()
    made = _cases[-1].made
    if key not in made:
        made[key] = make()
    found: T = made[key]
    return found
