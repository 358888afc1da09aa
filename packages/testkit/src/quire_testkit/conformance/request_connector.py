"""What a connector that hands requests on (`quire_interfaces.RequestConnector`) must do, alone and when the link
between the engines fails, as tests to inherit.

class TestMyConnector(RequestConnectorSuite):
    def make_connector(self, role, fingerprint, timeout_s): return MyConnector(...)

Both halves of two engines are in the test's process; no engine runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire_interfaces import (
    BlockKey,
    BlockMemory,
    BlockTransfer,
    FinishReason,
    KVTransferJob,
    Request,
    RequestConnector,
    RequestConnectorWorker,
    SamplingParams,
)
from quire_testkit.faulty_link import FaultyLink
from quire_testkit.faulty_tier import Faults

__all__ = ["BLOCK_BYTES", "NUM_BLOCKS", "PlainMemory", "RequestConnectorSuite"]

BLOCK_SIZE = 16
NUM_BLOCKS = 40
NUM_LAYERS = 2
BLOCK_BYTES = 3000
"""Bytes of a block, in all layers together."""
END_S = 10.0
"""A load that has not ended by then never does."""


class PlainMemory(BlockMemory):
    """A KV cache of one group in bytearrays, one per layer, of random bytes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.layers = [bytearray(rng.randbytes(NUM_BLOCKS * BLOCK_BYTES // NUM_LAYERS)) for _ in range(NUM_LAYERS)]

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """See `quire_interfaces.BlockMemory`."""
        size = BLOCK_BYTES // NUM_LAYERS
        return [memoryview(layer)[block_id * size : (block_id + 1) * size] for layer in self.layers]

    def content_of(self, block_id: int) -> bytes:
        """All of a block."""
        return b"".join(self.buffers(0, block_id))


class _Side:
    """One engine: a connector, its worker and their memory."""

    def __init__(self, connector: RequestConnector, seed: int) -> None:
        self.connector = connector
        self.memory = PlainMemory(seed)
        self.worker: RequestConnectorWorker = connector.make_worker(self.memory)
        self.finished: dict[int, list[bool]] = {}

    def step(self, loads: Sequence[KVTransferJob] = (), holds: Sequence[KVTransferJob] = ()) -> None:
        """What a step does: tell the worker, and hear from it."""
        self.worker.begin(loads, holds, self.connector.build_connector_meta())
        self.poll()

    def poll(self) -> None:
        self.finished.update(self.worker.get_finished(waits=True))

    def wait_for(self, job_id: int) -> list[bool]:
        """What became of a job."""
        end_s = time.monotonic() + END_S
        while job_id not in self.finished:
            assert time.monotonic() < end_s, f"job {job_id} never ends"
            self.poll()
        return self.finished.pop(job_id)


def make_request(name: str, params: dict[str, Any], seed: int = 1, num_blocks: int = 6) -> Request:
    """A request whose prompt has whole blocks, the hashes of which depend on `seed`."""
    rng = random.Random(seed)
    return Request(
        request_id=name,
        prompt_token_ids=[1] * (num_blocks * BLOCK_SIZE + 3),
        sampling_params=SamplingParams(extra_args={"kv_transfer_params": params}),
        seed=0,
        max_tokens=1,
        block_hashes=[rng.randbytes(32) for _ in range(num_blocks)],
    )


def job_of(job_id: int, request: Request, block_ids: Sequence[int], first: int = 0) -> KVTransferJob:
    """The request's blocks from `first` on in these places."""
    hashes = request.block_hashes[first:]
    blocks = [
        BlockTransfer(BlockKey(0, block_hash), place) for block_hash, place in zip(hashes, block_ids, strict=True)
    ]
    return KVTransferJob(job_id, tuple(blocks))


class RequestConnectorSuite:
    """A connector in its two roles, for one KV cache group: blocks of `BLOCK_SIZE` tokens and `BLOCK_BYTES` bytes."""

    def make_connector(self, role: str, fingerprint: bytes, timeout_s: float) -> RequestConnector:
        """A connector.

        Args:
            role: "kv_producer" or "kv_consumer".
            fingerprint: 32 bytes.
            timeout_s: Blocks that nobody has read after this time are let go.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_connector")

    @pytest.fixture
    def sides(self) -> Iterator[list[_Side]]:
        sides: list[_Side] = []
        yield sides
        for side in sides:
            side.worker.close()
            side.worker.close()

    def pair(
        self, sides: list[_Side], fingerprints: Sequence[bytes] = (bytes(32), bytes(32)), timeout_s: float = 60.0
    ) -> tuple[_Side, _Side]:
        """A prefill engine and a decode engine."""
        made = [
            _Side(self.make_connector(role, fingerprint, timeout_s), seed)
            for seed, (role, fingerprint) in enumerate(zip(("kv_producer", "kv_consumer"), fingerprints, strict=True))
        ]
        sides += made
        return made[0], made[1]

    def prefill(self, side: _Side, name: str = "p", job_id: int = -1, **options: Any) -> dict[str, Any]:
        """End a request on the prefill engine, in blocks 1 to 6. Returns what is to be handed on."""
        request = make_request(name, {"do_remote_decode": True}, **options)
        request.finish_reason = FinishReason.LENGTH
        job = job_of(job_id, request, range(1, 7))
        is_held, params = side.connector.request_finished(request, job)
        assert is_held
        assert params is not None
        side.step(holds=[job])
        return params

    def begin_load(self, side: _Side, params: dict[str, Any], job_id: int = -1, first: int = 0, **options: Any) -> None:
        """Begin to load into blocks 11 and further."""
        request = make_request(f"d{job_id}", params, **options)
        side.connector.check(request)
        num_tokens = side.connector.get_num_new_matched_tokens(request, first * BLOCK_SIZE)
        assert num_tokens == (6 - first) * BLOCK_SIZE
        job = job_of(job_id, request, range(11 + first, 17), first)
        side.connector.update_state_after_alloc(request, job)
        side.step(loads=[job])

    def test_blocks_arrive_and_are_let_go(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        for job_id, first in ((-1, 0), (-2, 2)):
            params = self.prefill(prefill, job_id=job_id)
            assert params["do_remote_prefill"] is True
            self.begin_load(decode, params, job_id, first)
            assert decode.wait_for(job_id) == [True] * (6 - first)
            assert prefill.wait_for(job_id) == []
            for place in range(first, 6):
                assert decode.memory.content_of(11 + place) == prefill.memory.content_of(1 + place)
            for layer in decode.memory.layers:  # the next one is to bring everything anew
                layer[:] = bytes(len(layer))

    def test_other_blocks_are_left_alone(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        before = [decode.memory.content_of(block_id) for block_id in range(NUM_BLOCKS)]
        self.begin_load(decode, self.prefill(prefill))
        assert all(decode.wait_for(-1))
        for block_id in range(NUM_BLOCKS):
            assert (decode.memory.content_of(block_id) == before[block_id]) == (block_id not in range(11, 17))

    def test_another_fingerprint_gets_nothing(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides, (bytes(32), b"\1" * 32))
        self.begin_load(decode, self.prefill(prefill))
        assert not any(decode.wait_for(-1))

    def test_other_content_is_not_served(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        self.begin_load(decode, self.prefill(prefill), seed=2)
        assert not any(decode.wait_for(-1))

    def test_blocks_are_served_once(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        params = self.prefill(prefill)
        self.begin_load(decode, params, -1)
        assert all(decode.wait_for(-1))
        self.begin_load(decode, params, -2)
        assert not any(decode.wait_for(-2))

    def test_what_nobody_reads_is_let_go(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides, timeout_s=0.05)
        params = self.prefill(prefill)
        assert prefill.wait_for(-1) == []
        self.begin_load(decode, params)
        assert not any(decode.wait_for(-1))

    def test_what_will_not_be_read_is_let_go(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        request = make_request("aborted", self.prefill(prefill))
        request.finish_reason = FinishReason.ABORT
        assert decode.connector.request_finished(request, None) == (False, None)
        decode.step()
        assert prefill.wait_for(-1) == []

    def test_requests_that_say_nothing(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        request = make_request("plain", {})
        for side in (prefill, decode):
            side.connector.check(request)
            assert side.connector.get_num_new_matched_tokens(request, 0) == 0
            assert side.connector.request_finished(request, job_of(-5, request, range(1, 7))) == (False, None)
            assert side.connector.build_connector_meta() is None

    def test_an_engine_that_is_gone(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        params = self.prefill(prefill)
        prefill.worker.close()
        self.begin_load(decode, params)
        assert not any(decode.wait_for(-1))

    @pytest.mark.parametrize("fault", ["delay", "loss", "corruption", "death", "all"])
    def test_a_bad_link_brings_nothing_wrong(self, sides: list[_Side], fault: str) -> None:
        """Loads end, or are late, and what is said to have arrived is what was sent."""
        prefill, decode = self.pair(sides)
        faults, num_arrived = Faults(7), 0
        params = self.prefill(prefill, "first", job_id=-1000)
        link = FaultyLink((params["remote_host"], params["remote_port"]), faults)
        try:
            for number in range(1, 13):
                faults.delay_s = 0.002 * (fault in ("delay", "all"))
                faults.loss = {"loss": 0.1, "all": 0.04}.get(fault, 0.0)
                faults.corruption = {"corruption": 0.1, "all": 0.04}.get(fault, 0.0)
                faults.is_dead = fault == "death" and number % 4 == 0
                params = {**self.prefill(prefill, f"r{number}", job_id=-number), "remote_port": link.port}
                self.begin_load(decode, params, -number)
                arrived = decode.wait_for(-number)
                num_arrived += all(arrived)
                for place, is_there in enumerate(arrived):
                    assert not is_there or decode.memory.content_of(11 + place) == prefill.memory.content_of(1 + place)
                for layer in decode.memory.layers:
                    layer[:] = bytes(len(layer))
        finally:
            link.close()
        assert num_arrived, "nothing came through, which proves nothing"
        assert num_arrived == 12 or fault != "delay"

    def test_blocks_that_are_let_go_while_they_are_read(self, sides: list[_Side]) -> None:
        """Nobody knows what was in them then."""
        prefill, decode = self.pair(sides, timeout_s=0.1)
        params = self.prefill(prefill)
        faults = Faults()
        faults.delay_s = 0.06
        link = FaultyLink((params["remote_host"], params["remote_port"]), faults)
        try:
            self.begin_load(decode, {**params, "remote_port": link.port})
            assert prefill.wait_for(-1) == []
            for block_id in range(1, 7):
                for buffer in prefill.memory.buffers(0, block_id):
                    buffer[:] = bytes(len(buffer))
            assert not any(decode.wait_for(-1))
        finally:
            link.close()

    def test_a_load_without_progress_is_late(self, sides: list[_Side]) -> None:
        prefill, decode = self.pair(sides)
        params = self.prefill(prefill)
        faults = Faults()
        faults.is_dead = True
        link = FaultyLink((params["remote_host"], params["remote_port"]), faults)
        try:
            self.begin_load(decode, {**params, "remote_port": link.port})
            begin_s = time.monotonic()
            while -1 not in decode.finished and -1 not in decode.worker.late_loads():
                assert time.monotonic() < begin_s + END_S
                decode.poll()
        finally:
            link.close()
        assert decode.wait_for(-1) == [False] * 6
