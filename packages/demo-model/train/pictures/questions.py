"""Questions about scenes with their answers, by task. Draws nothing.

A conversation shows one picture or two, and asks one to three questions about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from corpus.words import Source

from pictures.scenes import (
    COLORS,
    HELD_KINDS,
    MAX_SHAPES,
    SHAPES,
    Scene,
    kind,
    number,
    several_kinds,
    shapes_scene,
    text_scene,
    trained_kind,
    word,
)

PLURALS = {"cross": "crosses"}
WHAT = (
    "What is this?", "What do you see?", "What is in the picture?", "What does the picture show?",
    "Describe the picture.",
)  # fmt: skip
"""Questions that any picture answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about the pictures of a conversation."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewing:
    """Pictures, and what is asked about them."""

    task: str
    scenes: tuple[Scene, ...]
    questions: tuple[Question, ...]


def viewing(source: Source, task: str, num_questions: int = 1) -> Viewing:
    """Pictures of a task with some questions; fewer where there are not so many."""
    scenes, questions = TASKS[task](source)
    distinct: dict[str, Question] = {}
    for question in questions:
        distinct.setdefault(question.text, question)
        if len(distinct) == num_questions:
            break
    return Viewing(task=task, scenes=scenes, questions=tuple(distinct.values()))


_Asked = tuple[tuple[Scene, ...], Iterator[Question]]


def _naming(source: Source) -> _Asked:
    rng = source.rng
    count = rng.choice((1, 2, 3))
    kinds = [kind(source)]
    while len(kinds) < count:  # a question names a shape or a colour, which has to be the only one
        other = trained_kind(rng)
        if all(other[0] != each[0] and other[1] != each[1] for each in kinds):
            kinds.append(other)
    scene = shapes_scene(rng, kinds)
    return (scene,), _naming_questions(rng, scene, kinds)


def _naming_questions(rng: Random, scene: Scene, kinds: list[tuple[str, str]]) -> Iterator[Question]:
    for _ in range(8):
        color, shape = kinds[0] if rng.random() < 0.5 else rng.choice(kinds)
        draw = rng.random()
        if len(kinds) == 1 and draw < 0.5:
            yield Question(text=rng.choice(WHAT), answer=f"{a(color)} {shape}.".capitalize())
        elif len(kinds) < 3 and draw < 0.35:
            order = sorted(scene.shapes, key=lambda each: each.x)
            named = [f"{a(each.color)} {each.shape}" for each in order]
            yield Question(text=rng.choice(WHAT), answer=" and ".join(named).capitalize() + ".")
        elif draw < 0.7:
            yield Question(
                text=rng.choice((f"What color is the {shape}?", f"Which color does the {shape} have?")),
                answer=f"The {shape} is {color}.",
            )
        else:
            yield Question(
                text=rng.choice((f"Which shape is {color}?", f"What is {color}?")), answer=f"The {shape} is {color}."
            )


def _counting(source: Source) -> _Asked:
    rng = source.rng
    scene = shapes_scene(rng, several_kinds(source, rng.randint(1, MAX_SHAPES)))
    return (scene,), _counting_questions(rng, scene)


def _counting_questions(rng: Random, scene: Scene) -> Iterator[Question]:
    for _ in range(8):
        some = rng.choice(scene.shapes)
        color = some.color if rng.random() < 0.85 else rng.choice(list(COLORS))
        shape = some.shape if rng.random() < 0.85 else rng.choice(SHAPES)
        by = rng.choice((("", ""), ("", shape), (color, ""), (color, shape)))
        count = sum(by[0] in ("", each.color) and by[1] in ("", each.shape) for each in scene.shapes)
        noun = by[1] or "shape"
        singular, several = f"{by[0]} {noun}".strip(), f"{by[0]} {PLURALS.get(noun, noun + 's')}".strip()
        ask = (f"How many {several} are there?", f"How many {several} do you see?", f"Count the {several}.")
        verb, named = ("is", singular) if count == 1 else ("are", several)
        yield Question(text=rng.choice(ask), answer=f"There {verb} {count or 'no'} {named}.")


def _digits(source: Source) -> _Asked:
    text = number(source)
    return (text_scene(source.rng, text),), _text_questions(source.rng, text, "number")


def _words(source: Source) -> _Asked:
    text = word(source)
    return (text_scene(source.rng, text),), _text_questions(source.rng, text, "word")


def _text_questions(rng: Random, text: str, noun: str) -> Iterator[Question]:
    for _ in range(8):
        if rng.random() < 0.25:
            yield Question(text=rng.choice(WHAT), answer=f"The {noun} {text}.")
        else:
            ask = (f"What {noun} is this?", f"Read the {noun}.", "What does it say?", f"Which {noun} do you see?")
            yield Question(text=rng.choice(ask), answer=f"It says {text}.")


def _comparing(source: Source) -> _Asked:
    rng = source.rng
    if rng.random() < 0.5:
        kinds = [kind(source), trained_kind(rng)]
        if rng.random() < 0.5:
            kinds[1] = kinds[0]
        elif rng.random() < 0.5:  # differ in one thing alone
            near = [(kinds[0][0], rng.choice(SHAPES)), (rng.choice(list(COLORS)), kinds[0][1])]
            kinds[1] = next((pair for pair in near if pair not in (kinds[0], *HELD_KINDS)), kinds[1])
        rng.shuffle(kinds)
        scenes = tuple(shapes_scene(rng, [each]) for each in kinds)
        return scenes, _same_questions(rng, kinds)
    scenes = tuple(shapes_scene(rng, several_kinds(source, rng.randint(1, MAX_SHAPES))) for _ in range(2))
    return scenes, _more_questions(rng, scenes)


def _same_questions(rng: Random, kinds: list[tuple[str, str]]) -> Iterator[Question]:
    first, second = (f"{a(color)} {shape}" for color, shape in kinds)
    for _ in range(8):
        draw = rng.random()
        if draw < 0.5 or kinds[0] == kinds[1]:
            ask = ("Do both pictures show the same?", "Are the pictures the same?", "Is it the same in both pictures?")
            same = f"Yes, both show {first}."
            different = f"No, the first shows {first} and the second {second}."
            yield Question(text=rng.choice(ask), answer=same if first == second else different)
        else:
            index = rng.randrange(2)
            color, shape = kinds[index]
            name = ("first", "second")[index]
            shown = f"{a(color)} {shape}"
            yield Question(text=f"Which picture shows {shown}?", answer=f"The {name} picture shows {shown}.")


def _more_questions(rng: Random, scenes: tuple[Scene, ...]) -> Iterator[Question]:
    first, second = (len(scene.shapes) for scene in scenes)
    more = "both have the same" if first == second else f"the {'first' if first > second else 'second'} has more"
    ask = ("Which picture has more shapes?", "Where are more shapes?", "In which picture are more shapes?")
    yield Question(text=rng.choice(ask), answer=f"The first has {first} and the second {second}: {more}.")


def a(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


TASKS: dict[str, Callable[[Source], _Asked]] = {
    "naming": _naming,
    "counting": _counting,
    "digits": _digits,
    "words": _words,
    "comparing": _comparing,
}
