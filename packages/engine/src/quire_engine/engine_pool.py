"""`EnginePool`: several engines behind one `EngineClient`; data parallel serving.

Each request goes to the engine that will have the fewest tokens to compute before its first one. An engine that dies
is started again by its own client; its requests go on at once in the others, in their preempted form: the prompt as it
was, the tokens so far behind it, the seed as before. Knows neither processes nor transport.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from quire_engine.client import PauseMode
from quire_engine.compiled_grammars import CompiledGrammars
from quire_engine.config import EngineConfig
from quire_engine.messages import AddRequest, EngineInfo
from quire_engine.prefix_router import PrefixRouter
from quire_engine.process_client import ProcessClient
from quire_engine.streaming_client import EngineOwner, StreamingClient
from quire_engine.streams import OutputStream
from quire_interfaces import (
    AdapterInfo,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    RequestError,
    SchedulerStats,
    sum_stats,
)
from quire_interfaces.engine_watch import RequestRecord, WatchCursor, WatchReport

__all__ = ["EnginePool", "MakeEngine"]

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MakeEngine = Callable[[int, EngineOwner], ProcessClient]
"""Makes the client, not started, of the engine of a rank."""

REQUEST_TOKENS = 16
"""What a request in flight counts when an engine is chosen, in prompt tokens: it takes a token of each step."""
DRAIN_POLL_S = 0.05
"""How often a drain looks whether the engine's requests have ended."""


