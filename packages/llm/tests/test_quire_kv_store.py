"""Engines that share a block store: prefill in one and decode in another, nobody else's blocks, a store that goes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ConfigError, SamplingParams
from quire_kv_transfer import BlockStore, BlockStoreServer, StoreTenant
from quire_testkit.checkpoints import make_checkpoint

PROMPT = random.Random(1).choices(range(3, 300), k=75)
PREFILL = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with make_llm(folder) as llm:
        return generate(llm)[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BlockStoreServer]:
    tenants = [StoreTenant(name=name, api_key=f"key-{name}", memory_bytes=50 << 20) for name in ("a", "b")]
    server = BlockStoreServer(BlockStore(tenants), [f"unix:{tmp_path}/store"])
    server.start()
    yield server
    server.close()


def make_llm(folder: Path, server: BlockStoreServer | None = None, key: str = "key-a", **settings: Any) -> LLM:
    store = {} if server is None else {"kv_tier": server.addresses[0], "kv_tier_api_key": key}
    return LLM(folder, max_model_len=160, max_num_seqs=4, num_threads=1, **(store | settings))


def generate(llm: LLM, params: SamplingParams = PARAMS, **members: Any) -> tuple[list[int], int]:
    (output,) = llm.generate([{"prompt_token_ids": PROMPT, **members}], params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_one_engine_prefills_and_another_decodes(folder: Path, server: BlockStoreServer, expected: list[int]) -> None:
    with make_llm(folder, server) as decode:
        with make_llm(folder, server) as prefill:
            assert generate(prefill, PREFILL) == (expected[:1], 0)
        assert generate(decode) == (expected, 64)
        assert "block store" in decode.engine_info.choices["prefixes of other engines"]


def test_blocks_of_others_are_never_served(folder: Path, server: BlockStoreServer, tmp_path: Path) -> None:
    with make_llm(folder, server) as llm:
        generate(llm)
    other_weights = make_checkpoint(tmp_path / "other", like="qwen3", dtype="float32", seed=5)
    copied = shutil.copytree(folder, tmp_path / "copied")
    cases: list[tuple[Path, dict[str, Any], dict[str, Any], int]] = [
        (copied, {}, {}, 64),
        (folder, {"key": "key-b"}, {}, 0),
        (folder, {"dtype": "bfloat16"}, {}, 0),
        (folder, {}, {"cache_salt": "another tenant's"}, 0),
        (other_weights, {}, {}, 0),
        (folder, {"block_size": 32}, {}, 0),
    ]
    for place, settings, options, num_cached in cases:
        with make_llm(place, server, **settings) as llm:
            assert generate(llm, **options)[1] == num_cached, (place, settings, options)


def test_a_store_that_goes_costs_only_computing(folder: Path, server: BlockStoreServer, expected: list[int]) -> None:
    with make_llm(folder, server) as llm:
        assert generate(llm) == (expected, 0)
        server.close()
        assert llm.reset_prefix_cache()
        assert generate(llm) == (expected, 0)


def test_settings_that_cannot_be(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no address of a block store"):
        make_llm(folder, kv_tier="host:1")
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        make_llm(folder, kv_tier="tcp://127.0.0.1:1", enable_prefix_caching=False)
