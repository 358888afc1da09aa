"""Which rank has which experts of a layer, and who computes what: expert parallelism as data. Free of torch.

Balancing follows what DeepSeek says of its expert-parallel load balancer (DeepSeek-V3, sec. 3.4): experts with the most
tokens are kept more than once, and replicas are packed so that every rank has as much to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire_models.shards import split_evenly

__all__ = ["ExpertPlacement", "Move", "balanced_placement", "moves_between"]


class ExpertPlacement(NamedTuple):
    """Experts of a layer on each rank. A rank has an expert at most once."""

    of_rank: tuple[tuple[int, ...], ...]
    """Rank -> number of the expert in each of its slots."""

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
        """Neighbouring experts on one rank; redundant ones are the next ones, which another rank has, too.

        Args:
            num_redundant: At most so many that each rank has every expert.
        """
        sizes, slots = split_evenly(num_experts, num_ranks), split_evenly(num_experts + num_redundant, num_ranks)
        begins = [sum(sizes[:rank]) for rank in range(num_ranks)]
        return cls(
            tuple(
                tuple((begin + slot) % num_experts for slot in range(num))
                for begin, num in zip(begins, slots, strict=True)
            )
        )

    def ranks_of(self, num_experts: int) -> list[list[int]]:
        """Expert -> the ranks that have it."""
        ranks: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(self.of_rank):
            for expert in experts:
                ranks[expert].append(rank)
        return ranks

    def loads(self, tokens: Sequence[float]) -> list[float]:
        """Tokens that each rank computes, where an expert's are shared out between its replicas.

        Args:
            tokens: Of each expert.
        """
        replicas = self.ranks_of(len(tokens))
        return [sum(tokens[expert] / len(replicas[expert]) for expert in experts) for experts in self.of_rank]

    def balancedness(self, tokens: Sequence[float]) -> float:
        """Mean load of a rank over the largest: 1.0 where all have as much to do, or nothing."""
        loads = self.loads(tokens)
        return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0


class Move(NamedTuple):
    """An expert that comes to a slot of a rank from a rank that has it."""

    expert: int
    source: int
    target: int
    slot: int


def balanced_placement(tokens: Sequence[float], current: ExpertPlacement) -> ExpertPlacement:
    """The placement in as many slots of each rank in which the fullest one has little to do: greedy, in two steps.

    Each slot beyond one for every expert goes to the expert whose replicas have the most tokens each. Replicas then go,
    the largest first, to the rank with the least to do that has a slot left and does not have the expert yet.

    Args:
        tokens: Of each expert, within some steps.
        current: How they are placed. Experts that stay on a rank stay in their slots.
    """
    num_experts, slots = len(tokens), [len(experts) for experts in current.of_rank]
    replicas = [1] * num_experts
    for _ in range(sum(slots) - num_experts):
        open_ = [expert for expert in range(num_experts) if replicas[expert] < len(slots)]
        replicas[max(open_, key=lambda expert: (tokens[expert] / replicas[expert], -expert))] += 1
    held: list[list[int]] = [[] for _ in slots]
    loads = [0.0] * len(slots)

    def place(expert: int, share: float) -> bool:
        free = [rank for rank in range(len(slots)) if len(held[rank]) < slots[rank] and expert not in held[rank]]
        if not free:
            return False
        rank = min(free, key=lambda rank: (loads[rank], expert not in current.of_rank[rank], rank))
        held[rank].append(expert)
        loads[rank] += share
        return True

    by_share = sorted(range(num_experts), key=lambda expert: (-tokens[expert] / replicas[expert], expert))
    # One of each first: where the rest finds no rank, no expert lacks.
    queue = [expert for expert in by_share for _ in range(replicas[expert])]
    for expert in queue:
        place(expert, tokens[expert] / replicas[expert])
    _fill(held, slots, by_share)
    return ExpertPlacement(tuple(_in_slots(had, has) for had, has in zip(current.of_rank, held, strict=True)))


def _fill(held: list[list[int]], slots: list[int], by_share: list[int]) -> None:
    """Give what found no rank a slot: an expert that lacks altogether first, else one that the rank does not have."""
    lacking = [expert for expert in by_share if not any(expert in experts for experts in held)]
    for rank, experts in enumerate(held):
        while len(experts) < slots[rank]:
            expert = lacking.pop(0) if lacking else next(each for each in by_share if each not in experts)
            experts.append(expert)
    assert not lacking


def _in_slots(had: tuple[int, ...], has: list[int]) -> tuple[int, ...]:
    """What a rank has, what it had already in the same slots."""
    new = iter([expert for expert in has if expert not in had])
    return tuple(expert if expert in has else next(new) for expert in had)


def moves_between(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """What has to be sent, in an order that all ranks share; each from the lowest rank that has it."""
    moves = []
    for target, (had, has) in enumerate(zip(old.of_rank, new.of_rank, strict=True)):
        for slot, (before, expert) in enumerate(zip(had, has, strict=True)):
            if before != expert:
                source = next(rank for rank, experts in enumerate(old.of_rank) if expert in experts)
                moves.append(Move(expert, source, target, slot))
    return moves
