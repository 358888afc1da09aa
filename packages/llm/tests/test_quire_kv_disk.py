"""Prefixes on disk, through `LLM` and `AsyncLLM` on tiny random checkpoints: the tokens are those of an engine without
a tier, whatever happened to the files; prefixes are found after a restart, and by nobody they do not belong to.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, ConfigError, QuireConfig, RequestOutput, SamplingParams
from quire_interfaces import RenderedPrompt, RequestOptions
from quire_testkit.checkpoints import make_checkpoint

PROMPT = random.Random(1).choices(range(3, 300), k=75)
PROMPTS = [PROMPT, PROMPT[:50] + [7] * 9, [9, 8, 7], PROMPT[:33]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, max_tokens=9, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def make_llm(folder: Path, disk: Path | None = None, **settings: Any) -> LLM:
    tier = {} if disk is None else {"kv_disk_path": str(disk), "kv_disk_size": "50M"}
    return LLM(folder, max_model_len=160, max_num_seqs=4, num_threads=1, **(tier | settings))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[list[int]]]:
    with make_llm(folder) as llm:
        yield tokens(generate(llm))


def files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


@pytest.mark.parametrize(
    "settings", [{}, {"async_scheduling": True}, {"speculative_method": "ngram", "speculative_adaptive": False}]
)
def test_the_tokens_are_those_without_a_tier_before_and_after_a_restart(
    folder: Path, disk: Path, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    with make_llm(folder, disk, **settings) as llm:
        outputs = generate(llm)
        assert tokens(outputs) == expected
        assert llm.stats().external_prefix_cache_hit_tokens_total == 0
    assert len(files(disk)) >= 75 // 16 + 1
    with make_llm(folder, disk, **settings) as llm:
        outputs = generate(llm)
        assert tokens(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [64, 48, 0, 32]
        stats = llm.stats()
        assert stats.external_prefix_cache_hit_tokens_total == 64 + 48 + 32
        assert stats.num_external_prompt_tokens_total == 64 + 48 + 32
        assert llm.reset_prefix_cache()
        assert tokens(generate(llm)) == expected


def test_a_process_leaves_its_prefixes_to_the_next(folder: Path, disk: Path, expected: list[list[int]]) -> None:
    """The same in another process that ends without closing its engine in so many words, while its disk is slow."""
    code = f"""
