"""Requests that are pooled, through both fronts and the wire, beside requests that generate."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire_engine import AsyncEngine, EngineConfig, EngineInfo, InprocClient, InputProcessor, LLMEngine, ProcessClient
from quire_engine.messages import Outputs as OutputsMessage
from quire_engine.messages import decode_client_message, decode_core_message, encode_message
from quire_interfaces import (
    ContextLengthError,
    EngineCoreOutput,
    FinishReason,
    ModelNotFoundError,
    PooledOutput,
    PoolingParams,
    QuireError,
    RenderedPrompt,
    RequestAbortedError,
    RequestError,
    RequestOptions,
    SamplingParams,
)
from quire_testkit.fake_engine import FACTORY, FakeEngineConfig, build_fake_engine
from quire_testkit.fake_runner import expected_output, expected_pooled

ENGINE = FakeEngineConfig(block_size=4, num_blocks=200, max_model_len=64, pooling_tasks=("embed", "classify"))
INFO = EngineInfo(max_model_len=8, vocab_size=50, pooling_tasks=("embed", "token_embed"), embedding_size=16)
GENERATES = SamplingParams(temperature=0, max_tokens=5, seed=3, detokenize=False)


@asynccontextmanager
async def served(where: str, engine: FakeEngineConfig = ENGINE, **settings: Any) -> AsyncIterator[AsyncEngine]:
    client: InprocClient | ProcessClient
    if where == "process":
        client = ProcessClient(FACTORY, dataclasses.asdict(engine), EngineConfig(**settings))
        client.start()
    else:
        client = InprocClient(build_fake_engine(engine), EngineConfig(**settings))
    await client.ready()
    try:
        yield AsyncEngine(client)
        assert client.num_requests() == 0
    finally:
        await client.shutdown(0.0)


def test_what_is_refused_before_the_core() -> None:
    processor = InputProcessor(INFO)

    def refused(kind: type[QuireError], match: str, token_ids: list[int], **params: Any) -> None:
        with pytest.raises(kind, match=match):
            processor.process_pooling("r", RenderedPrompt(token_ids=token_ids), PoolingParams(**params))

    refused(ContextLengthError, "9 tokens, but this model's context is 8", [1] * 9)
    refused(RequestError, "no tokens", [])
    refused(RequestError, "token id 50", [1, 50])
    refused(RequestError, "does not support the task 'classify'; it has embed, token_embed", [1], task="classify")
    with pytest.raises(ModelNotFoundError, match="serves none"):
        processor.process_pooling("r", RenderedPrompt(token_ids=[1]), PoolingParams(), RequestOptions(adapter="a"))
    prompt = RenderedPrompt(token_ids=[1])
    assert processor.process_pooling("r", prompt, PoolingParams()).pooling_params == PoolingParams(task="embed")
    with pytest.raises(RequestError, match="pools nothing"):
        InputProcessor(EngineInfo(max_model_len=8, vocab_size=50)).process_pooling("r", prompt, PoolingParams())


def test_messages_come_through_the_wire_whole() -> None:
    info = dataclasses.replace(INFO, cached_pooling_tasks=("embed",))
    for task, reads in (("embed", True), ("token_embed", False)):
        prompt = RenderedPrompt(token_ids=[1, 2, 3], second_segment_start=2)
        params = PoolingParams(task=task, returned_token_ids=(3, 1))  # type: ignore[arg-type]
        message = InputProcessor(info).process_pooling("r", prompt, params)
        assert decode_client_message(encode_message(message)) == message
        request = message.to_request()
        assert (request.pooling_params, request.second_segment_start) == (params, 2)
        assert (request.reads_prefix_cache, request.max_tokens, request.stop_token_ids) == (reads, 1, {0})
    output = EngineCoreOutput("r", [], FinishReason.STOP, pooled=PooledOutput(struct.pack("<4f", 1, 2, 3, 4), (2, 2)))
    sent = OutputsMessage(outputs=[output])
    assert decode_core_message(encode_message(sent)) == sent


@pytest.mark.parametrize("where", ["thread", "process"])
@pytest.mark.parametrize("depth", [False, True])
async def test_pooling_beside_generation(where: str, depth: bool) -> None:
    prompts = [[number % 40, 7] * (1 + number % 32) for number in range(40)]
    async with served(where, async_scheduling=depth) as engine:

        async def generate(token_ids: list[int]) -> list[int]:
            outputs = engine.generate(token_ids, GENERATES)
            return [token_id async for output in outputs for token_id in output.outputs[0].token_ids]

        pooled, generated = await asyncio.gather(
            asyncio.gather(*[engine.encode(each, PoolingParams(task="classify")) for each in prompts]),
            asyncio.gather(*[generate(each) for each in prompts[:9]]),
        )
    assert [each.pooled for each in pooled] == [expected_pooled(each) for each in prompts]
    assert [each.prompt_token_ids for each in pooled] == prompts
    assert {each.error for each in pooled} == {None}
    assert {each.metrics[0].num_generation_tokens for each in pooled} == {0}
    assert generated == [expected_output(each, 5, request_seed=3) for each in prompts[:9]]


async def test_what_fails_and_what_nobody_waits_for() -> None:
    async with served("thread", dataclasses.replace(ENGINE, step_time_s=0.02, max_num_seqs=1)) as engine:
        failed, broken, fine = await asyncio.gather(
            engine.encode([1], PoolingParams(), request_id="fail me"),
            engine.encode([2], PoolingParams(), request_id="raise me"),
            engine.encode([3], PoolingParams()),
        )
        assert (failed.pooled, str(failed.error)) == (None, "asked to fail")
        assert "broke the step" in str(broken.error)
        assert fine.pooled == expected_pooled([3])
        with pytest.raises(RequestError, match="is in use"):
            await asyncio.gather(*[engine.encode([4], PoolingParams(), request_id="twice") for _ in range(2)])
        calls = [asyncio.ensure_future(engine.encode([number], PoolingParams())) for number in range(30)]
        await asyncio.sleep(0.05)
        for call in calls[1:]:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert ended[0].pooled == expected_pooled([0])  # type: ignore[union-attr]
        assert sum(isinstance(each, asyncio.CancelledError) for each in ended) > 20
        prompts = (await engine.client.stats()).num_prompt_tokens_total
        assert prompts < 20, "requests whose callers had left were computed"
        aborted = asyncio.ensure_future(engine.encode([5] * 50, PoolingParams(), request_id="long"))
        await asyncio.sleep(0)
        engine.abort("long")
        assert isinstance((await aborted).error, RequestAbortedError)


def test_the_synchronous_front(tokenizer: Any, make_detokenizer: Callable[..., Any]) -> None:
    engine = LLMEngine(build_fake_engine(ENGINE), tokenizer=tokenizer, make_detokenizer=make_detokenizer)
    names = [engine.add_request([number, 1, 2], PoolingParams()) for number in range(5)]
    generating = engine.add_request([9, 1, 2], GENERATES)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step()}
    assert [outputs[name].pooled for name in names] == [expected_pooled([number, 1, 2]) for number in range(5)]
    assert outputs[generating].outputs[0].token_ids == expected_output([9, 1, 2], 5, request_seed=3)
    engine.close()
