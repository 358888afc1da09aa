"""What every `EngineClient` must do, as tests to inherit.

    class TestMyClient(EngineClientSuite):
        def make_client(self, engine, settings): return MyClient(...)

The client is served by a fake engine, so all outputs are known beforehand. The suite sees a client only through the
Protocol.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire_engine import AddRequest, EngineClient, EngineConfig, OutputStream, pack_token_ids
from quire_interfaces import (
    EngineDeadError,
    FinishReason,
    OverloadedError,
    RequestError,
    RequestFailure,
    SamplingParams,
    TokenLogprobs,
)
from quire_testkit.fake_engine import FakeEngineConfig
from quire_testkit.fake_runner import expected_output

__all__ = ["EngineClientSuite", "collect", "make_message"]

DEADLINE_S = 20.0


def make_message(
    request_id: str, prompt: list[int], max_tokens: int = 8, *, seed: int = 0, **params: Any
) -> AddRequest:
    """A request as the client sends it."""
    return AddRequest(
        request_id=request_id,
        prompt=pack_token_ids(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        seed=seed,
        max_tokens=max_tokens,
        arrival_time_s=time.monotonic(),
    )


async def collect(stream: OutputStream) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Request id -> (all tokens, how it ended)."""
    result: dict[str, tuple[list[int], FinishReason | None]] = {}
    async with asyncio.timeout(DEADLINE_S):
        async for output in stream:
            tokens, _ = result.get(output.request_id, ([], None))
            result[output.request_id] = (tokens + output.new_token_ids, output.finish_reason)
    return result


