"""The block store and its client: conformance, tenants, quotas, other models, stores that are slow, gone or hostile."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_interfaces import BlockKey, ConfigError
from quire_kv_transfer import (
    BlockStore,
    BlockStoreServer,
    BlockTier,
    RemoteTier,
    StoreTenant,
    TierStack,
    parse_address,
)
from quire_kv_transfer.block_frame import HEADER_BYTES, frame_header
from quire_kv_transfer.store_wire import GREETING, LENGTH, MAGIC, REQUEST, STORE, VERSION, pack_key
from quire_testkit.conformance.block_tier import BLOCK_BYTES, BlockTierSuite, block_key, content
from quire_testkit.faulty_tier import Faults, FaultyTier

FINGERPRINT = b"m" * 32
FRAME_BYTES = BLOCK_BYTES + HEADER_BYTES
MakeServer = Callable[..., BlockStoreServer]


def tenant(name: str = "default", api_key: str = "", num_blocks: int = 30, num_on_disk: int = 0) -> StoreTenant:
    return StoreTenant(name=name, api_key=api_key, memory_bytes=num_blocks * FRAME_BYTES, disk_bytes=num_on_disk * 8192)


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    servers = []

    def make(*tenants: StoreTenant, folder: str | None = None, address: str = "", **bounds: int) -> BlockStoreServer:
        address = address or f"unix:{tmp_path}/store"
        server = BlockStoreServer(BlockStore(tenants or [tenant()], folder), [address], **bounds)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def stack_of(address: str, fingerprint: bytes = FINGERPRINT, api_key: str = "") -> TierStack:
    return TierStack([RemoteTier(address, fingerprint, api_key=api_key)], fingerprint, [BLOCK_BYTES])


def read(stack: TierStack, number: int) -> bytes | None:
    data = bytearray(BLOCK_BYTES)
    return bytes(data) if stack.read(block_key(number), [memoryview(data)]) else None


class TestRemoteTier(BlockTierSuite):
    @pytest.fixture(autouse=True)
    def server(self, make_server: MakeServer) -> None:
        self.address = make_server().addresses[0]

    def make_tier(self) -> BlockTier:
        return RemoteTier(self.address, FINGERPRINT)

    def make_stack(self, tier: BlockTier) -> TierStack:
        return TierStack([tier], FINGERPRINT, [BLOCK_BYTES])

    def frame_of(self, key: BlockKey, number: int) -> bytes:
        return frame_header(FINGERPRINT, key, [content(number)]) + content(number)


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"])
def test_another_engine_finds_what_one_has_stored(make_server: MakeServer, address: str) -> None:
    (found,) = make_server(address=address).addresses
    writer, reader = stack_of(found), stack_of(found)
    for number in range(20):
        assert writer.write(block_key(number), content(number))
        assert writer.contains(block_key(number))
    assert not reader.contains(block_key(1)), "nobody asked"
    reader.look_up([block_key(number) for number in range(25)])
    assert [reader.contains(block_key(number)) for number in range(25)] == [True] * 20 + [False] * 5
    assert [read(reader, number) for number in range(25)] == [content(n) for n in range(20)] + [None] * 5
    for stack in (writer, reader):
        stack.close()


def test_faults_cost_only_computing(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, wrong bits and connections that break, at random: what arrives is right, and the store is used on."""
    monkeypatch.setattr("quire_kv_transfer.remote_tier.FIRST_PAUSE_S", 0.001)
    server = make_server()
    rng = random.Random(5)
    faults = Faults(5, loss=0.1, corruption=0.2)
    remote = RemoteTier(server.addresses[0], FINGERPRINT)
    stack = TierStack([FaultyTier(remote, faults)], FINGERPRINT, [BLOCK_BYTES])
    num_arrived = 0
    for step in range(400):
        number = rng.randrange(12)
        if rng.random() < 0.4:
            stack.write(block_key(number), content(number))
        else:
            stack.look_up([block_key(number)])
            arrived = read(stack, number)
            assert arrived in (None, content(number)), step
            num_arrived += arrived is not None
        if step % 100 == 50:
            with server._lock:
                for connection in server._connections:
                    connection.shutdown(socket.SHUT_RDWR)
    assert num_arrived > 20
    assert faults.num_corrupted > 10
    assert not stack.is_stopped, "a store that may come back is not left out for good"
    stack.close()


def test_the_quota_holds(make_server: MakeServer) -> None:
    stack = stack_of(make_server(tenant(num_blocks=5)).addresses[0])
    for number in range(20):
        stack.write(block_key(number), content(number))
    assert [read(stack, number) is not None for number in range(20)] == [False] * 15 + [True] * 5
    stack.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_other_models_and_tenants_find_nothing(make_server: MakeServer, tmp_path: Path, is_on_disk: bool) -> None:
    num_on_disk = 50 if is_on_disk else 0
    tenants = [tenant(name, f"key of {name}", num_on_disk=num_on_disk) for name in ("a", "b")]
    (address,) = make_server(*tenants, folder=str(tmp_path / "disk") if is_on_disk else None).addresses
    own = stack_of(address, api_key="key of a")
    assert own.write(block_key(1), content(1))
    others = [
        stack_of(address, api_key="key of b"),
        stack_of(address, api_key="key of c"),
        stack_of(address),
        stack_of(address, b"n" * 32, "key of a"),
    ]
    for other in others:
        other.look_up([block_key(1)])
        assert not other.contains(block_key(1))
        assert read(other, 1) is None
    assert read(own, 1) == content(1)
    assert others[0].write(block_key(1), content(2))
    assert read(own, 1) == content(1), "equal keys of two tenants are two blocks"
    for stack in (own, *others):
        stack.close()


