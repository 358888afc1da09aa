"""Models with recurrent layers through the whole engine: memory plan, prefix cache, disk, refusals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire import LLM, RequestError, SamplingParams
from quire.assemble import build_parts
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import MambaSpec
from quire_models.config import ModelConfig
from quire_ops import op_table, ops
from quire_testkit.checkpoint_families import RECURRENT_FAMILIES
from quire_testkit.checkpoints import make_checkpoint

PROMPT = list(range(3, 303))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=RECURRENT_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "made", like=request.param, dtype="float32")


def settings(folder: Path) -> dict[str, object]:
    return {"model": str(folder), "max_model_len": 512, "kv_cache_memory_bytes": 40_000_000, "max_num_seqs": 8}


def test_cache_and_weights_are_as_planned(folder: Path) -> None:
    config = QuireConfig.of(**settings(folder))
    plan = make_plan(config, ModelConfig.from_path(folder))
    weights = sum(size for what, size in plan.ledger_bytes.items() if what.startswith("weights"))
    assert 0 <= (folder / "model.safetensors").stat().st_size - weights < 16_384  # the header
    assert any(isinstance(group.spec, MambaSpec) for group in plan.kv_plan.groups)
    assert plan.block_size == 128, "the states of these models are small"
    parts = build_parts(config)
    caches = {cache.untyped_storage().data_ptr(): cache for cache in parts.executor._layers.kv_caches}  # type: ignore[attr-defined]
    allocated = sum(cache.untyped_storage().nbytes() for cache in caches.values())
    assert allocated == plan.ledger_bytes["KV cache"] <= 40_000_000
    parts.executor.close()


def test_a_repeated_beginning_is_read_from_the_cache(folder: Path) -> None:
    with LLM(**settings(folder), max_num_batched_tokens=200) as llm:
        first = llm.generate([PROMPT], GREEDY)[0]
        block = llm.engine_info.block_size
        assert block >= 128
        longer = PROMPT + first.outputs[0].token_ids[:5]
        again, later = llm.generate([PROMPT, longer], GREEDY)
        assert again.num_cached_tokens == later.num_cached_tokens == len(PROMPT) // block * block > 0
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert later.outputs[0].token_ids[:7] == first.outputs[0].token_ids[5:]


def test_states_come_back_from_disk(folder: Path, tmp_path: Path) -> None:
    options = settings(folder) | {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_size": "200M"}
    with LLM(**options) as llm:
        first = llm.generate([PROMPT], GREEDY)[0]
        llm.generate([[7, 8, 9]], GREEDY)  # lets the store end
    with LLM(**options) as llm:
        again = llm.generate([PROMPT], GREEDY)[0]
    assert again.num_cached_tokens >= 128
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_tokens_are_the_same_to_the_bit_in_every_situation(folder: Path) -> None:
    rng = random.Random(4)
    prompts = [PROMPT[: rng.choice([0, 128, 200])] + rng.choices(PROMPT, k=rng.choice([1, 9, 150])) for _ in range(8)]
    params = [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=20 + 30 * (i % 2), ignore_eos=True, logprobs=2, deterministic=True
        )
        for i in range(8)
    ]

    def answers(batches: list[list[int]], **options: object) -> dict[int, object]:
        with LLM(**settings(folder), **options) as llm:
            assert llm.engine_info.batch_invariant
            found = {}
            for batch in batches:
                outputs = llm.generate([prompts[i] for i in batch], [params[i] for i in batch])
                found |= {
                    i: (out.outputs[0].token_ids, out.outputs[0].logprobs)
                    for i, out in zip(batch, outputs, strict=True)
                }
            return found

    if not any(each.name == "cpu" and each.unavailable is None for each in op_table().backends(ops.mamba2_scan)):
        with LLM(**settings(folder)) as llm, pytest.raises(RequestError, match="deterministic"):
            llm.generate([prompts[0]], [params[0]])
        return
    everyone = list(range(8))
    alone = answers([[i] for i in everyone], enable_prefix_caching=False)
    assert answers([everyone, everyone]) == alone
    assert answers([everyone], max_num_batched_tokens=24, long_prefill_token_threshold=7) == alone
    preempting = {"num_gpu_blocks_override": 18, "enable_prefix_caching": False, "async_scheduling": False}
    assert answers([everyone], **preempting) == alone
