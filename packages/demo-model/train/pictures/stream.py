"""An endless, seeded stream of drawn pictures with their questions, made in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from corpus.words import Source

from pictures.drawing import draw, pixels
from pictures.labels import labels
from pictures.questions import Viewing, viewing

WEIGHTS = {"naming": 5, "counting": 6, "digits": 2, "words": 4, "comparing": 8}
"""How often each task is chosen."""


@dataclass(slots=True, kw_only=True)
class Drawn:
    """A viewing with its pictures."""

    viewing: Viewing
    pixels: np.ndarray
    """float32 [B, 3, SIDE, SIDE]"""
    labels: np.ndarray
    """int64 [B, P, len(LABEL_SIZES)]"""


def drawn(viewing: Viewing) -> Drawn:
    """The pictures of a viewing, and what their patches show."""
    images = np.stack([pixels(draw(scene)) for scene in viewing.scenes])
    return Drawn(viewing=viewing, pixels=images, labels=np.stack([labels(scene) for scene in viewing.scenes]))


def _produce(queue: multiprocessing.Queue[list[Drawn]], seed: int, num_pictures: int) -> None:
    rng = Random(seed)
    source = Source(rng)
    while True:
        step: list[Drawn] = []
        count = 0
        while count < num_pictures:
            task = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            step.append(drawn(viewing(source, task, rng.choices((1, 2, 3), (20, 30, 50))[0])))
            count += len(step[-1].pixels)
        queue.put(step)


def stream(seed: int, num_pictures: int) -> Iterator[list[Drawn]]:
    """Steps of `num_pictures` pictures or one more, from a process that works ahead and ends with this one."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[Drawn]] = context.Queue(maxsize=16)
    context.Process(target=_produce, args=(queue, seed, num_pictures), daemon=True).start()
    while True:
        yield queue.get(timeout=600)
