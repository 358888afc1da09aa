"""`quire bench peers`: every engine in every situation, in turn, several rounds; medians and ratios of neighbours.

In a round all engines are loaded, one after another, and stopped; then each situation goes through all of them, seconds
apart, so that a machine whose speed changes changes it for all. An engine that fails or is too slow leaves the round,
and the situation in which it did is not tried again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from quire_bench.embed_situations import EmbedSituation
from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.peer_process import PeerProcess
from quire_bench.peers import OURS, Engine
from quire_bench.situations import Situation
from quire_bench.speech_situations import SpeechSituation
from quire_bench.stream_situations import StreamSituation
from quire_bench.vision_situations import ImageSituation
from quire_interfaces import ConfigError, QuireError

__all__ = ["AnySituation", "Comparison", "Probe", "compare"]

AnySituation = Situation | ImageSituation | EmbedSituation | StreamSituation | SpeechSituation
OnProgress = Callable[[str], object]
"""Called with what is being measured now."""
OnRound = Callable[["Comparison"], object]
"""Called after each round with what is known by then."""
OnFigure = Callable[[AnySituation, str, float], object]
"""Called with a situation, an engine's name and its figure, when it is known."""


class Probe(Protocol):
    """The machine, as `quire_bench.limits.MachineProbe` measures it."""

    limits: MachineLimits

    def sample(self, rate: str) -> float:
        """The rate as it is now: "read" or "multiply"."""
        ...

    def __enter__(self) -> Probe: ...

    def __exit__(self, *exc: object) -> None: ...


@dataclass(slots=True)
class Comparison:
    """What was measured: tokens per second, seconds or bytes, a figure per round, None where there is none."""

    engines: list[str]
    situations: list[AnySituation]
    figures: dict[str, dict[str, list[float | None]]]
    """Situation -> engine -> figure of each round."""
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    """Engine -> situation, or "start" -> what went wrong."""
    versions: dict[str, str] = field(default_factory=dict)
    machine: list[MachineLimits] = field(default_factory=list)
    """As measured at the beginning of each round."""
    rates: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    """Situation -> engine -> samples of each round of the rate that bounds it, taken between slices of its run."""
    beside: dict[str, str] = field(default_factory=dict)
    """Peer -> the engine that it is compared with; ours where nothing is said."""

    def limits(self, situation: AnySituation, engine: str, work: ModelWork) -> list[float | None]:
        """Of each round: the figure that nothing could exceed at the rate that the machine had while this ran."""
        found = []
        for number, machine in enumerate(self.machine):
            rates = self.rates.get(situation.name, {}).get(engine, [])
            if number < len(rates) and rates[number]:
                name = {"read": "read_bytes_per_s", "multiply": "matmul_flop_per_s"}[situation.bound or ""]
                machine = replace(machine, **{name: median(rates[number])})
            found.append(situation.limit(machine, work))
        return found

    def of_limit(self, situation: AnySituation, engine: str, work: ModelWork) -> float | None:
        """The median of figure divided by limit of the same round."""
        pairs = zip(self.figures[situation.name][engine], self.limits(situation, engine, work), strict=False)
        shares = [figure / limit for figure, limit in pairs if figure is not None and limit]
        return median(shares) if shares else None

    def median(self, situation: str, engine: str) -> float | None:
        """Over the rounds that have a figure."""
        known = [figure for figure in self.figures[situation][engine] if figure is not None]
        return median(known) if known else None

    def ratio(self, situation: str, peer: str) -> float | None:
        """The median of ours divided by the peer's of the same round."""
        ours = self.figures[situation][self.beside.get(peer, OURS)]
        pairs = zip(ours, self.figures[situation][peer], strict=True)
        ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
        return median(ratios) if ratios else None


