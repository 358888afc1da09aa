"""`--device NAME:1`: threads that compute tell the platform first. The device is pretended; the CPU computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire_interfaces.platforms import PLATFORMS, Platform


class Devices(ModuleType):
    """Two devices; a thread is at the first until it says otherwise, as threads of torch.cuda are."""

    def __init__(self) -> None:
        super().__init__("two_devices")
        self._own = threading.local()

    def set_device(self, index: int) -> None:
        self._own.index = index

    def current_device(self) -> int:
        return int(getattr(self._own, "index", 0))

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def get_device_properties(self, index: int) -> Any:
        return type("Properties", (), {"name": f"pretended {index}", "total_memory": 1 << 30})


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setitem(sys.modules, "two_devices", found)
    monkeypatch.setitem(PLATFORMS, "two", Platform(name="two", device_type="cpu", module="two_devices"))
    return found


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_thread_that_computes_is_at_the_device(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, *, async_scheduling: bool
) -> None:
    places: set[tuple[str, int]] = set()

    def note(token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
        places.add((threading.current_thread().name, devices.current_device()))
        return logits

    own = SamplingParams(temperature=0, max_tokens=5, extra_args={"logits_processors": ["note"]})
    with LLM(device="two:1", logits_processors={"note": note}, async_scheduling=async_scheduling) as llm:
        devices.set_device(0)  # as a caller does who works with another device, too
        llm.generate(["red", "blue"], own, use_tqdm=False)
    assert {device for _, device in places} == {1}
