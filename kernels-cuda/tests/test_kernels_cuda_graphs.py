"""Whole decode steps made of Triton kernels, by graphs: the tokens of steps that are launched kernel by kernel.

With a GPU the graphs are CUDA's. Without one they are recorded: launches of interpreted kernels, done again with the
same tensors and numbers. So nothing that differs between steps may come from the host.
"""

from __future__ import annotations

from typing import Any

import pytest
from kernels_cuda_runner import NETWORK, Driver, triton_table, use_triton
from kernels_cuda_support import DEVICE

from quire_ops import OpRequest, ops
from quire_runner import config
from quire_sampling import SampleMode

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
    # So many that no score is zero because all heads' are: of equal scores torch's topk takes any.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 5,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)


STEPS = [[0, 1], [0, 1], [1, 0], [0], [0], [2, 1], [1, 2], [0, 2]]


def test_tokens_are_those_of_eager_steps() -> None:
    eager, graphs = Driver(enforce_eager=True), Driver()
    for rows in STEPS:
        eager.step(rows)
        graphs.step(rows)
    assert graphs.tokens == eager.tokens
    assert eager.runner.graphs is None
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert set(graphs.runner.graphs.captured) == {(2, mode) for mode in SampleMode if mode < SampleMode.OBSERVED}


@pytest.mark.parametrize("network", ["windows", "latent"])
def test_prompts_beside_decodes_are_in_graphs(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """A prompt alone, and one beside a decode; full and sliding windows, and latent and sparse attention."""
    monkeypatch.setattr(config, "MIXED_GRAPH_STEP", 16)  # fewer tokens, for interpreting takes its time
    fields = NETWORK if network == "windows" else LATENT_NETWORK
    eager, graphs = Driver(fields, enforce_eager=True), Driver(fields, cuda_graph_mixed_tokens=16)
    captured = graphs.runner._captured
    assert captured is not None
    assert captured.mixed is not None
    captured.mixed.graphs.capture(0.0)
    for _ in range(2):  # of greedy and of sampled requests
        captured.mixed.graphs.capture_left()
    served, try_run = [], captured.mixed.try_run

    def counted(step: Any) -> Any:
        pending = try_run(step)
        served.append(pending is not None)
        return pending

    captured.mixed.try_run = counted  # type: ignore[method-assign]
    for rows in ([0], [0, 1], [1, 0]):
        for driver in (eager, graphs):
            driver.step(rows)
    assert captured.mixed.graphs.failure is None
    assert served == [True, True]
    assert graphs.tokens == eager.tokens


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
    """Greedy, sampled and penalized rows; their right tokens are taken from steps without drafts."""
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
    assert graphs.runner.graphs.captured == ((9, SampleMode.EDITED),)


def test_a_network_with_sparse_latent_attention() -> None:
    """From fewer tokens than the index finds to more."""
    eager, graphs = Driver(LATENT_NETWORK, enforce_eager=True), Driver(LATENT_NETWORK)
    for _ in range(6):
        eager.step([0])
        graphs.step([0])
    assert graphs.tokens == eager.tokens
    assert graphs.runner.graphs is not None
    assert graphs.runner.graphs.failure is None
    assert set(graphs.runner.graphs.captured) == {(2, SampleMode.ARGMAX)}


def test_every_kernel_of_a_step_is_ours() -> None:
    table = triton_table()
    request = OpRequest(device=DEVICE, sizes={"head_dim": 16, "queries_per_kv_head": 2})
    for op in (
        ops.decode_inputs,
        ops.paged_attention,
        ops.sample,
        ops.sample_masked,
        ops.penalize,
        ops.lm_head_argmax,
        ops.rms_norm,
        ops.rope_and_write_kv,
    ):
        assert table.choose(op, request).name == "triton"


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
