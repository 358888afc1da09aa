"""Steps with prompts by graphs: the tokens of steps kernel by kernel, however prompts are cut and rows come and go.

The graphs are recorded operations on the CPU, as in `test_runner_graphs.py`: a replay knows of a step only the numbers
that are written before it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from runner_grammar_cases import EOS, DigitsSource
from runner_graph_network import add_torch_networks
from runner_harness import VOCAB_SIZE, make_request, random_model

from quire_interfaces import ModelRunnerOutput, Request, SchedulerOutput, StructuredOutputsParams
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_lora import Adapter, AdapterRuntime, AdapterSlots, AdapterStore
from quire_lora.adapter import LinearAdapter
from quire_models import DecoderLM
from quire_runner import ModelRunner, RunnerConfig
from quire_sampling import SampleMode
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.recorded_graph import record_graph

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 40}


@pytest.fixture(autouse=True)
def _only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch, with_prompts=True)


def requests(seed: int, *, sampled: bool) -> list[Request]:
    """Prompts shorter and longer than a step, which begin while others decode."""
    rng = random.Random(seed)
    return [
        make_request(
            str(i), [rng.randrange(101) for _ in range(length)], max_tokens=rng.randint(2, 9), seed=i,
            **({"temperature": 0.9, "top_p": 0.9} if sampled and i % 2 else {}),
        )
        for i, length in enumerate((2, 9, 70, 30, 1, 70, 7, 8))
    ]  # fmt: skip


def run_backwards(runner: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
    """The step with its rows the other way round, so that one whose prompt goes on may stand before others."""
    turned = replace(
        output, rows=output.rows[::-1], request_ids=output.request_ids[::-1], samples=output.samples[::-1],
        num_computed_tokens=output.num_computed_tokens[::-1], num_scheduled_tokens=output.num_scheduled_tokens[::-1],
    )  # fmt: skip
    result = runner.run(turned)
    return replace(result, sampled_token_ids=result.sampled_token_ids[::-1])


class UnevenOracle:
    """Drafts the true continuation of known sequences: none, one or several tokens, every third of them spoilt."""

    def __init__(self, several: list[Request], tokens: dict[str, list[int]]) -> None:
        self._sequences = [[*each.prompt_token_ids, *tokens[each.request_id]] for each in several]

    def propose(self, token_ids: Any, max_tokens: int) -> list[int]:
        known = list(token_ids)
        for number, sequence in enumerate(self._sequences):
            if sequence[: len(known)] == known:
                end = min(len(known) + min(max_tokens, (len(known) * 7 + number * 3) % 5), len(sequence))
                return [(sequence[i] + (i % 3 == 0)) % VOCAB_SIZE for i in range(len(known), end)]
        return []


class Adapters:
    """Where slots are filled from."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def adapter(self, version: str) -> Adapter:
        generator = torch.Generator().manual_seed(int(version))
        linears = {}
        for name, site in self._slots.linears.items():
            outputs, inputs = site.shape
            a, b = (torch.randn(size, generator=generator) * 0.2 for size in ((3, inputs), (3, outputs)))
            linears[name] = LinearAdapter(a=a, b=b.T.contiguous().T)
        return Adapter(linears=linears)


def with_adapters(output: SchedulerOutput) -> SchedulerOutput:
    """The step, in which every other request has an adapter."""
    new = [
        replace(each, adapter_slot=int(each.request_id) % 3 - 1, adapter_version=str(int(each.request_id) % 3 - 1))
        for each in output.new_rows
    ]
    return replace(output, new_rows=new)


class Ran(NamedTuple):
    tokens: dict[str, list[int]]
    logprobs: list[Any]
    """In the order of the steps: row, and the tokens whose log probabilities are told."""
    runner: ModelRunner
    num_forwards: int
    """How often the network ran behind the captures."""
    num_mixed: int
    """Steps with prompts beside decodes."""
    num_drafted: int
    """Those of them in which drafts were verified."""


def run(
    model: DecoderLM, several: list[Request], *, backwards: bool = False, drafter: Any = None, **config: Any
) -> Ran:
    """Each of the requests comes while others decode."""
    plan = plan_kv_cache(model.config.kv_cache_specs(4, "float32"), num_blocks=80)
    limits = {**LIMITS, "num_speculative_tokens": 0 if drafter is None else 4}
    slots = model.adapters
    adapters = None if slots is None else AdapterRuntime(slots, cast(AdapterStore, Adapters(slots)))
    runner = ModelRunner.for_model(
        model, plan, RunnerConfig(**limits, **config), capture=record_graph, drafter=drafter, adapters=adapters,
        grammars=DigitsSource(),
    )  # fmt: skip
    runner.warm_up(capture_s=1e9)
    logprobs: list[Any] = []
    num_forwards = num_mixed = num_drafted = 0
    forward = model.forward

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return forward(*args, **named)

    model.forward = counted  # type: ignore[method-assign]
    scheduler = Scheduler(
        SchedulerConfig(**limits), KVCacheManager(plan, KVCacheConfig(block_size=4, enable_prefix_caching=False))
    )
    for request in several[:2]:
        scheduler.add_request(request)
    waiting = several[2:]
    while scheduler.has_requests():
        output = scheduler.schedule()
        assert output is not None
        is_mixed = max(output.num_scheduled_tokens) > 5 and len(output.rows) > 1
        num_mixed += is_mixed
        num_drafted += is_mixed and bool(output.draft_token_ids)
        planned = output if adapters is None else with_adapters(output)
        result = run_backwards(runner, planned) if backwards else runner.run(planned)
        logprobs += [(row, each[0].token_ids) for row, each in sorted(result.logprobs.items())]
        scheduler.update(output, result)
        if waiting:
            scheduler.add_request(waiting.pop(0))
    del model.forward
    tokens = {request.request_id: request.output_token_ids for request in several}
    return Ran(tokens, logprobs, runner, num_forwards, num_mixed, num_drafted)


