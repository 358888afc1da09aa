"""What stands in a picture: coloured shapes, or characters. Knows the held-out split; draws nothing.

Lengths are in shares of the picture's side, positions from its upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from corpus.words import WORDS, Source, held_out

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (38, 90, 205),
    "yellow": (240, 210, 40),
    "orange": (245, 135, 25),
    "purple": (130, 60, 175),
    "pink": (245, 140, 190),
    "black": (25, 25, 25),
}
MAX_SHAPES = 5
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_CHARACTERS = 4
KINDS = tuple((color, shape) for color in COLORS for shape in SHAPES)
HELD_KINDS = tuple(kind for kind in KINDS if held_out("picture", *kind))
"""Pairs of colour and shape that no training picture shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A coloured shape."""

    color: str
    shape: str
    x: float
    """Of its centre."""
    y: float
    radius: float
    angle: float
    """Turned by so many degrees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Character:
    """A printed digit or capital letter."""

    text: str
    x: float
    """Of its centre."""
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One picture: shapes, or characters in one line."""

    background: tuple[int, int, int]
    shapes: tuple[Shape, ...] = ()
    characters: tuple[Character, ...] = ()
    font_size: float = 0.0
    """Height of a line of the characters."""
    ink: tuple[int, int, int] = field(default=(25, 25, 25))
    """Colour of the characters."""
    seed: int = 0
    """Decides how colours waver."""

    @property
    def text(self) -> str:
        """What is printed; empty for shapes."""
        return "".join(character.text for character in self.characters)


def _background(rng: Random) -> tuple[int, int, int]:
    if rng.random() < 0.4:
        return (255, 255, 255)
    return (rng.randint(215, 255), rng.randint(215, 255), rng.randint(215, 255))


def shapes_scene(rng: Random, kinds: list[tuple[str, str]]) -> Scene:
    """A picture of shapes of these kinds, (colour, shape) each, in places that do not touch."""
    while True:
        largest = {1: 0.36, 2: 0.24, 3: 0.19}.get(len(kinds), 0.15)
        placed: list[Shape] = []
        for color, shape in kinds:
            for _ in range(60):
                radius = rng.uniform(0.105, largest)
                x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
                if all((x - o.x) ** 2 + (y - o.y) ** 2 > (radius + o.radius + 0.02) ** 2 for o in placed):
                    angle = rng.uniform(-12, 12)
                    placed.append(Shape(color=color, shape=shape, x=x, y=y, radius=radius, angle=angle))
                    break
        if len(placed) == len(kinds):
            return Scene(background=_background(rng), shapes=tuple(placed), seed=rng.getrandbits(32))


def text_scene(rng: Random, text: str) -> Scene:
    """A picture of one printed line of up to four characters."""
    size = rng.uniform(0.24, 0.34)
    step = rng.uniform(0.165, 0.215)
    width = step * (len(text) - 1)
    left = rng.uniform(0.12, 0.88 - width)
    y = rng.uniform(0.2, 0.8)
    ink = rng.choice([color for name, color in COLORS.items() if name not in ("yellow", "pink")])
    characters = tuple(Character(text=each, x=left + step * i, y=y) for i, each in enumerate(text))
    return Scene(background=_background(rng), characters=characters, font_size=size, ink=ink, seed=rng.getrandbits(32))


def kind(source: Source) -> tuple[str, str]:
    """A pair of colour and shape from the source's side of the split."""
    return source.rng.choice(HELD_KINDS) if source.held else trained_kind(source.rng)


def trained_kind(rng: Random) -> tuple[str, str]:
    """A pair of colour and shape that training may show."""
    while True:
        drawn = rng.choice(KINDS)
        if drawn not in HELD_KINDS:
            return drawn


def several_kinds(source: Source, count: int) -> list[tuple[str, str]]:
    """Kinds of the shapes of one picture, often alike; of a held-out picture, at least one is held out."""
    rng = source.rng
    palette = [kind(source)] + [trained_kind(rng) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.6:  # same colour or shape, so that both have to be looked at
        color, shape = palette[0]
        near = [(other, shape) for other in COLORS] + [(color, other) for other in SHAPES]
        near = [pair for pair in near if pair not in HELD_KINDS]
        if near:
            palette.append(rng.choice(near))
    kinds = [palette[0]] + [rng.choice(palette) for _ in range(count - 1)]
    rng.shuffle(kinds)
    return kinds


def number(source: Source) -> str:
    """A number of one to three digits from the source's side; those of one digit are never held out."""
    rng = source.rng
    while True:
        length = rng.choice((2, 3)) if source.held or rng.random() < 0.85 else 1
        text = str(rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length))
        if length == 1 or held_out("number in a picture", text) == source.held:
            return text


def word(source: Source) -> str:
    """A word of three or four capital letters from the source's side; half are made up, half are of the list."""
    rng = source.rng
    while True:
        text = source.made_up() if rng.random() < 0.5 else rng.choice(WORDS)
        if 3 <= len(text) <= MAX_CHARACTERS and held_out("word", text) == source.held:
            return text.upper()