def compare(
    engines: Sequence[Engine],
    situations: Sequence[AnySituation],
    settings: dict[str, Any],
    *,
    repeats: int,
    timeout_s: float,
    open_probe: Callable[[], Probe],
    one_at_a_time: bool = False,
    on_progress: OnProgress = lambda what: None,
    on_figure: OnFigure = lambda situation, engine, figure: None,
    on_round: OnRound = lambda result: None,
) -> Comparison:
    """Measure.

    Args:
        engines: Ours, and its peers.
        situations: What to measure.
        settings: For the engines' programs.
        repeats: Rounds.
        timeout_s: Bound on each start and each run of an engine.
        open_probe: Called at the beginning of each round.
        one_at_a_time: Load an engine only when the one before it has gone, for machines whose memory does not hold all
            of them; neighbours are minutes apart then.
        on_progress: Told before each measurement.
        on_figure: Told after it.
        on_round: Told after each round, so that what was measured outlives a comparison that is ended early.

    Raises:
        ConfigError: repeats below 1.
        QuireError: the machine's limits cannot be measured.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}", field="repeats")
    names = [engine.name for engine in engines]
    figures: dict[str, dict[str, list[float | None]]] = {
        situation.name: {name: [None] * repeats for name in names} for situation in situations
    }
    result = Comparison(names, list(situations), figures, beside={each.name: each.beside for each in engines})
    for number in range(repeats):
        on_progress(f"round {number + 1}/{repeats}: limits of the machine")
        with open_probe() as probe:
            result.machine.append(probe.limits)
            # Everybody begins in turn: what comes first in a round has no advantage over the rounds.
            order = [*engines[number % len(engines) :], *engines[: number % len(engines)]]
            one_round = _Round(result, number, repeats, settings, timeout_s, probe, on_progress, on_figure)
            for group in [[engine] for engine in order] if one_at_a_time else [order]:
                one_round.measure(group)
        on_round(result)
    return result


class _Round:
    """Fills one round's places of a `Comparison`."""

    def __init__(
        self,
        result: Comparison,
        number: int,
        repeats: int,
        settings: dict[str, Any],
        timeout_s: float,
        probe: Probe,
        on_progress: OnProgress,
        on_figure: OnFigure,
    ) -> None:
        self._result = result
        self._number = number
        self._repeats = repeats
        self._settings = settings
        self._timeout_s = timeout_s
        self._probe = probe
        self._on_progress = on_progress
        self._on_figure = on_figure
        self._situations = {situation.name: situation for situation in result.situations}

    def measure(self, engines: Sequence[Engine]) -> None:
        """All situations on these engines, which are loaded together."""
        with contextlib.ExitStack() as stack:
            loaded: dict[str, PeerProcess] = {}
            for engine in engines:
                process = self._start(engine)
                if process is not None:
                    loaded[engine.name] = stack.enter_context(process)
            for situation in self._result.situations:
                if situation.sends_requests:
                    for name in list(loaded):
                        if not self._measure_one(situation, name, loaded[name]):
                            del loaded[name]
            for name, process in loaded.items():
                self._put("memory", name, process.peak_memory_bytes())

    def _start(self, engine: Engine) -> PeerProcess | None:
        if "start" in self._result.failures.get(engine.name, {}):
            return None
        with self._failing_as(engine.name, "start"):
            settings = self._settings
            if engine.quantization is not None:
                settings = {**settings, "quantization": engine.quantization}
            process = PeerProcess(engine, settings, timeout_s=self._timeout_s)
            self._result.versions[engine.name] = process.version
            self._put("first-token", engine.name, process.first_token_s)
            return process
        return None

    def _measure_one(self, situation: AnySituation, name: str, process: PeerProcess) -> bool:
        """Whether the engine is still there."""
        if situation.name in self._result.failures.get(name, {}):
            return True
        with self._failing_as(name, situation.name):
            if isinstance(situation, StreamSituation | SpeechSituation):
                for row, figure in situation.measure(process.serve, self._number).items():
                    self._put(row, name, figure)
                return True
            rates: list[float] = []
            bound = situation.bound

            def run(requests: Any) -> float:
                if bound is None:
                    return process.run(requests)
                return process.run(requests, lambda: rates.append(self._probe.sample(bound)))

            self._put(situation.name, name, situation.measure(run, self._number))
            rounds = self._result.rates.setdefault(situation.name, {}).setdefault(name, [])
            rounds += [[] for _ in range(self._number - len(rounds))]
            rounds.append(rates)
            return True
        return False

    @contextlib.contextmanager
    def _failing_as(self, engine: str, what: str) -> Iterator[None]:
        self._on_progress(f"round {self._number + 1}/{self._repeats}: {engine}, {what}")
        try:
            yield
        except QuireError as error:
            self._result.failures.setdefault(engine, {})[what] = str(error)

    def _put(self, situation: str, engine: str, figure: float | None) -> None:
        if situation in self._result.figures:
            self._result.figures[situation][engine][self._number] = figure
            if figure is not None:
                self._on_figure(self._situations[situation], engine, figure)