@pytest.mark.parametrize(
    ("family", "sampled", "backwards"), [("qwen3", False, False), ("qwen3", True, True), ("mistral", True, False)]
)
def test_tokens_are_those_of_steps_kernel_by_kernel(family: str, sampled: bool, backwards: bool) -> None:
    model = random_model(family)
    alone = run(model, requests(3, sampled=sampled), enforce_eager=True)
    assert alone.runner.graphs is None
    got = run(model, requests(3, sampled=sampled), backwards=backwards, cuda_graph_sizes=(4,))
    captured = got.runner._captured
    assert captured is not None
    assert captured.mixed is not None
    assert captured.graphs.failure is captured.mixed.graphs.failure is None
    assert set(captured.mixed.graphs.captured) == {(64, mode) for mode in SampleMode if mode < SampleMode.HOST}
    assert got.num_forwards == 0  # every step is a replay
    assert got.tokens == alone.tokens
    assert all(got.tokens.values())


EVERYTHING = [
    {"repetition_penalty": 1.3, "temperature": 0.8},
    {"structured_outputs": StructuredOutputsParams(regex="2,9"), "stop": [EOS]},
    {"logprobs": 2},
    {"logit_bias": {3: 4.0, 8: -50.0, 11: 3.5}, "bad_words_token_ids": ((3, 3), (11,)), "min_tokens": 5},
    {},
    {"structured_outputs": StructuredOutputsParams(regex="3,6"), "stop": [EOS], "temperature": 1.1},
]


def everything() -> list[Request]:
    """Requests with penalties, grammars (some of whose tokens are certain), log probabilities and lists of tokens,
    beside others."""
    rng = random.Random(5)
    return [
        make_request(
            str(i), [rng.randrange(VOCAB_SIZE) for _ in range(length)], max_tokens=rng.randint(6, 12), seed=i,
            **EVERYTHING[i % len(EVERYTHING)],
        )
        for i, length in enumerate((5, 9, 50, 30, 7, 60, 7, 8))
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["edits", "drafts", "adapters"])
def test_edits_drafts_and_adapters_are_in_graphs(kind: str) -> None:
    model = random_model("qwen3", max_loras=2 if kind == "adapters" else 0, vocab_size=VOCAB_SIZE)
    alone = run(model, everything(), enforce_eager=True)
    assert all(token % 2 == i % 2 for i, token in enumerate(alone.tokens["1"]) if token not in (EOS, 9, 10))
    assert all(alone.tokens.values())
    drafter = UnevenOracle(everything(), alone.tokens) if kind == "drafts" else None
    got = run(model, everything(), backwards=kind == "edits", drafter=drafter, cuda_graph_sizes=(4, 20))
    assert got.tokens == alone.tokens
    assert got.num_forwards == 0
    assert len(got.logprobs) > 4
    assert kind == "drafts" or got.logprobs == alone.logprobs
    assert got.num_mixed > 4
    assert (got.num_drafted > 2) == (kind == "drafts")


def test_steps_that_want_more_run_kernel_by_kernel() -> None:
    def several() -> list[Request]:
        return [make_request("0", [1, 2, 3, 4, 5], max_tokens=5, prompt_logprobs=1), *requests(5, sampled=False)[1:]]

    model = random_model("qwen3")
    got = run(model, several(), cuda_graph_sizes=(4,))
    assert got.num_forwards > 0
    assert got.tokens == run(model, several(), enforce_eager=True).tokens


def test_none_are_captured_where_they_are_switched_off() -> None:
    model = random_model("qwen3")
    got = run(model, requests(3, sampled=False), cuda_graph_mixed_tokens=0, cuda_graph_sizes=(4,))
    assert got.runner._captured is not None
    assert got.runner._captured.mixed is None
    assert got.num_forwards > 0


def test_sizes() -> None:
    assert RunnerConfig(max_num_batched_tokens=512, max_model_len=4096).mixed_graph_sizes == tuple(range(64, 513, 64))
    assert RunnerConfig(max_num_batched_tokens=100, max_model_len=4096).mixed_graph_sizes == (64, 128)
    assert RunnerConfig(max_model_len=100).mixed_graph_sizes == (64,)
    assert RunnerConfig(enforce_eager=True).mixed_graph_sizes == ()
    assert RunnerConfig(cuda_graph_mixed_tokens=0).mixed_graph_sizes == ()


def test_logit_rows() -> None:
    assert RunnerConfig(max_num_seqs=32).mixed_logit_rows == 32
    assert RunnerConfig(max_num_seqs=32, num_speculative_tokens=3).mixed_logit_rows == 128
    assert RunnerConfig(max_num_seqs=128, num_speculative_tokens=7).mixed_logit_rows == 256
    assert RunnerConfig(max_num_seqs=32, num_speculative_tokens=9, draft_topk=2).mixed_logit_rows == 32
    assert RunnerConfig(max_num_seqs=128, max_num_batched_tokens=64, max_model_len=64).mixed_logit_rows == 64
    assert RunnerConfig(cuda_graph_mixed_tokens=0).mixed_logit_rows == 0
