"""What a comparison measures: each situation makes its requests, turns seconds into a figure, and knows its limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.workload import BenchRequest, Workload, random_requests
from quire_interfaces import ConfigError

__all__ = ["Lengths", "Situation", "parse_situations"]

WARM_UP_LEN = 16

RunRequests = Callable[[Sequence[BenchRequest]], float]
"""Seconds that an engine takes for requests that it gets all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the requests.

    Raises:
        ConfigError: a length below 1.
    """

    input_len: int = 128
    output_len: int = 128
    prefill_len: int = 2048
    token_range: tuple[int, int] = (10, 250)

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "prefill_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)

    def requests(self, count: int, input_len: int, output_len: int, seed: int) -> list[BenchRequest]:
        """Random prompts of exactly these lengths."""
        low, high = self.token_range
        workload = Workload(num_requests=count, input_len=input_len, output_len=output_len, seed=seed)
        return random_requests(workload, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One row of the comparison.

    `kind` is "first-token" or "memory", which no requests are sent for, "prefill", "decode" or "concurrent".
    """

    name: str
    kind: str
    lengths: Lengths
    num_requests: int = 1

    @property
    def title(self) -> str:
        sizes = self.lengths
        return {
            "first-token": "from the start of the process to its first token, s (less is better)",
            "memory": "peak resident memory, GB (less is better)",
            "prefill": f"prefill of {sizes.prefill_len} tokens, prompt tokens/s",
            "decode": f"decode of one request ({sizes.input_len} in, {sizes.output_len} out), tokens/s after the first",
            "concurrent": f"{self.num_requests} requests at once ({sizes.input_len} in, {sizes.output_len} out each), "
            "output tokens/s",
        }[self.kind]

    @property
    def sends_requests(self) -> bool:
        return self.kind not in ("first-token", "memory")

    @property
    def bound(self) -> str | None:
        """The rate that `limit` follows from most: "read", "multiply", or None where there is no limit."""
        return {"prefill": "multiply", "decode": "read", "concurrent": "read"}.get(self.kind)

    @property
    def max_model_len(self) -> int:
        """Longest sequence of its requests."""
        sizes = self.lengths
        return sizes.prefill_len + 1 if self.kind == "prefill" else sizes.input_len + sizes.output_len + 1

    def measure(self, run: RunRequests, seed: int) -> float | None:
        """The figure, from runs of an engine; a short one of the same shape comes first and does not count. None when
        the tokens took too little time to be told from noise."""
        sizes = self.lengths
        run(sizes.requests(self.num_requests, min(WARM_UP_LEN, sizes.input_len), min(2, sizes.output_len), seed))
        if self.kind == "prefill":
            return sizes.prefill_len / run(sizes.requests(1, sizes.prefill_len, 1, seed))
        if self.kind == "concurrent":
            requests = sizes.requests(self.num_requests, sizes.input_len, sizes.output_len, seed)
            return self.num_requests * sizes.output_len / run(requests)
        # The prompt's own time is taken out by a run that ends with the first token.
        prompt_s = run(sizes.requests(1, sizes.input_len, 1, seed))
        whole_s = run(sizes.requests(1, sizes.input_len, 1 + sizes.output_len, seed))
        return sizes.output_len / (whole_s - prompt_s) if whole_s > prompt_s else None

    def limit(self, machine: MachineLimits, work: ModelWork) -> float | None:
        """The figure that nothing can exceed; None where there is no such bound."""
        sizes = self.lengths
        if self.kind == "prefill":
            return sizes.prefill_len / work.prefill_s(machine, 1, sizes.prefill_len)
        context_len = sizes.input_len + sizes.output_len / 2
        if self.kind == "decode":
            return 1 / work.step_s(machine, 1, context_len)
        if self.kind == "concurrent":
            seconds = work.prefill_s(machine, self.num_requests, sizes.input_len)
            seconds += (sizes.output_len - 1) * work.step_s(machine, self.num_requests, context_len)
            return self.num_requests * sizes.output_len / seconds
        return None


def parse_situations(text: str, lengths: Lengths) -> list[Situation]:
    """Situations by name, comma-separated.

    Raises:
        ConfigError: an unknown name.
    """
    situations = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        found = re.fullmatch(r"concurrent-([1-9]\d{0,3})", name)
        if found:
            situations.append(Situation(name=name, kind="concurrent", lengths=lengths, num_requests=int(found[1])))
        elif name in ("first-token", "memory", "prefill", "decode"):
            situations.append(Situation(name=name, kind=name, lengths=lengths))
        else:
            raise ConfigError(
                f"situations must be among first-token, decode, concurrent-N, prefill, memory, got {name!r}",
                field="situations",
            )
    return situations
