"""Tiers and connectors of engines with several ranks: each keeps its part of a block; the bits are those of one."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_thread_ranks import ranks_in_threads

from quire import LLM, SamplingParams
from quire_kv_transfer import BlockStore, BlockStoreServer, HostMemoryTier, StoreTenant
from quire_testkit.checkpoints import make_checkpoint

PROMPTS = [random.Random(seed).choices(range(3, 300), k=75) for seed in range(4)]
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
TP: dict[str, Any] = {"tensor_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_parallel_size": 2}
DCP: dict[str, Any] = {**TP, "decode_context_parallel_size": 2}
ALL: dict[str, Any] = {**TP, **PP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_in_threads():
        yield


def make_llm(folder: Path, **settings: Any) -> LLM:
    """With room for little more than one prompt."""
    common = {"max_model_len": 96, "max_num_seqs": 1, "num_threads": 1, "num_gpu_blocks_override": 8}
    return LLM(folder, **{**common, **settings})


def generate(llm: LLM, prompt: list[int], transfer: Any = None) -> tuple[Any, int]:
    """Tokens with their log probabilities, and how many of the prompt were not computed."""
    params = PARAMS
    if transfer is not None:
        params = SamplingParams(
            temperature=1,
            seed=3,
            max_tokens=6,
            ignore_eos=True,
            logprobs=2,
            extra_args={"kv_transfer_params": transfer},
        )
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    one = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in at.items()} for at in one.logprobs or ()]
    return (one.token_ids, logprobs), output.num_cached_tokens


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with make_llm(folder) as llm:
        return [generate(llm, prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("ranks", [TP, PP, DCP, ALL], ids=["tp", "pp", "dcp", "tp x pp"])
def test_blocks_come_back_from_memory_and_disk(
    folder: Path, tmp_path: Path, expected: list[Any], ranks: dict[str, Any]
) -> None:
    settings = {"kv_offloading_size": 0.02, "kv_disk_path": str(tmp_path), "kv_disk_size": "50M", **ranks}
    with make_llm(folder, **ranks) as llm:
        alone = [generate(llm, prompt)[0] for prompt in PROMPTS]
    if ranks is not DCP:  # which sums in another order
        assert alone == expected
    with make_llm(folder, **settings) as llm:
        assert [generate(llm, prompt) for prompt in PROMPTS] == [(answer, 0) for answer in alone]
        assert [generate(llm, prompt) for prompt in PROMPTS] == [(answer, 64) for answer in alone]
        llm.engine.core.parts.check_integrity()
    with make_llm(folder, **settings) as llm:  # from the disk, after a restart
        assert [generate(llm, prompt) for prompt in PROMPTS] == [(answer, 64) for answer in alone]


def test_blocks_of_another_width_are_never_served(folder: Path, tmp_path: Path, expected: list[Any]) -> None:
    settings = {"kv_disk_path": str(tmp_path), "kv_disk_size": "50M"}
    for ranks in ({}, TP, {"tensor_parallel_size": 3}, PP, DCP, ALL):
        for num_cached in (0, 64):
            with make_llm(folder, **settings, **ranks) as llm:
                (token_ids, logprobs), found = generate(llm, PROMPTS[0])
            assert (token_ids, found) == (expected[0][0], num_cached), ranks
            assert logprobs == expected[0][1] or ranks is DCP


@pytest.mark.parametrize("which", [0, 1])
def test_a_part_that_one_rank_has_lost_counts_for_all_and_is_stored_anew(
    folder: Path, expected: list[Any], which: int
) -> None:
    with make_llm(folder, **TP, kv_offloading_size=0.02) as llm:
        for prompt in PROMPTS:
            generate(llm, prompt)
        with pytest.MonkeyPatch.context() as patch:
            load = HostMemoryTier.load
            readers = [thread.ident or 0 for thread in threading.enumerate() if thread.name == "quire-kv-reader"]
            assert len(readers) == 2
            lost = readers[which]

            def lose(self: HostMemoryTier, key: Any, buffers: Any) -> bool:
                return threading.get_ident() != lost and load(self, key, buffers)

            patch.setattr(HostMemoryTier, "load", lose)
            assert generate(llm, PROMPTS[0]) == (expected[0], 0)
        for prompt in PROMPTS[1:]:
            generate(llm, prompt)
        assert generate(llm, PROMPTS[0]) == (expected[0], 64)
        llm.engine.core.parts.check_integrity()


def test_a_loss_fails_the_request_where_that_is_asked_for(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    settings = {"kv_disk_path": str(tmp_path), "kv_disk_size": "50M", "kv_load_failure_policy": "fail", **TP}
    with make_llm(folder, **settings) as llm:
        generate(llm, PROMPTS[0])
    damaged = sorted(tmp_path.rglob("*.kv"))
    assert len({path.parents[1] for path in damaged}) == 2, "each rank has a place of its own"
    last = max(path.parents[1] for path in damaged)
    for path in damaged:
        if path.parents[1] == last:
            path.write_bytes(path.read_bytes()[:-1] + b"!")
    with make_llm(folder, **settings) as llm:
        (output,) = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert generate(llm, PROMPTS[0]) == (expected[0], 0)


def test_ranks_share_a_block_store(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/store.sock"
    server = BlockStoreServer(BlockStore([StoreTenant(name="a", memory_bytes=50 << 20)]), [address])
    server.start()
    for ranks in (TP, {}, PP):
        for num_cached in (0, 64):
            with make_llm(folder, kv_tier=address, **ranks) as llm:
                assert generate(llm, PROMPTS[0]) == (expected[0], num_cached), ranks
    server.close()


def connected(folder: Path, role: str, ranks: dict[str, Any], kind: str = "SocketConnector", **extra: Any) -> LLM:
    connector = {"kv_connector": kind, "kv_role": role, "kv_connector_extra_config": extra}
    return make_llm(folder, kv_transfer_config=connector, num_gpu_blocks_override=32, **ranks)


def prefill(llm: LLM) -> dict[str, Any]:
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, extra_args=extra), use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


BY_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install nixl")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("SocketConnector", TP),
        ("SocketConnector", PP),
        ("SocketConnector", ALL),
        pytest.param("NixlConnector", TP, marks=BY_NIXL),
        pytest.param("NixlConnector", ALL, marks=BY_NIXL),
    ],
    ids=["tp", "pp", "tp x pp", "tp by nixl", "tp x pp by nixl"],
)
def test_ranks_read_from_the_same_ranks_of_another_engine(
    folder: Path, expected: list[Any], kind: str, ranks: dict[str, Any]
) -> None:
    with (
        connected(folder, "kv_producer", ranks, kind) as prefilling,
        connected(folder, "kv_consumer", ranks, kind) as llm,
    ):
        transfer = prefill(prefilling)
        assert transfer["tp_size"] == len(transfer["remote_ports"]) == llm.config.parallel.num_ranks
        assert generate(llm, PROMPTS[0], transfer) == (expected[0], 64)
        assert llm.stats().external_prefix_cache_hit_tokens_total == 64
        while prefilling.stats().kv_cache_usage > 0:  # until steps have told that all ranks were read
            generate(prefilling, [5, 6])
        prefilling.engine.core.parts.check_integrity()
        llm.engine.core.parts.check_integrity()


def test_ranks_of_another_number_compute(folder: Path, expected: list[Any]) -> None:
    with connected(folder, "kv_producer", TP, abort_request_timeout=2.0) as prefilling:
        for ranks in ({}, PP, {"tensor_parallel_size": 3}):
            with connected(folder, "kv_consumer", ranks) as llm:
                assert generate(llm, PROMPTS[0], prefill(prefilling)) == (expected[0], 0), ranks
