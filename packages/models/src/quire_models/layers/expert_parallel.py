"""Experts of a layer shared out between ranks: which of them this rank has, who computes what, and how it is combined.

Knows placements, routed ids and managers; what an expert is, its layer knows.

Shape legend: T tokens of the step, K experts per token, E experts, P pairs of token and expert that this rank computes,
I width of what experts take and give.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_distributed import Collectives
from quire_distributed.all2all import All2AllManager, make_all2all_manager
from quire_models.expert_placement import ExpertPlacement, Move, balanced_placement, moves_between
from quire_ops import LinearWeights
from quire_quantization.experts import EACH_EXPERT, FUSED, ExpertsChoice, form_of

__all__ = ["EplbSettings", "ExpertBalancer", "ExpertParallel", "MoveExperts", "Outputs", "PlacedExperts", "Sum",
           "share_experts"]  # fmt: skip

Outputs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [P, I], expert of each [P], token of each [P]) -> [P, I] float32, as wide as the layer sums."""
Sum = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""Op `moe_sum`."""
MoveExperts = Callable[[list[Move]], None]
"""Sends and receives experts between ranks, then computes with them."""

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbSettings:
    """When experts are moved. Fields and defaults are vLLM's."""

    window_size: int = 1000
    """Steps whose tokens decide."""
    step_interval: int = 3000
    """Experts are moved after so many steps."""
    num_redundant_experts: int = 0
    """Slots of all ranks beyond one for each expert."""
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    """Steps from one line of the log to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """How the ranks of a network share out its experts."""

    group: Collectives
    manager: All2AllManager
    eplb: EplbSettings | None = None
    """None where experts stay where they are."""
    balancer: ExpertBalancer | None = None
    """Set with `eplb`."""
    absent: set[str] = field(default_factory=set)
    """Names of the experts that other ranks read from the checkpoint."""

    layers: list[PlacedExperts] = field(default_factory=list)
    """Experts of each layer that has some."""

    @property
    def summary(self) -> str:
        """How many experts of how many this rank has."""
        counts = [f"{len(layer.own)} of {layer.num_experts}" for layer in self.layers]
        return f"{counts[0]} experts of {len(counts)} layers" if counts else "no experts: the network has none"

    @property
    def num_redundant(self) -> int:
        """Slots beyond one for each expert."""
        return 0 if self.eplb is None else self.eplb.num_redundant_experts


def share_experts(group: Collectives, backend: str, eplb: EplbSettings | None = None) -> ExpertParallel:
    """How the ranks of a group share out the experts of a network that each of them builds with it.

    Args:
        backend: One of `quire_distributed.all2all_backends.ALL2ALL_BACKENDS`.
        eplb: When experts are moved; None for never.

    Raises:
        ConfigError: There is no such manager here.
    """
    layers: list[PlacedExperts] = []
    balancer = None if eplb is None else ExpertBalancer(eplb, layers, group.size, is_logged=group.rank == 0)
    manager = make_all2all_manager(backend, group)
    return ExpertParallel(group=group, manager=manager, eplb=eplb, balancer=balancer, layers=layers)


class PlacedExperts:
    """The experts of one layer on all ranks."""

    __slots__ = (
        "_device", "_move", "_num_replicas", "_parallel", "_ranks", "counts", "num_experts", "placement", "slots"
    )  # fmt: skip

    placement: ExpertPlacement
    slots: Tensor
    """[E] int64, in which slot of this rank an expert is; -1 for none."""
    counts: deque[Tensor]
    """[E] int64 each: tokens of each expert in the last steps; empty where nothing is moved."""

    def __init__(self, num_experts: int, parallel: ExpertParallel, device: torch.device) -> None:
        """Args:
        device: Of the experts.
        """
        self.num_experts, self._parallel, self._device = num_experts, parallel, device
        window = 0 if parallel.eplb is None else parallel.eplb.window_size
        self.counts = deque(maxlen=window)
        self._move: MoveExperts | None = None
        self.place(ExpertPlacement.linear(num_experts, parallel.group.size, parallel.num_redundant))
        parallel.layers.append(self)

    @property
    def group(self) -> Collectives:
        """The ranks."""
        return self._parallel.group

    def agreed(self, choice: ExpertsChoice, *roles: Sequence[LinearWeights]) -> ExpertsChoice:
        """The method of a layer on all ranks: as on one that has all experts, only weights of one form run together.

        Args:
            choice: This rank's.
            roles: The weights of its experts, for each matrix that they have.
        """
        form = form_of(*roles) if choice.method == FUSED else ""
        codes = self.group.all_gather(torch.tensor([zlib.crc32(form.encode())]), dim=0)
        if choice.method != FUSED or len(torch.unique(codes)) == 1:
            return choice
        return ExpertsChoice(EACH_EXPERT, ((FUSED, "takes weights of one form, and other ranks have another"),))

    def place(self, placement: ExpertPlacement) -> None:
        """Compute by this placement from now on."""
        self.placement = placement
        slots = torch.full((self.num_experts,), -1)
        slots[torch.tensor(self.own)] = torch.arange(len(self.own))
        self.slots = slots.to(self._device)
        ranks = placement.ranks_of(self.num_experts)
        self._num_replicas = torch.tensor([len(each) for each in ranks], device=self._device)
        most = max(len(each) for each in ranks)
        self._ranks = torch.tensor([(each * most)[:most] for each in ranks], device=self._device)

    @property
    def own(self) -> tuple[int, ...]:
        """The expert in each slot of this rank."""
        return self.placement.of_rank[self._parallel.group.rank]

    def moved_by(self, move: MoveExperts) -> None:
        """Let the balancer move the experts of this layer."""
        self._move = move

    def begin(self) -> None:
        """A step comes to this layer."""
        if self._parallel.balancer is not None:
            self._parallel.balancer.begin(self)

    def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, outputs: Outputs, sum_: Sum) -> Tensor:
        """As `quire_ops.RunExperts`: [T, I], with the bits of one rank that has all experts.

        Args:
            outputs: What this rank's experts make of rows.
            sum_: The sum of a token's values, in the order of the experts' numbers.
        """
        manager = self._parallel.manager
        balancer = self._parallel.balancer
        if balancer is not None:
            self.counts.append(torch.bincount(topk_ids.flatten(), minlength=self.num_experts))
        tokens = torch.arange(len(topk_ids), device=topk_ids.device)[:, None]
        owners = self._ranks[topk_ids, tokens % self._num_replicas[topk_ids]]
        if balancer is not None:
            counts = torch.bincount(owners.flatten(), minlength=self.group.size)
            balancer.rank_tokens = balancer.rank_tokens.to(counts.device) + counts
        rows = manager.dispatch(x, owners)
        pairs = torch.where((owners == self._parallel.group.rank).flatten())[0]
        values = outputs(rows, topk_ids.flatten()[pairs], pairs // topk_ids.shape[1])
        return manager.combine(
            values, owners, lambda of_tokens, at: sum_(of_tokens, topk_ids[at], topk_weights[at], x.dtype)
        )

    def rebalance(self) -> int:
        """Move experts by the tokens of the last steps; how many came to another rank."""
        if self._move is None or not self.counts:
            return 0
        new = balanced_placement(torch.stack(tuple(self.counts)).sum(0).tolist(), self.placement)
        moves = moves_between(self.placement, new)
        if moves:
            self._move(moves)
            self.place(new)
        return len(moves)


class ExpertBalancer:
    """Counts the steps of a network and moves the experts of all of its layers between two of them.

    Every rank routes every token, so that all of them count alike, and decide alike without asking.
    """

    __slots__ = ("_is_logged", "_layers", "_settings", "num_moved", "num_rebalances", "num_steps", "rank_tokens")

    def __init__(
        self, settings: EplbSettings, layers: Sequence[PlacedExperts], num_ranks: int, *, is_logged: bool
    ) -> None:
        """Args:
        layers: Of a network that is still being made.
        is_logged: Whether this rank writes the log.
        """
        self._settings, self._is_logged = settings, is_logged and settings.log_balancedness
        self._layers = layers
        self.num_steps = 0
        self.num_moved = 0
        """Experts that came to another rank so far."""
        self.num_rebalances = 0
        """Times that experts were moved so far."""
        self.rank_tokens = torch.zeros(num_ranks, dtype=torch.int64)
        """[ranks]: pairs of token and expert of all layers that each rank computed so far."""

    @property
    def balancedness(self) -> float:
        """Mean tokens of a rank over those of the fullest one, in the last steps, on average over the layers."""
        counted = [layer for layer in self._layers if layer.counts]
        each = [layer.placement.balancedness(torch.stack(tuple(layer.counts)).sum(0).tolist()) for layer in counted]
        return sum(each) / len(each) if each else 1.0

    def begin(self, layer: PlacedExperts) -> None:
        """A step comes to a layer; to the first one of the network: a step begins."""
        if layer is not self._layers[0]:
            return
        settings = self._settings
        if self._is_logged and self.num_steps and self.num_steps % settings.log_balancedness_interval == 0:
            logger.info("expert balancedness %.3f after %d steps", self.balancedness, self.num_steps)
        if self.num_steps and self.num_steps % settings.step_interval == 0:
            self.rebalance()
        self.num_steps += 1

    def rebalance(self) -> int:
        """Move experts by the tokens of the last steps; all ranks call this, between two steps or two layers. Number of
        experts that came to another rank."""
        before = self.balancedness
        moved = sum(each.rebalance() for each in self._layers)
        self.num_moved += moved
        self.num_rebalances += moved > 0
        if self._is_logged:
            logger.info("moved %d experts: balancedness %.3f, was %.3f", moved, self.balancedness, before)
        return moved

    def load(self) -> list[dict[str, list[int]]]:
        """Of each layer with routed experts: tokens of each expert in the last steps, and the expert in each slot of
        this rank."""
        return [
            {
                "expert_tokens": torch.stack(tuple(layer.counts)).sum(0).tolist() if layer.counts else [],
                "slots": list(layer.own),
            }
            for layer in self._layers
        ]