def test_disk_keeps_blocks_over_a_restart(make_server: MakeServer, tmp_path: Path) -> None:
    folder = str(tmp_path / "disk")
    server = make_server(tenant(num_blocks=3, num_on_disk=50), folder=folder)
    stack = stack_of(server.addresses[0])
    for number in range(10):
        assert stack.write(block_key(number), content(number))
    deadline_s = time.monotonic() + 30
    while len(list((tmp_path / "disk").rglob("*.kv"))) < 10:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert [read(stack, number) for number in range(10)] == [content(number) for number in range(10)]
    server.close()
    stack.close()
    stack = stack_of(make_server(tenant(num_blocks=3, num_on_disk=50), folder=folder).addresses[0])
    path = sorted((tmp_path / "disk").rglob(f"{block_key(4).block_hash.hex()}*.kv"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    stack.look_up([block_key(4)])
    assert stack.contains(block_key(4))
    assert read(stack, 4) is None, "damaged"
    assert not path.exists()
    assert read(stack, 5) == content(5)
    stack.close()


def test_a_store_that_is_not_there_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stack = stack_of(f"unix:{tmp_path}/nobody")
    for number in range(50):
        stack.look_up([block_key(number)])
        assert not stack.write(block_key(number), content(number))
        assert read(stack, number) is None
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    stack.close()


def test_a_store_comes_back(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_kv_transfer.remote_tier.FIRST_PAUSE_S", 0.01)
    server = make_server()
    stack = stack_of(server.addresses[0])
    assert stack.write(block_key(1), content(1))
    server.close()
    assert read(stack, 1) is None
    assert not stack.contains(block_key(1)), "another store may not have it"
    make_server()
    deadline_s = time.monotonic() + 30
    while not stack.write(block_key(2), content(2)):
        assert time.monotonic() < deadline_s
    assert read(stack, 2) == content(2)
    stack.close()


def test_a_store_that_answers_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/silent")
        listener.listen()
        stack = stack_of(f"unix:{tmp_path}/silent")
        for number in range(20):
            stack.look_up([block_key(number)])
            assert read(stack, number) is None
        stack.close()


def test_hostile_clients_harm_nobody(make_server: MakeServer) -> None:
    (address,) = make_server(max_frame_bytes=1 << 20).addresses
    greeting = GREETING.pack(MAGIC, VERSION, 0, FINGERPRINT)
    store = REQUEST.pack(STORE, 1) + pack_key(block_key(1))
    bad_frame = LENGTH.pack(FRAME_BYTES) + bytes(FRAME_BYTES)
    for message in (
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n" + bytes(64),
        GREETING.pack(MAGIC, VERSION + 1, 0, FINGERPRINT),
        GREETING.pack(MAGIC, VERSION, 1 << 31, FINGERPRINT),
        greeting + REQUEST.pack(77, 1) + pack_key(block_key(1)),
        greeting + REQUEST.pack(STORE, 1 << 31),
        greeting + REQUEST.pack(STORE, 1) + struct.pack("<II32s", 0, 99, bytes(32)),
        greeting + store + LENGTH.pack(1 << 62),
        greeting + store + bad_frame,
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(parse_address(address)[1])
            sock.settimeout(30)
            with contextlib.suppress(ConnectionError):  # it may hang up before all was said
                sock.sendall(message)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    stack = stack_of(address)
    stack.look_up([block_key(1)])
    assert not stack.contains(block_key(1)), "a frame that is none is not taken"
    assert stack.write(block_key(1), content(1))
    assert read(stack, 1) == content(1)
    stack.close()


def test_connections_are_bounded(make_server: MakeServer) -> None:
    (address,) = make_server(max_connections=1).addresses
    first, second = stack_of(address), stack_of(address)
    assert first.write(block_key(1), content(1))
    assert not second.write(block_key(2), content(2))
    first.close()
    second.close()


def test_a_socket_is_private_and_one_that_was_left_is_replaced(make_server: MakeServer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{tmp_path}/store")
    make_server()
    assert stat.S_IMODE(os.stat(tmp_path / "store").st_mode) & 0o077 == 0
    with pytest.raises(ConfigError, match="cannot listen"):
        make_server()


@pytest.mark.parametrize("address", ["", "unix:", "http://host:1", "tcp://host", "tcp://:5", "tcp://host:99999"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="no address of a block store"):
        RemoteTier(address, FINGERPRINT)


def test_stores_that_cannot_be(make_server: MakeServer) -> None:
    with pytest.raises(ConfigError, match="asks nobody for a key"):
        make_server(address="tcp://0.0.0.0:0")
    for tenants in ([], [tenant("a"), tenant("b")], [tenant("a", "k"), tenant("b", "k")], [tenant("../a")]):
        with pytest.raises(ConfigError, match="tenant"):
            BlockStore(tenants)


def test_two_engines_at_once(make_server: MakeServer) -> None:
    (address,) = make_server(tenant(num_blocks=8)).addresses
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng, stack = random.Random(seed), stack_of(address)
        for _ in range(150):
            number = rng.randrange(12)
            if rng.random() < 0.5:
                stack.write(block_key(number), content(number))
            elif read(stack, number) not in (None, content(number)):
                wrong.append(number)
        stack.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
