"""KV cache events as a subscriber reads them, who knows vLLM's wire format and nothing of ours."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire_engine import EngineConfig, EngineCore, EngineInfo, EngineParts, KVEventPublisher, KVEventsConfig
from quire_engine.kv_event_publisher import rank_endpoint
from quire_interfaces import (
    ConfigError,
    FullAttentionSpec,
    KVCachePlan,
    Request,
    RequestOptions,
    SamplingParams,
    SlidingWindowSpec,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager, hash_blocks, plan_kv_cache
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.fake_runner import FakeExecutor, FakeRunner

BLOCK = 4
COMMON: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 1, "dtype": "bfloat16"}


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Keeps what it was told is cached, per group."""

    def __init__(self, folder: Path, topic: str = "") -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._live.connect(endpoint(folder))
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(endpoint(folder, "replay"))
        self.cached: dict[int, set[bytes]] = {}
        self.batches: dict[int, Batch] = {}
        self.next_number = 0

    def wait_until_subscribed(self, publisher: KVEventPublisher) -> None:
        """Messages that nobody hears are not sent: send some until one is heard."""
        while not self._live.poll(10):
            publisher._send([])
        self.receive(publisher)

    def receive(self, publisher: KVEventPublisher) -> list[Batch]:
        """Take in what comes, up to the last batch that was published."""
        batches = []
        while self.next_number < publisher._next_number:
            assert self._live.poll(30_000), f"batch {self.next_number} did not come"
            _, number, payload = self._live.recv_multipart()
            self.next_number = int.from_bytes(number, "big") + 1
            batches.append(self._take(number, payload))
        return batches

    def replay(self, start: int) -> list[int]:
        """Numbers of the batches that are replayed from `start` on."""
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self._replay.poll(30_000)
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return numbers
            self._take(number, payload)
            numbers.append(int.from_bytes(number, "big"))

    def _take(self, number: bytes, payload: bytes) -> Batch:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        self.batches[int.from_bytes(number, "big")] = batch
        return batch

    def apply(self) -> None:
        """Work out what is cached from all batches, none of which may be missing."""
        assert sorted(self.batches) == list(range(len(self.batches)))
        self.cached = {}
        for number in sorted(self.batches):
            for event in self.batches[number].events:
                if isinstance(event, AllBlocksCleared):
                    self.cached.clear()
                elif isinstance(event, BlockRemoved):
                    assert set(event.block_hashes) <= self.cached[event.group_idx or 0]
                    self.cached[event.group_idx or 0] -= set(event.block_hashes)
                else:
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    self.cached.setdefault(event.group_idx or 0, set()).update(event.block_hashes)

    def close(self) -> None:
        self._context.destroy(linger=0)


def endpoint(folder: Path, name: str = "live") -> str:
    return f"ipc://{folder}/{name}"


def events_config(folder: Path, **members: Any) -> KVEventsConfig:
    return KVEventsConfig.of(
        {
            "enable_kv_cache_events": True,
            "endpoint": endpoint(folder),
            "replay_endpoint": endpoint(folder, "replay"),
            **members,
        }
    )


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    subscriber = Subscriber(tmp_path)
    yield subscriber
    subscriber.close()


def make_plan(*windows: int | None, num_blocks: int) -> KVCachePlan:
    specs = {
        str(i): FullAttentionSpec(**COMMON) if window is None else SlidingWindowSpec(**COMMON, sliding_window=window)
        for i, window in enumerate(windows)
    }
    return plan_kv_cache(specs, num_blocks=num_blocks + 1)


def make_core(plan: KVCachePlan, config: KVEventsConfig) -> tuple[EngineCore, KVCacheManager, KVEventPublisher]:
    cache = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK, enable_kv_cache_events=True))
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=6, max_model_len=64), cache)
    runner = FakeRunner(
        num_rows=6,
        block_sizes=(BLOCK,) * len(plan.groups),
        sliding_windows=tuple(getattr(group.spec, "sliding_window", None) for group in plan.groups),
        num_blocks=plan.num_blocks,
    )
    publisher = KVEventPublisher(config, plan.groups, cache.take_events)
    parts = EngineParts(
        scheduler=scheduler,
        executor=FakeExecutor(runner),
        info=EngineInfo(max_model_len=64, vocab_size=1000),
        kv_events=publisher,
    )
    return EngineCore(parts, EngineConfig()), cache, publisher


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        seed=0,
        max_tokens=max_tokens,
        options=RequestOptions(**options),
    )


