"""Decode steps by graphs give the tokens of steps kernel by kernel, whatever the batches do.

The graphs are recorded operations on the CPU (`quire_testkit.recorded_graph`): a replay runs no Python of the step.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from runner_grammar_cases import DigitsSource, constrained, reference
from runner_graph_network import DeviceNetwork, add_torch_ops
from runner_harness import FULL, HYBRID, VOCAB_SIZE, Engine, TinyNetwork, make_request, reference_tokens
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces import ConfigError, Request
from quire_ops import LoraTokens
from quire_runner import RunnerConfig
from quire_runner.graphs import DecodeGraphs
from quire_sampling import SampleMode
from quire_testkit.recorded_graph import record_graph


@pytest.fixture(autouse=True)
def _sample_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_ops(monkeypatch)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
    "penalized": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "penalized and sampled": {"temperature": 0.9, "frequency_penalty": 0.7},
    "log probabilities": {"logprobs": 2},
    "listed": {"logit_bias": {3: 9.0, 4: 8.0, 5: -9.0}, "bad_words_token_ids": ((3, 4), (4, 3, 3), (7,))},
    "listed and drawn": {
        "allowed_token_ids": tuple(range(2, 20)), "temperature": 0.9, "min_tokens": 6, "stop": (2, 3, 5, 7, 11, 13),
        "repetition_penalty": 1.2,
    },
}  # fmt: skip


def requests(kinds: list[str], seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            str(i),
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))],
            max_tokens=rng.randint(3, 16),
            seed=rng.randrange(1 << 30),
            **SAMPLING[rng.choice(kinds)],
        )
        for i in range(9)
    ]


def run_in_waves(engine: Engine, several: list[Request]) -> None:
    """Two requests at once, later more: rows come and go, batches grow and shrink."""
    engine.add(*several[:2])
    for request in several[2:]:
        for _ in range(3):
            engine.step()
        engine.add(request)
    engine.run()


@pytest.mark.parametrize(("windows", "depth"), [(FULL, 1), (HYBRID, 0)], ids=["full, one ahead", "hybrid"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["greedy"],
        ["sampled"],
        ["penalized", "penalized and sampled", "sampled"],
        ["listed", "listed and drawn"],
        list(SAMPLING),
    ],
    ids=["greedy", "sampled", "penalized", "listed", "mixed"],
)
def test_tokens_are_those_of_every_request_alone(kinds: list[str], windows: Any, depth: int) -> None:
    several = requests(kinds, seed=len(kinds) + depth)
    engine = Engine(
        DeviceNetwork(windows), capture=record_graph, depth=depth, reads_apart=depth > 0, max_num_seqs=6, num_blocks=60
    )
    run_in_waves(engine, several)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    sizes = {size for size, _ in graphs.captured}
    assert len(sizes) >= (2 if "log probabilities" in kinds else 3)
    assert sizes <= {1, 2, 4, 6}
    assert any(mode is SampleMode.EDITED for _, mode in graphs.captured) == bool({"penalized", "listed"} & {*kinds})
    for request in several:
        outcome = engine.outcomes[request.request_id]
        assert outcome.token_ids == reference_tokens(engine.network, request)
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_with_grammars_are_in_the_graphs(depth: int) -> None:
    """Beside rows without one, with penalties and without; one grammar breaks half-way, and its row fails alone."""
    sampled = {"temperature": 1.3, "top_k": 9}
    masked = [
        constrained("c", [3, 4], "2,9", frequency_penalty=0.8),
        constrained("d", [4, 9, 2], "3,14", seed=5, **sampled),
    ]
    plain = requests(["greedy", "penalized and sampled"], seed=depth)[:2]
    several = [each for pair in zip(plain, masked, strict=True) for each in pair]
    bad = constrained("bad", [5, 6], "6,20")
    engine = Engine(
        DeviceNetwork(), capture=record_graph, grammars=DigitsSource(jumps=False), depth=depth, max_num_seqs=6
    )
    run_in_waves(engine, [several[1], bad, *several[2:], several[0]])
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.failure is None
    assert len([size for size, mode in engine.runner.graphs.captured if mode is SampleMode.EDITED]) > 1
    assert engine.network.num_forwards < engine.num_steps * 0.6
    for request in several:
        alone = reference_tokens(engine.network, request)
        if request in masked:
            alone = reference(engine.network, request, jumps=False)
        assert engine.outcomes[request.request_id].token_ids == alone, request.request_id
    assert "too complex" in (engine.outcomes["bad"].error or "")
    assert len(engine.outcomes["bad"].token_ids) == 13
    engine.close()


def test_only_the_first_step_of_a_size_runs_python() -> None:
    engine = Engine(DeviceNetwork(), capture=record_graph)
    engine.run(make_request("0", [1, 2, 3], max_tokens=40))
    # The prompt; the step that first wanted a graph; a step before it is captured, and its capture.
    assert engine.network.num_forwards == 4
    engine.run(make_request("1", [4, 5], max_tokens=40))
    assert engine.network.num_forwards == 5
    assert len(engine.outcomes["1"].token_ids) == 40
    engine.close()


def test_preempted_requests_find_their_rows() -> None:
    several = [make_request(str(i), [i, 7, 9], max_tokens=20) for i in range(4)]
    engine = Engine(
        DeviceNetwork(), capture=record_graph, num_blocks=16, max_num_seqs=4, max_model_len=32, prefix_caching=False
    )
    engine.run(*several)
    assert engine.runner.graphs is not None
    assert len(engine.runner.graphs.captured) > 1
    for request in several:
        assert engine.outcomes[request.request_id].token_ids == reference_tokens(engine.network, request)
    engine.close()


class BrokenAt20(DeviceNetwork):
    """Computes NaN for the token at position 20."""

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.where(positions[:, None] == 20, torch.nan, super()._embed(token_ids, positions))


@pytest.mark.parametrize(("logprobs", "mode"), [(None, SampleMode.ARGMAX), (3, SampleMode.OBSERVED)])
def test_a_row_that_fails_fails_alone(logprobs: int | None, mode: SampleMode) -> None:
    engine = Engine(BrokenAt20(), capture=record_graph)
    short = make_request("short", [5, 6], max_tokens=16)
    engine.run(short, make_request("long", [1, 2, 3], max_tokens=40, logprobs=logprobs))
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.failure is None
    assert engine.runner.graphs.captured[0] == (2, mode)
    assert engine.outcomes["short"].token_ids == reference_tokens(engine.network, short)
    assert "NaN" in (engine.outcomes["long"].error or "")
    assert len(engine.outcomes["long"].token_ids) == 18
    engine.close()


class Waiting(DeviceNetwork):
    """Asks the device something in the middle of a step."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        if max(batch.attention[0].query_lens) == 1 and int(batch.positions.max()) < 0:
            raise AssertionError
        return super().forward(batch)


