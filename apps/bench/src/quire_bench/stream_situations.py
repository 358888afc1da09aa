"""What a comparison of servers measures: clients that stream at the same time, each of which asks again at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.report import percentiles
from quire_bench.situations import WARM_UP_LEN, Lengths, Situation
from quire_bench.workload import ClientRequests
from quire_interfaces import ConfigError

__all__ = ["StreamSituation", "parse_stream_situations"]

REQUESTS_PER_CLIENT = 2
"""The second prompts arrive while others stream."""
ROWS = {
    "": "output tokens/s",
    "ttft-p50": "time to the first token, median, s (less is better)",
    "ttft-p99": "time to the first token, 99th percentile, s (less is better)",
    "itl-p50": "time between tokens, median, s (less is better)",
    "itl-p99": "time between tokens, 99th percentile, s (less is better)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSituation:
    """One row of the comparison; those of one number of clients come from one run."""

    name: str
    num_clients: int
    lengths: Lengths
    figure: str = ""
    """A key of `ROWS`."""
    kind: ClassVar[str] = "clients"
    bound: ClassVar[None] = None
    """No rate of the machine."""

    @property
    def title(self) -> str:
        """What the figures are."""
        sizes = f"{self.lengths.input_len} in, {self.lengths.output_len} out"
        return f"{self.num_clients} streaming clients ({sizes}): {ROWS[self.figure]}"

    @property
    def sends_requests(self) -> bool:
        return not self.figure

    @property
    def num_requests(self) -> int:
        return self.num_clients

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.lengths.input_len + self.lengths.output_len + 1

    def measure(self, serve: Callable[[Sequence[ClientRequests]], dict[str, Any]], seed: int) -> dict[str, float]:
        """Row -> figure, from a run of a server; a short one of as many clients comes first and does not count.

        Args:
            serve: Answers all clients, and says "seconds", "ttft_s" of each request and "itl_s" of all gaps.
            seed: Of the prompts.
        """
        sizes = self.lengths
        serve(self._clients(min(WARM_UP_LEN, sizes.input_len), min(2, sizes.output_len), seed + 500))
        reply = serve(self._clients(sizes.input_len, sizes.output_len, seed))
        num_tokens = self.num_clients * REQUESTS_PER_CLIENT * sizes.output_len
        figures = {self.name: num_tokens / float(reply["seconds"])}
        for of in ("ttft", "itl"):
            points = percentiles(reply[f"{of}_s"])
            figures |= {f"{self.name}-{of}-{point}": points[point] for point in ("p50", "p99") if point in points}
        return figures

    def limit(self, machine: MachineLimits, work: ModelWork) -> float | None:
        """None: what a server adds has no bound that is known."""
        return None

    def _clients(self, input_len: int, output_len: int, seed: int) -> list[ClientRequests]:
        count = self.num_clients * REQUESTS_PER_CLIENT
        prompts = [each.prompt_token_ids for each in self.lengths.requests(count, input_len, output_len, seed)]
        clients = (prompts[first :: self.num_clients] for first in range(self.num_clients))
        return [ClientRequests(prompt=list(each), output_len=output_len) for each in clients]


def parse_stream_situations(text: str, lengths: Lengths) -> list[Situation | StreamSituation]:
    """Situations by name, comma-separated; "clients-N" is several rows.

    Raises:
        ConfigError: an unknown name.
    """
    situations: list[Situation | StreamSituation] = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name in ("first-token", "memory"):
            situations.append(Situation(name=name, kind=name, lengths=lengths))
        elif match := re.fullmatch(r"clients-([1-9]\d{0,3})", name):
            situations += [
                StreamSituation(
                    name=f"{name}-{figure}" if figure else name,
                    num_clients=int(match[1]),
                    lengths=lengths,
                    figure=figure,
                )
                for figure in ROWS
            ]
        else:
            raise ConfigError(
                f"situations of task serve must be among first-token, clients-N, memory, got {name!r}",
                field="situations",
            )
    return situations
