"""Draws scenes with Pillow, with its own font. Knows nothing about questions."""

from __future__ import annotations

import functools
import math
from random import Random

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from pictures.scenes import COLORS, Scene, Shape

SIDE = 96
"""Pixels that the tower sees, in both directions."""
DRAWN = 192
"""Pixels of a drawing."""


def draw(scene: Scene, side: int = DRAWN) -> PIL.Image.Image:
    """The picture, `side` pixels wide and high, RGB."""
    rng = Random(scene.seed)
    image = PIL.Image.new("RGB", (side, side), scene.background)
    canvas = PIL.ImageDraw.Draw(image)
    for shape in scene.shapes:
        color = tuple(min(255, max(0, part + rng.randint(-14, 14))) for part in COLORS[shape.color])
        _draw_shape(canvas, shape, color, side)
    font = _font(round(scene.font_size * side)) if scene.characters else None
    for character in scene.characters:
        place = (character.x * side, character.y * side)
        canvas.text(place, character.text, fill=scene.ink, font=font, anchor="mm")
    return image


def pixels(image: PIL.Image.Image) -> np.ndarray:
    """What the image processor makes of a picture: float32 [3, SIDE, SIDE], from -1 to 1."""
    small = image.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
    return np.asarray(small, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


@functools.cache
def _font(size: int) -> PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont:
    return PIL.ImageFont.load_default(size)


def _draw_shape(canvas: PIL.ImageDraw.ImageDraw, shape: Shape, color: tuple[int, ...], side: int) -> None:
    x, y, r = shape.x * side, shape.y * side, shape.radius * side
    if shape.shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=color)
        return
    turn = math.radians(shape.angle)
    cos, sin = math.cos(turn), math.sin(turn)
    points = [(x + r * (u * cos - v * sin), y + r * (u * sin + v * cos)) for u, v in _OUTLINES[shape.shape]]
    canvas.polygon(points, fill=color)


def _heart() -> list[tuple[float, float]]:
    angles = [2 * math.pi * i / 40 for i in range(40)]
    curve = [
        (16 * math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)))
        for a in angles
    ]
    return [(u / 17, v / 17) for u, v in curve]


def _star() -> list[tuple[float, float]]:
    radii = [1.0, 0.42] * 5
    return [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in enumerate(radii)]


_A, _B = 0.95, 0.32
_OUTLINES = {
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0.0, -0.95), (0.92, 0.7), (-0.92, 0.7)],
    "star": _star(),
    "cross": [
        (-_B, -_A), (_B, -_A), (_B, -_B), (_A, -_B), (_A, _B), (_B, _B), (_B, _A), (-_B, _A), (-_B, _B), (-_A, _B),
        (-_A, -_B), (-_B, -_B),
    ],
    "heart": _heart(),
}  # fmt: skip
"""Corners of the shapes of radius 1 around the origin."""
