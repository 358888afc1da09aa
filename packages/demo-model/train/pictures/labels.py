"""What each patch of a picture shows, for training the tower before there are answers to learn from.

A patch that shows nothing has label 0 everywhere.
"""

from __future__ import annotations

import numpy as np

from pictures.drawing import SIDE
from pictures.scenes import CHARACTERS, COLORS, MAX_CHARACTERS, MAX_SHAPES, SHAPES, Scene

PATCH = 12
"""Pixels of a patch, in both directions."""
GRID = SIDE // PATCH
"""Patches in a line of a picture."""
_COUNT = MAX_SHAPES + 1
LABEL_SIZES = (1 + len(SHAPES) + len(CHARACTERS), 1 + len(COLORS), _COUNT, _COUNT, _COUNT, _COUNT, 1 + MAX_CHARACTERS)
"""Number of classes of each label: what it is, its colour; how many shapes there are, how many of this shape, of this
colour, of both; which character of the line it is."""


def labels(scene: Scene) -> np.ndarray:
    """int64 [GRID * GRID, len(LABEL_SIZES)], patches line by line."""
    result = np.zeros((GRID, GRID, len(LABEL_SIZES)), dtype=np.int64)
    nearest = np.full((GRID, GRID), np.inf)
    centers = (np.arange(GRID) + 0.5) / GRID

    def mark(x: float, y: float, width: float, height: float, values: tuple[int, ...]) -> None:
        distance = ((centers[None, :] - x) / width) ** 2 + ((centers[:, None] - y) / height) ** 2
        inside = distance < 1
        inside[min(GRID - 1, int(y * GRID)), min(GRID - 1, int(x * GRID))] = True
        inside &= distance < nearest
        nearest[inside] = distance[inside]
        result[inside] = values

    shapes = scene.shapes
    for each in shapes:
        same_shape = sum(other.shape == each.shape for other in shapes)
        same_color = sum(other.color == each.color for other in shapes)
        both = sum(other.shape == each.shape and other.color == each.color for other in shapes)
        what, color = 1 + SHAPES.index(each.shape), 1 + list(COLORS).index(each.color)
        extent = 0.8 * each.radius
        mark(each.x, each.y, extent, extent, (what, color, len(shapes), same_shape, same_color, both, 0))
    for index, character in enumerate(scene.characters, 1):
        what = 1 + len(SHAPES) + CHARACTERS.index(character.text)
        mark(character.x, character.y, 0.07, 0.1, (what, 0, 0, 0, 0, 0, index))
    return result.reshape(GRID * GRID, -1)
