"""Several engines behind one client: where requests go, and what becomes of them when engines die, leave or come."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire_engine import AddRequest, EngineConfig, EnginePool, OutputStream, ProcessClient, pack_token_ids, process
from quire_engine.prefix_router import PrefixRouter
from quire_interfaces import (
    EngineCoreOutput,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    RequestError,
    RequestOptions,
    SamplingParams,
    StructuredOutputsParams,
)
from quire_testkit.conformance.engine_client import collect, make_message
from quire_testkit.fake_engine import FACTORY
from quire_testkit.fake_runner import expected_output


def make_pool(size: int, engine: dict[str, Any] | None = None, first_rank: int = 0, **settings: Any) -> EnginePool:
    config = EngineConfig(forward_output=False, **settings)

    def make_engine(rank: int, owner: Any) -> ProcessClient:
        return ProcessClient(FACTORY, engine or {}, config, owner=owner)

    return EnginePool(make_engine, size, config, first_rank=first_rank)


@asynccontextmanager
async def running(size: int, engine: dict[str, Any] | None = None, **arguments: Any) -> AsyncIterator[EnginePool]:
    pool = make_pool(size, engine, **arguments)
    await pool.ready()
    try:
        yield pool
    finally:
        await pool.shutdown(0.0)


def message(request_id: str, prompt: list[int], max_tokens: int = 2, **options: Any) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt=pack_token_ids(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        options=RequestOptions(**options),
    )


def rank_of(pool: EnginePool, request_id: str) -> int:
    (rank,) = [rank for rank, engine in pool.engines.items() if engine.has_request(request_id)]
    return rank


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def kill(engine: ProcessClient) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


async def last_output(stream: OutputStream) -> EngineCoreOutput:
    return [output async for output in stream][-1]


async def first_token(stream: OutputStream) -> list[int]:
    return (await anext(aiter(stream))).new_token_ids


def test_the_table_of_prefixes_knows_blocks_salts_and_adapters() -> None:
    router = PrefixRouter(block_size=4, num_blocks=100)
    tokens = list(range(10))
    hashes = router.block_hashes(message("a", tokens))
    assert len(hashes) == 2
    router.record(0, hashes)
    assert router.num_cached_tokens(0, hashes) == 8
    assert router.num_cached_tokens(1, hashes) == 0
    longer = router.block_hashes(message("b", [*tokens[:8], 77, 78, 79, 80]))
    assert router.num_cached_tokens(0, longer) == 8
    for options in ({"cache_salt": "x"}, {"adapter": "y"}):
        assert router.num_cached_tokens(0, router.block_hashes(message("c", tokens, **options))) == 0
    other = AddRequest(
        request_id="d",
        prompt=pack_token_ids(tokens),
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=1,
        cache_extra_keys=((5, 6, "an image"),),
    )
    assert router.num_cached_tokens(0, router.block_hashes(other)) == 4, "the image stands in the second block"
    router.forget(0)
    assert router.num_cached_tokens(0, hashes) == 0


def test_the_table_of_prefixes_is_bounded_and_forgets_ends_of_prefixes_first() -> None:
    router = PrefixRouter(block_size=1, num_blocks=4)
    old = router.block_hashes(message("old", [1, 2, 3]))
    new = router.block_hashes(message("new", [7, 8]))
    router.record(0, old)
    router.record(0, new)
    assert router.num_cached_tokens(0, old) == 2
    assert router.num_cached_tokens(0, new) == 2


async def test_conversations_stay_where_their_prefix_is_and_others_spread() -> None:
    async with running(2, {"step_time_s": 0.001}) as pool:
        starts = [[100 * i + k for k in range(64)] for i in range(4)]
        homes = []
        for i, prompt in enumerate(starts):
            stream = pool.open([message(f"start{i}", prompt)])
            homes.append(rank_of(pool, f"start{i}"))
            await collect(stream)
        assert sorted(homes) == [0, 0, 1, 1]
        for turn in range(3):
            for i, prompt in enumerate(starts):
                stream = pool.open([message(f"turn{turn}-{i}", prompt + [5] * 16 * turn)])
                assert rank_of(pool, f"turn{turn}-{i}") == homes[i]
                cached = [output.num_cached_tokens async for output in stream]
                assert max(cached) >= 48


async def test_an_overloaded_engine_gives_its_conversations_away() -> None:
    async with running(2, {"step_time_s": 0.02}) as pool:
        prompt = list(range(64))
        await collect(pool.open([message("start", prompt)]))
        home = next(iter(pool._last_turns))
        for i in range(8):
            pool.open([message(f"busy{i}", [900 + i] * 3, 500, data_parallel_rank=home)])
        pool.open([message("next", prompt, 100)])
        assert rank_of(pool, "next") != home


async def test_requests_may_choose_their_engine() -> None:
    async with running(2, first_rank=2) as pool:
        for rank in (3, 3, 3, 2):
            name = f"r{rank}-{pool.num_requests()}"
            pool.open([message(name, [1], 500, data_parallel_rank=rank)])
            assert rank_of(pool, name) == rank
        with pytest.raises(RequestError, match="data_parallel_rank must be one of 2, 3, got 0"):
            pool.open([message("nowhere", [1], data_parallel_rank=0)])
        assert pool.info is not None
        assert "2 engines of ranks 2, 3" in pool.info.choices["data parallel"]


async def test_an_engine_alone_has_one_rank() -> None:
    client = ProcessClient(FACTORY, {}, EngineConfig(forward_output=False))
    await client.ready()
    await collect(client.open([message("mine", [1], data_parallel_rank=0)]))
    with pytest.raises(RequestError, match="one engine only"):
        client.open([message("other", [1], data_parallel_rank=1)])
    await client.shutdown(0.0)


async def test_requests_of_a_dead_engine_go_on_in_the_others_which_gets_its_place_back() -> None:
    async with running(2, {"step_time_s": 0.003}, max_restarts=2) as pool:
        streams = [pool.open([make_message(f"r{i}", [i, i], 300, seed=i)]) for i in range(12)]
        several = pool.open([make_message(f"n{i}", [7], 200, seed=90 + i) for i in range(3)], n=3)
        tasks = [asyncio.create_task(collect(stream)) for stream in (*streams, several)]
        await until(lambda: all(engine.last_stats.num_running for engine in pool.engines.values()))
        victim = pool.engines[0]
        moved = [name for name in map("r{}".format, range(12)) if victim.has_request(name)]
        assert moved
        kill(victim)
        await until(lambda: victim.num_restarts == 1)
        assert victim.num_requests() == 0
        assert all(pool.engines[1].has_request(name) for name in moved)
        assert not pool.is_loading
        pool.check_health()
        for i, task in enumerate(tasks[:12]):
            assert await task == {f"r{i}": (expected_output([i, i], 300, request_seed=i), FinishReason.LENGTH)}
        assert await tasks[12] == {
            f"n{i}": (expected_output([7], 200, request_seed=90 + i), FinishReason.LENGTH) for i in range(3)
        }
        await until(lambda: not victim.is_loading)
        again = pool.open([message("again", [1], 2, data_parallel_rank=0)])
        assert rank_of(pool, "again") == 0
        await collect(again)
        assert await pool.check_integrity() is None


async def test_an_engine_that_is_gone_for_good_leaves_the_others_serving() -> None:
    async with running(2, {"step_time_s": 0.003}, max_restarts=0) as pool:
        streams = [pool.open([make_message(f"r{i}", [i], 200, seed=i)]) for i in range(6)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.gather(*(first_token(pool.open([message(f"p{i}", [3])])) for i in range(2)))
        kill(pool.engines[1])
        await until(lambda: pool.engines[1].is_dead)
        for i, task in enumerate(tasks):
            assert (await task)[f"r{i}"] == (expected_output([i], 200, request_seed=i), FinishReason.LENGTH)
        pool.check_health()
        assert (await pool.stats()).num_running == 0
        last = pool.open([make_message("last", [1], 900)])
        kill(pool.engines[0])
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(last)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            pool.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            pool.open([make_message("late", [1], 2)])


async def test_all_engines_at_once_are_started_again_and_their_requests_go_on() -> None:
    async with running(2, {"step_time_s": 0.003}, max_restarts=3) as pool:
        streams = [pool.open([make_message(f"r{i}", [i], 200, seed=i)]) for i in range(8)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await until(lambda: all(engine.last_stats.num_running for engine in pool.engines.values()))
        for engine in pool.engines.values():
            kill(engine)
        await until(lambda: pool.num_restarts == 2)
        for i, task in enumerate(tasks):
            assert (await task)[f"r{i}"] == (expected_output([i], 200, request_seed=i), FinishReason.LENGTH)


async def test_a_request_that_kills_every_engine_is_given_up_and_the_others_are_saved() -> None:
    async with running(2, {"step_time_s": 0.003}, max_restarts=3) as pool:
        fine = [asyncio.create_task(collect(pool.open([make_message(f"r{i}", [i], 600, seed=i)]))) for i in range(4)]
        await until(lambda: all(engine.last_stats.num_generation_tokens_total for engine in pool.engines.values()))
        assert (await collect(pool.open([make_message("exit", [4], 9)])))["exit"][1] == FinishReason.ERROR
        assert pool.num_restarts == 3
        for i, task in enumerate(fine):
            assert (await task)[f"r{i}"] == (expected_output([i], 600, request_seed=i), FinishReason.LENGTH)


async def test_a_request_that_saw_several_deaths_goes_on_as_long_as_it_may() -> None:
    """Who is killed by somebody else each time it has no token yet is tried apart in the end; a process that is killed
    before shows that it is not the cause."""
    async with running(1, {"step_time_s": 0.5}, max_restarts=20) as pool:
        engine = pool.engines[0]
        stream = pool.open([message("a", [1], 3)])
        for num_deaths in range(10):
            await until(lambda: not engine.is_loading)
            await asyncio.sleep(0.1)
            kill(engine)
            await until(lambda num_deaths=num_deaths: engine.num_restarts > num_deaths)
        async with asyncio.timeout(60):
            assert (await collect(stream))["a"][1] == FinishReason.LENGTH


@pytest.mark.parametrize(("memory_ran_out", "num_deaths"), [(True, 5), (False, 9)])
async def test_a_request_with_which_every_process_is_killed_is_given_up(
    memory_ran_out: bool, num_deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later where nothing was killed for want of memory: then somebody else did it."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr(process, "VMSTAT", vmstat)
    async with running(1, {"step_time_s": 30.0}, max_restarts=20) as pool:
        engine = pool.engines[0]
        task = asyncio.create_task(last_output(pool.open([message("a", [1], 3)])))
        while not task.done():
            await until(lambda: not engine.is_loading)
            await until(lambda: task.done() or (bool(engine.num_requests()) and not engine._suspects))
            if not task.done():
                await asyncio.sleep(0.05)
                if memory_ran_out:
                    vmstat.write_text(f"oom_kill {10 + engine.num_restarts}\n")
                kill(engine)
                await until(lambda: engine.is_loading or task.done())
        output = await task
        assert output.finish_reason == FinishReason.ERROR
        assert output.failure is not None
        assert output.failure.signal == "SIGKILL"
        assert engine.num_restarts == num_deaths


async def test_a_pause_reaches_an_engine_that_dies_before_it_has_answered() -> None:
    async with running(2, max_restarts=1) as pool:
        kill(pool.engines[0])
        await pool.pause()
        assert pool.num_restarts == 1
        assert [await engine.is_paused() for engine in pool.engines.values()] == [True, True]
        await pool.resume()
        kill(pool.engines[0])
        await pool.pause()
        assert pool.engines[0].is_dead
        assert await pool.is_paused(), "of those that are left"


async def test_a_restart_in_turn_loses_nothing_and_keeps_the_pause() -> None:
    async with running(2, {"step_time_s": 0.003}) as pool:
        pids = [engine.pid for engine in pool.engines.values()]
        tasks = [asyncio.create_task(collect(pool.open([make_message(f"r{i}", [i], 500, seed=i)]))) for i in range(6)]
        restart = asyncio.create_task(pool.restart(drain_s=0.1))
        await until(lambda: pool.is_resizing)
        with pytest.raises(RequestError, match="try again later"):
            await pool.restart(0.0)
        with pytest.raises(RequestError, match="try again later"):
            await pool.resize(3, 0.0)
        late = asyncio.create_task(collect(pool.open([make_message("late", [9], 50, seed=9)])))
        await restart
        assert not set(pids) & {engine.pid for engine in pool.engines.values()}
        for i, task in enumerate(tasks):
            assert (await task)[f"r{i}"] == (expected_output([i], 500, request_seed=i), FinishReason.LENGTH)
        assert (await late)["late"][0] == expected_output([9], 50, request_seed=9)
        await pool.pause()
        await pool.restart(0.0)
        assert await pool.is_paused()
        await pool.resume()
        assert (await collect(pool.open([message("after", [1])])))["after"][1] == FinishReason.LENGTH


async def test_engines_come_and_go_under_load() -> None:
    async with running(1, {"step_time_s": 0.003}) as pool:
        with pytest.raises(RequestError, match="with one engine"):
            await pool.restart(0.0)
        with pytest.raises(RequestError, match="at least 1 engine"):
            await pool.resize(0, 0.0)
        await pool.resize(2, 0.0)
        assert list(pool.engines) == [0, 1]
        tasks = [asyncio.create_task(collect(pool.open([make_message(f"r{i}", [i], 300, seed=i)]))) for i in range(6)]
        await until(lambda: pool.engines[1].num_requests() == 3)
        gone = pool.engines[1]
        await pool.resize(1, drain_s=0.05)
        assert list(pool.engines) == [0]
        assert gone.is_dead
        for i, task in enumerate(tasks):
            assert (await task)[f"r{i}"] == (expected_output([i], 300, request_seed=i), FinishReason.LENGTH)


async def test_a_drain_waits_for_requests() -> None:
    async with running(2, {"step_time_s": 0.002}) as pool:
        stream = pool.open([message("last", [1], 100, data_parallel_rank=1)])
        task = asyncio.create_task(collect(stream))
        engine = pool.engines[1]
        await pool.resize(1, drain_s=60.0)
        assert (await task)["last"][1] == FinishReason.LENGTH
        assert stream.metrics[0].num_preemptions == 0, "it has not moved"
        assert engine.is_dead


async def test_a_start_that_fails_ends_all_and_says_why() -> None:
    pool = make_pool(2, {"fault": "the moon"})
    with pytest.raises(EngineDeadError, match="asked to fail: the moon"):
        await pool.ready()
    assert pool.is_dead


def test_engines_hear_which_constraints_were_compiled_before() -> None:
    async def run() -> None:
        async with running(2) as pool:
            sent: list[tuple[str, bool]] = []

            def record(engine: Any) -> None:
                send = engine._send

                def recorded(each: Any) -> None:
                    if isinstance(each, AddRequest):
                        sent.append((each.request_id, each.grammar_was_compiled))
                    send(each)

                engine._send = recorded

            for engine in pool.engines.values():
                record(engine)

            async def ask(name: str, regex: str | None, rank: int) -> None:
                constraint = None if regex is None else StructuredOutputsParams(regex=regex)
                params = SamplingParams(max_tokens=2, structured_outputs=constraint)
                request = AddRequest(
                    request_id=name, prompt=pack_token_ids([5]), sampling_params=params, seed=0, max_tokens=2,
                    options=RequestOptions(data_parallel_rank=rank),
                )  # fmt: skip
                await collect(pool.open([request]))

            await ask("first", "a+", 0)
            await ask("other", "b+", 0)
            await ask("again", "a+", 1)
            await ask("plain", None, 1)
            killed = pool.engines[0].pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            await until(lambda: pool.num_restarts == 1 and not pool.engines[0].is_loading)
            await ask("restarted", "b+", 0)
            assert dict(sent) == {"first": False, "other": False, "again": True, "plain": False, "restarted": True}

    asyncio.run(run())


async def test_settings_change_in_all_engines_or_in_none() -> None:
    config = EngineConfig(forward_output=False)

    def make_engine(rank: int, owner: Any) -> ProcessClient:
        return ProcessClient(FACTORY, {"max_num_seqs": 4 - 2 * rank, "step_time_s": 0.005}, config, owner=owner)

    pool = EnginePool(make_engine, 2, config)
    await pool.ready()
    try:
        await pool.reconfigure({"max_num_seqs": 2, "max_requests_in_flight": 3})
        with pytest.raises(RequestError, match="max_num_seqs must be at most 2"):  # of the second engine
            await pool.reconfigure({"max_num_seqs": 3, "max_requests_in_flight": 100})
        with pytest.raises(OverloadedError, match="max_requests_in_flight is 3"):
            pool.open([message(f"x{number}", [1, 2]) for number in range(4)])
        streams = [pool.open([message(f"r{n}", [1, 2, 3], 40, data_parallel_rank=0)]) for n in range(3)]
        await until(lambda: pool.engines[0].last_stats.num_running > 0)
        most = 0
        while pool.num_requests():
            most = max(most, (await pool.engines[0].stats()).num_running)
        assert most == 2
        for stream in streams:
            ((tokens, reason),) = (await collect(stream)).values()
            assert (len(tokens), reason) == (40, FinishReason.LENGTH)
    finally:
        await pool.shutdown(0.0)
