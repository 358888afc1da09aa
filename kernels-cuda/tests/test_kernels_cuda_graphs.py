"""Whole decode steps made of Triton kernels, by graphs: the tokens of steps that are launched kernel by kernel.

With a GPU the graphs are CUDA's. Without one they are recorded: launches of interpreted kernels, done again with the
same tensors and numbers. So nothing that differs between steps may come from the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernels_cuda_support import DEVICE

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput
from quire_kernels_cuda.ops import backends
from quire_kv_cache import plan_kv_cache
from quire_lora import Adapter, AdapterDevice, AdapterStore
from quire_lora.adapter import LinearAdapter
from quire_models import ModelConfig, Network, build_model
from quire_ops import OpRequest, OpTable, builtin_table
from quire_runner import ModelRunner, RunnerConfig
from quire_runner.graphs import Choice
from quire_testkit.recorded_graph import record_graph

BLOCK = 16
PROMPTS = ([5, 6, 7], list(range(11, 22)), [9])
NETWORK: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 11,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}


LATENT_NETWORK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 5,
    "max_position_embeddings": 64,
}


def triton_table() -> OpTable:
    """Triton's kernels before all others, which they are not where they are interpreted."""
    table = builtin_table()
    for backend in backends():
        table.add(dataclasses.replace(backend, priority=10))
    return table


@pytest.fixture(autouse=True)
def _triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    table = triton_table()
    for place in (
        "quire_ops.backends",
        "quire_models.layers.scope",
        "quire_attention.selection",
        "quire_lora.slots",
        "quire_runner.runner",
    ):
        monkeypatch.setattr(f"{place}.op_table", lambda: table)


class Driver:
    """A runner whose requests never end."""

    def __init__(self, network: dict[str, Any] = NETWORK, *, max_loras: int = 0, **config: Any) -> None:
        model = build_model(
            ModelConfig.from_dict(network), dtype="float32", device=DEVICE, max_loras=max_loras, max_lora_rank=4
        )
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters:
            scale = parameter.shape[-1] ** -0.5 * 1.5 if len(parameter.shape) > 1 else 1.0
            parameter.tensor = (torch.randn(parameter.shape, generator=generator) * scale).to(DEVICE)
        model.finish_loading()
        assert not model.host_lengths
        self.plan = plan_kv_cache(model.config.kv_cache_specs(BLOCK, "float32"), num_blocks=32)
        config = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 3, "max_model_len": 64, **config}
        config = {"cuda_graph_sizes": (2,), **config}
        capture = None if DEVICE == "cuda" else record_graph
        self.slots = tuple(row % max_loras if max_loras and row else -1 for row in range(3))
        self.runner = ModelRunner.for_model(
            model, self.plan, RunnerConfig(**config), capture=capture, adapters=_placed(model, max_loras)
        )
        self.num_tokens: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {row: [] for row in range(3)}
        self._step = 0

    def step(self, rows: list[int]) -> None:
        """A prompt for each row that is new, one token for the others."""
        new = [row for row in rows if row not in self.num_tokens]
        counts = [len(PROMPTS[row]) if row in new else 1 for row in rows]
        output = SchedulerOutput(
            step_id=self._step,
            rows=rows,
            request_ids=[str(row) for row in rows],
            num_computed_tokens=[0 if row in new else self.num_tokens[row] - 1 for row in rows],
            num_scheduled_tokens=counts,
            samples=[True] * len(rows),
            total_num_scheduled_tokens=sum(counts),
            new_rows=[self._new(row) for row in new],
        )
        self._step += 1
        for row, tokens in zip(rows, self.runner.execute(output).sampled_token_ids, strict=True):
            self.num_tokens[row] = self.num_tokens.get(row, len(PROMPTS[row])) + 1
            self.tokens[row] += tokens
        if self.runner.graphs is not None:
            self.runner.graphs.wait()

    def verify(self, drafts: dict[int, list[int]]) -> None:
        """Rows with drafts behind their last token, which are right as far as they are kept."""
        counts = [1 + len(ids) for ids in drafts.values()]
        output = SchedulerOutput(
            step_id=self._step,
            rows=list(drafts),
            request_ids=[str(row) for row in drafts],
            num_computed_tokens=[self.num_tokens[row] - 1 for row in drafts],
            num_scheduled_tokens=counts,
            samples=[True] * len(drafts),
            total_num_scheduled_tokens=sum(counts),
            draft_token_ids={row: ids for row, ids in drafts.items() if ids},
        )
        self._step += 1
        for row, tokens in zip(drafts, self.runner.execute(output).sampled_token_ids, strict=True):
            self.num_tokens[row] += len(tokens)
            self.tokens[row] += tokens
        if self.runner.graphs is not None:
            self.runner.graphs.wait()

    def _new(self, row: int) -> NewRow:
        ids = list(range(1 + 4 * row, 5 + 4 * row))
        return NewRow(
            row=row,
            request_id=str(row),
            token_ids=PROMPTS[row],
            num_prompt_tokens=len(PROMPTS[row]),
            num_computed_tokens=0,
            block_ids=tuple([12 * group + block for block in ids] for group in range(len(self.plan.groups))),
            sampling_params=PARAMS[row],
            seed=row,
            stop_token_ids=frozenset(),
            adapter_slot=self.slots[row],
            adapter_version=str(self.slots[row]) if self.slots[row] >= 0 else "",
        )


