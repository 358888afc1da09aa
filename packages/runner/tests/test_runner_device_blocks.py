"""Blocks of a cache on an accelerator: the bytes of the caches, copied behind the steps that were launched before."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from runner_harness import cache_shape
from torch.utils._python_dispatch import TorchDispatchMode

from quire_interfaces import ConfigError, FullAttentionSpec, KVCacheGroup, KVCachePlan
from quire_interfaces.platforms import Platform
from quire_runner import allocate_kv_caches
from quire_runner.device_blocks import DeviceBlocks

NUM_BLOCKS = 6


class Streams(ModuleType):
    """What torch.cuda has of streams, on the CPU: says in which order what was asked of which."""

    def __init__(self) -> None:
        super().__init__("streams_of_tests")
        self.log: list[tuple[str, str]] = []
        self._own = threading.local()
        self.made_on: list[int] = []
        self._device = 0
        outer = self

        class Event:
            def record(self, stream: Any) -> None:
                self.stream = stream
                outer.log.append(("record", stream.name))

            def synchronize(self) -> None:
                outer.log.append(("await", self.stream.name))

        class Stream:
            def __init__(self, name: str = "") -> None:
                self.name = name or "side"
                outer.made_on += [] if name else [outer._device]

            def wait_stream(self, other: Stream) -> None:
                outer.log.append((f"{self.name} waits for", other.name))

            def wait_event(self, event: Event) -> None:
                outer.log.append((f"{self.name} waits for event of", event.stream.name))

        self.Event, self.Stream = Event, Stream
        self._steps = Stream("steps")

    def set_device(self, index: int) -> None:
        self._device = index

    def current_stream(self) -> Any:
        return getattr(self._own, "stream", self._steps)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._own.stream = stream
        yield
        self._own.stream = before


class Noted(TorchDispatchMode):
    """Notes on which stream what is read and written."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index_select", "copy_"):
            self._streams.log.append((name, self._streams.current_stream().name))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


@pytest.fixture
def caches() -> tuple[KVCachePlan, dict[str, torch.Tensor]]:
    """Two groups whose layers share tensors though their blocks differ in size."""
    shape: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "dtype": "bfloat16"}
    wide, narrow = FullAttentionSpec(**shape, head_dim=8), FullAttentionSpec(**shape, head_dim=4)
    plan = KVCachePlan(
        groups=(KVCacheGroup(spec=wide, layer_names=("a", "b")), KVCacheGroup(spec=narrow, layer_names=("c",))),
        num_blocks=NUM_BLOCKS,
        tensor_block_bytes=(wide.block_bytes, wide.block_bytes),
    )
    made = allocate_kv_caches(plan, device="cpu", cache_shape=cache_shape)
    for name in ("a", "b", "c"):
        made[name].copy_(torch.randn(made[name].shape))
    return plan, made


def device_blocks(streams: Streams, plan: KVCachePlan, caches: dict[str, torch.Tensor]) -> DeviceBlocks:
    return DeviceBlocks(plan, caches, Platform(name="side", device_type="cpu", module=streams.__name__), "side")


def bytes_of(caches: dict[str, torch.Tensor], group: int, block: int) -> bytes:
    names = (("a", "b"), ("c",))[group]
    return b"".join(caches[name][block].contiguous().view(torch.uint8).numpy().tobytes() for name in names)


def test_snapshots_are_of_the_steps_before_them(streams: Streams, caches: Any) -> None:
    plan, made = caches
    memory = device_blocks(streams, plan, made)
    places = [(0, 5), (1, 2), (0, 0), (1, 1), (0, 3)]
    expected = [bytes_of(made, *place) for place in places]
    with Noted(streams):
        read = memory.snapshot(places)
    order = streams.log.copy()
    for cache in made.values():
        cache.zero_()  # the next step
    assert read() == expected
    # Gathered on the stream of the steps, for these may overwrite the blocks; copied on another one, which waits.
    assert ("index_select", "side") not in order
    waits = [index for index, each in enumerate(order) if each == ("side waits for", "steps")]
    sent = [index for index, each in enumerate(order) if each == ("copy_", "side")]
    assert len(waits) == len(sent) == 2
    assert all(wait < copy for wait, copy in zip(waits, sent, strict=True))
    assert order[-1] == ("record", "side")
    assert streams.log[-1] == ("await", "side")


def test_loads_wait_for_the_steps_before_them(streams: Streams, caches: Any) -> None:
    plan, made = caches
    memory = device_blocks(streams, plan, made)
    untouched = [bytes_of(made, 0, block) for block in range(NUM_BLOCKS)]
    mark = memory.launched()

    def read(buffers: Any) -> bool:
        for buffer in buffers:
            buffer[:] = bytes(range(len(buffer)))
        return True

    with Noted(streams):
        assert memory.load(0, 4, read, mark)
    size = len(untouched[0]) // 2
    assert bytes_of(made, 0, 4) == 2 * bytes(range(size))
    assert memory.content(0, 4) == 2 * bytes(range(size))
    assert [bytes_of(made, 0, block) for block in range(4)] == untouched[:4]
    assert streams.log[:3] == [("record", "steps"), ("side waits for event of", "steps"), ("copy_", "side")]
    assert streams.log[-2:] == [("record", "side"), ("await", "side")]

    assert not memory.load(0, 1, lambda buffers: False, mark)
    assert bytes_of(made, 0, 1) == untouched[1]


def test_streams_are_of_the_device_of_the_cache(streams: Streams, caches: Any) -> None:
    platform = Platform(name="side", device_type="cpu", module=streams.__name__)
    DeviceBlocks(*caches, platform, "side:3")
    assert streams.made_on == [3, 3]


def test_nobody_reads_its_memory_as_the_hosts(streams: Streams, caches: Any) -> None:
    plan, made = caches
    with pytest.raises(ConfigError, match="SocketConnector") as caught:
        device_blocks(streams, plan, made).buffers(0, 1)
    assert caught.value.field == "kv_transfer_config"
