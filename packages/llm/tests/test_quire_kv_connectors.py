"""Engines that hand requests on by a connector: the same tokens as of one, nobody else's blocks, losses."""

from __future__ import annotations

import importlib.util
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ConfigError, RequestError, SamplingParams
from quire_interfaces import RequestConnector
from quire_kv_transfer import ConnectorContext
from quire_kv_transfer.pull_connector import socket_connector
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.faulty_connector import FaultyConnector
from quire_testkit.faulty_tier import Faults

PROMPT = random.Random(1).choices(range(3, 300), k=75)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(folder, max_model_len=160, max_num_seqs=4, num_threads=1) as llm:
        return decode(llm, None)[0]


def make_llm(folder: Path, role: str, *, extra: dict[str, Any] | None = None, **settings: Any) -> LLM:
    connector = {"kv_connector": "SocketConnector", "kv_role": role, "kv_connector_extra_config": extra or {}}
    connector |= settings.pop("connector", {})
    return LLM(folder, max_model_len=160, max_num_seqs=4, num_threads=1, kv_transfer_config=connector, **settings)


@pytest.fixture(scope="module")
def prefill_llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder, "kv_producer") as llm:
        yield llm


def params_with(transfer: dict[str, Any] | None, max_tokens: int) -> SamplingParams:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(temperature=1, seed=3, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def prefill(llm: LLM, **members: Any) -> dict[str, Any]:
    params = params_with({"do_remote_decode": True}, 1)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT, **members}], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, transfer: dict[str, Any] | None, **members: Any) -> tuple[list[int], int]:
    (output,) = llm.generate([{"prompt_token_ids": PROMPT, **members}], params_with(transfer, 8), use_tqdm=False)
    assert output.kv_transfer_params is None
    return output.outputs[0].token_ids, output.num_cached_tokens


def used_blocks(llm: LLM) -> float:
    """Share of the cache in use, after a step that asks the worker."""
    llm.generate([{"prompt_token_ids": [5, 6]}], params_with(None, 2), use_tqdm=False)
    return llm.engine.core.stats().kv_cache_usage


def test_one_engine_prefills_and_another_decodes(folder: Path, prefill_llm: LLM, expected: list[int]) -> None:
    with make_llm(folder, "kv_consumer") as llm:
        transfer = prefill(prefill_llm)
        assert set(transfer) == {
            "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids",
            "remote_host", "remote_port", "remote_num_tokens", "tp_size",
        }  # fmt: skip
        assert transfer["remote_num_tokens"] == 64
        assert used_blocks(prefill_llm) > 0
        assert decode(llm, transfer) == (expected, 64)
        stats = llm.engine.core.stats()
        assert stats.external_prefix_cache_hit_tokens_total == 64
        assert stats.num_external_prompt_tokens_total == 64
        assert used_blocks(prefill_llm) == 0
        assert llm.engine_info.choices["keys and values of other engines"] == "SocketConnector as kv_consumer"
        llm.engine.core.parts.check_integrity()
        prefill_llm.engine.core.parts.check_integrity()


def test_what_is_in_memory_is_not_fetched_but_let_go(folder: Path, prefill_llm: LLM, expected: list[int]) -> None:
    with make_llm(folder, "kv_consumer") as llm:
        assert decode(llm, None) == (expected, 0)
        assert decode(llm, prefill(prefill_llm)) == (expected, 64)
        assert llm.engine.core.stats().external_prefix_cache_hit_tokens_total == 0
        used_blocks(llm)  # a step that tells the worker
        while used_blocks(prefill_llm) > 0:  # until it has heard of it
            time.sleep(0.01)


def test_blocks_of_others_are_never_served(folder: Path, prefill_llm: LLM, tmp_path: Path) -> None:
    other_weights = make_checkpoint(tmp_path / "other", like="qwen3", dtype="float32", seed=5)
    cases: list[tuple[Path, dict[str, Any], dict[str, Any]]] = [
        (folder, {"dtype": "bfloat16"}, {}),
        (other_weights, {}, {}),
        (folder, {"block_size": 32}, {}),
        (folder, {}, {"cache_salt": "another tenant's"}),
        (folder, {}, {"prompt_token_ids": PROMPT[::-1]}),
    ]
    for place, settings, members in cases:
        with make_llm(place, "kv_consumer", **settings) as llm:
            assert decode(llm, prefill(prefill_llm), **members)[1] == 0, (place, settings, members)


def test_a_name_that_is_guessed_opens_nothing(folder: Path, prefill_llm: LLM, expected: list[int]) -> None:
    transfer = prefill(prefill_llm)
    with make_llm(folder, "kv_consumer") as llm:
        name, _, _ = transfer["remote_request_id"].rpartition("-")
        assert decode(llm, {**transfer, "remote_request_id": name}) == (expected, 0)


def test_blocks_that_nobody_reads_are_let_go(folder: Path, expected: list[int]) -> None:
    with make_llm(folder, "kv_both", extra={"abort_request_timeout": 0.0}) as llm:
        transfer = prefill(llm)
        assert used_blocks(llm) == 0
        with make_llm(folder, "kv_consumer") as decoding:
            assert decode(decoding, transfer) == (expected, 0)


def test_held_blocks_come_back_for_who_waits(folder: Path) -> None:
    """All blocks are held, and a request gets them when the time is over."""
    with make_llm(folder, "kv_producer", extra={"abort_request_timeout": 0.5}, num_gpu_blocks_override=11) as llm:
        prefill(llm)
        llm.engine.add_request(PROMPT[::-1] * 2, params_with(None, 8))
        llm.engine.step()
        assert llm.engine.core.stats().num_waiting == 1
        assert llm.engine.core.has_work(), "a loop that has nothing to do asks nobody whether blocks are free"
        outputs: list[Any] = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 8


