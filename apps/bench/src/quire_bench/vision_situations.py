"""What a comparison of engines that see measures: the time to a token behind an image and a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.situations import Lengths, Situation
from quire_bench.workload import ImageRequest
from quire_interfaces import ConfigError

__all__ = ["ImageSituation", "parse_image_size", "parse_vision_situations"]

MAX_MODEL_LEN = 4096
WARM_UP_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSituation:
    """One row of the comparison: seconds from a message with an image to a token of the answer. The image is prepared
    and encoded in that time; no two runs have the same one."""

    name: str
    size: tuple[int, int]
    """Width and height, pixels."""
    output_len: int = 1
    """The token that ends the time."""
    max_model_len: int = MAX_MODEL_LEN
    """Tokens of a prompt with an image, and of what follows."""
    kind: ClassVar[str] = "image"
    num_requests: ClassVar[int] = 1
    sends_requests: ClassVar[bool] = True
    bound: ClassVar[None] = None
    """No rate of the machine."""

    @property
    def title(self) -> str:
        """What the figures are."""
        token = "first token" if self.output_len == 1 else f"token {self.output_len}"
        return f"an image of {self.size[0]} x {self.size[1]} and a question, to the {token}, s (less is better)"

    def measure(self, run: Callable[[Sequence[ImageRequest]], float], seed: int) -> float | None:
        """Seconds of the second of two runs of an engine, with other images."""
        run([ImageRequest(size=self.size, seed=WARM_UP_SEED + seed, output_len=self.output_len)])
        return run([ImageRequest(size=self.size, seed=seed, output_len=self.output_len)])

    def limit(self, machine: MachineLimits, work: ModelWork) -> float | None:
        """None: a model's work does not count its towers."""
        return None


def parse_image_size(text: str) -> tuple[int, int]:
    """(width, height) of "WIDTHxHEIGHT".

    Raises:
        ConfigError: it is something else.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ConfigError(f"image_size must be WIDTHxHEIGHT in pixels, got {text!r}", field="image_size")
    return int(match[1]), int(match[2])


def parse_vision_situations(text: str, size: tuple[int, int], max_model_len: int) -> list[Situation | ImageSituation]:
    """Situations by name, comma-separated.

    Args:
        size: Width and height of images, pixels.
        max_model_len: Tokens of the model's context.

    Raises:
        ConfigError: an unknown name.
    """
    situations: list[Situation | ImageSituation] = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name in ("first-token", "memory"):
            situations.append(Situation(name=name, kind=name, lengths=Lengths()))
        elif match := re.fullmatch(r"image(?:-([1-9]\d{0,3}))?", name):
            context, output_len = min(MAX_MODEL_LEN, max_model_len), int(match[1] or 1)
            situations.append(ImageSituation(name=name, size=size, output_len=output_len, max_model_len=context))
        else:
            raise ConfigError(
                f"situations of task vision must be among first-token, image, image-N, memory, got {name!r}",
                field="situations",
            )
    return situations
