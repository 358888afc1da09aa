"""Networks whose experts several ranks share out give the bits that one rank gives. Ranks are threads here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from models_gguf_writer import write_gguf
from models_paged_driver import PagedDriver
from test_models_gguf import random_model
from test_models_stored_experts import make as make_experts
from test_models_tensor_parallel import OP_BY_OP
from torch import Tensor

from quire_distributed import Collectives, run_thread_ranks
from quire_distributed.all2all import make_all2all_manager
from quire_interfaces import ConfigError
from quire_models import ModelConfig, build_model, load_model
from quire_models.expert_placement import ExpertPlacement, balanced_placement, moves_between
from quire_models.hub import resolve_model
from quire_models.layers.expert_parallel import EplbSettings, share_experts
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

KINDS = {
    "MixtralForCausalLM": "naive",
    "Qwen2MoeForCausalLM": "allgather_reducescatter",  # a shared expert with a gate
    "Qwen3MoeForCausalLM": "allgather_reducescatter",
    "DeepseekV2ForCausalLM": "naive",  # shared experts, groups
    "DeepseekV3ForCausalLM": "allgather_reducescatter",
    "GptOssForCausalLM": "naive",  # stacked by turns, biases
    "Llama4ForCausalLM": "naive",  # weights of what goes in
    "NemotronHForCausalLM": "allgather_reducescatter",  # experts without a gate
}


def run(
    folder: Path, *, tp_group: Collectives, backend: str = "", eplb: EplbSettings | None = None, **options: Any
) -> tuple[Tensor, int]:
    """Logits [N, vocab_size] of prefills in chunks and of decode steps, and how many experts were moved meanwhile."""
    config = ModelConfig.from_path(folder)
    parallel = share_experts(tp_group, backend, eplb) if backend and tp_group.size > 1 else None
    model = load_model(config, folder, tp_group=tp_group, expert_parallel=parallel, **options)
    if config.architecture in OP_BY_OP and tp_group.size == 1:
        model._stack = None  # else one rank computes its layers in one call
        model._widen()
    driver = PagedDriver(model, block_size=8, shuffle=True)
    rng = random.Random(3)
    first, second = (driver.add([rng.randrange(3, 60) for _ in range(length)]) for length in (37, 29))
    driver.step((first, 30), (second, 4))
    driver.step((first, 1), (second, 16))
    for _ in range(4):
        driver.step((first, 1), (second, 1))
    moved = 0 if parallel is None or parallel.balancer is None else parallel.balancer.num_moved
    return torch.stack([*first.logits, *second.logits]), moved


def shared_bits(folder: Path, sizes: Sequence[int], backend: str, **options: Any) -> int:
    """Hold the logits of every rank to those of one that has all experts; how many experts were moved."""
    eplb, num_moved = options.pop("eplb", None), 0
    ((alone, _),) = run_thread_ranks(1, lambda group: run(folder, tp_group=group, **options))
    for size in sizes:
        ranks = run_thread_ranks(size, lambda group: run(folder, tp_group=group, backend=backend, eplb=eplb, **options))
        for logits, moved in ranks:
            assert torch.equal(logits, alone), f"ep {size}"
            num_moved += moved
    return num_moved


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (4,)), ("bfloat16", (2,))])
@pytest.mark.parametrize("architecture", KINDS)
def test_experts_of_ranks_give_the_bits_of_one(
    architecture: str, dtype: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    shared_bits(tmp_path, sizes, KINDS[architecture], dtype=dtype)


@pytest.mark.parametrize("linear_method", ["int8", "int4", "w8a8"])
def test_experts_quantized_while_loaded(linear_method: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "MixtralForCausalLM", CASES["MixtralForCausalLM"])
    shared_bits(tmp_path, (2,), "naive", dtype="bfloat16", linear_method=linear_method)


@pytest.mark.parametrize("name", ["packed zeros", "fp8 block", "mxfp4", "w8a8 static"])
def test_experts_of_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """Inputs with scales of their own ("w8a8 static") go expert by expert."""
    make_experts(tmp_path, name)
    shared_bits(tmp_path, (3,), "allgather_reducescatter", dtype="bfloat16")


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "Q4_1"), ("gpt-oss", "MXFP4")])
def test_experts_of_a_gguf_file(name: str, kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model(name), name, lambda _: kind, stacked=True)
    shared_bits(resolve_model(tmp_path / "model.gguf"), (2,), "naive", dtype="float32")


def test_a_rank_reads_its_own_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Qwen3MoeForCausalLM", CASES["Qwen3MoeForCausalLM"])
    config = ModelConfig.from_path(tmp_path)
    num_experts = max(getattr(layer.feed_forward, "num_experts", 0) for layer in config.network.layers)

    def names(group: Collectives) -> list[int]:
        model = build_model(config, tp_group=group, expert_parallel=share_experts(group, "naive"))
        found = {each.name.split(".experts.")[1].split(".")[0] for each in model.parameters if ".experts." in each.name}
        return sorted(map(int, found))

    assert [*chain.from_iterable(run_thread_ranks(3, names))] == list(range(num_experts)) != []


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("MixtralForCausalLM", {"dtype": "float32"}),
        ("GptOssForCausalLM", {"dtype": "bfloat16", "linear_method": "int4"}),
        ("DeepseekV3ForCausalLM", {"dtype": "bfloat16"}),
    ],
)
def test_experts_that_move_between_steps_change_no_bit(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    eplb = EplbSettings(window_size=2, step_interval=1, num_redundant_experts=2)
    assert shared_bits(tmp_path, (2, 3), "naive", eplb=eplb, **options) > 0


def test_replicas_go_to_busy_experts_and_ranks_get_as_much_to_do() -> None:
    rng = random.Random(5)
    for num_ranks, num_redundant in ((2, 0), (2, 2), (4, 3), (4, 24), (3, 5)):
        current = ExpertPlacement.linear(8, num_ranks, num_redundant)
        for _ in range(30):
            tokens = [int(100 * rng.random() ** 4) for _ in range(8)]
            new = balanced_placement(tokens, current)
            assert [len(each) for each in new.of_rank] == [len(each) for each in current.of_rank]
            assert all(len(set(each)) == len(each) for each in new.of_rank)
            assert {expert for each in new.of_rank for expert in each} == set(range(8))
            for move in moves_between(current, new):
                assert move.expert in current.of_rank[move.source]
                assert new.of_rank[move.target][move.slot] == move.expert
            current = new
    skewed = [0, 90, 10, 0, 5, 5, 5, 5]
    before = ExpertPlacement.linear(8, 2, 2)
    after = balanced_placement(skewed, before)
    assert before.balancedness(skewed) < 0.8
    assert after.balancedness(skewed) > 0.95
    assert all(1 in experts for experts in after.of_rank)  # the busy one twice


@pytest.mark.parametrize("backend", ["pplx", "deepep_low_latency", "nccl"])
def test_managers_that_are_not_there_are_refused_by_name(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"all2all_backend.*{backend}.*|got '{backend}'"):
        run_thread_ranks(2, lambda group: make_all2all_manager(backend, group))
