"""Groups of some ranks of a larger group: those of one axis of a `Mesh`.

Knows addresses and memory; does not know what the ranks do in their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from quire_distributed.collectives import Collectives
from quire_distributed.shared_memory import SharedMemoryCollectives, SharedMemoryRendezvous
from quire_distributed.single import SingleRank

__all__ = ["subgroup"]

_ADDRESS_BYTES = 256


@runtime_checkable
class _Divides(Protocol):
    """A group that makes groups of its ranks itself: threads, and ranks of several hosts."""

    def subgroup(self, members: Sequence[int]) -> Collectives: ...


def subgroup(world: Collectives, members: Sequence[int]) -> Collectives:
    """The group of some ranks of `world`; every rank of `world` calls this, with the members of its own group.

    Args:
        world: All ranks; processes of one host meet in shared memory.
        members: Ranks of `world`, this one among them, in the order of their numbers in the new group.

    Raises:
        RankDeadError: A rank ended meanwhile.
        ConfigError: There is no kernel package for this machine.
        ValueError: This rank is no member.
    """
    own = list(members).index(world.rank)
    if isinstance(world, _Divides):
        return world.subgroup(members)
    rendezvous = SharedMemoryRendezvous(len(members)) if own == 0 and len(members) > 1 else None
    address = torch.zeros(1, _ADDRESS_BYTES, dtype=torch.uint8)
    if rendezvous is not None:
        text = rendezvous.address.encode()
        address[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    addresses = world.all_gather(address, dim=0)
    group: Collectives = SingleRank()
    if len(members) > 1:
        place = bytes(addresses[members[0]].numpy()).rstrip(b"\0").decode()
        group = SharedMemoryCollectives(place, own, len(members))
    world.barrier()
    if rendezvous is not None:
        rendezvous.close()
    return group
