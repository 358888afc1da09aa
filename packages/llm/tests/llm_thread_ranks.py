"""Ranks, stages and engines as threads of this process: what the engine starts as processes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire.assemble
import quire.async_llm
from quire import AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.assemble import build_parts, build_rank_worker
from quire.config import QuireConfig
from quire.outputs import to_request_output
from quire.parallel.rank_groups import RankGroups
from quire.parallel.tensor_parallel_ranks import OtherRanks, RankWorker, rank_payloads
from quire.plan import MemoryPlan
from quire.prompts import parse_prompt_async
from quire_distributed import Collectives, thread_group
from quire_engine import EnginePool, InprocClient, ProcessClient
from quire_interfaces import (
    KVTransferOutput,
    ModelRunnerOutput,
    OutputKind,
    RankDeadError,
    RequestOptions,
    SchedulerOutput,
    SchedulerStats,
)
from quire_models.config import ModelConfig


class ThreadRank:
    """A rank in a thread, as the executor sees it."""

    def __init__(self, group: Collectives, build: Callable[[], RankWorker]) -> None:
        self.rank = group.rank
        self._group = group
        self.on_failure: Callable[[RankDeadError, int | None], None] = lambda failure, step_id: None
        self.on_result: Callable[[ModelRunnerOutput], None] = lambda result: None
        self.num_steps = 0
        self._messages: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._errors: dict[int, str | None] = {}
        self._transfers: KVTransferOutput | None = None
        self._changed = threading.Condition()
        self._is_ready = False
        self._end: RankDeadError | None = None
        self._thread = threading.Thread(target=self._serve, args=(build,), name=f"rank-{self.rank}")
        self._thread.start()

    def send(self, message: tuple[Any, ...]) -> None:
        self._messages.put(message)

    def wait_until_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._end is not None)
        self.check()

    def check(self) -> None:
        if self._end is not None:
            raise self._end

    def tell_failure(self) -> None:
        pass

    def error_of(self, step_id: int) -> str | None:
        with self._changed:
            assert self._changed.wait_for(lambda: step_id in self._errors, 5.0)
            return self._errors[step_id]

    def transfers_of(self, output: SchedulerOutput) -> KVTransferOutput | None:
        with self._changed:
            if output.kv_transfer is not None and output.kv_transfer.waits:
                assert self._changed.wait_for(lambda: output.step_id in self._errors or self._end is not None, 60.0)
            return self._transfers

    def close(self) -> None:
        if not self._is_ready:  # it may wait for a rank that could not be built
            self._group.abort("another rank could not be built")
        self._messages.put(("close",))
        self._thread.join()

    def _note(self, end: RankDeadError | None = None, **errors: str | None) -> None:
        with self._changed:
            self._is_ready = True
            self._end = self._end or end
            self._errors |= {int(step.removeprefix("step")): error for step, error in errors.items()}
            self._changed.notify_all()

    def _serve(self, build: Callable[[], RankWorker]) -> None:
        try:
            worker = build()
            self._note()
            while (message := self._messages.get())[0] != "close":
                if message[0] == "call":
                    worker.call(message[1], *message[2])
                else:
                    self._step(worker, *message)
            worker.close()
        except Exception as error:
            self._note(RankDeadError(self.rank, str(error)))
            self.on_failure(RankDeadError(self.rank, str(error)), None)

    def _step(self, worker: RankWorker, kind: str, output: Any) -> None:
        self.num_steps += 1
        name = f"step{output.step_id}"
        try:
            result = worker.run(output)
        except RankDeadError:
            raise
        except Exception as error:
            self._note(**{name: f"{type(error).__name__}: {error}"})
            self.on_failure(RankDeadError(self.rank, str(error)), output.step_id)
            return
        if kind == "result":
            self.on_result(result)
        self._transfers = result.kv_transfer
        self._note(**{name: None})


@contextmanager
def ranks_in_threads() -> Iterator[list[ThreadRank]]:
    """Engines that are built meanwhile have their other ranks in threads, which are listed in what this gives."""
    ranks: list[ThreadRank] = []

    def start(config: QuireConfig, folder: Path, model: ModelConfig, plan: MemoryPlan) -> OtherRanks:
        mesh, kv_plans, payloads = rank_payloads(config, model, plan)
        group = thread_group(mesh.world_size)

        def make(rank: int, own: Collectives) -> ThreadRank:
            return ThreadRank(own, lambda: build_rank_worker(payloads[rank - 1], own))

        own: Any = [make(rank, group[rank]) for rank in range(1, mesh.world_size)]  # as the executor sees them
        ranks.extend(own)
        return OtherRanks(own, RankGroups.of(group[0], mesh), kv_plans[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quire.assemble, "start_other_ranks", start)
        yield ranks


class ThreadEngine(InprocClient):
    """An engine of a pool in a thread, in the place of a `ProcessClient`."""

    num_restarts = 0
    is_remote = False

    def __init__(self, factory: str, data: dict[str, Any], config: Any, listener: Any, *, owner: Any = None) -> None:
        super().__init__(build_parts(QuireConfig.from_dict(data)), config, listener)
        self._owner = owner

    def start(self) -> None:
        """Nothing: it starts with the event loop."""


def client_in_threads(config: QuireConfig) -> ProcessClient | EnginePool:
    """The client of the engines of a server, which are threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quire.async_llm, "ProcessClient", ThreadEngine)
        return quire.async_llm.make_client(config, lambda rank: None, None)


class PooledLLM:
    """Several engines in threads of this process, behind their pool, with the methods of `LLM` that tests call."""

    def __init__(self, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quire.async_llm, "ProcessClient", ThreadEngine)
            self._llm = AsyncLLM(QuireConfig.of(**settings))
        self._runner.run(self._llm.ready())

    @property
    def media(self) -> Any:
        return self._llm.media

    def generate(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], lora_request: Sequence[str | None], **more: Any
    ) -> list[RequestOutput]:
        async def one(prompt: Any, params: SamplingParams, adapter: str | None) -> RequestOutput:
            options = RequestOptions(output_kind=OutputKind.FINAL_ONLY, adapter=adapter)
            outputs = [output async for output in self._llm.generate(prompt, params, options)]
            return to_request_output(outputs[-1])

        async def everything() -> list[RequestOutput]:
            return await asyncio.gather(*map(one, prompts, params, lora_request))

        return self._runner.run(everything())

    def beam_search(
        self, prompts: Sequence[Any], params: BeamSearchParams, lora_request: Sequence[str | None]
    ) -> list[RequestOutput]:
        async def one(prompt: Any, adapter: str | None) -> RequestOutput:
            parsed = await parse_prompt_async(prompt, self._llm.renderer, self._llm.media)
            try:
                options = RequestOptions(adapter=adapter)
                return to_request_output(
                    await self._llm.engine.beam_search(parsed.rendered, params, options, max_logprobs=20)
                )
            finally:
                if parsed.media is not None:
                    parsed.media.release()

        async def everything() -> list[RequestOutput]:
            return await asyncio.gather(*map(one, prompts, lora_request))

        return self._runner.run(everything())

    def stats(self) -> SchedulerStats:
        return self._runner.run(self._llm.client.stats())

    def check_integrity(self) -> None:
        assert self._runner.run(self._llm.client.check_integrity()) is None

    def __enter__(self) -> PooledLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._llm.shutdown())
        self._runner.close()
