"""What the benchmarks ask: random prompts of exact lengths, the same for the same seed. No tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire_interfaces import ConfigError

__all__ = ["BenchRequest", "Workload", "random_requests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many requests of which lengths."""

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
        if not 0 <= self.prefix_len <= self.input_len * (1 - self.length_spread):
            raise ConfigError(
                f"prefix_len must be from 0 to the shortest prompt "
                f"({int(self.input_len * (1 - self.length_spread))}), got {self.prefix_len}",
                field="prefix_len",
            )


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    output_len: int


def random_requests(workload: Workload, *, low: int, high: int) -> list[BenchRequest]:
    """Requests with token ids drawn from [low, high).

    Raises:
        ConfigError: the range is empty.
    """
    if not 0 <= low < high:
        raise ConfigError(
            f"the token range {low}:{high} is empty; give LOW:HIGH with 0 <= LOW < HIGH", field="token_range"
        )
    chooser = random.Random(workload.seed)
    prefix = [chooser.randrange(low, high) for _ in range(workload.prefix_len)]
    requests = []
    for _ in range(workload.num_requests):
        input_len = _spread(chooser, workload.input_len, workload.length_spread)
        output_len = _spread(chooser, workload.output_len, workload.length_spread)
        rest = [chooser.randrange(low, high) for _ in range(input_len - len(prefix))]
        requests.append(BenchRequest(prefix + rest, output_len))
    return requests


def _spread(chooser: random.Random, length: int, spread: float) -> int:
    if spread == 0:
        return length
    return max(1, chooser.randint(round(length * (1 - spread)), round(length * (1 + spread))))