class EnginePool:
    """Engines of consecutive ranks as one `EngineClient`. All calls from one event loop.

    Args:
        make_engine: Makes the client of the engine of a rank.
        size: Number of engines.
        config: The engines' settings; `max_requests_in_flight` bounds all of them together.
        first_rank: Rank of the first engine.
    """

    def __init__(
        self, make_engine: MakeEngine, size: int, config: EngineConfig | None = None, *, first_rank: int = 0
    ) -> None:
        self.config = config or EngineConfig()
        self.compiled_grammars = CompiledGrammars()
        self._make_engine = make_engine
        self.engines: dict[int, ProcessClient] = {
            rank: make_engine(rank, self) for rank in range(first_rank, first_rank + size)
        }
        """Rank -> engine; those that were scaled away are not among them."""
        self._draining: set[int] = set()
        """Ranks of engines that get no requests."""
        self._router = PrefixRouter(1, 1)
        self._turns = itertools.count()
        self._last_turns: dict[int, int] = {}
        self._is_started = False
        self._is_stopping = False
        self._live_values: dict[str, Any] = {}
        """Settings that were changed since the start."""
        self._max_requests = self.config.max_requests_in_flight
        self._resize_lock = asyncio.Lock()
        self.on_progress: Callable[[str, float], None] | None = None
        """Called with (stage, fraction) while the engines start."""

    # The engines.

    def start(self) -> None:
        """Start all processes; does not wait for them. Raises as `ProcessClient.start`."""
        for rank, engine in self.engines.items():
            engine.on_progress = lambda stage, fraction, rank=rank: self._tell_progress(rank, stage, fraction)
            engine.start()
        self._is_started = True

    def _tell_progress(self, rank: int, stage: str, fraction: float) -> None:
        if self.on_progress is not None:
            self.on_progress(f"engine {rank}: {stage}", fraction)

    async def ready(self) -> EngineInfo:
        self.check_health()
        if not self._is_started:
            self.start()
        infos = await asyncio.gather(*(engine.ready() for engine in self.engines.values()), return_exceptions=True)
        errors = [each for each in infos if isinstance(each, BaseException)]
        if errors:
            await self.shutdown(0.0)
            raise errors[0]
        info = self.info
        assert info is not None
        self._router = PrefixRouter(info.block_size or 16, info.num_blocks)
        return info

    @property
    def info(self) -> EngineInfo | None:
        """Facts that hold for every engine; `max_num_seqs` is that of all together."""
        infos = [engine.info for engine in self.engines.values()]
        if not infos or not all(infos):
            return None
        known = [info for info in infos if info is not None]
        ranks = list(self.engines)
        size = len(ranks)
        text = f"{size} engine{'s' if size > 1 else ''} of rank{'s' if size > 1 else ''} {', '.join(map(str, ranks))}"
        return dataclasses.replace(
            known[0],
            max_model_len=min(info.max_model_len for info in known),
            num_blocks=min(info.num_blocks for info in known),
            max_num_seqs=sum(info.max_num_seqs for info in known),
            choices={**known[0].choices, "data parallel": f"{text}; what is said of memory is said of each"},
        )

    @property
    def num_restarts(self) -> int:
        """How often engine processes were started again."""
        return sum(engine.num_restarts for engine in self.engines.values())

    def _living(self) -> list[ProcessClient]:
        return [engine for engine in self.engines.values() if not engine.is_dead]

    def _takers(self, others_than: StreamingClient | None = None) -> list[int]:
        """Ranks of engines that requests may go to: those that run, else those that start, else those that drain."""
        living = {
            rank: engine for rank, engine in self.engines.items() if not engine.is_dead and engine is not others_than
        }
        staying = [rank for rank in living if rank not in self._draining]
        running = [rank for rank in staying if not living[rank].is_loading]
        return running or staying or list(living)

    # Requests.

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        self.check_health()
        bound = self._max_requests
        if self.num_requests() + len(requests) > bound:
            raise OverloadedError(
                f"{self.num_requests()} requests are in flight and max_requests_in_flight is {bound}: "
                "try again later, or raise the bound",
                retry_after_s=min(engine.retry_after_s() for engine in self.engines.values()),
            )
        for request in requests:
            if self._engine_of(request.request_id) is not None:
                raise RequestError(
                    f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
                )
        rank = self._choose(requests[0], self._takers())
        return self.engines[rank].open(requests, n=n)

    def _choose(self, request: AddRequest, ranks: list[int]) -> int:
        """The rank that the request asks for, or the one with the fewest tokens to compute before its first one; of
        equals, the one chosen longest ago."""
        asked = request.options.data_parallel_rank
        if asked is not None and asked not in self.engines:
            raise RequestError(
                f"data_parallel_rank must be one of {', '.join(map(str, self.engines))}, got {asked}",
                param="data_parallel_rank",
            )
        if request.media is not None:  # prepared media lie in this host's memory
            ranks = [rank for rank in ranks if not self.engines[rank].is_remote] or ranks
        hashes = self._router.block_hashes(request)

        def cost(rank: int) -> tuple[int, int]:
            engine = self.engines[rank]
            num_waiting = engine.num_waiting_tokens + REQUEST_TOKENS * engine.num_requests()
            return num_waiting - self._router.num_cached_tokens(rank, hashes), self._last_turns.get(rank, -1)

        rank = asked if asked is not None and asked in ranks else min(ranks, key=cost)
        self._last_turns[rank] = next(self._turns)
        self._router.record(rank, hashes)
        return rank

    def _engine_of(self, request_id: str) -> ProcessClient | None:
        return next((engine for engine in self.engines.values() if engine.has_request(request_id)), None)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        request_ids = list(request_ids)
        for engine in self.engines.values():
            engine.abort(request_ids, reason)

    def abort_all(self) -> None:
        for engine in self.engines.values():
            engine.abort_all()

    def num_requests(self) -> int:
        return sum(engine.num_requests() for engine in self.engines.values())

    # Faults.

    def on_engine_failed(self, client: StreamingClient) -> None:
        """Move its requests to the engines that run, if there are any."""
        for rank, engine in self.engines.items():
            if engine is client:
                self._router.forget(rank)
        if not self._is_stopping:
            self._move_requests(client)

    def on_engine_ready(self, client: StreamingClient) -> None:
        """Give it the requests of engines that are still starting."""
        if self._is_stopping or client not in self.engines.values():
            return
        for engine in self._living():
            if engine is not client and engine.is_loading and engine.num_requests():
                self._move_requests(engine)

    def _move_requests(self, client: StreamingClient) -> None:
        """Requests go on elsewhere: together where they are completions of one prompt."""
        ranks = self._takers(others_than=client)
        if not client.is_dead:  # it returns: better there than in another one that starts, too
            ranks = [rank for rank in ranks if not self.engines[rank].is_loading]
        if not ranks:
            return
        entries = client.take_requests()
        if entries:
            _logger.warning("%d requests in flight go on in another engine", len(entries))
        groups: dict[str, int] = {}
        for entry in entries:
            request = entry.request
            group = request.prompt_group or request.request_id
            if group not in groups:
                groups[group] = self._choose(request, ranks)
            self.engines[groups[group]].adopt_requests([entry])

    # Size, and restarts in turn.

    async def restart(self, drain_s: float) -> None:
        """Start every engine anew, one after the other, while the others serve.

        Args:
            drain_s: Seconds that the requests of an engine get to finish there; then they go on in others.

        Raises:
            RequestError: there is one engine only, or engines are being added, taken away or restarted.
            EngineDeadError: a new process could not start; the engines after it are as they were.
        """
        self._refuse_while_resizing()
        if len(self._living()) < 2:
            raise RequestError("with one engine, nothing would serve meanwhile: add another one first", code="busy")
        async with self._resize_lock:
            for rank, former in list(self.engines.items()):
                await self._drain(rank, drain_s)
                self._move_all(former)
                await former.shutdown(0.0)
                engine = self._make_engine(rank, self)
                engine.follow(former)
                self._router.forget(rank)
                await engine.ready()
                self.engines[rank] = engine
                self._draining.discard(rank)
                self.on_engine_ready(engine)

    def _refuse_while_resizing(self) -> None:
        if self._resize_lock.locked():
            raise RequestError("engines are being added, taken away or restarted: try again later", code="busy")

    async def resize(self, size: int, drain_s: float) -> None:
        """Add engines of the next ranks, or take away those of the highest ranks.

        Args:
            size: Number of engines from now on.
            drain_s: Seconds that the requests of an engine that goes get to finish there; then they go on in others.

        Raises:
            RequestError: there would be none left, or another change of the size is under way.
            EngineDeadError: a new engine could not start; those that were there serve on.
        """
        if size < 1:
            raise RequestError(f"there must be at least 1 engine, got {size}", param="new_data_parallel_size")
        self._refuse_while_resizing()
        async with self._resize_lock:
            ranks = list(self.engines)
            new_ranks = range(ranks[-1] + 1, ranks[0] + size)
            await self._add_engines(new_ranks)
            await asyncio.gather(*(self._drain(rank, drain_s) for rank in ranks[size:]))
            gone = [self.engines.pop(rank) for rank in ranks[size:]]
            for engine in gone:
                self._move_all(engine)
                await engine.shutdown(0.0)
            for rank in ranks[size:]:
                self._draining.discard(rank)
                self._router.forget(rank)

    async def _add_engines(self, ranks: Iterable[int]) -> None:
        former = next(iter(self.engines.values()))
        engines = {rank: self._make_engine(rank, self) for rank in ranks}
        try:
            for engine in engines.values():
                engine.follow(former)
            await asyncio.gather(*(engine.ready() for engine in engines.values()))
        except BaseException:
            for engine in engines.values():
                await engine.shutdown(0.0)
            raise
        self.engines.update(engines)

    @property
    def is_resizing(self) -> bool:
        """Whether engines are being added, taken away or restarted."""
        return self._resize_lock.locked()

    async def _drain(self, rank: int, drain_s: float) -> None:
        """Give an engine no more requests, and wait until it has none, or the time is over."""
        self._draining.add(rank)
        deadline = asyncio.get_running_loop().time() + drain_s
        while self.engines[rank].num_requests() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    def _move_all(self, client: ProcessClient) -> None:
        """Move the requests of an engine that goes."""
        self._move_requests(client)
        if client.num_requests():  # all others start: they wait there
            ranks = self._takers(others_than=client)
            for entry in client.take_requests():
                self.engines[self._choose(entry.request, ranks)].adopt_requests([entry])

    # Control calls, to all engines.

    async def _each(self, call: Callable[[ProcessClient], Awaitable[Result]]) -> list[Result]:
        """The results of all engines that are not gone for good; what one raises, when all have answered."""
        self.check_health()
        engines = self._living()
        asked = await asyncio.gather(*(self._ask(engine, call) for engine in engines), return_exceptions=True)
        results = []
        for engine, result in zip(engines, asked, strict=True):
            if not isinstance(result, BaseException):
                results.append(result)
            elif not engine.is_dead:
                raise result
        self.check_health()
        return results

    @staticmethod
    async def _ask(engine: ProcessClient, call: Callable[[ProcessClient], Awaitable[Result]]) -> Result:
        """An engine's answer; one that dies before it has answered is asked again when it is there again."""
        try:
            return await call(engine)
        except EngineDeadError:
            if engine.is_dead or not engine.is_loading:
                raise
            return await call(engine)

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        await self._each(lambda engine: engine.pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def is_paused(self) -> bool:
        return all(await self._each(lambda engine: engine.is_paused()))

    async def sleep(self, level: int = 1) -> int:
        return sum(await self._each(lambda engine: engine.sleep(level)))

    async def wake_up(self, tags: Sequence[str] = ()) -> int | None:
        return (await self._each(lambda engine: engine.wake_up(tags)))[0]

    async def sleep_level(self) -> int | None:
        return (await self._each(lambda engine: engine.sleep_level()))[0]

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        for rank in self.engines:
            self._router.forget(rank)
        return all(await self._each(lambda engine: engine.reset_prefix_cache(preempt_running=preempt_running)))

    async def reset_encoder_cache(self) -> bool:
        return all(await self._each(lambda engine: engine.reset_encoder_cache()))

    @property
    def adapters(self) -> Mapping[str, str]:
        living = self._living()
        return living[0].adapters if living else {}

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """In all engines, or, if one of them cannot, in none."""
        former = self.adapters.get(name)
        try:
            return (await self._each(lambda engine: engine.load_adapter(name, path, replace=replace)))[0]
        except BaseException:
            for engine in self._living():
                if former is None and name in engine.adapters:
                    await engine.unload_adapter(name)
            raise

    async def unload_adapter(self, name: str) -> None:
        await self._each(lambda engine: engine.unload_adapter(name))

    async def stats(self) -> SchedulerStats:
        return sum_stats(await self._each(lambda engine: engine.stats()))

    async def ping(self) -> float:
        return max(await self._each(lambda engine: engine.ping()))

    async def check_integrity(self) -> str | None:
        return next((each for each in await self._each(lambda engine: engine.check_integrity()) if each), None)

    async def engine_ranks(self) -> list[int]:
        return list(self.engines)

    async def watch(self, rank: int, watcher: str, cursor: WatchCursor) -> WatchReport:
        if rank not in self.engines:
            raise RequestError(f"there is no engine of rank {rank}: {', '.join(map(str, self.engines))}", param="rank")
        return await self.engines[rank].watch(rank, watcher, cursor)

    async def leave_watch(self, watcher: str) -> None:
        await self._each(lambda engine: engine.leave_watch(watcher))

    async def collective_rpc(
        self, method: str, arguments: Sequence[Any] = (), named: Mapping[str, Any] = {}
    ) -> list[list[Any]]:
        answers = await self._each(lambda engine: engine.collective_rpc(method, arguments, named))
        return [ranks for engines in answers for ranks in engines]

    async def reconfigure(self, values: Mapping[str, Any]) -> None:
        former = self._live_values
        try:
            await self._each(lambda engine: engine.reconfigure(values))
        except BaseException:
            await self._each(lambda engine: engine.reconfigure(former))
            raise
        self._live_values = dict(values)
        self._max_requests = values.get("max_requests_in_flight", self.config.max_requests_in_flight)

    async def explain_request(self, request_id: str) -> RequestRecord | None:
        engine = self._engine_of(request_id)
        return None if engine is None else await engine.explain_request(request_id)

    # Health: the pool serves as long as one engine does.

    def check_health(self) -> None:
        if not self._living():
            next(iter(self.engines.values())).check_health()

    @property
    def is_dead(self) -> bool:
        """Whether all engines are gone for good."""
        return not self._living()

    @property
    def is_loading(self) -> bool:
        living = self._living()
        return bool(living) and all(engine.is_loading for engine in living)

    @property
    def is_resting(self) -> bool:
        living = self._living()
        return bool(living) and all(engine.is_resting for engine in living)

    @property
    def is_stalled(self) -> bool:
        return any(engine.is_stalled for engine in self._living())

    @property
    def stalled_s(self) -> float:
        return max((engine.stalled_s for engine in self._living()), default=0.0)

    # The end.

    def kill(self) -> None:
        """End all processes now; for an end of this process that waits for nothing."""
        for engine in self.engines.values():
            engine.kill()

    async def shutdown(self, drain_s: float | None = None) -> None:
        self._is_stopping = True
        await asyncio.gather(*(engine.shutdown(drain_s) for engine in self.engines.values()))
