"""Ranks of one engine on several hosts: some are processes of rank 0's host, the others of hosts that have connected.

All of them meet by torch.distributed. Knows processes and hosts; knows no network.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import quire_distributed
from quire_distributed.collectives import Collectives
from quire_distributed.executor import RankProcess
from quire_distributed.rank_handle import RankHandle
from quire_distributed.rank_listener import Node, RankListener, RemoteRank
from quire_distributed.worker import RankSpec, TorchGroup

__all__ = ["join_with", "start_ranks_of_hosts"]

_CONNECT_S = 60.0
"""How long a host may take to connect a rank that it was told to run."""
_JOIN_S = 300.0
"""How long the ranks may take to meet: each imports torch before."""


def start_ranks_of_hosts(
    build: str,
    payloads: Sequence[Any],
    listener: RankListener | None,
    nodes: Mapping[int, Node],
    *,
    master_addr: str,
    silence_s: float,
) -> tuple[list[RankHandle], Collectives]:
    """The ranks beside rank 0, and rank 0's end of their group, once all have joined it.

    Args:
        build: A `quire_distributed.worker.BuildWorker` as "module:function".
        payloads: What it is given, for ranks 1, 2, ...; the ranks of a host have consecutive numbers.
        listener: Where the ranks of other hosts connect; None where all are of this one.
        nodes: Number of a host -> the host, for all but rank 0's, which is number 0.
        master_addr: Address of this host, as the others reach it.
        silence_s: How long nothing may be heard of a rank before it counts as gone.

    Raises:
        ConfigError: The ranks cannot meet.
        RankDeadError: One ended before it joined.
    """
    size = len(payloads) + 1
    per_node = size // (len(nodes) + 1)
    rendezvous = quire_distributed.TorchRendezvous(master_addr, 0, 0, size, timeout_s=_JOIN_S)
    group = TorchGroup(master_addr, rendezvous.port, silence_s)
    specs = [RankSpec(rank, size, build, payload, group, list(sys.path)) for rank, payload in enumerate(payloads, 1)]
    ranks: list[RankHandle] = []
    try:
        ranks += [RankProcess(spec) for spec in specs if spec.rank < per_node]
        for number, node in nodes.items():
            assert listener is not None
            own = [spec for spec in specs if spec.rank // per_node == number]
            node.start(own)
            causes = {spec.rank: partial(node.cause_of_absence, spec.rank) for spec in own}
            channels = listener.wait_for_ranks(causes, _CONNECT_S)
            last = own[-1].rank
            for rank, channel in channels.items():
                release = node.close if rank == last else _nothing
                ranks.append(RemoteRank(rank, channel, partial(node.cause_of_end, rank), release))
        return ranks, join_with(ranks, lambda: rendezvous.group("ranks", range(size), silence_s=silence_s))
    except BaseException:
        for each in ranks:
            each.close()
        for node in nodes.values():
            node.close()
        raise


def join_with(ranks: Sequence[RankHandle], join: Callable[[], Collectives]) -> Collectives:
    """Join a group, unless one of its ranks ends meanwhile.

    Args:
        ranks: The others.
        join: Joins; may wait for them.

    Raises:
        RankDeadError: One of them ended; whoever still waits in `join` is left to its timeout.
    """
    joined: list[Collectives | BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            joined.append(join())
        except BaseException as error:
            joined.append(error)
        is_over.set()

    threading.Thread(target=run, name="quire-join", daemon=True).start()
    while not is_over.wait(0.05):
        for rank in ranks:
            rank.check()
    (result,) = joined
    if isinstance(result, BaseException):
        raise result
    return result


def _nothing() -> None:
    """What closing a rank does beside it, where others of its host still run."""
