"""What a comparison of engines that embed measures: texts per second, and the time of one text alone."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.situations import Lengths, Situation
from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError

__all__ = ["EmbedSituation", "mixed_lengths", "parse_embed_situations"]

TOKENS_AT_ONCE = 8192
"""Tokens of all texts of a run, about."""
NUM_MIXED = 96
MIXED_MEDIAN, MIXED_SIGMA = 100, 0.8
"""Median of the log-normal lengths of "embed-mixed", and deviation of their logarithms."""
NUM_LATENCIES = 15
"""Texts that are sent one after another, of whose times the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedSituation:
    """One row of the comparison: texts per second of texts that an engine gets all at once, or seconds of one text."""

    name: str
    kind: str
    """"embed", or "latency" for texts one after another."""
    lens: tuple[int, ...]
    """Tokens of each text."""
    lengths: Lengths = field(default_factory=Lengths)
    """Whose token range is drawn from."""
    sends_requests: ClassVar[bool] = True
    bound: ClassVar[None] = None
    """No rate of the machine."""

    @property
    def title(self) -> str:
        """What the figures are."""
        if self.kind == "latency":
            return f"one text of {self.lens[0]} tokens, s (less is better)"
        alike = len(set(self.lens)) == 1
        sizes = f"{self.lens[0]}" if alike else f"{min(self.lens)} to {max(self.lens)}"
        return f"{len(self.lens)} texts of {sizes} tokens at once, texts/s"

    @property
    def num_requests(self) -> int:
        return len(self.lens)

    @property
    def max_model_len(self) -> int:
        """Tokens of its longest text."""
        return max(self.lens)

    def measure(self, run: Callable[[Sequence[BenchRequest]], float], seed: int) -> float | None:
        """The figure, from runs of an engine; the same texts in other words come first and do not count."""
        if self.kind == "latency":
            (length,) = self.lens
            times = [run(self._texts([length], seed * 1000 + i)) for i in range(NUM_LATENCIES + 2)]
            return median(times[2:])
        run(self._texts(self.lens, seed + 500))
        return len(self.lens) / run(self._texts(self.lens, seed))

    def limit(self, machine: MachineLimits, work: ModelWork) -> float | None:
        """None: engines may multiply in other ways than what is measured of the machine."""
        return None

    def _texts(self, lens: Sequence[int], seed: int) -> list[BenchRequest]:
        chooser, ids = random.Random(seed), range(*self.lengths.token_range)
        return [BenchRequest(chooser.choices(ids, k=length), 1) for length in lens]


def mixed_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Lengths of texts, log-normal around `MIXED_MEDIAN`, from 4 to `longest`; always the same."""
    chooser = random.Random(0)
    drawn = (round(math.exp(chooser.gauss(math.log(MIXED_MEDIAN), MIXED_SIGMA))) for _ in range(count))
    return tuple(min(max(length, 4), longest) for length in drawn)


def parse_embed_situations(text: str, lengths: Lengths, max_model_len: int) -> list[Situation | EmbedSituation]:
    """Situations by name, comma-separated.

    Args:
        text: The names.
        lengths: For the range of token ids.
        max_model_len: Tokens of the model's context.

    Raises:
        ConfigError: an unknown name.
    """
    situations: list[Situation | EmbedSituation] = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name in ("first-token", "memory"):
            situations.append(Situation(name=name, kind=name, lengths=lengths))
        elif name == "embed-mixed":
            lens = mixed_lengths(NUM_MIXED, min(max_model_len, 512))
            situations.append(EmbedSituation(name=name, kind="embed", lens=lens, lengths=lengths))
        elif match := re.fullmatch(r"(embed|latency)-([1-9]\d{0,4})", name):
            kind, length = match[1], int(match[2])
            count = max(TOKENS_AT_ONCE // length, 1) if kind == "embed" else 1
            situations.append(EmbedSituation(name=name, kind=kind, lens=(length,) * count, lengths=lengths))
        else:
            raise ConfigError(
                f"situations of task embed must be among first-token, embed-N, embed-mixed, latency-N, memory, "
                f"got {name!r}",
                field="situations",
            )
    return situations