def test_what_cannot_be_captured_runs_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(Waiting(), capture=record_graph)
    request = make_request("0", [1, 2, 3], max_tokens=30)
    engine.run(request)
    assert engine.outcomes["0"].token_ids == reference_tokens(engine.network, request)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert not graphs.captured
    assert "waits" in (graphs.failure or "")
    assert caplog.text.count("cannot be captured") == 1
    engine.close()


@pytest.mark.parametrize(
    ("network", "settings", "why"),
    [
        (TinyNetwork(), {}, "lengths are read on the host by the network"),
        (DeviceNetwork(), {"enforce_eager": True}, "enforce_eager is set"),
    ],
)
def test_why_nothing_is_captured(network: TinyNetwork, settings: dict[str, Any], why: str) -> None:
    engine = Engine(network, capture=record_graph, config=settings)
    assert engine.runner.graphs is None
    assert engine.runner.graph_refusal == why
    engine.close()


def test_graphs_are_prepared_beside_the_steps() -> None:
    may_go_on, threads = threading.Event(), []
    features = torch.full((4, 1), -1)

    def compute(
        spans: Tensor, mode: SampleMode, found: Tensor | None, lora: LoraTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        threads.append(threading.current_thread())
        assert may_go_on.wait(30)
        if found is not None:
            found.copy_(spans[1, :, None])
        return spans[0] * 100 + spans[1], spans[1].float()

    kinds = (SampleMode.ARGMAX,)
    device = torch.device("cpu")
    graphs = DecodeGraphs(compute, (4,), kinds, padding_row=9, device=device, capture=record_graph, features=features)
    rows, starts = np.array([3, 5]), np.array([10, 20])
    with torch.inference_mode():
        assert graphs.find(2, SampleMode.ARGMAX) is None
        assert graphs.find(2, SampleMode.ARGMAX) is None  # not there yet, and nobody waits
        may_go_on.set()
        graphs.wait()
        assert features.tolist() == [[-1]] * 4  # a drafter may be reading those of a step
        graph = graphs.find(2, SampleMode.ARGMAX)
        assert graph is not None
        first = graph.run(rows, starts)
        assert features.tolist() == [[10], [20], [0], [0]]
        assert graphs.find(1, SampleMode.ARGMAX) is graph
        graph.run(rows[:1], starts[:1] + 1)
        assert graphs.find(5, SampleMode.ARGMAX) is None  # more rows than any graph has
        assert graphs.find(2, SampleMode.SAMPLED) is None  # the step knows no other way
    assert first[0].tolist() == [310, 520]
    assert len(threads) == 3
    assert threads[0] is not threads[1] is threads[2] is threading.current_thread()
    graphs.close()


def test_sizes() -> None:
    assert RunnerConfig(max_num_seqs=20).graph_sizes == (1, 2, 4, 8, 16, 20)
    assert RunnerConfig(max_num_seqs=4, cuda_graph_sizes=(3, 64)).graph_sizes == (3, 4)
    assert RunnerConfig(max_num_seqs=4, enforce_eager=True).graph_sizes == ()
    assert RunnerConfig(max_num_seqs=1000).graph_sizes[-2:] == (496, 512)
    with pytest.raises(ConfigError, match="cuda_graph_sizes must be numbers of tokens"):
        RunnerConfig(cuda_graph_sizes=(0,))