def test_losses_are_computed_or_fail(folder: Path, prefill_llm: LLM, expected: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        gone = {**prefill(prefill_llm), "remote_port": port}
        extra = {"handshake_timeout": 0.2}
        with make_llm(folder, "kv_consumer", extra=extra) as llm:
            assert decode(llm, gone) == (expected, 0)  # it listens, and never answers
            listener.close()
            assert llm.reset_prefix_cache()
            assert decode(llm, gone) == (expected, 0)  # nobody listens
            (refused,) = llm.generate(
                [{"prompt_token_ids": PROMPT}], params_with({**gone, "remote_host": "8.8.8.8"}, 8), use_tqdm=False
            )
            assert refused.outputs[0].token_ids == expected
    with make_llm(folder, "kv_consumer", connector={"kv_load_failure_policy": "fail"}) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params_with(gone, 8), use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "kv_load_failure_policy is fail" in (output.outputs[0].error or "")
        assert decode(llm, prefill(prefill_llm)) == (expected, 64)


def test_requests_that_make_no_sense(folder: Path, prefill_llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"remote_port must be a port, got 70000"):
        decode(prefill_llm, {"do_remote_prefill": True, "remote_port": 70000})
    with pytest.raises(RequestError, match=r"do_remote_decode must be true or false"):
        decode(prefill_llm, {"do_remote_decode": "yes"})
    with LLM(folder, max_model_len=160, num_threads=1) as llm, pytest.raises(RequestError, match="kv-transfer-config"):
        decode(llm, {"do_remote_decode": True})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kv_connector": "NixlConector"}, "did you mean 'NixlConnector'"),
        ({"kv_connector": "SocketConnector", "kv_rol": "kv_both"}, "did you mean 'kv_role'"),
        ({"kv_connector": "SocketConnector", "kv_role": "both"}, "kv_role must be kv_producer or kv_consumer"),
        ({"kv_connector": "SocketConnector", "kv_connector_extra_config": {"peers": ["x"]}}, "list of networks"),
        ({"kv_connector": "SocketConnector", "kv_connector_extra_config": {"peer": []}}, "did you mean 'peers'"),
        ({"kv_connector": "X", "kv_connector_module_path": "no_such_module"}, "there is no X in"),
        ({"kv_connector": "OffloadingConnector"}, "cpu_bytes_to_use"),
        ({"kv_connector": "SharedStorageConnector"}, "shared_storage_path"),
        ({"kv_connector": "MultiConnector"}, "connectors, a list"),
        ({"kv_connector": "SocketConnector", "kv_ip": "192.0.2.1"}, "cannot be served at 192.0.2.1"),
    ],
)
def test_settings_that_cannot_be(folder: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(folder, max_model_len=160, num_threads=1, kv_transfer_config=config)


def test_names_of_vllm_are_tiers(folder: Path, expected: list[int], tmp_path: Path) -> None:
    members = [
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 50 << 20}},
        {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}},
        {"kv_connector": "SocketConnector"},
    ]
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": members}}
    with make_llm(folder, "kv_both", connector=several) as llm:
        transfer = prefill(llm)
        used_blocks(llm)  # steps that write to the tiers
        assert llm.reset_prefix_cache()  # what is held stays as it is
        with make_llm(folder, "kv_both", connector=several) as other:
            assert decode(other, transfer) == (expected, 64)
    with make_llm(folder, "kv_both", connector=several) as llm:
        assert decode(llm, None) == (expected, 64)  # from the files


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install nixl")
def test_nixl_reads_what_another_engine_holds(folder: Path, expected: list[int]) -> None:
    nixl = {"kv_connector": "NixlConnector"}
    with make_llm(folder, "kv_both", connector=nixl) as prefilling, make_llm(folder, "kv_both", connector=nixl) as llm:
        for _ in range(3):
            assert llm.reset_prefix_cache()
            assert decode(llm, prefill(prefilling)) == (expected, 64)
        assert used_blocks(prefilling) == 0


def test_nixl_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"install quire-kv-transfer\[nixl\]"):
        make_llm(folder, "kv_both", connector={"kv_connector": "NixlConnector"})


def make_flaky(context: ConnectorContext) -> RequestConnector:
    """A connector of another module: the same, on bad days."""
    connector = socket_connector(context)
    return connector if context.config.kv_role == "kv_producer" else FaultyConnector(connector, FAULTS)


FAULTS = Faults(3)


def test_a_connector_on_bad_days_costs_only_computing(folder: Path, prefill_llm: LLM, expected: list[int]) -> None:
    flaky = {"kv_connector": "make_flaky", "kv_connector_module_path": __name__}
    found = set()
    with make_llm(folder, "kv_consumer", connector=flaky) as llm:
        for loss, corruption, delay_s, is_dead in (
            (0.4, 0.0, 0.0, False), (0.0, 0.3, 0.0, False), (0.3, 0.2, 0.02, False), (0.0, 0.0, 0.0, True)
        ) * 3:  # fmt: skip
            FAULTS.loss, FAULTS.corruption, FAULTS.delay_s, FAULTS.is_dead = loss, corruption, delay_s, is_dead
            llm.reset_prefix_cache()
            tokens, num_cached = decode(llm, prefill(prefill_llm))
            assert tokens == expected
            assert num_cached == 0 or not is_dead
            found.add(num_cached)
        FAULTS.is_dead = False
        for _ in range(5):
            used_blocks(llm)
        assert used_blocks(llm) == 0
    assert FAULTS.num_lost
    assert FAULTS.num_corrupted
    assert len(found) > 2, "some prefixes came in part"
