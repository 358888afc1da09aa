"""Tiers, sleep and connectors where the KV cache is on an accelerator. It is pretended; the CPU computes and copies."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire_interfaces import ConfigError, RequestError
from quire_interfaces.platforms import PLATFORMS, Platform

PROMPTS = [f"What is {number} + 25? " + "Say it slowly, and then spell the word basket. " * 3 for number in range(8)]
PLAIN: dict[str, Any] = {"max_model_len": 256, "block_size": 8, "num_threads": 1, "enable_prefix_caching": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


class Runtime(ModuleType):
    """In the manner of torch.cuda, of a device whose work is done when a call returns."""

    class Event:
        def record(self, stream: Any) -> None: ...
        def synchronize(self) -> None: ...

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def synchronize(self) -> None: ...

    def __init__(self) -> None:
        super().__init__("pretended_accelerator")
        self.num_emptied = 0
        self._steps = Runtime.Stream()

    def current_stream(self, device: Any = None) -> Any:
        return self._steps

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def set_device(self, index: int) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def get_device_properties(self, index: int) -> Any:
        return type("Properties", (), {"name": "pretended", "total_memory": 1 << 30})

    def empty_cache(self) -> None:
        self.num_emptied += 1


class Pretended(Platform):
    @property
    def is_host(self) -> bool:
        return False


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    platform = Pretended(name="pretended", device_type="cpu", module=runtime.__name__)
    monkeypatch.setitem(PLATFORMS, platform.name, platform)
    return runtime


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**PLAIN) as llm:
        return tokens(llm)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_prefixes_come_back_from_tiers(
    accelerator: Runtime, expected: list[list[int]], tmp_path: Path, tier: str, *, async_scheduling: bool
) -> None:
    settings: dict[str, Any] = {"kv_offloading_size": 0.02} if tier == "memory" else {"kv_disk_path": str(tmp_path)}
    # Room for about one request: what the others had is in the tier only.
    few = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 48, "async_scheduling": async_scheduling}
    with LLM(device="pretended", **PLAIN, **few, **settings) as llm:
        assert tokens(llm) == expected
        threading.Event().wait(0.2)  # stores are written beside the steps
        assert tokens(llm) == expected
        assert llm.stats().external_prefix_cache_hit_tokens_total > 0
        llm.engine.core.parts.check_integrity()


def test_another_engine_reads_blocks_over_a_socket(accelerator: Runtime, expected: list[list[int]]) -> None:
    def config(role: str, connector: str = "SocketConnector") -> dict[str, Any]:
        return {"kv_transfer_config": {"kv_connector": connector, "kv_role": role}}

    asks = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with (
        LLM(device="pretended", **PLAIN, **config("kv_producer")) as prefill,
        LLM(device="pretended", **PLAIN, **config("kv_consumer")) as decode,
    ):
        computed = prefill.generate(PROMPTS, asks, use_tqdm=False)
        params = [
            SamplingParams(temperature=0, max_tokens=12, extra_args={"kv_transfer_params": each.kv_transfer_params})
            for each in computed
        ]
        assert tokens(decode, params) == expected
        assert decode.stats().external_prefix_cache_hit_tokens_total > 8 * len(PROMPTS)


def test_sleep_gives_everything_on_the_device_back(accelerator: Runtime, expected: list[list[int]]) -> None:
    with LLM(device="pretended", **PLAIN) as llm:
        assert tokens(llm) == expected
        for level in (1, 2):
            emptied = accelerator.num_emptied
            assert llm.sleep(level) > 1 << 20
            assert accelerator.num_emptied > emptied
            with pytest.raises(RequestError, match=f"sleep level {level}"):
                llm.wake_up(["kv_cache"])
            with pytest.raises(RequestError, match="wake it first"):
                llm.sleep(2)
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            assert tokens(llm) == expected


def test_with_a_tier_it_sleeps_with_its_memory(accelerator: Runtime) -> None:
    with LLM(device="pretended", **PLAIN, kv_offloading_size=0.01) as llm:
        with pytest.raises(RequestError, match="level 0"):
            llm.sleep(1)
        llm.sleep(0)


def test_nixl_says_what_to_take(accelerator: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", ModuleType("nixl._api"))
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="take SocketConnector"):
        LLM(device="pretended", **PLAIN, kv_transfer_config=transfer)
