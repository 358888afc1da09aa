"""Ranks of another host, here one of this machine's addresses: joined, told apart from strangers, gone, back again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed_counting_worker import CountingWorker

from quire_distributed.executor import MultiprocExecutor
from quire_distributed.host_ranks import start_ranks_of_hosts
from quire_distributed.rank_listener import RankListener
from quire_distributed.signed_channel import SignedChannel, WrongSecretError, accept_channel, connect_channel
from quire_interfaces import ConfigError, RankDeadError
from quire_interfaces.step import SchedulerOutput

HOST = "127.0.0.1"
NODE = """
import sys, threading
from quire_distributed.node import serve_node
serve_node(("127.0.0.1", int(sys.argv[1])), 1, {"cores": 2}, secret=b"a secret", silence_s=5.0,
           localize=lambda spec: spec._replace(payload=10 * spec.payload), is_stopping=threading.Event())
"""


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=[0],
        request_ids=[""],
        num_computed_tokens=[0],
        num_scheduled_tokens=[1],
        samples=[True],
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def node() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", NODE, str(port)])
    yield port, process
    process.kill()
    process.wait()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def start(port: int) -> MultiprocExecutor:
    with RankListener(HOST, port, b"a secret", silence_s=5.0) as listener:
        nodes = listener.wait_for_nodes([1], 60.0)
        assert nodes[1].hello == {"cores": 2}
        ranks, collectives = start_ranks_of_hosts(
            "distributed_counting_worker:build", [1], listener, nodes, master_addr=HOST, silence_s=5.0
        )
    for rank in ranks:
        rank.wait_until_ready()
    return MultiprocExecutor(CountingWorker(1, collectives), ranks, collectives)


def test_a_node_runs_ranks_says_how_they_ended_and_rejoins(node: tuple[int, subprocess.Popen[bytes]]) -> None:
    port, process = node
    executor = start(port)
    assert executor.execute(step(1)).result().sampled_token_ids == [[1 + 2 * 10]]
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGKILL)
    failure: BaseException | None = None
    for step_id in range(2, 1000):
        failure = executor.execute(step(step_id)).exception()
        if failure is not None:
            break
    assert isinstance(failure, RankDeadError)
    assert "its process was ended by SIGKILL" in str(failure)
    executor.close()

    executor = start(port)
    assert executor.execute(step(1)).result().sampled_token_ids == [[1 + 2 * 10]]
    (again,) = children(process.pid)
    assert again != rank
    executor.close()
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{again}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{again}").exists()


def test_a_node_that_ends_is_named() -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", NODE, str(port)])
    try:
        executor = start(port)
        (rank,) = children(process.pid)
        process.kill()
        process.wait()
        failure = next(
            failure for step_id in range(1, 100_000) if (failure := executor.execute(step(step_id)).exception())
        )
        assert isinstance(failure, RankDeadError)
        assert failure.rank == 1
        executor.close()
        deadline_s = time.monotonic() + 30
        while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not Path(f"/proc/{rank}").exists()
    finally:
        process.kill()
        process.wait()


def test_hosts_that_do_not_come_are_named() -> None:
    missing = pytest.raises(ConfigError, match=r"node 1, 2 did not come .* --headless, its --node-rank")
    with RankListener(HOST, 0, b"", silence_s=5.0) as listener, missing:
        listener.wait_for_nodes([1, 2], 0.2)
    with pytest.raises(ConfigError, match="master_addr must be an address of the host of node_rank 0"):
        RankListener("192.0.2.1", 0, b"", silence_s=5.0)


def connected(secret: bytes, other: bytes) -> tuple[list[object], BaseException | None]:
    """Both ends of a connection: what the accepting one got, and what the connecting one raised."""
    accepted: list[object] = []
    with socket.create_server((HOST, 0)) as listening:

        def accept() -> None:
            try:
                accepted.extend(accept_channel(listening.accept()[0], secret, silence_s=5.0))
            except Exception as error:
                accepted.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            accepted_by: BaseException | None = None
            channel = connect_channel(listening.getsockname(), {"rank": 1}, other, silence_s=5.0)
            accepted.append(channel)
        except Exception as error:
            accepted_by = error
        thread.join()
    return accepted, accepted_by


def test_who_knows_another_secret_is_refused_by_both_ends() -> None:
    accepted, raised = connected(b"one", b"another")
    assert isinstance(raised, WrongSecretError)
    assert len(accepted) == 1
    assert isinstance(accepted[0], (OSError, WrongSecretError))


def test_messages_that_are_not_signed_are_not_read() -> None:
    accepted, raised = connected(b"one", b"one")
    assert raised is None
    ends = [each for each in accepted if isinstance(each, SignedChannel)]
    here, there = ends
    here.send(("step", 1))
    assert there.receive() == ("step", 1)
    there.send(["done"] * 100_000)
    assert len(here.receive()) == 100_000
    # The same bytes again: signed, but with the number of the message before.
    raw = socket.socket(fileno=os.dup(here.fileno()))
    message = Recorder(here).record(("step", 2))
    raw.sendall(message)
    assert there.receive() == ("step", 2)
    raw.sendall(message)
    with pytest.raises(EOFError, match="did not sign"):
        there.receive()
    raw.close()
    here.close()


class Recorder:
    """What a channel would send next."""

    def __init__(self, channel: SignedChannel) -> None:
        self._keys = channel.keys

    def record(self, message: object) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = SignedChannel(ours, self._keys)
            channel.send(("step", 1))  # the number of messages before
            first = len(theirs.recv(1 << 16))
            assert first
            channel.send(message)
            return theirs.recv(1 << 16)
