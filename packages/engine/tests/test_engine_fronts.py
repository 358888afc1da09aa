"""Both fronts give the same outputs: text, stop strings, n completions, logprobs, kinds of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire_engine import (
    AsyncEngine,
    EngineConfig,
    InprocClient,
    LLMEngine,
    PauseMode,
    ProcessClient,
    RequestOutput,
)
from quire_engine.client import PAUSE_MODES
from quire_interfaces import (
    ContextLengthError,
    Detokenizer,
    FinishReason,
    OutputKind,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
    Tokenizer,
)
from quire_testkit.fake_engine import FACTORY, FakeEngineConfig, build_fake_engine
from quire_testkit.fake_runner import expected_output

Factory = Callable[..., Detokenizer]
ENGINE = FakeEngineConfig(block_size=4, num_blocks=200)
WHOLE = RequestOptions(output_kind=OutputKind.FINAL_ONLY)
GROWING = RequestOptions(output_kind=OutputKind.CUMULATIVE)


class RecordingClient(InprocClient):
    """Notes what it aborts, and does it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aborted: list[tuple[list[str], FinishReason]] = []

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        request_ids = list(request_ids)
        self.aborted.append((request_ids, reason))
        super().abort(request_ids, reason)


@asynccontextmanager
async def async_engine(
    tokenizer: Tokenizer, make_detokenizer: Factory, engine: FakeEngineConfig = ENGINE, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    client = RecordingClient(build_fake_engine(engine), EngineConfig(**settings))
    await client.ready()
    front = AsyncEngine(client, tokenizer=tokenizer, make_detokenizer=make_detokenizer)
    try:
        yield front
    finally:
        assert client.num_requests() == 0
        await front.client.shutdown(0.0)


async def gather(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    async with asyncio.timeout(60):
        return [output async for output in outputs]


def letters(token_ids: list[int]) -> str:
    return "".join(chr(97 + each % 26) if each else "" for each in token_ids)


def run_offline(
    tokenizer: Tokenizer,
    make_detokenizer: Factory,
    prompt: list[int],
    params: SamplingParams,
    depth: int,
    **options: Any,
) -> list[RequestOutput]:
    engine = LLMEngine(
        build_fake_engine(ENGINE),
        EngineConfig(async_scheduling=bool(depth)),
        tokenizer=tokenizer,
        make_detokenizer=make_detokenizer,
    )
    engine.add_request(prompt, params, **options)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    while engine.core.has_work():
        assert engine.step() == []
    stats = engine.stats()
    assert stats.kv_cache_usage == 0.0
    # Nothing is computed for nobody: what ran ahead of the output is a step for each completion.
    told = outputs[-1].num_generation_tokens
    assert told <= stats.num_generation_tokens_total <= told + 2 * max(1, params.n), "the core went on"
    engine.close()
    return outputs


CASES: list[dict[str, Any]] = [
    {"max_tokens": 12, "seed": 3},
    {"max_tokens": 12, "seed": 3, "n": 4},
    {"max_tokens": 12, "seed": 3, "logprobs": 2},
    {"max_tokens": 12, "seed": 3, "logprobs": 0, "prompt_logprobs": 1, "n": 2},
    {"max_tokens": 12, "seed": 3, "detokenize": False},
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("depth", [0, 1])
async def test_both_fronts_agree_with_the_request_run_alone(
    tokenizer: Tokenizer, make_detokenizer: Factory, params: dict[str, Any], depth: int
) -> None:
    prompt = [5, 6, 7, 8, 9]
    (final,) = run_offline(tokenizer, make_detokenizer, prompt, SamplingParams(**params), depth)
    async with async_engine(tokenizer, make_detokenizer, async_scheduling=bool(depth)) as front:
        pieces = await gather(front.generate(prompt, SamplingParams(**params)))
        (whole,) = await gather(front.generate(prompt, SamplingParams(**params), WHOLE))
        growing = await gather(front.generate(prompt, SamplingParams(**params), GROWING))
    assert final.finished
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert final.outputs == whole.outputs == growing[-1].outputs
    assert final.prompt_logprobs == whole.prompt_logprobs
    for index, completion in enumerate(final.outputs):
        deltas = [each for piece in pieces for each in piece.outputs if each.index == index]
        expected = expected_output(prompt, 12, request_seed=3 + index)
        assert completion.token_ids == expected
        assert [token for each in deltas for token in each.token_ids] == expected
        assert completion.text == (letters(expected) if params.get("detokenize", True) else "")
        assert "".join(each.text for each in deltas) == completion.text
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.LENGTH, None)
        if params.get("logprobs") is None:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None
        assert [position[0].token_id for position in completion.logprobs] == expected
        assert {len(position) for position in completion.logprobs} == {1 + params["logprobs"]}
        assert [position[0].decoded_token for position in completion.logprobs] == [letters([t]) for t in expected]
        assert completion.logprobs[0][0].token_bytes == letters(expected[:1]).encode()
        assert len(completion.text_offsets) == len(expected)
    if "prompt_logprobs" in params:
        assert final.prompt_logprobs is not None
        assert final.prompt_logprobs[0] is None
        assert [each[0].token_id for each in final.prompt_logprobs[1:] if each] == prompt[1:]
        assert sum(piece.prompt_logprobs is not None for piece in pieces) == 1
    assert final.num_generation_tokens == 12 * params.get("n", 1)
    assert [each.num_generation_tokens for each in final.metrics] == [12] * params.get("n", 1)


async def test_prompt_logprobs_of_a_one_token_prompt(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    (final,) = run_offline(tokenizer, make_detokenizer, [5], SamplingParams(max_tokens=2, prompt_logprobs=0), 0)
    assert final.prompt_logprobs == [None]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream_interval", [1, 4])
async def test_stop_strings_end_a_completion_and_free_it(
    tokenizer: Tokenizer, make_detokenizer: Factory, include: bool, stream_interval: int
) -> None:
    prompt = [5, 6, 7]
    expected = expected_output(prompt, 200, request_seed=1)
    text = letters(expected)
    stop = text[20:23]
    end = text.index(stop) + len(stop)
    num_tokens = next(n for n in range(len(expected) + 1) if len(letters(expected[:n])) == end)
    params = SamplingParams(
        max_tokens=700, seed=1, stop=("never!", stop), include_stop_str_in_output=include, logprobs=0
    )
    # Slow enough that the core cannot come to the end of 700 tokens before it is told, however busy the machine is.
    slow = FakeEngineConfig(block_size=4, num_blocks=200, step_time_s=0.02)
    async with async_engine(tokenizer, make_detokenizer, slow, stream_interval=stream_interval) as front:
        pieces = await gather(front.generate(prompt, params))
        async with asyncio.timeout(60):
            while (await front.client.stats()).kv_cache_usage > 0:
                await asyncio.sleep(0.01)
        assert await front.client.check_integrity() is None
        assert isinstance(front.client, RecordingClient)
        assert [reason for _, reason in front.client.aborted] == [FinishReason.STOP], "the core was not told"
    (offline,) = run_offline(tokenizer, make_detokenizer, prompt, params, 1)
    for got_text, tokens, last in [
        (
            "".join(each.outputs[0].text for each in pieces),
            [token for each in pieces for token in each.outputs[0].token_ids],
            pieces[-1].outputs[0],
        ),
        (offline.outputs[0].text, offline.outputs[0].token_ids, offline.outputs[0]),
    ]:
        assert got_text == (text[:end] if include else text[: end - len(stop)])
        assert tokens == expected[:num_tokens]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    assert offline.outputs[0].logprobs is not None
    assert len(offline.outputs[0].logprobs) == num_tokens
    assert pieces[-1].num_generation_tokens == num_tokens


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("by_caller", [False, True])
async def test_stop_tokens(tokenizer: Tokenizer, make_detokenizer: Factory, include: bool, by_caller: bool) -> None:
    expected = expected_output([5], 50, request_seed=2)
    stop = expected[10]
    if not by_caller:
        tokenizer.eos_token_ids = (stop,)
    params = SamplingParams(
        max_tokens=50,
        seed=2,
        stop_token_ids=(stop,) if by_caller else (),
        include_stop_str_in_output=include,
        logprobs=1,
    )
    (final,) = run_offline(tokenizer, make_detokenizer, [5], params, 1)
    completion = final.outputs[0]
    end = expected.index(stop) + 1
    assert completion.token_ids == expected[:end]
    assert completion.text == letters(expected[:end] if include else expected[: end - 1])
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop if by_caller else None)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == end
    assert completion.text_offsets == [len(letters(expected[:place])) for place in range(end)]


async def test_log_probabilities_of_named_tokens(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    params = SamplingParams(max_tokens=3, seed=2, logprob_token_ids=(9, 4))
    (final,) = run_offline(tokenizer, make_detokenizer, [5], params, 0)
    completion = final.outputs[0]
    assert completion.logprobs is not None
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert [each.token_id for each in position] == [token_id, 9, 4]
        assert [each.rank for each in position] == [1, None, None]
        assert [each.decoded_token for each in position] == [letters([each]) for each in (token_id, 9, 4)]
    async with async_engine(tokenizer, make_detokenizer) as front:
        (whole,) = await gather(front.generate([5], params, WHOLE))
    assert whole.outputs == final.outputs


async def test_one_of_n_stops_while_the_others_go_on(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    texts = [letters(expected_output([5], 40, request_seed=seed)) for seed in range(4)]
    stop = next(texts[0][i : i + 2] for i in range(5, 30) if all(texts[0][i : i + 2] not in text for text in texts[1:]))
    async with async_engine(tokenizer, make_detokenizer) as front:
        pieces = await gather(front.generate([5], SamplingParams(max_tokens=40, seed=0, n=4, stop=(stop,))))
    reasons = {each.index: each.finish_reason for piece in pieces for each in piece.outputs}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    got = ["".join(each.text for piece in pieces for each in piece.outputs if each.index == i) for i in range(4)]
    assert got == [texts[0][: texts[0].index(stop)], *texts[1:]]


async def test_the_prompts_text_and_cached_tokens_are_told(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    prompt = RenderedPrompt(token_ids=list(range(40)), text="forty")
    async with async_engine(tokenizer, make_detokenizer) as front:
        first = (await gather(front.generate(prompt, SamplingParams(max_tokens=2))))[-1]
        second = (await gather(front.generate(prompt, SamplingParams(max_tokens=2))))[-1]
    assert (first.prompt, first.prompt_token_ids) == ("forty", prompt.token_ids)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
    metrics = second.metrics[0]
    assert metrics.num_cached_tokens == 36
    assert metrics.arrival_time_s <= metrics.scheduled_time_s <= metrics.first_token_time_s
    assert metrics.first_token_time_s <= metrics.last_token_time_s <= metrics.finished_time_s


async def test_errors_come_at_once_or_from_the_iterator(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    async with async_engine(tokenizer, make_detokenizer, FakeEngineConfig(num_blocks=4, block_size=4)) as front:
        with pytest.raises(ContextLengthError):
            front.generate([1] * 2000, SamplingParams())
        with pytest.raises(RequestError, match="token id 1000"):
            front.generate([1000], SamplingParams())
        refused = front.generate([1] * 100, SamplingParams(max_tokens=5))
        with pytest.raises(RequestError, match="KV cache"):
            await gather(refused)
        (failed,) = await gather(front.generate([1], SamplingParams(max_tokens=5), request_id="fail"))
        assert failed.outputs[0].finish_reason == FinishReason.ERROR
        assert failed.outputs[0].error == "asked to fail"
    client = InprocClient(build_fake_engine())
    with pytest.raises(RuntimeError, match="not ready"):
        AsyncEngine(client)
    await client.ready()
    front = AsyncEngine(client)
    with pytest.raises(RequestError, match="no detokenizer"):
        front.generate([1], SamplingParams(stop=("x",)))
    await front.client.shutdown()


async def test_abort_by_the_callers_name(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    async with async_engine(tokenizer, make_detokenizer, FakeEngineConfig(step_time_s=0.002)) as front:
        task = asyncio.create_task(gather(front.generate([1], SamplingParams(max_tokens=900, n=3), request_id="me")))
        while (await front.client.stats()).num_running < 3:
            await asyncio.sleep(0.002)
        with pytest.raises(RequestError, match="'me' is in use"):
            front.generate([1], SamplingParams(), request_id="me")
        front.abort("me")
        front.abort(["me", "unknown"])
        pieces = await task
        reasons = {each.index: each.finish_reason for piece in pieces for each in piece.outputs}
        assert set(reasons.values()) == {FinishReason.ABORT}
        assert len(reasons) == 3
        assert pieces[-1].finished
        again = await gather(front.generate([1], SamplingParams(max_tokens=2), request_id="me"))
        assert again[-1].finished
        assert front.num_requests() == 0


@pytest.mark.parametrize("mode", PAUSE_MODES)
async def test_a_pause_holds_waits_for_or_ends_what_runs(
    tokenizer: Tokenizer, make_detokenizer: Factory, mode: PauseMode
) -> None:
    """Two rows; so one of three requests is new when the pause comes, and cached prefixes are forgotten under all."""
    engine = FakeEngineConfig(step_time_s=0.002, max_num_seqs=2, block_size=4, num_blocks=400)
    prompt = list(range(40))
    async with async_engine(tokenizer, make_detokenizer, engine) as front:
        params = [SamplingParams(max_tokens=num, ignore_eos=True, seed=1) for num in (60, 120, 30)]
        tasks = [asyncio.create_task(gather(front.generate(prompt, each))) for each in params]
        while (await front.client.stats()).num_running < 2 or (
            await front.client.stats()
        ).num_generation_tokens_total < 8:
            await asyncio.sleep(0.002)
        await front.client.pause(mode, clear_cache=True)
        stats = await front.client.stats()
        assert stats.num_running == 0
        assert stats.kv_cache_usage == 0
        assert await front.client.is_paused()
        late = asyncio.create_task(gather(front.generate(prompt, params[2])))
        await asyncio.sleep(0.1)
        assert (await front.client.stats()).num_generation_tokens_total == stats.num_generation_tokens_total
        ended = {"keep": [False] * 3, "wait": [True, True, False], "abort": [True] * 3}
        assert [task.done() for task in tasks] == ended[mode]
        await front.client.resume()
        reasons = {piece.outputs[0].finish_reason for task in tasks for piece in (await task)[-1:]}
        assert reasons == {FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH}
        if mode != "abort":
            for task, each in zip(tasks, params, strict=True):
                token_ids = [token for piece in await task for token in piece.outputs[0].token_ids]
                assert token_ids == expected_output(prompt, each.max_tokens, request_seed=1)
        assert (await late)[-1].outputs[0].finish_reason is FinishReason.LENGTH
        assert await front.client.check_integrity() is None


async def test_who_resumes_ends_a_pause_that_waits(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    async with async_engine(tokenizer, make_detokenizer, FakeEngineConfig(step_time_s=0.002)) as front:
        running = asyncio.create_task(gather(front.generate([1], SamplingParams(max_tokens=900, ignore_eos=True))))
        while not (await front.client.stats()).num_running:
            await asyncio.sleep(0.002)
        pausing = asyncio.create_task(front.client.pause("wait"))
        await asyncio.sleep(0.05)
        await front.client.resume()
        async with asyncio.timeout(60):
            await pausing
        assert not running.done()
        assert not await front.client.is_paused()
        assert (await gather(front.generate([2], SamplingParams(max_tokens=2))))[-1].finished
        with pytest.raises(RequestError, match="mode must be one of keep, wait, abort, got 'stop'"):
            await front.client.pause("stop")  # type: ignore[arg-type]
        front.abort(list(front._streams))
        await running


async def test_200_callers_that_leave_in_the_middle(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    client = ProcessClient(FACTORY, {"num_blocks": 80, "block_size": 4, "max_num_seqs": 20}, EngineConfig())
    await client.ready()
    front = AsyncEngine(client, tokenizer=tokenizer, make_detokenizer=make_detokenizer)

    async def leave(i: int) -> None:
        outputs = front.generate([i % 7, 1, 2], SamplingParams(max_tokens=100, n=1 + i % 3, seed=i))
        num_seen = 0
        async for _ in outputs:
            num_seen += 1
            if num_seen > i % 11:
                break
        await outputs.aclose()

    async def cancelled(i: int) -> None:
        task = asyncio.create_task(gather(front.generate([i], SamplingParams(max_tokens=100))))
        await asyncio.sleep(0.001 * (i % 13))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with asyncio.timeout(60):
        await asyncio.gather(*(leave(i) if i % 2 else cancelled(i) for i in range(200)))
        while (await front.client.stats()).kv_cache_usage > 0:
            await asyncio.sleep(0.01)
    stats = await front.client.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert await front.client.check_integrity() is None
    assert client.num_requests() == front.num_requests() == 0
    await front.client.shutdown()


def test_offline_abort_and_reuse(tokenizer: Tokenizer, make_detokenizer: Factory) -> None:
    engine = LLMEngine(build_fake_engine(ENGINE), tokenizer=tokenizer, make_detokenizer=make_detokenizer)
    engine.add_request([1], SamplingParams(max_tokens=50, n=2), request_id="a")
    with pytest.raises(RequestError, match="in use"):
        engine.add_request([1], SamplingParams(), request_id="a")
    engine.step()
    engine.abort("a")
    engine.abort(["a", "b"])
    assert not engine.has_unfinished_requests()
    engine.add_request([1], SamplingParams(max_tokens=3, seed=0), request_id="a")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[0].outputs[0].token_ids == expected_output([1], 3, request_seed=0)
    assert engine.reset_prefix_cache()
    engine.close()


def test_offline_refusal_leaves_no_trace(tokenizer: Tokenizer) -> None:
    engine = LLMEngine(build_fake_engine(FakeEngineConfig(num_blocks=4, block_size=4)), tokenizer=tokenizer)
    with pytest.raises(RequestError, match="KV cache"):
        engine.add_request([1] * 100, SamplingParams(max_tokens=5, n=2))
    with pytest.raises(RequestError, match="no detokenizer"):
        engine.add_request([1], SamplingParams(stop=("x",)))
    assert not engine.has_unfinished_requests()
    assert not engine.core.has_requests()
    engine.close()
