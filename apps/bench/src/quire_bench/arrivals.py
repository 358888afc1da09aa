"""When requests arrive: gaps of a gamma distribution, whose burstiness 1 is a Poisson process; rates that grow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire_interfaces import ConfigError

__all__ = ["Arrivals", "RampUp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    """A rate that grows from the first request to the last.

    Raises:
        ConfigError: a value that cannot work.
    """

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if not 0 < self.start_rps <= self.end_rps:
            raise ConfigError(
                f"a ramp goes from --ramp-up-start-rps, above 0, up to --ramp-up-end-rps, got {self.start_rps:g} and "
                f"{self.end_rps:g}",
                field="ramp_up_start_rps",
            )

    def rate(self, progress: float) -> float:
        """Requests per second when this share of them was sent, 0 to 1."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive.

    Raises:
        ConfigError: a value that cannot work.
    """

    rate: float
    """Requests per second."""
    burstiness: float = 1.0
    """1 is a Poisson process; less comes in bursts, more is more even. The shape of a gamma distribution, whose mean
    stays 1 / rate."""
    ramp_up: RampUp | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)

    def gaps(self, count: int) -> Iterator[float]:
        """Seconds between an arrival and the next one."""
        chooser = random.Random(self.seed)
        for number in range(count):
            rate = self.rate if self.ramp_up is None else self.ramp_up.rate(number / max(1, count - 1))
            if self.burstiness == 1.0:
                yield chooser.expovariate(rate)
            else:
                yield chooser.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness))
