"""Rows with adapters by graphs, with drafts and without: the tokens of networks into which the adapters are merged.

The graphs are recorded operations on the CPU, as in `test_runner_graphs.py`.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
import torch
from runner_graph_network import add_torch_networks
from runner_harness import random_model
from torch import Tensor

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput
from quire_kv_cache import plan_kv_cache
from quire_lora import Adapter, AdapterRuntime, AdapterStore
from quire_lora.adapter import LinearAdapter
from quire_models import DecoderLM
from quire_ops import builtin_table
from quire_runner import ModelRunner, RunnerConfig
from quire_sampling import SampleMode
from quire_testkit.recorded_graph import record_graph

NUM_ROWS = 4
PROMPTS = ([5, 6, 7], list(range(11, 22)), [9, 3], [5, 6, 7])
SLOTS = (1, -1, 0, 2)
"""Of each row. The first and the last one have the same prompt."""
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9),
    "penalized": SamplingParams(temperature=0.9, repetition_penalty=1.3),
}
MODES = {"greedy": SampleMode.ARGMAX, "sampled": SampleMode.SAMPLED, "penalized": SampleMode.EDITED}
RANKS = {0: 3, 1: 16, 2: 7}
BLOCKS = 12


def captured_steps(driver: Any) -> Any:
    graphs = driver.runner.graphs
    assert graphs is not None
    return graphs.captured


@pytest.fixture(autouse=True)
def _only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch)


@functools.cache
def adapter(slot: int, *, shifted: bool = False) -> Adapter:
    """For every other linear layer, of a rank of its own."""
    generator = torch.Generator().manual_seed(100 + slot)
    linears = {}
    slots = random_model("qwen3", max_loras=1).adapters
    assert slots is not None
    for name, site in list(slots.linears.items())[slot % 2 :: 2]:
        outputs, inputs = site.shape
        linears[name] = LinearAdapter(
            a=torch.randn(RANKS[slot], inputs, generator=generator) * inputs**-0.5,
            b=torch.randn(RANKS[slot], outputs, generator=generator) * 0.2,
            shift=torch.randn(outputs, generator=generator) * 0.3 if shifted else None,
        )
    assert len(linears) > 5
    return Adapter(linears=linears)


class Adapters:
    """Where slots are filled from: the version is the slot, with an s behind for shifts."""

    def adapter(self, version: str) -> Adapter:
        return adapter(int(version[0]), shifted=version.endswith("s"))


class Driver:
    """A runner whose requests never end."""

    def __init__(
        self, model: DecoderLM, kind: str, *, slots: tuple[int, ...] = SLOTS, merge_after: int = 0, **config: Any
    ) -> None:
        self.plan = plan_kv_cache(model.config.kv_cache_specs(4, "float32"), num_blocks=1 + NUM_ROWS * BLOCKS)
        limits = {"max_num_seqs": NUM_ROWS, "max_model_len": 48, "num_speculative_tokens": 3}
        device, adapters = None, cast(AdapterStore, Adapters())
        if model.adapters is not None:
            device = AdapterRuntime(model.adapters, adapters, merge_after=merge_after)
        self.runner = ModelRunner.for_model(
            model, self.plan, RunnerConfig(**limits, **config), capture=record_graph, adapters=device
        )
        self.params, self.slots = PARAMS[kind], slots
        self.versions = {slot: str(slot) for slot in RANKS}
        self.num_tokens: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_steps = 0

    def step(self, drafts: dict[int, list[int]]) -> None:
        """One token for each row and its drafts, which are right as far as they are kept; a prompt for new rows."""
        new = [row for row in drafts if row not in self.num_tokens]
        counts = [len(PROMPTS[row]) if row in new else 1 + len(ids) for row, ids in drafts.items()]
        output = SchedulerOutput(
            step_id=self.num_steps,
            rows=list(drafts),
            request_ids=[str(row) for row in drafts],
            num_computed_tokens=[0 if row in new else self.num_tokens[row] - 1 for row in drafts],
            num_scheduled_tokens=counts,
            samples=[True] * len(drafts),
            total_num_scheduled_tokens=sum(counts),
            draft_token_ids={row: ids for row, ids in drafts.items() if ids},
            new_rows=[self._new(row) for row in new],
        )
        self.num_steps += 1
        for row, tokens in zip(drafts, self.runner.run(output).sampled_token_ids, strict=True):
            self.num_tokens[row] = self.num_tokens.get(row, len(PROMPTS[row])) + len(tokens)
            self.tokens[row] = self.tokens.get(row, []) + tokens

    def _new(self, row: int) -> NewRow:
        slot = self.slots[row]
        return NewRow(
            row=row,
            request_id=str(row),
            token_ids=PROMPTS[row],
            num_prompt_tokens=len(PROMPTS[row]),
            num_computed_tokens=0,
            block_ids=(list(range(1 + row * BLOCKS, 1 + (row + 1) * BLOCKS)),),
            sampling_params=self.params,
            seed=row,
            stop_token_ids=frozenset(),
            adapter_slot=slot,
            adapter_version=self.versions.get(slot, ""),
        )


def merged(slot: int) -> DecoderLM:
    """The network with an adapter in its weights."""
    linears = {} if slot < 0 else adapter(slot).linears

    def change(name: str, weight: Tensor) -> Tensor:
        found = linears.get(name.removesuffix(".weight"))
        return weight if found is None else (weight.double() + found.b.double().T @ found.a.double()).float()

    return random_model("qwen3", change=change)


def alone(kind: str, num_steps: int) -> dict[int, list[int]]:
    """Tokens of each row, by a network of its own, kernel by kernel."""
    tokens = {}
    for row, slot in enumerate(SLOTS):
        driver = Driver(merged(slot), kind, slots=(-1,) * NUM_ROWS, enforce_eager=True)
        for _ in range(num_steps):
            driver.step({row: []})
        tokens[row] = driver.tokens[row]
    return tokens


def count_steps(model: DecoderLM) -> list[int]:
    """Gets the number of tokens of every step that runs Python of the network."""
    sizes: list[int] = []
    forward = model.forward

    def counting(batch: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return forward(batch)

    model.forward = counting  # type: ignore[method-assign]
    return sizes


def check(driver: Driver, expected: dict[int, list[int]], kind: str) -> None:
    for row, tokens in driver.tokens.items():
        assert tokens == expected[row][: len(tokens)]
    graphs = driver.runner.graphs
    assert graphs is not None
    assert graphs.failure is None
    assert {mode for _, mode in graphs.captured} == {MODES[kind]}


@pytest.mark.parametrize("kind", PARAMS)
def test_rows_have_their_own_adapters(kind: str) -> None:
    """Rows come, and go out of steps in which they were; rows without an adapter are beside others, and alone."""
    expected = alone(kind, 14)
    assert expected[0] != expected[3]  # the same prompt
    model = random_model("qwen3", max_loras=3)
    driver = Driver(model, kind, cuda_graph_sizes=(2, 4))
    steps = count_steps(model)
    for rows in (
        [0, 1],
        [0, 1],
        [1, 0],
        [0],
        [1],
        [1],
        [1],
        [1, 0],
        [2],
        [2, 0],
        [3, 1],
        [3],
        [1, 2, 3, 0],
        [0, 3, 2, 1],
    ):
        driver.step({row: [] for row in rows})
    check(driver, expected, kind)
    served = len(captured_steps(driver))
    assert served == 3  # two with adapters, one without
    driver.step({0: [], 1: [], 2: []})
    # Prompts; of each graph the first step, one before the capture, and the capture.
    assert len(steps) == 3 + 3 * served
    driver.runner.close()


@pytest.mark.parametrize("kind", PARAMS)
def test_drafts_of_rows_with_adapters_are_verified(kind: str) -> None:
    expected = alone(kind, 14)
    model = random_model("qwen3", max_loras=3)
    driver = Driver(model, kind, cuda_graph_sizes=(16,))
    steps = count_steps(model)
    driver.step({row: [] for row in range(NUM_ROWS)})
    lengths = ((3, 1, 0, 2), (0, 2, 3, 1), (1, 3, 1, 0), (2, 0, 2, 3))
    for wrong_from, of_rows in zip((9, 1, 2, 9), lengths, strict=True):
        drafts: dict[int, list[int]] = {}
        for row in (2, 0, 3, 1):
            ids = expected[row][len(driver.tokens[row]) :][: of_rows[row]]
            drafts[row] = [(token + (i >= wrong_from)) % 101 for i, token in enumerate(ids)]
        driver.step(drafts)
    check(driver, expected, kind)
    assert max(map(len, driver.tokens.values())) > 8
    assert len(steps) == 4  # the prompts, the first step, one before the capture, and the capture
    driver.runner.close()


def test_slots_may_be_filled_anew() -> None:
    """What graphs were captured with is not what is in the slots later: other matrices, of other ranks."""
    driver = Driver(random_model("qwen3", max_loras=3), "greedy", slots=(0, 0, 0, 0), cuda_graph_sizes=(2,))
    driver.versions[0] = "0"
    for _ in range(4):
        driver.step({0: []})
    assert len(captured_steps(driver)) == 1
    driver.versions[0] = "1"
    for _ in range(6):
        driver.step({1: []})
    other = Driver(merged(1), "greedy", slots=(-1,) * NUM_ROWS, enforce_eager=True)
    for _ in range(6):
        other.step({1: []})
    assert driver.tokens[1] == other.tokens[1]
    driver.runner.close()


def test_an_adapter_in_the_weights_needs_no_graph_with_adapters() -> None:
    """Weights change under a graph that was captured before, and back again."""
    model = random_model("qwen3", max_loras=3)
    driver = Driver(model, "greedy", cuda_graph_sizes=(2,), merge_after=2)
    for _ in range(4):
        driver.step({1: []})
    plain = captured_steps(driver)
    assert len(plain) == 1
    num_steps = 2 + len(adapter(1).linears)
    for _ in range(num_steps):
        driver.step({0: []})
    assert driver.runner.rows.adapter_slots[0] == 1
    assert driver.runner.rows.lora_slots[0] == -1
    both, steps = captured_steps(driver), count_steps(model)
    assert len(both) == 2
    for _ in range(3):
        driver.step({0: []})
    for _ in range(3):
        driver.step({1: []})
    for _ in range(3):
        driver.step({0: [], 1: []})
    assert not steps  # graphs that were there
    expected = alone("greedy", num_steps + 6)
    check(driver, {row: expected[row] for row in (0, 1)}, "greedy")
    driver.runner.close()


def test_adapters_with_shifts_are_in_graphs() -> None:
    """Beside others, and in graphs that were captured with others."""
    model = random_model("qwen3", max_loras=3)
    driver = Driver(model, "greedy", cuda_graph_sizes=(2,))
    driver.versions[1] = "1s"
    for _ in range(5):
        driver.step({0: []})
    assert len(captured_steps(driver)) == 1
    steps = count_steps(model)
    for row in (1, 1, 0, 1, 1, 0, 1, 0, 1):
        driver.step({row: []})
    assert len(steps) == 4  # row 1's prompt, its first step, one before the capture of its graph, and the capture
    check(driver, {**alone("greedy", 9), 0: driver.tokens[0]}, "greedy")
    eager = Driver(random_model("qwen3", max_loras=3), "greedy", enforce_eager=True)
    eager.versions[1] = "1s"
    for _ in range(8):
        eager.step({0: []})
    assert driver.tokens[0] == eager.tokens[0]
    driver.runner.close()


def test_a_backend_that_reads_slots_on_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = builtin_table()
    monkeypatch.setattr("quire_lora.slots.op_table", lambda: table)
    model = random_model("qwen3", max_loras=3)
    assert model.adapters is not None
    assert model.adapters.capture_refusal == "op lora_linear of backend torch finds tokens on the host"
    driver = Driver(model, "greedy", cuda_graph_sizes=(2,))
    for _ in range(6):
        driver.step({0: []})
    assert driver.tokens[0] == alone("greedy", 6)[0]
    graphs = driver.runner.graphs
    assert graphs is not None
    assert (graphs.captured, graphs.failure) == ((), None)
    driver.runner.close()
