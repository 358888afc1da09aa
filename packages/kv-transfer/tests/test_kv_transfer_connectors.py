"""Connectors that pull: by NIXL where it is there, by a socket, and connectors of other packages."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import BlockKey, ConfigError, RequestConnector
from quire_kv_transfer import (
    ConnectorConfig,
    ConnectorContext,
    HostMemoryTier,
    OpenConnectors,
    TierStack,
    check_connector,
    open_connectors,
    peer_transports,
)
from quire_testkit.conformance.request_connector import BLOCK_BYTES, NUM_BLOCKS, RequestConnectorSuite


def make_context(config: ConnectorConfig, fingerprint: bytes = bytes(32)) -> ConnectorContext:
    return ConnectorContext(
        config=config, fingerprint=fingerprint, block_bytes=(BLOCK_BYTES,), block_size=16, num_blocks=NUM_BLOCKS
    )


class TestSocketConnector(RequestConnectorSuite):
    name = "SocketConnector"

    def make_connector(self, role: str, fingerprint: bytes, timeout_s: float) -> RequestConnector:
        extra = {"abort_request_timeout": timeout_s, "handshake_timeout": 0.3, "late_after": 0.3}
        config = ConnectorConfig(kv_connector=self.name, kv_role=role, kv_connector_extra_config=extra)
        connector = open_connectors(make_context(config, fingerprint)).connector
        assert connector is not None
        return connector


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install nixl")
class TestNixlConnector(TestSocketConnector):
    name = "NixlConnector"


def open_named(config: dict[str, Any]) -> OpenConnectors:
    return open_connectors(make_context(ConnectorConfig.of(config)))


MODULE = """
from quire_kv_transfer import HostMemoryTier

class NotebookConnector(HostMemoryTier):
    def __init__(self, context):
        super().__init__(context.config.extra("size", 1000))
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with connectors, one of which is broken."""
    (tmp_path / "notebook_connector.py").write_text(MODULE)
    info = tmp_path / "notebook-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.kv_connectors]\nNotebook = notebook_connector:NotebookConnector\nBroken = notebook_connector:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "notebook_connector", raising=False)


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(
    "named",
    [
        {"kv_connector": "Notebook"},
        {"kv_connector": "NotebookConnector", "kv_connector_module_path": "notebook_connector"},
    ],
)
def test_connectors_of_other_packages(named: dict[str, Any]) -> None:
    opened = open_named({**named, "kv_connector_extra_config": {"size": 12345}})
    (tier,) = opened.tiers
    assert isinstance(tier, HostMemoryTier)
    assert tier.size_bytes == 12345
    assert opened.connector is None


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"kv_connector": "Notebok"}, "did you mean 'Notebook'"),
        ({"kv_connector": "Broken"}, "cannot be loaded"),
        ({"kv_connector": "Nothing", "kv_connector_module_path": "notebook_connector"}, "there is no Nothing"),
    ],
)
def test_connectors_that_there_are_not(named: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_connector(ConnectorConfig.of(named))


def test_several_connectors() -> None:
    memory = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 100}}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [memory, {"kv_connector": "SocketConnector"}, memory]},
    }
    opened = open_named(several)
    assert [type(tier) for tier in opened.tiers] == [HostMemoryTier, HostMemoryTier]
    assert opened.connector is not None
    several["kv_connector_extra_config"] = {"connectors": [{"kv_connector": "SocketConnector"}] * 2}
    with pytest.raises(ConfigError, match="take one of them"):
        open_named(several)


def test_members_of_other_servers_are_passed_over() -> None:
    config = ConnectorConfig.of(
        {"kv_connector": "NixlConnector", "kv_buffer_size": 1e9, "kv_rank": 0, "engine_id": None}
    )
    assert config == ConnectorConfig(kv_connector="NixlConnector")


@pytest.mark.parametrize(
    "values",
    [
        {"kv_port": -1},
        {"kv_port": True},
        {"kv_ip": ""},
        {"kv_connector": 5},
        {"kv_buffer_device": "cuda"},
        {"kv_connector_extra_config": []},
        {"kv_load_failure_policy": "x"},
    ],
)
def test_values_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        ConnectorConfig.of(values)


def test_long_transfers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte once, in its place, neighbours together, no transfer longer than it may be."""
    monkeypatch.setattr(peer_transports, "BATCH_BYTES", 250)
    mine, theirs = [[(1000, 100, 100), (5000, 120, 100)]], [[(20_000, 100, 100), (50_000, 100, 100)]]
    local, remote = [(0, 1), (0, 2), (0, 3), (0, 7)], [(0, 4), (0, 5), (0, 9), (0, 2)]
    pieces = peer_transports.read_pieces(mine, theirs, local, remote)
    assert pieces[:3] == [(1100, 20_400, 200), (1300, 20_900, 100), (1700, 20_200, 100)]
    batches = list(peer_transports.read_batches(pieces))
    assert [sum(size for _, _, size in batch) for batch in batches] == [250, 250, 250, 50]

    def moved(each: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(here + byte, there + byte) for here, there, size in each for byte in range(size)]

    assert moved([piece for batch in batches for piece in batch]) == moved(pieces)
    assert len(set(moved(pieces))) == 800
    with pytest.raises(peer_transports.PeerError, match="100 bytes there and 90 here"):
        peer_transports.read_pieces([[(0, 90, 90)]], [[(0, 100, 100)]], [(0, 1)], [(0, 1)])


