"""What the benchmarks ask: random prompts of exact lengths, the same for the same seed. No tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from quire_interfaces import ConfigError

__all__ = [
    "BenchRequest",
    "ClientRequests",
    "ImageRequest",
    "RecordingRequest",
    "Workload",
    "parse_token_range",
    "random_requests",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many requests of which lengths.

    Raises:
        ConfigError: a value that cannot work.
    """

    num_requests: int = 32
    input_len: int = 128
    """Prompt tokens."""
    output_len: int = 128
    """Generated tokens; end-of-sequence tokens do not cut it short."""
    length_spread: float = 0.0
    """0 gives every request exactly these lengths; 0.5 draws each length from 50 % to 150 % of them."""
    prefix_len: int = 0
    """Tokens at the head of every prompt that all requests share, part of input_len."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        if not 0 <= self.length_spread < 1:
            raise ConfigError(f"length_spread must be in [0, 1), got {self.length_spread}", field="length_spread")
        shortest, _ = length_bounds(self.input_len, self.length_spread)
        if not 0 <= self.prefix_len <= shortest:
            raise ConfigError(
                f"prefix_len must be from 0 to the shortest prompt ({shortest}), got {self.prefix_len}",
                field="prefix_len",
            )


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt_token_ids: list[int]
    output_len: int
    """Tokens to generate, exactly."""

    @property
    def prompt(self) -> list[int]:
        """As an engine's program is told."""
        return self.prompt_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRequest:
    """A recording to transcribe."""

    path: Path
    """A WAV file of 16 kHz, one channel and 16 bits."""
    output_len: int
    """Most tokens of each window."""

    @property
    def prompt(self) -> str:
        """As an engine's program is told."""
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequests:
    """What one client asks, one after another."""

    prompt: list[list[int]]
    """Token ids of each prompt."""
    output_len: int
    """Tokens of each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One request of a benchmark: a message with a random image and a question."""

    size: tuple[int, int]
    """Width and height, pixels."""
    seed: int
    """The same for the same image."""
    output_len: int
    """Tokens to generate, exactly."""

    @property
    def prompt(self) -> dict[str, int]:
        """As an engine's program is told."""
        return {"width": self.size[0], "height": self.size[1], "seed": self.seed}


def length_bounds(length: int, spread: float) -> tuple[int, int]:
    """Shortest and longest of the lengths drawn around `length`."""
    return max(1, round(length * (1 - spread))), round(length * (1 + spread))


def parse_token_range(text: str) -> tuple[int, int]:
    """(LOW, HIGH) of "LOW:HIGH".

    Raises:
        ConfigError: it is something else.
    """
    try:
        low, high = (int(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(
            f"token_range must be LOW:HIGH, for example 10:250, got {text!r}", field="token_range"
        ) from None
    return low, high


def random_requests(workload: Workload, *, low: int, high: int) -> list[BenchRequest]:
    """Requests with token ids drawn from [low, high); the same for the same workload and range.

    Raises:
        ConfigError: the range is empty.
    """
    if not 0 <= low < high:
        raise ConfigError(
            f"the token range {low}:{high} is empty; give LOW:HIGH with 0 <= LOW < HIGH", field="token_range"
        )
    chooser, ids = random.Random(workload.seed), range(low, high)
    prefix = chooser.choices(ids, k=workload.prefix_len)
    requests = []
    for _ in range(workload.num_requests):
        input_len = chooser.randint(*length_bounds(workload.input_len, workload.length_spread))
        output_len = chooser.randint(*length_bounds(workload.output_len, workload.length_spread))
        requests.append(BenchRequest(prefix + chooser.choices(ids, k=input_len - len(prefix)), output_len))
    return requests