class EngineClientSuite:
    """Inherit, and give `make_client`."""

    num_engines = 1
    """Number of engines of these sizes that the client has."""

    def make_client(self, engine: FakeEngineConfig, config: EngineConfig) -> EngineClient:
        """A client, not started, of an engine of these sizes."""
        raise NotImplementedError("give make_client")

    @asynccontextmanager
    async def running(self, engine: FakeEngineConfig | None = None, **settings: Any) -> AsyncIterator[EngineClient]:
        client = self.make_client(engine or FakeEngineConfig(), EngineConfig(**settings))
        await client.ready()
        try:
            yield client
        finally:
            await client.shutdown(0.0)

    async def wait_until_empty(self, client: EngineClient) -> None:
        """Wait until the engine holds no request; then nothing may be left over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                stats = await client.stats()
                if stats.num_running == 0 and stats.num_waiting == 0 and stats.kv_cache_usage == 0.0:
                    break
                await asyncio.sleep(0.01)
        assert await client.check_integrity() is None

    @pytest.mark.parametrize("async_scheduling", [False, True])
    async def test_outputs_are_those_of_requests_run_alone(self, async_scheduling: bool) -> None:
        rng = random.Random(1)
        prompts = [[rng.randrange(1000) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
        async with self.running(async_scheduling=async_scheduling) as client:
            streams = [
                client.open([make_message(f"r{i}", prompt, 1 + i % 13, seed=i)]) for i, prompt in enumerate(prompts)
            ]
            results = await asyncio.gather(*map(collect, streams))
            for i, prompt in enumerate(prompts):
                expected = expected_output(prompt, 1 + i % 13, request_seed=i)
                assert results[i] == {f"r{i}": (expected, FinishReason.LENGTH)}
            await self.wait_until_empty(client)

    async def test_one_stream_for_several_requests(self) -> None:
        async with self.running() as client:
            stream = client.open([make_message(f"r{i}", [7, 8], 5 + i, seed=i) for i in range(6)], n=6)
            result = await collect(stream)
            assert result == {
                f"r{i}": (expected_output([7, 8], 5 + i, request_seed=i), FinishReason.LENGTH) for i in range(6)
            }

    @pytest.mark.parametrize("stream_interval", [1, 3, 100])
    async def test_stream_interval_changes_no_token(self, stream_interval: int) -> None:
        async with self.running(stream_interval=stream_interval) as client:
            stream = client.open([make_message("r", [1, 2, 3], 20)])
            pieces = [output.new_token_ids async for output in stream]
            assert [token for piece in pieces for token in piece] == expected_output([1, 2, 3], 20, request_seed=0)
            # A reader that falls behind gets larger pieces, never smaller ones.
            assert all(len(piece) >= stream_interval for piece in pieces[1:-1])

    async def test_a_slow_reader_loses_nothing(self) -> None:
        async with self.running() as client:
            stream = client.open([make_message("slow", [5], 300, logprobs=1)])
            tokens: list[int] = []
            logprobs: list[TokenLogprobs] = []
            num_pieces = 0
            async with asyncio.timeout(DEADLINE_S):
                async for output in stream:
                    tokens += output.new_token_ids
                    logprobs += output.logprobs or []
                    num_pieces += 1
                    await asyncio.sleep(0.05)
            assert tokens == expected_output([5], 300, request_seed=0)
            assert [each.token_ids[0] for each in logprobs] == tokens
            assert num_pieces < 100

    async def test_abort_ends_the_stream_and_frees_everything(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.002)) as client:
            stream = client.open([make_message("gone", [1], 900)])
            other = client.open([make_message("stays", [1], 30)])
            async for _ in stream:
                break
            client.abort(["gone", "unknown"])
            result = await collect(stream)
            assert result["gone"][1] == FinishReason.ABORT
            assert (await collect(other))["stays"][0] == expected_output([1], 30, request_seed=0)
            await self.wait_until_empty(client)
            assert (await client.stats()).num_generation_tokens_total < 500

    async def test_leaving_early_aborts(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.002)) as client:
            stream = client.open([make_message(f"r{i}", [i], 900) for i in range(3)], n=3)
            async for _ in stream:
                break
            stream.close()
            stream.close()
            await self.wait_until_empty(client)

    async def test_readers_that_leave_at_random_times_leave_nothing_behind(self) -> None:
        rng = random.Random(3)
        engine = FakeEngineConfig(num_blocks=60, block_size=4, max_num_seqs=16, max_num_batched_tokens=32)

        async def reader(i: int) -> None:
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 40))]
            num_wanted = rng.randrange(0, 30)
            stream = client.open([make_message(f"r{i}", prompt, 60, seed=i)])
            tokens: list[int] = []
            try:
                if num_wanted:
                    async for output in stream:
                        tokens += output.new_token_ids
                        if len(tokens) >= num_wanted:
                            break
            finally:
                stream.close()
            assert tokens == expected_output(prompt, 60, request_seed=i)[: len(tokens)]

        async with self.running(engine) as client, asyncio.timeout(60):
            for start in range(0, 200, 50):
                await asyncio.gather(*(reader(i) for i in range(start, start + 50)))
            await self.wait_until_empty(client)

    async def test_a_refused_request_is_its_own_error(self) -> None:
        async with self.running() as client:
            too_long = client.open([make_message("long", [1] * 2000, 1)])
            with pytest.raises(RequestError, match="2000"):
                await collect(too_long)
            fine = await collect(client.open([make_message("fine", [1], 3)]))
            assert fine["fine"][1] == FinishReason.LENGTH

    async def test_ids_in_use_are_refused(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.002)) as client:
            stream = client.open([make_message("twice", [1], 500)])
            with pytest.raises(RequestError, match="twice"):
                client.open([make_message("twice", [1], 5)])
            stream.close()

    async def test_overload_by_the_client_and_by_the_scheduler(self) -> None:
        engine = FakeEngineConfig(max_num_seqs=1, max_queued_requests=2, step_time_s=0.005)
        size = self.num_engines
        async with self.running(engine, max_requests_in_flight=8 * size) as client:
            running = [client.open([make_message(f"first{i}", [1], 500)]) for i in range(size)]
            for stream in running:
                async for _ in stream:
                    break
            streams = [client.open([make_message(f"r{i}", [1], 2)]) for i in range(7 * size)]
            with pytest.raises(OverloadedError, match="max_requests_in_flight") as caught:
                client.open([make_message("one too many", [1], 2)])
            assert caught.value.retry_after_s > 0
            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
            async with asyncio.timeout(DEADLINE_S):
                while sum(task.done() for task in tasks) < 5 * size:
                    await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    with pytest.raises(OverloadedError, match="max_queued_requests"):
                        await task
            queued = [task for task in tasks if not task.done()]
            assert len(queued) == 2 * size
            for stream in running:
                stream.close()
            for task in queued:
                assert [reason for _, reason in (await task).values()] == [FinishReason.LENGTH]
            await self.wait_until_empty(client)

    async def test_a_request_that_fails_alone(self) -> None:
        async with self.running() as client:
            streams = [client.open([make_message(f"r{i}", [i], 20, seed=i)]) for i in range(5)]
            stream = client.open([make_message("fail", [1], 20)])
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == FinishReason.ERROR
            assert outputs[-1].failure == RequestFailure("asked to fail")
            for i, result in enumerate(await asyncio.gather(*map(collect, streams))):
                assert result[f"r{i}"][0] == expected_output([i], 20, request_seed=i)
            await self.wait_until_empty(client)

    @pytest.mark.parametrize("async_scheduling", [False, True])
    async def test_a_request_that_breaks_the_step_is_found(self, async_scheduling: bool) -> None:
        async with self.running(async_scheduling=async_scheduling) as client:
            ids = [f"r{i}" for i in range(20)]
            ids[7] = "raise7"
            ids[8] = "raise8"
            streams = [client.open([make_message(name, [i, 5], 25, seed=i)]) for i, name in enumerate(ids)]
            results = await asyncio.gather(*map(collect, streams))
            for i, name in enumerate(ids):
                if name.startswith("raise"):
                    assert results[i][name] == ([], FinishReason.ERROR)
                else:
                    expected = expected_output([i, 5], 25, request_seed=i)
                    assert results[i][name] == (expected, FinishReason.LENGTH)
            await self.wait_until_empty(client)

    async def test_pause_and_resume(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.001)) as client:
            stream = client.open([make_message("r", [1], 400)])
            async for _ in stream:
                break
            await client.pause("keep")
            assert await client.is_paused()
            before = (await client.stats()).num_generation_tokens_total
            await asyncio.sleep(0.1)
            assert (await client.stats()).num_generation_tokens_total == before
            await client.resume()
            assert not await client.is_paused()
            assert (await collect(stream))["r"][1] == FinishReason.LENGTH

    async def test_new_requests_held(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.001)) as client:
            await client.pause("wait")
            stream = client.open([make_message("r", [1], 4)])
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.1)
            assert not task.done()
            await client.resume()
            assert (await task)["r"][1] == FinishReason.LENGTH

    async def test_a_pause_that_aborts_and_forgets(self) -> None:
        async with self.running(FakeEngineConfig(step_time_s=0.001, block_size=4)) as client:
            streams = [client.open([make_message(f"r{i}", list(range(40)), 4000)]) for i in range(2)]
            async for _ in streams[0]:
                break
            assert client.num_requests() == 2
            await client.pause("abort", clear_cache=True)
            assert client.num_requests() == 0
            assert client.is_resting
            assert await client.is_paused()
            for i, stream in enumerate(streams):
                assert (await collect(stream))[f"r{i}"][1] == FinishReason.ABORT
            await client.resume()
            assert not client.is_resting
            cached = [each.num_cached_tokens async for each in client.open([make_message("b", list(range(40)), 2)])]
            assert max(cached) == 0
            with pytest.raises(RequestError, match="mode must be one of keep, wait, abort, got 'stop'"):
                await client.pause("stop")

    async def test_a_sleep_holds_requests_until_the_engine_wakes_up(self) -> None:
        async with self.running() as client:
            assert await client.sleep_level() is None
            assert await client.sleep(0) == 0
            assert await client.sleep_level() == 0
            assert client.is_resting
            task = asyncio.create_task(collect(client.open([make_message("r", [1], 4)])))
            with pytest.raises(RequestError, match="sleeps"):
                await client.pause()
            with pytest.raises(RequestError, match="level"):
                await client.sleep(1)  # this engine has no memory to release
            await asyncio.sleep(0.05)
            assert not task.done()
            await client.wake_up()
            assert not client.is_resting
            assert (await task)["r"][1] == FinishReason.LENGTH

    async def test_health_and_facts(self) -> None:
        client = self.make_client(FakeEngineConfig(), EngineConfig())
        assert client.info is None
        assert client.is_loading
        info = await client.ready()
        assert client.info == info
        assert not client.is_loading
        client.check_health()
        assert 0 <= await client.ping() < DEADLINE_S
        assert not client.is_stalled
        assert client.stalled_s == 0.0
        stream = client.open([make_message("r", [1, 2, 3], 4)])
        (metrics,) = stream.metrics
        await collect(stream)
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (3, 4)
        assert 0 < metrics.arrival_time_s <= metrics.scheduled_time_s <= metrics.first_token_time_s
        assert metrics.first_token_time_s <= metrics.last_token_time_s <= metrics.finished_time_s
        assert dict(client.adapters) == {}
        with pytest.raises(RequestError, match="serves no adapters"):
            await client.load_adapter("a", "nowhere")
        with pytest.raises(RequestError, match="serves no adapters"):
            await client.unload_adapter("a")
        await client.shutdown()
        assert not client.is_loading
        with pytest.raises(EngineDeadError, match="shut down"):
            await client.ping()

    async def test_prefix_cache_reset(self) -> None:
        async with self.running(FakeEngineConfig(block_size=4, step_time_s=0.001)) as client:
            prompt = list(range(64))
            await collect(client.open([make_message("a", prompt, 4)]))
            cached = [output.num_cached_tokens async for output in client.open([make_message("b", prompt, 4)])]
            assert max(cached) >= 60
            assert await client.reset_prefix_cache()
            assert await client.reset_encoder_cache(), "a network that takes no media keeps no embeddings of any"
            cached = [output.num_cached_tokens async for output in client.open([make_message("c", prompt, 4)])]
            assert max(cached) == 0
            running = client.open([make_message("d", prompt, 200)])
            async for _ in running:
                break
            assert not await client.reset_prefix_cache()
            assert await client.reset_prefix_cache(preempt_running=True)
            tokens, _ = (await collect(running))["d"]
            assert expected_output(prompt, 200, request_seed=0)[-len(tokens) :] == tokens

    async def test_shutdown_lets_requests_finish(self) -> None:
        client = self.make_client(FakeEngineConfig(step_time_s=0.001), EngineConfig())
        await client.ready()
        streams = [client.open([make_message(f"r{i}", [i], 60, seed=i)]) for i in range(10)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0.02)
        await client.shutdown(20.0)
        for i, task in enumerate(tasks):
            assert (await task)[f"r{i}"] == (expected_output([i], 60, request_seed=i), FinishReason.LENGTH)
        with pytest.raises(EngineDeadError, match="shut down"):
            client.check_health()
        with pytest.raises(EngineDeadError, match="shut down"):
            client.open([make_message("late", [1], 2)])
        await client.shutdown()

    async def test_shutdown_aborts_when_its_time_is_over(self) -> None:
        client = self.make_client(FakeEngineConfig(step_time_s=0.01), EngineConfig())
        await client.ready()
        task = asyncio.create_task(collect(client.open([make_message("long", [1], 900)])))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await client.shutdown(0.2)
        assert time.monotonic() - start < 5
        assert (await task)["long"][1] == FinishReason.ABORT

    async def test_shutdown_resumes_what_was_held(self) -> None:
        client = self.make_client(FakeEngineConfig(), EngineConfig())
        await client.ready()
        await client.pause()
        task = asyncio.create_task(collect(client.open([make_message("held", [1], 9)])))
        await asyncio.sleep(0.05)
        await client.shutdown(10.0)
        assert (await task)["held"][1] == FinishReason.LENGTH

    async def test_a_second_shutdown_may_shorten_the_first(self) -> None:
        client = self.make_client(FakeEngineConfig(step_time_s=0.01), EngineConfig())
        await client.ready()
        task = asyncio.create_task(collect(client.open([make_message("long", [1], 900)])))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        first = asyncio.create_task(client.shutdown(60.0))
        await asyncio.sleep(0.05)
        assert not first.done()
        await client.shutdown(0.0)
        await first
        assert time.monotonic() - start < 5
        assert (await task)["long"][1] == FinishReason.ABORT

    async def test_shutdown_before_the_start(self) -> None:
        client = self.make_client(FakeEngineConfig(), EngineConfig())
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await client.ready()