class StandInStore:
    """The documented interface of `mooncake.store.MooncakeDistributedStore`, in a dictionary. The real one cannot be
    imported without libibverbs and the CUDA runtime."""

    def __init__(self, num_bytes: int = 1 << 30, status: int = 0) -> None:
        self.frames: dict[str, bytes] = {}
        self._num_bytes = num_bytes
        self._status = status

    def setup(self, *arguments: Any) -> int:
        (hostname, metadata, segment, buffer, protocol, device, master) = arguments
        assert (protocol, device, master) == ("tcp", "", "127.0.0.1:50051")
        assert isinstance(segment, int)
        assert hostname
        assert metadata
        assert buffer
        return self._status

    def put(self, name: str, value: bytes) -> int:
        if len(value) > self._num_bytes:
            return -200
        self.frames[name] = value
        while sum(map(len, self.frames.values())) > self._num_bytes:
            del self.frames[next(iter(self.frames))]
        return 0

    def get(self, name: str) -> bytes:
        return self.frames.get(name, b"")

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.frames) for name in names]

    def remove(self, name: str) -> int:
        return 0 if self.frames.pop(name, None) is not None else -704

    def close(self) -> int:
        return 0


def mooncake(monkeypatch: pytest.MonkeyPatch, store: StandInStore) -> OpenConnectors:
    module = types.ModuleType("mooncake.store")
    vars(module)["MooncakeDistributedStore"] = lambda: store
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return open_named({"kv_connector": "MooncakeStoreConnector"})


def test_blocks_go_through_a_mooncake_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StandInStore()
    (tier,) = mooncake(monkeypatch, store).tiers
    stack = TierStack([tier], bytes(32), [BLOCK_BYTES])
    keys = [BlockKey(0, bytes([number]) * 32) for number in range(3)]
    for number, key in enumerate(keys[:2]):
        assert stack.write(key, bytes([number]) * BLOCK_BYTES)
    (other,) = mooncake(monkeypatch, store).tiers
    reader = TierStack([other], bytes(32), [BLOCK_BYTES])
    reader.look_up(keys)
    assert [reader.contains(key) for key in keys] == [True, True, False]
    data = bytearray(BLOCK_BYTES)
    assert reader.read(keys[1], [memoryview(data)])
    assert data == b"\1" * BLOCK_BYTES
    name = next(iter(store.frames))
    store.frames[name] = store.frames[name][:-1] + b"x"
    assert not reader.read(keys[0], [memoryview(data)])
    assert name not in store.frames, "what is damaged is removed"
    store.frames.clear()
    assert not reader.read(keys[1], [memoryview(data)])
    assert not reader.contains(keys[1])
    for each in (stack, reader):
        each.close()


def test_mooncake_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot be joined \(status 7\)"):
        mooncake(monkeypatch, StandInStore(status=7))
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="needs the package mooncake-transfer-engine"):
        open_named({"kv_connector": "MooncakeStoreConnector"})


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "MooncakeConnector"])
def test_connectors_that_are_not_here_say_what_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no {name}: .*MooncakeStoreConnector"):
        check_connector(ConnectorConfig(kv_connector=name))