import time
from quire import LLM, SamplingParams
from quire_kv_transfer import block_files
write_frame = block_files.write_frame
block_files.write_frame = lambda *block: (time.sleep(0.2), write_frame(*block))
llm = LLM({str(folder)!r}, max_model_len=160, max_num_seqs=4, num_threads=1,
          kv_disk_path={str(disk)!r}, kv_disk_size="50M")
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
print(llm.generate([{PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(expected[0]), done.stderr
    assert files(disk)
    with make_llm(folder, disk) as llm:
        (output,) = generate(llm, [PROMPT])
        assert output.num_cached_tokens == 64
        assert output.outputs[0].token_ids == expected[0]


def test_damaged_files_cost_time_and_nothing_else(
    folder: Path, disk: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(folder, disk) as llm:
        generate(llm)
    written = files(disk)
    for number, path in enumerate(written):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif number % 3 == 1:
            os.truncate(path, len(data) - 1)
    with caplog.at_level(logging.WARNING), make_llm(folder, disk) as llm:
        assert tokens(generate(llm)) == expected
    removed = [record for record in caplog.records if "removed" in record.message]
    assert 0 < len(removed) <= len(written)


def test_a_cache_that_is_too_small_for_all_loads_what_it_evicted(folder: Path, disk: Path) -> None:
    """Memory for little more than one request: every turn evicts the one before."""
    prompts = [random.Random(seed).choices(range(3, 300), k=70) for seed in range(5)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_llm(folder) as llm:
        alone = tokens(llm.generate(prompts * 2, params, use_tqdm=False))
    with make_llm(folder, disk, num_gpu_blocks_override=12) as llm:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts * 2]
        assert tokens(outputs) == alone
        assert [output.num_cached_tokens for output in outputs[5:]] == [64] * 5
    with make_llm(folder, disk, num_gpu_blocks_override=12) as llm:
        assert tokens(llm.generate(prompts * 2, params, use_tqdm=False)) == alone


def test_the_bound_is_kept(folder: Path, disk: Path) -> None:
    with make_llm(folder, disk) as llm:
        generate(llm, [PROMPT])
    one_file = -(-files(disk)[0].stat().st_size // 4096) * 4096
    bound = 3 * one_file
    with make_llm(folder, disk, kv_disk_size=bound) as llm:
        assert len(files(disk)) == 3
        generate(llm)
    assert sum(path.stat().st_size for path in files(disk)) <= bound


def test_salts_models_and_forms_do_not_meet(folder: Path, disk: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)

    def num_cached(llm: LLM, salt: str | None = None) -> int:
        llm.engine.add_request(RenderedPrompt(token_ids=PROMPT), params, RequestOptions(cache_salt=salt))
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        return outputs[-1].num_cached_tokens

    with make_llm(folder, disk) as llm:
        assert num_cached(llm, "mine") == 0
    with make_llm(folder, disk) as llm:
        assert num_cached(llm, "yours") == 0
        assert num_cached(llm) == 0
        assert num_cached(llm, "mine") == 64
    other = make_checkpoint(tmp_path / "other", like="qwen3", dtype="float32", seed=9)
    for model, settings in (
        (other, {}),
        (folder, {"dtype": "bfloat16"}),
        (folder, {"block_size": 8}),
        (folder, {"prefix_caching_hash_algo": "xxhash"}),
        (folder, {"quantization": "int8"}),
    ):
        with make_llm(model, disk, **settings) as llm:
            assert num_cached(llm, "mine") == 0, settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_disk_path": "file"}, "no files can be written"),
        ({"kv_disk_path": "tier", "kv_disk_size": "1k"}, "one block of this model takes"),
        ({"kv_disk_path": "tier", "kv_disk_size": "4000T"}, "has room for"),
        ({"kv_disk_path": "tier", "enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"kv_disk_size": "1G"}, "no kv_disk_path"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message) as caught:
        make_llm(folder, **settings)
    assert caught.value.field in ("kv_disk_path", "kv_disk_size")


def test_a_disk_that_breaks_while_serving(
    folder: Path, disk: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(folder, disk) as llm:
        generate(llm, [PROMPT])
    model = files(disk)[0].parent.parent
    with make_llm(folder, disk) as llm:
        # What was a folder is a file now: nothing can be written below it.
        shutil.rmtree(model)
        model.write_text("")
        for _ in range(3):
            assert tokens(generate(llm)) == expected
    assert len([record for record in caplog.records if "switched off" in record.message]) == 1
    assert files(disk) == []


async def test_two_engine_processes_share_a_folder_and_count_cached_tokens(
    folder: Path, disk: Path, expected: list[list[int]]
) -> None:
    config = QuireConfig.of(
        model=str(folder), max_model_len=160, num_threads=1, kv_disk_path=str(disk), kv_disk_size="50M"
    )
    first, second = AsyncLLM.start(config), AsyncLLM.start(config)
    try:
        info = await first.ready()
        await second.ready()
        assert str(disk) in info.choices["prefixes on disk"]

        async def ask(llm: AsyncLLM, number: int) -> tuple[list[int], int]:
            outputs = [output async for output in llm.engine.generate(PROMPTS[number], PARAMS[number])]
            return [token for output in outputs for token in output.outputs[0].token_ids], outputs[-1].num_cached_tokens

        assert await ask(first, 0) == (expected[0], 0)
        # What the first engine has computed, the second finds; files appear while both run.
        for _ in range(200):
            if len(files(disk)) >= 4:
                break
            await ask(first, 2)
        assert await ask(second, 0) == (expected[0], 64)
        stats = await second.client.stats()
        assert stats.external_prefix_cache_hit_tokens_total == 64
        assert await second.client.check_integrity() is None
    finally:
        await first.client.shutdown()
        await second.client.shutdown()
    assert not list(disk.rglob("*.tmp"))
