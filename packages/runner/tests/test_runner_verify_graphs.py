"""Steps that verify chains of drafts, by graphs: the tokens of every request alone, whatever is drafted.

The graphs are recorded operations on the CPU, as in `test_runner_graphs.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runner_grammar_cases import DigitsSource, constrained, reference
from runner_graph_network import DeviceNetwork, add_torch_ops
from runner_harness import FULL, HYBRID, VOCAB_SIZE, Engine, make_request, reference_tokens

from quire_interfaces import Request
from quire_runner import RunnerConfig
from quire_runner.output import PendingResult
from quire_runner.step import Step
from quire_sampling import SampleMode, SamplingConfig
from quire_spec_decode import NgramDrafter
from quire_testkit.recorded_graph import record_graph


@pytest.fixture(autouse=True)
def _sample_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_ops(monkeypatch)


class UnevenOracle:
    """Drafts the true continuation of known sequences: none, one or several tokens, every third of them spoilt."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences

    def propose(self, token_ids: Any, max_tokens: int) -> list[int]:
        known = list(token_ids)
        for number, sequence in enumerate(self._sequences):
            if sequence[: len(known)] == known:
                length = min(max_tokens, (len(known) * 7 + number * 3) % 5)
                places = range(len(known), min(len(known) + length, len(sequence)))
                return [(sequence[i] + (i % 3 == 0)) % VOCAB_SIZE for i in places]
        return []


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
    "penalized": {"temperature": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
}
SIZES = {"cuda_graph_sizes": (3, 10, 25)}
MODES = {"greedy": SampleMode.ARGMAX, "sampled": SampleMode.SAMPLED, "penalized": SampleMode.EDITED}


def requests(kind: str) -> list[Request]:
    return [
        make_request(f"r{i}", range(i, i + 3 + 2 * i), max_tokens=14 + 3 * i, seed=40 + i, **SAMPLING[kind])
        for i in range(5)
    ]


def oracle(network: DeviceNetwork, several: list[Request]) -> tuple[UnevenOracle, dict[str, list[int]]]:
    alone = {request.request_id: reference_tokens(network, request) for request in several}
    return UnevenOracle([[*each.prompt_token_ids, *alone[each.request_id]] for each in several]), alone


def count_graph_steps(engine: Engine) -> list[int]:
    """Gets the number of drafts of every step that a graph served."""
    served: list[int] = []
    captured = engine.runner._captured
    assert captured is not None
    try_run = captured.try_run

    def counting(step: Step) -> PendingResult | None:
        pending = try_run(step)
        if pending is not None:
            served.append(sum(map(len, step.output.draft_token_ids.values())))
        return pending

    captured.try_run = counting  # type: ignore[method-assign]
    return served


@pytest.mark.parametrize(
    ("windows", "situation"),
    [
        (FULL, {}),
        (HYBRID, {}),
        (FULL, {"depth": 1, "reads_apart": True}),
        (FULL, {"num_blocks": 30, "prefix_caching": False, "max_model_len": 48}),
    ],
    ids=["full", "hybrid", "one ahead", "preemption"],
)
@pytest.mark.parametrize("kind", list(SAMPLING))
def test_tokens_are_those_of_every_request_alone(kind: str, windows: Any, situation: dict[str, Any]) -> None:
    """Rows with several drafts, one and none are in one step; some are right."""
    network = DeviceNetwork(windows)
    several = requests(kind)
    drafter, alone = oracle(network, several)
    engine = Engine(network, capture=record_graph, config=SIZES, num_speculative_tokens=4, drafter=drafter, **situation)
    served = count_graph_steps(engine)
    engine.add(*several[:2])
    for _ in range(4):
        engine.step()
    outcomes = engine.run(*several[2:])
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == alone
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    assert {mode for _, mode in graphs.captured} == {MODES[kind]}
    assert sum(drafts > 0 for drafts in served) > 3
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total
    engine.close()


def test_samples_of_one_prompt_have_their_own_drafts() -> None:
    """The rows of n = 4 share the blocks of their prompt, and differ in their seeds only."""
    network = DeviceNetwork()
    several = [make_request(f"n{i}", range(3, 15), max_tokens=16, seed=i, temperature=1.1) for i in range(4)]
    drafter, alone = oracle(network, several)
    assert len({tuple(ids) for ids in alone.values()}) == 4
    engine = Engine(network, capture=record_graph, config=SIZES, num_speculative_tokens=4, drafter=drafter)
    served = count_graph_steps(engine)
    engine.add(several[0])
    engine.step()
    outcomes = engine.run(*several[1:])
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == alone
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_hit_tokens_total >= 3 * 8
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total
    assert sum(drafts > 0 for drafts in served) > 3
    engine.close()


def test_steps_without_drafts_are_captured_beside_a_drafter() -> None:
    engine = Engine(DeviceNetwork(), capture=record_graph, num_speculative_tokens=4, drafter=UnevenOracle([]))
    served = count_graph_steps(engine)
    request = make_request("0", [1, 2, 3], max_tokens=30)
    assert engine.run(request)["0"].token_ids == reference_tokens(engine.network, request)
    assert len(served) == 28  # but the prompt, and the step that first wanted a graph
    engine.close()