def _placed(model: Network, max_loras: int) -> AdapterDevice | None:
    """A random adapter in each slot."""
    if model.adapters is None:
        return None
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    for slot in range(max_loras):
        linears = {
            name: LinearAdapter(a=random(2 + slot, site.shape[1]), b=random(2 + slot, site.shape[0]))
            for name, site in model.adapters.linears.items()
        }
        model.adapters.place(slot, str(slot), Adapter(linears=linears))
    return AdapterDevice(model.adapters, AdapterStore(model.adapters, model.parameter_tensors, max_adapters=1))


STEPS = [[0, 1], [0, 1], [1, 0], [0], [0], [2, 1], [1, 2], [0, 2]]
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=1.2, frequency_penalty=1.9, repetition_penalty=1.5),
)


def test_tokens_are_those_of_eager_steps() -> None:
    eager, graphs = Driver(enforce_eager=True), Driver()
    for rows in STEPS:
        eager.step(rows)
        graphs.step(rows)
    assert graphs.tokens == eager.tokens
    assert eager.runner.graphs is None
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert set(graphs.runner.graphs.captured) == {(2, choice) for choice in Choice if choice is not Choice.OBSERVED}


def test_rows_with_adapters_are_in_the_graphs() -> None:
    plain, eager = Driver(enforce_eager=True), Driver(max_loras=2, enforce_eager=True)
    graphs = Driver(max_loras=2, num_speculative_tokens=3, cuda_graph_sizes=(2, 9))
    for rows in (*STEPS[:3], [2, 1], [1, 2]):
        for driver in (plain, eager, graphs):
            driver.step(rows)
    assert graphs.tokens == eager.tokens
    assert eager.tokens[0] == plain.tokens[0]
    assert eager.tokens[1] != plain.tokens[1]
    for lengths in ((1, 2, 0), (0, 1, 2), (2, 0, 1)):
        for _ in range(3):
            eager.step([0, 1, 2])
        drafts = {row: eager.tokens[row][len(graphs.tokens[row]) :][:length] for row, length in enumerate(lengths)}
        graphs.verify(drafts)
    for row, tokens in graphs.tokens.items():
        assert tokens == eager.tokens[row][: len(tokens)]
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert {size for size, _ in graphs.runner.graphs.captured} == {2, 9}


@pytest.mark.parametrize("network", [NETWORK, LATENT_NETWORK], ids=["window", "latent"])
def test_drafts_are_verified_as_in_steps_of_one_token(network: dict[str, Any]) -> None:
    """Greedy, drawn and penalized rows; their right tokens are taken from steps without drafts."""
    plain = Driver(network, enforce_eager=True)
    for _ in range(12):
        plain.step([0, 1, 2])
    graphs = Driver(network, num_speculative_tokens=3, cuda_graph_sizes=(9,))
    graphs.step([0, 1, 2])
    for lengths, wrong_from in (((3, 1, 0), 9), ((2, 3, 1), 1), ((0, 2, 3), 2), ((3, 0, 3), 9)):
        drafts: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            ids = plain.tokens[row][len(graphs.tokens[row]) :][:length]
            drafts[row] = [(token + (i >= wrong_from)) % 31 for i, token in enumerate(ids)]
        graphs.verify(drafts)
    assert max(map(len, graphs.tokens.values())) > 8
    for row, tokens in graphs.tokens.items():
        assert tokens[:12] == plain.tokens[row][: len(tokens)]
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert graphs.runner.graphs.captured == ((9, Choice.EDITED),)


def test_a_network_with_sparse_latent_attention() -> None:
    """From fewer tokens than the index finds to more."""
    eager, graphs = Driver(LATENT_NETWORK, enforce_eager=True), Driver(LATENT_NETWORK)
    for _ in range(6):
        eager.step([0])
        graphs.step([0])
    assert graphs.tokens == eager.tokens
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert set(graphs.runner.graphs.captured) == {(2, Choice.MOST_LIKELY)}


def test_every_kernel_of_a_step_is_ours() -> None:
    table = triton_table()
    request = OpRequest(device=DEVICE, sizes={"head_dim": 16, "queries_per_kv_head": 2})
    for op in (
        "decode_inputs",
        "paged_attention",
        "draw",
        "draw_masked",
        "penalize",
        "lm_head_argmax",
        "rms_norm",
        "rotate_and_write",
    ):
        assert table.choose(op, request)[0].name == "triton"


RECURRENT_NETWORKS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
        "tie_word_embeddings": True,
    },
    "gated delta net": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", RECURRENT_NETWORKS)
def test_states_of_recurrent_networks_move_on(name: str) -> None:
    """Steps without drafts, by graphs; those with drafts hold states back, and run kernel by kernel between them."""
    network = RECURRENT_NETWORKS[name]
    eager, graphs = Driver(network, enforce_eager=True), Driver(network, num_speculative_tokens=3)
    for rows in STEPS[:6]:
        for driver in (eager, graphs):
            driver.step(rows)
    assert graphs.tokens == eager.tokens
    for _ in range(3):
        eager.step([0, 1])
    wanted = {row: eager.tokens[row][len(graphs.tokens[row]) :] for row in (0, 1)}
    before = graphs.runner.graphs.captured
    graphs.verify({0: [wanted[0][0], (wanted[0][1] + 1) % 31], 1: wanted[1][:1]})
    assert graphs.runner.graphs.captured == before
    graphs.step([1, 0])
    for row in (0, 1):
        assert graphs.tokens[row] == eager.tokens[row][: len(graphs.tokens[row])]
    assert graphs.runner.graphs.failure is None
    assert graphs.runner.graphs.captured
