"""Networks that several ranks share give the bits that one rank gives. Ranks are threads here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from models_paged_driver import PagedDriver
from models_quantized import FORMATS, make
from torch import Tensor

from quire_distributed import Collectives, SharedMemoryCollectives, SharedMemoryRendezvous, run_thread_ranks
from quire_models import ModelConfig, build_model, load_model
from quire_models.sharding import shard
from quire_models.shards import split_outputs
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

KINDS = [
    "AXK2ForCausalLM",  # gates of latent attention from the queries' latent, gated norms
    "BailingHybridForCausalLM",  # Kimi's delta attention, gates of latent attention's heads
    "BambaForCausalLM",  # attention beside Mamba-2
    "BloomForCausalLM",  # linear biases of the heads' scores
    "CohereForCausalLM",  # a norm with a weight for each head
    "DeepseekV2ForCausalLM",  # queries without a latent
    "DeepseekV32ForCausalLM",  # sparse latent attention
    "DeepseekV3ForCausalLM",  # latent attention, experts in groups
    "DeepseekV4ForCausalLM",  # compressed attention, hyper-connections
    "FalconForCausalLM",  # one key-value head
    "Gemma2ForCausalLM",  # soft caps
    "Gemma3ForCausalLM",  # windows, tied embedding
    "GPT2LMHeadModel",  # biases everywhere
    "GptOssForCausalLM",  # sinks
    "HYV4ForCausalLM",  # sinks and gates of sparse latent attention, several channels
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "Olmo2ForCausalLM",  # a norm over all heads at once
    "OPTForCausalLM",  # positions are learned
    "Phi3ForCausalLM",  # fused projections in the checkpoint
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",  # a shared expert with a gate
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",  # gated delta net, gated attention
    "RwkvForCausalLM",
    "MambaForCausalLM",
]

OP_BY_OP = {"Olmo2ForCausalLM", "Qwen2MoeForCausalLM"}
"""Networks that one rank computes in one call with other bits than op by op: norms over all heads are summed head by
head there, and a shared expert is added before the sum is rounded."""

NEVER_IN_ONE_CALL = {
    "AXK2ForCausalLM", "BailingHybridForCausalLM", "CohereForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "HYV4ForCausalLM", "MptForCausalLM", "RwkvForCausalLM", "MambaForCausalLM",
}  # fmt: skip
"""Networks whose layers no rank computes in one call."""

T = TypeVar("T")


def run_shared_ranks(size: int, function: Callable[[Collectives], T]) -> list[T]:
    """As `run_thread_ranks`, with threads that meet in shared memory, as kernels can inside one call."""
    num_threads = torch.get_num_threads()

    def join(address: str, rank: int) -> T:
        torch.set_num_threads(1)  # of this thread's teams
        group = SharedMemoryCollectives(address, rank, size)
        try:
            return function(group)
        except BaseException as error:
            group.abort(f"it raised {type(error).__name__}: {error}")
            raise

    try:
        with SharedMemoryRendezvous(size) as rendezvous:
            return run_thread_ranks(size, lambda group: join(rendezvous.address, group.rank))
    finally:
        torch.set_num_threads(num_threads)


def run(folder: Path, *, tp_group: Collectives, in_one_call: bool = False, **options: Any) -> Tensor:
    """Logits [N, vocab_size] of a prefill beside a chunked one, then of decode steps of both.

    Args:
        in_one_call: The network's layers are to be computed in one call, as far as they can be.
    """
    config = ModelConfig.from_path(folder)
    model = load_model(config, folder, tp_group=tp_group, **options)
    if in_one_call:
        assert model.in_one_call == (config.architecture not in NEVER_IN_ONE_CALL)
    elif config.architecture in OP_BY_OP and tp_group.size == 1:
        model._stack = None  # else one rank computes its layers in one call
        model._widen()
    driver = PagedDriver(model, block_size=8, shuffle=True)
    rng = random.Random(3)
    first, second = (driver.add([rng.randrange(3, 60) for _ in range(length)]) for length in (37, 29))
    driver.step((first, 30), (second, 4))
    driver.step((first, 1), (second, 16))
    for _ in range(4):
        driver.step((first, 1), (second, 1))
    return torch.stack([*first.logits, *second.logits])


def shared_bits(folder: Path, sizes: Sequence[int], **options: Any) -> None:
    """Hold the logits of every rank of groups of some sizes to those of one rank."""
    (alone,) = run_thread_ranks(1, lambda group: run(folder, tp_group=group, **options))
    for size in sizes:
        for logits in run_thread_ranks(size, lambda group: run(folder, tp_group=group, **options)):
            assert torch.equal(logits, alone), f"tp {size}"


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (4,)), ("bfloat16", (2, 3))])
@pytest.mark.parametrize("architecture", KINDS)
def test_ranks_give_the_bits_of_one(architecture: str, dtype: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    shared_bits(tmp_path, sizes, dtype=dtype)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 2), ("bfloat16", 3)])
@pytest.mark.parametrize("architecture", KINDS)
def test_ranks_that_meet_inside_one_call_give_the_bits_of_one(
    architecture: str, dtype: str, size: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    bits_in_one_call(tmp_path, size, dtype=dtype)


def bits_in_one_call(folder: Path, size: int, **options: Any) -> None:
    """Hold the logits of ranks that meet inside one call to those of one rank."""
    (alone,) = run_thread_ranks(1, lambda group: run(folder, tp_group=group, in_one_call=True, **options))
    for logits in run_shared_ranks(size, lambda group: run(folder, tp_group=group, in_one_call=True, **options)):
        assert torch.equal(logits, alone), f"tp {size}"


@pytest.mark.parametrize("linear_method", ["int8", "int4", "w8a8", "fp8"])
def test_ranks_with_quantized_weights_meet_inside_one_call(linear_method: str, tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=320)
    for size in (2, 3):
        bits_in_one_call(tmp_path, size, dtype="bfloat16", linear_method=linear_method)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoints_are_shared_out(name: str, tmp_path: Path) -> None:
    make(tmp_path, name)
    shared_bits(tmp_path, (3,), dtype="bfloat16")


@pytest.mark.parametrize("linear_method", ["int8", "int4", "w8a8", "fp8"])
def test_weights_quantized_while_loaded_are_shared_out(linear_method: str, tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=320)
    shared_bits(tmp_path, (2, 3), dtype="bfloat16", linear_method=linear_method)


def test_a_rank_holds_its_part_only(tmp_path: Path) -> None:
    """Of attention, feed-forward network, table and head; norms are replicated."""
    tiny_hf_checkpoint(tmp_path, "llama", num_key_value_heads=1)
    config = ModelConfig.from_path(tmp_path)

    def sizes(group: Collectives) -> dict[str, int]:
        model = build_model(config, tp_group=group)
        return {each.name: math.prod(each.shape) for each in model.parameters}

    (alone,), ranks = run_thread_ranks(1, sizes), run_thread_ranks(2, sizes)
    for name, size in alone.items():
        is_whole = "norm" in name or "k_proj" in name or "v_proj" in name  # one key-value head
        assert sum(rank[name] for rank in ranks) == (2 * size if is_whole else size)
    heads = [shard(config.network, rank, 3).attention.heads for rank in range(3)]
    assert [(each.query_heads, each.kv_heads) for each in heads] == [
        (slice(0, 2), slice(0, 1)),
        (slice(2, 3), slice(0, 1)),
        (slice(3, 4), slice(0, 1)),
    ]


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [
        (1024, 2, (512, 512)),
        (1000, 3, (352, 352, 296)),
        (10, 4, (3, 3, 2, 2)),
        (320, 4, (80, 80, 80, 80)),
        (1, 2, None),
    ],
)
def test_outputs_are_split_in_units(total: int, parts: int, sizes: tuple[int, ...] | None) -> None:
    assert split_outputs(total, parts) == sizes