def run(core: EngineCore) -> None:
    deadline_s = time.monotonic() + 60
    while core.has_requests():
        core.step()
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_stored_minus_removed_is_what_is_cached(
    tmp_path: Path, subscriber: Subscriber, windows: tuple[int | None, ...]
) -> None:
    core, cache, publisher = make_core(make_plan(*windows, num_blocks=40), events_config(tmp_path))
    subscriber.wait_until_subscribed(publisher)
    rng = random.Random(3)
    for number in range(60):
        prefix = rng.choice([[], list(range(12)), list(range(20))])
        prompt = prefix + [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        core.add_request(make_request(str(number), prompt, rng.randrange(1, 9), cache_salt=rng.choice([None, "b"])))
        if number == 30:
            run(core)
            core.reset_prefix_cache()
        for _ in range(rng.randrange(4)):
            core.step()
    run(core)
    subscriber.receive(publisher)
    subscriber.replay(0)
    subscriber.apply()
    expected = {group: set(index.blocks) for group, index in enumerate(cache._pool.indexes)}
    assert subscriber.cached == expected
    kinds = [event for batch in subscriber.batches.values() for event in batch.events]
    assert any(isinstance(event, BlockRemoved) for event in kinds), "the load was to be larger than the cache"
    assert sum(isinstance(event, AllBlocksCleared) for event in kinds) == 2, "at the start, and for the reset"
    core.close()


def test_fields_of_a_stored_block(tmp_path: Path, subscriber: Subscriber) -> None:
    core, _, publisher = make_core(make_plan(None, 6, num_blocks=40), events_config(tmp_path))
    subscriber.wait_until_subscribed(publisher)
    core.add_request(make_request("a", list(range(9)), 1))
    run(core)
    before = time.time()
    (batch,) = subscriber.receive(publisher)
    full, window = batch.events
    assert isinstance(full, BlockStored)
    assert isinstance(window, BlockStored)
    assert full.block_hashes == hash_blocks(range(8), BLOCK)
    assert (full.parent_block_hash, full.token_ids, full.block_size) == (None, list(range(8)), BLOCK)
    assert (full.lora_id, full.lora_name, full.medium, full.extra_keys) == (None, None, "GPU", None)
    assert (full.group_idx, full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    assert (window.group_idx, window.kv_cache_spec_kind) == (1, "sliding_window")
    assert window.kv_cache_spec_sliding_window == 6
    assert batch.data_parallel_rank == 0
    assert abs(before - batch.ts) < 60
    core.close()


def test_another_tenants_salt_is_told_and_has_other_hashes(tmp_path: Path, subscriber: Subscriber) -> None:
    core, _, publisher = make_core(make_plan(None, num_blocks=40), events_config(tmp_path))
    subscriber.wait_until_subscribed(publisher)
    for name, salt in (("a", None), ("b", "tenant b")):
        core.add_request(make_request(name, list(range(9)), 1, cache_salt=salt))
        run(core)
    plain, salted = [event for batch in subscriber.receive(publisher) for event in batch.events]
    assert isinstance(plain, BlockStored)
    assert isinstance(salted, BlockStored)
    assert plain.token_ids == salted.token_ids
    assert salted.extra_keys == [["tenant b"], None]
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    core.close()


def test_a_gap_is_seen_and_filled_by_replay(tmp_path: Path, subscriber: Subscriber) -> None:
    core, cache, publisher = make_core(make_plan(None, num_blocks=40), events_config(tmp_path, topic="kv"))
    for name, first in (("a", 0), ("b", 10)):  # a batch each
        core.add_request(make_request(name, list(range(first, first + 9)), 1))
        run(core)
    deadline_s = time.monotonic() + 30
    while subscriber.replay(0) != [0, 1, 2]:  # who subscribes before a batch is sent hears it
        assert time.monotonic() < deadline_s
    with contextlib.closing(Subscriber(tmp_path, "kv")) as late:
        late.wait_until_subscribed(publisher)
        missed = min(late.batches)
        assert missed > 2
        assert late.replay(1)[:1] == [1]
        assert late.replay(0) == list(range(late.next_number))
        late.apply()
        assert late.cached == {0: set(cache._pool.indexes[0].blocks)}
    core.close()


def test_replay_is_bounded(tmp_path: Path, subscriber: Subscriber) -> None:
    core, _, _ = make_core(make_plan(None, num_blocks=40), events_config(tmp_path, buffer_steps=3))
    for _ in range(10):
        core.reset_prefix_cache()
    deadline_s = time.monotonic() + 30
    while subscriber.replay(0) != [8, 9, 10]:
        assert time.monotonic() < deadline_s
    assert subscriber.replay(10) == [10]
    assert subscriber.replay(11) == []
    core.close()


def test_nonsense_at_the_replay_address_harms_nobody(tmp_path: Path, subscriber: Subscriber) -> None:
    core, _, _ = make_core(make_plan(None, num_blocks=40), events_config(tmp_path))
    for frames in ((b"",), (b"", b"x"), (b"", b"1" * 8, b"1" * 8), (b"a", b"1" * 8)):
        subscriber._replay.send_multipart(frames)
    assert subscriber.replay(0) == [0]
    core.close()
    core.close()


def test_no_publisher_without_being_enabled() -> None:
    assert not EngineConfig().kv_events.is_published
    assert not KVEventsConfig.of({"publisher": "zmq"}).is_published
    assert not KVEventsConfig.of({"enable_kv_cache_events": True, "publisher": "null"}).is_published
    assert EngineConfig(kv_events_config={"enable_kv_cache_events": True}).kv_events.is_published


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"endpint": "x"}, "did you mean 'endpoint'"),
        ({"publisher": "kafka"}, "one of zmq, null"),
        ({"buffer_steps": 0}, "at least 1"),
        ([], "a JSON object"),
    ],
)
def test_what_cannot_be_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig(kv_events_config=value)
    assert caught.value.field == "kv_events_config"


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = events_config(tmp_path, endpoint=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="cannot be used"):
            KVEventPublisher(config, make_plan(None, num_blocks=2).groups, list)


def test_ranks_have_addresses_of_their_own() -> None:
    assert rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert rank_endpoint("inproc://cache", 1) == "inproc://cache_dp1"
    with pytest.raises(ConfigError, match="no port"):
        rank_endpoint("tcp://host", 1)
