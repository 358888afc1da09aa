"""One `LLM` in several threads, interrupted, and closed while it runs: each call gets its own outputs, or an error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, EngineDeadError, RequestError, RequestOutput, SamplingParams
from quire_testkit.checkpoints import make_checkpoint

PROMPTS = [[number % 50 + 3, number % 7 + 4, number + 5] for number in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_model_len=2048, max_num_seqs=4, num_threads=1, max_queued_requests=3) as made:
        yield made


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_each_thread_gets_its_own_outputs(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    [searched] = llm.beam_search([PROMPTS[0]], beams)

    def one(prompt: list[int]) -> list[list[int]]:
        return tokens(llm.generate(prompt, GREEDY, use_tqdm=False))

    def all_of_them(_: int) -> list[list[int]]:
        return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    with ThreadPoolExecutor(6) as pool:
        alone = [pool.submit(one, prompt) for prompt in PROMPTS]
        together = [pool.submit(all_of_them, number) for number in range(3)]
        search = pool.submit(llm.beam_search, [PROMPTS[0]], beams)
        assert [future.result() for future in alone] == [[each] for each in expected]
        assert [future.result() for future in together] == [expected] * 3
        assert [each.token_ids for each in search.result()[0].outputs] == [each.token_ids for each in searched.outputs]
    assert not llm.engine.has_unfinished_requests()


def test_calls_of_several_threads_share_steps(llm: LLM) -> None:
    """While one call runs long, another one's few tokens come and go."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(llm.generate, [5, 6], LONG, False)
        while llm.stats().num_running == 0:
            time.sleep(0.001)
        short = llm.generate([7, 8], GREEDY, use_tqdm=False)
        assert not long.done()
        assert len(short[0].outputs[0].token_ids) == 12
        assert len(long.result()[0].outputs[0].token_ids) == 1500


def test_a_wrong_request_leaves_other_calls_alone(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(llm.generate, [5, 6], LONG, False)
        with pytest.raises(RequestError, match=r"prompts\[1\]: stop_token_ids holds token id 5000"):
            llm.generate([[1], [2]], [LONG, SamplingParams(stop_token_ids=(5000,))], use_tqdm=False)
        assert len(long.result()[0].outputs[0].token_ids) == 1500


async def test_from_an_event_loop(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False))
    calls = [asyncio.to_thread(llm.generate, prompt, GREEDY, False) for prompt in PROMPTS[:8]]
    assert [tokens(each)[0] for each in await asyncio.gather(*calls)] == expected


def test_prompts_from_a_generator(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False))
    assert tokens(llm.generate((each for each in PROMPTS[:3]), GREEDY, use_tqdm=False)) == expected


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Python's own handler, which a process that a shell started in the background lacks: there SIGINT is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("num_interrupts", [1, 3])
def test_an_interrupted_call_leaves_the_next_one_right(llm: LLM, num_interrupts: int) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for _ in range(num_interrupts):

        def interrupt() -> None:
            while llm.stats().num_running == 0:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], *PROMPTS], LONG, use_tqdm=False)
        thread.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not llm.engine.has_unfinished_requests()
        assert llm.stats().num_running == 0
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_closing_ends_the_calls_of_other_threads(folder: Path) -> None:
    llm = LLM(folder, max_model_len=2048, max_num_seqs=4, num_threads=1)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(llm.generate, [[5, 6]] * 40, LONG, False) for _ in range(2)]
        while llm.stats().num_running == 0:
            time.sleep(0.001)
        llm.shutdown()
        for each in running:
            with pytest.raises(EngineDeadError, match="closed"):
                each.result()
    llm.close()


def test_sleep_waits_for_nobody(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(llm.generate, [5, 6], LONG, False)
        while llm.stats().num_running == 0:
            time.sleep(0.001)
        with pytest.raises(RequestError, match="requests of another call run"):
            llm.sleep(0)
        assert len(long.result()[0].outputs[0].token_ids) == 1500


def test_a_call_from_within_a_step_is_refused(folder: Path) -> None:
    def calls_again(token_ids: object, num_prompt_tokens: int, logits: object) -> object:
        again.generate([5], GREEDY, use_tqdm=False)
        return logits

    settings = {"max_model_len": 64, "num_threads": 1, "async_scheduling": False}
    with LLM(folder, logits_processors={"again": calls_again}, **settings) as again:  # type: ignore[dict-item]
        params = SamplingParams(max_tokens=3, extra_args={"logits_processors": ["again"]})
        [output] = again.generate([5], params, use_tqdm=False)
        assert "called from within its own step" in str(output.outputs[0].error)
        assert len(again.generate([5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