def test_rows_with_grammars_have_drafts_in_graphs() -> None:
    masked = [constrained("c", [3, 4], "2,9"), constrained("d", [4, 9, 2], "3,14", seed=5, temperature=1.3)]
    network = DeviceNetwork()
    alone = {each.request_id: reference(network, each, jumps=False) for each in masked}
    drafter = UnevenOracle([[*each.prompt_token_ids, *alone[each.request_id]] for each in masked])
    engine = Engine(
        network, capture=record_graph, grammars=DigitsSource(jumps=False), num_speculative_tokens=4, drafter=drafter
    )
    served = count_graph_steps(engine)
    outcomes = engine.run(*masked)
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == alone
    assert any(served)
    engine.close()


def test_certain_tokens_run_kernel_by_kernel() -> None:
    """Those that a grammar forces need no logits, and get none."""
    masked = constrained("c", [3, 4], "2,9")
    network = DeviceNetwork()
    engine = Engine(
        network, capture=record_graph, grammars=DigitsSource(jumps=True), num_speculative_tokens=4,
        drafter=NgramDrafter(1, 3),
    )  # fmt: skip
    outcomes = engine.run(masked)
    assert outcomes["c"].token_ids == reference(network, masked, jumps=True)
    engine.close()


class BrokenAt20(DeviceNetwork):
    """Computes NaN for the token at position 20."""

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.where(positions[:, None] == 20, torch.nan, super()._embed(token_ids, positions))


def test_a_row_that_fails_fails_alone() -> None:
    network = BrokenAt20()
    short, long = make_request("short", [5, 6], max_tokens=16), make_request("long", [1, 2, 3], max_tokens=40)
    drafter, alone = oracle(network, [short])
    drafter._sequences.append([1, 2, 3, *reference_tokens(network, make_request("", [1, 2, 3], max_tokens=18))])
    engine = Engine(network, capture=record_graph, num_speculative_tokens=4, drafter=drafter)
    engine.run(short, long)
    assert engine.outcomes["short"].token_ids == alone["short"]
    assert "NaN" in (engine.outcomes["long"].error or "")
    engine.close()


def test_sizes_count_drafts() -> None:
    assert RunnerConfig(max_num_seqs=4, num_speculative_tokens=4).graph_sizes == (1, 2, 4, 8, 16, 20)
    assert RunnerConfig(max_num_seqs=4, num_speculative_tokens=9, draft_topk=3).graph_sizes == (1, 2, 4)
    assert RunnerConfig(max_num_seqs=4, num_speculative_tokens=4, max_num_batched_tokens=10).graph_sizes[-1] == 10
    # No more memory than without drafts, where there are many rows.
    assert RunnerConfig(max_num_seqs=200, num_speculative_tokens=4).graph_sizes[-1] == 256
    assert RunnerConfig(max_num_seqs=256, num_speculative_tokens=4).graph_sizes[-1] == 256
    named = RunnerConfig(max_num_seqs=200, num_speculative_tokens=4, cuda_graph_sizes=(8, 500))
    assert named.graph_sizes == (8, 500)


@pytest.mark.parametrize(("kind", "most"), [*((kind, 5) for kind in SAMPLING), ("sampled", 32), ("sampled", 33)])
def test_log_probabilities_beside_drafts(kind: str, most: int) -> None:
    """They are those of the raw logits behind each token that was right; rows that want none get none. Steps with a row
    that wants a great many run kernel by kernel."""
    network = DeviceNetwork()
    wanted = {"r0": 2, "r2": 0, "r3": most}
    several = [
        make_request(
            each.request_id,
            each.prompt_token_ids,
            max_tokens=each.max_tokens,
            seed=each.seed,
            logprobs=wanted.get(each.request_id),
            **SAMPLING[kind],
        )
        for each in requests(kind)
    ]
    drafter, alone = oracle(network, requests(kind))
    limits = SamplingConfig(max_logprobs=VOCAB_SIZE)
    engine = Engine(
        network,
        capture=record_graph,
        config=SIZES,
        num_speculative_tokens=4,
        drafter=drafter,
        sampling_config=limits,
    )
    served = count_graph_steps(engine)
    outcomes = engine.run(*several)
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == alone
    for request in several:
        found = outcomes[request.request_id].logprobs
        if request.request_id not in wanted:
            assert not found
            continue
        tokens = alone[request.request_id]
        logits = network.dense_logits([*request.prompt_token_ids, *tokens])[request.num_prompt_tokens - 1 : -1]
        expected = logits.double().log_softmax(-1)
        assert len(found) == len(tokens)
        for token, each, scores in zip(tokens, found, expected, strict=True):
            best = scores.topk(wanted[request.request_id])
            assert each.token_ids == [token, *best.indices.tolist()]
            assert each.rank == 1 + int((scores > scores[token]).sum())
            assert (torch.tensor(each.logprobs).double() - scores[each.token_ids]).abs().max() < 1e-5
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    if most <= 32:
        assert sum(drafts > 0 for drafts in served) > 3
        assert SampleMode.OBSERVED in {mode for _, mode in graphs.captured}
    else:
        assert len(served) < 3  # after that row has ended
    engine.close()
