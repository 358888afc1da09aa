"""Steps beside drafters that read the network's hidden states, by graphs: the tokens and the drafts of eager steps.

The graphs are recorded operations on the CPU, as in `test_runner_graphs.py`. Heads of random weights are mostly wrong,
so that what is verified are true continuations, spoilt here and there: what heads propose is kept, and compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from runner_drafting import NUM_DRAFTS, SITUATIONS, Engine, runner_of
from runner_graph_network import add_torch_networks
from runner_harness import make_request, random_model
from test_runner_draft_networks import eagle_head
from test_runner_medusa import NUM_LAYERS, load_heads, random_heads
from test_runner_mtp import Checkpoint

from quire_interfaces import Request, SchedulerOutput
from quire_models import Network, load_model
from quire_models.config import ModelConfig
from quire_models.draft_heads.mtp_config import mtp_config
from quire_sampling import SampleMode
from quire_spec_decode import Draft
from quire_spec_decode.row_drafter import DraftStep, RowDrafter
from quire_testkit.recorded_graph import record_graph

SIZES = (3, 9, 16)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3},
}
MODES = {"greedy": SampleMode.ARGMAX, "sampled": SampleMode.SAMPLED, "penalized": SampleMode.EDITED}
CASES = [
    ("eagle3", "sampled", "chunks of prompts"),
    ("eagle3", "penalized", "preemption"),
    ("eagle3", "greedy", "asynchronous"),
    ("eagle", "sampled", "preemption"),
    ("medusa", "penalized", "chunks of prompts"),
    ("mtp", "greedy", "chunks of prompts"),
]


@pytest.fixture(autouse=True)
def _only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch)


class DenseCheckpoint(Checkpoint):
    """Torch's experts ask the device how many tokens each has, and cannot be captured."""

    fields: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 3}


def networks(drafter: str, folder: Path) -> tuple[Network, Network]:
    """A target, and what drafts for it."""
    if drafter == "mtp":
        config = ModelConfig.from_path(DenseCheckpoint(folder, "Glm4MoeForCausalLM").folder)
        return load_model(config, folder, dtype="float32"), load_model(mtp_config(config), folder, dtype="float32")
    target = random_model("llama")
    if drafter == "medusa":
        fields = {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": NUM_LAYERS}
        return target, load_heads(folder, target, random_heads(target), fields)
    return target, eagle_head(target, kind=drafter, draft_vocab_size=80 if drafter == "eagle3" else 101)


def requests(kind: str) -> list[Request]:
    return [
        make_request(
            f"r{i}",
            [(7 * i + j * j) % 101 for j in range(3 + 7 * i)],
            max_tokens=9 + 4 * i,
            seed=i,
            **SAMPLING[kind],
        )
        for i in range(4)
    ]


class Guided(RowDrafter):
    """Asks a drafter, keeps what it says, and drafts true continuations instead: none, one or several tokens, some of
    them spoilt."""

    def __init__(self, asked: RowDrafter, engine: Engine, sequences: list[list[int]]) -> None:
        self._asked = asked
        self._rows = runner_of(engine).rows
        self._sequences = sequences
        self.feature_layers, self.wants_hidden = asked.feature_layers, asked.wants_hidden
        self.said: list[tuple[list[int], list[int]]] = []
        """(tokens of a row, what was proposed to follow)."""

    def begin(self, output: SchedulerOutput) -> None:
        self._asked.begin(output)

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        for row, draft in self._asked.propose(step).items():
            self.said.append((list(self._rows.history(row)), draft.token_ids))
        found = {row: self._continuation(row, limit) for row, limit in step.limits.items()}
        return {row: Draft(token_ids) for row, token_ids in found.items() if token_ids}

    def _continuation(self, row: int, limit: int) -> list[int]:
        known = list(self._rows.history(row))
        sequence = next((each for each in self._sequences if each[: len(known)] == known), [])
        places = range(len(known), min(len(known) + min(limit, len(known) * 7 % 4), len(sequence)))
        return [(sequence[i] + (i % 5 == 0)) % 101 for i in places]


def guide(engine: Engine, sequences: list[list[int]]) -> Guided:
    drafting = runner_of(engine)._drafting
    drafting.drafter = Guided(drafting.drafter, engine, sequences)
    return drafting.drafter


def count_steps(network: Network) -> list[int]:
    """Gets the number of tokens of every step that runs Python of the network."""
    sizes: list[int] = []
    for name in ("forward", "forward_with_features"):
        function = getattr(network, name)

        def counting(batch: Any, *more: Any, function: Any = function) -> Any:
            sizes.append(len(batch.input_ids))
            return function(batch, *more)

        setattr(network, name, counting)
    return sizes


@pytest.mark.parametrize(("drafter", "kind", "situation"), CASES)
def test_tokens_and_drafts_are_those_of_eager_steps(drafter: str, kind: str, situation: str, tmp_path: Path) -> None:
    target, head = networks(drafter, tmp_path)
    alone = {name: ids for each in requests(kind) for name, ids in Engine(target).run(each).items()}
    sequences = [[*each.prompt_token_ids, *alone[each.request_id]] for each in requests(kind)]
    eager = Engine(target, head, **SITUATIONS[situation])
    expected = guide(eager, sequences)
    assert eager.run(*requests(kind)) == alone
    engine = Engine(target, head, capture=record_graph, graph_sizes=SIZES, **SITUATIONS[situation])
    guided = guide(engine, sequences)
    assert engine.run(*requests(kind)) == alone
    assert guided.said == expected.said
    assert len(guided.said) > 20
    assert 0.2 < engine.acceptance < 1
    graphs = runner_of(engine).graphs
    assert graphs is not None
    assert graphs.failure is None
    assert len(graphs.captured) >= 2
    assert {mode for _, mode in graphs.captured} == {MODES[kind]}
    if situation == "preemption":
        assert engine.scheduler.stats().num_preemptions_total > 0
    engine.executor.close()
    eager.executor.close()


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_steps_with_prompts_leave_what_heads_read(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads read every token of a prompt, in whichever order requests are in the step."""
    add_torch_networks(monkeypatch, with_prompts=True)
    target, head = networks(drafter, tmp_path)
    eager = Engine(target, head, **SITUATIONS["chunks of prompts"])
    alone = eager.run(*requests("greedy"))
    assert alone == {name: ids for each in requests("greedy") for name, ids in Engine(target).run(each).items()}
    engine = Engine(target, head, capture=record_graph, graph_sizes=(16,), **SITUATIONS["chunks of prompts"])
    runner_of(engine).warm_up(capture_s=1e9)
    steps = count_steps(target)
    assert engine.run(*requests("greedy")) == alone
    assert engine.proposals == eager.proposals
    assert len(engine.proposals) > 20
    assert steps == []
    engine.executor.close()
    eager.executor.close()


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_only_the_first_step_of_a_size_runs_python(drafter: str, tmp_path: Path) -> None:
    target, head = networks(drafter, tmp_path)
    engine = Engine(target, head, capture=record_graph, graph_sizes=(4,))
    steps = count_steps(target)
    engine.run(make_request("0", [1, 2, 3], max_tokens=30))
    assert len(engine.proposals) > 20
    # The prompt; the step that first wanted a graph; a step before it is captured, and its capture.
    assert steps == [3, 4, 4, 4]
    engine.run(make_request("1", [4, 5], max_tokens=30))
    assert steps[4:] == [2]
    engine.executor.close()
