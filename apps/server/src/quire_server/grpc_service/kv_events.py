"""`SubscribeKvEvents`: what the engine publishes of its KV cache by ZMQ, as messages of gRPC. Knows no engine."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2

from quire_engine import KVEventsConfig
from quire_engine.kv_event_wire import WireBatch, WireBlockRemoved, WireBlocksCleared, WireBlockStored, WireEvent

__all__ = ["kv_event_batches"]

REPLAY_WAIT_S = 5.0
"""How long the engine may take to answer with what it has kept."""
_END = (-1).to_bytes(8, "big", signed=True)
_BATCH = msgspec.msgpack.Decoder(WireBatch)


async def kv_event_batches(config: KVEventsConfig, start: int) -> AsyncGenerator[Any, None]:
    """Batches of an engine's events: those that it has kept from number `start` on, then those that come.

    Args:
        config: Where they are published.
        start: Number of the first batch; 0 for all of them, or, where they are not kept any more, for new ones alone.
    """
    context = zmq.asyncio.Context()
    try:
        live = context.socket(zmq.SUB)
        live.set(zmq.RCVHWM, config.hwm)
        live.subscribe(config.topic)
        live.connect(_reachable(config.endpoint))
        last = -1
        kept = await _kept_batches(context, config, start)
        if start or (kept and kept[0][0] == 0):
            for last, payload in kept:
                yield _message(last, payload)
        while True:
            _, sent_number, payload = await live.recv_multipart()
            number = int.from_bytes(sent_number, "big")
            if -1 < last < number - 1:  # the subscription began later than what was kept ended
                for missed, content in await _kept_batches(context, config, last + 1):
                    if missed < number:
                        yield _message(missed, content)
            if number > last or number == 0:  # an engine that starts again begins at 0
                last = number
                yield _message(number, payload)
    finally:
        context.destroy(linger=0)


def _reachable(endpoint: str) -> str:
    """An address that is listened on, as one of this machine to connect to."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)", "tcp://127.0.0.1", endpoint)


async def _kept_batches(context: zmq.asyncio.Context, config: KVEventsConfig, start: int) -> list[tuple[int, bytes]]:
    """Numbers and contents of what is kept from a number on; none where nothing is, or the engine does not answer."""
    if config.replay_endpoint is None:
        return []
    socket = context.socket(zmq.DEALER)
    socket.connect(_reachable(config.replay_endpoint))
    await socket.send_multipart((b"", start.to_bytes(8, "big")))
    kept = []
    while await socket.poll(int(REPLAY_WAIT_S * 1000)):
        _, number, payload = await socket.recv_multipart()
        if number == _END:
            break
        kept.append((int.from_bytes(number, "big"), payload))
    return kept


def _message(number: int, payload: bytes) -> Any:
    batch = _BATCH.decode(payload)
    events = msgspec.convert(batch.events, list[WireEvent])
    return common_pb2.KvEventBatch(
        sequence_number=number,
        timestamp=batch.ts,
        events=[_event(number, event) for event in events],
        dp_rank=batch.data_parallel_rank,
    )


def _event(number: int, event: WireEvent) -> Any:
    if isinstance(event, WireBlockStored):
        return common_pb2.KvCacheEvent(event_id=number, stored=_stored(event))
    if isinstance(event, WireBlockRemoved):
        removed = common_pb2.KvBlocksRemoved(
            block_hashes=map(_block_hash, event.block_hashes), medium=event.medium, group_idx=event.group_idx
        )
        return common_pb2.KvCacheEvent(event_id=number, removed=removed)
    assert isinstance(event, WireBlocksCleared)
    return common_pb2.KvCacheEvent(event_id=number, cleared=common_pb2.KvCacheCleared())


def _stored(event: WireBlockStored) -> Any:
    size, parent = event.block_size, event.parent_block_hash
    blocks = [
        common_pb2.KvBlock(
            block_hash=_block_hash(block_hash),
            token_ids=event.token_ids[index * size : (index + 1) * size],
            block_size=size,
            extra_keys=[
                common_pb2.KvBlockExtraKey(text=key)
                for key in (event.extra_keys[index] if event.extra_keys else None) or ()
            ],
        )
        for index, block_hash in enumerate(event.block_hashes)
    ]
    return common_pb2.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=None if parent is None else _block_hash(parent),
        medium=event.medium,
        lora_name=event.lora_name,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )


def _block_hash(digest: bytes) -> int:
    """The first 8 bytes of a digest, as the protocol's signed number."""
    return int.from_bytes(digest[:8], "big", signed=True)
