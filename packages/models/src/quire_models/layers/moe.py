"""Mixture of experts in the place of a feed-forward network: routed experts, and shared ones that every token uses.

Experts keep one matrix each. A checkpoint may bring them one by one or stacked; either way they stay where its files
are mapped.

Shape legend: T tokens of the step, E experts, K experts per token, I width of the network, M width within an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import ConfigError
from quire_lora import AdapterSlots, ExpertSite, LinearSite
from quire_lora.adapter import ExpertAdapter
from quire_models.expert_placement import Move
from quire_models.feed_forward_spec import GatedMLPSpec, SparseMoESpec
from quire_models.layers.expert_moves import move_linears
from quire_models.layers.expert_parallel import PlacedExperts
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.routing import CorrectionBias, ExpertChoice, Router
from quire_models.layers.scope import Scope
from quire_ops import (
    GATED_ACTIVATIONS,
    Experts,
    LinearWeights,
    LoraTokens,
    Op,
    QuantizedTokens,
    RoutedExperts,
    RoutingRule,
    RunExperts,
    ops,
    swigluoai_and_mul,
)
from quire_ops.expert_outputs import torch_moe_sum
from quire_quantization.experts import FUSED, ExpertsChoice, alike, choose_experts_method

__all__ = ["FusedExperts", "SharedExpert", "SparseMoE", "make_router", "place_experts"]


def make_router(spec: SparseMoESpec, scope: Scope, dtype: torch.dtype | None = None) -> Router:
    """The router of a mixture.

    Args:
        scope: Scope of the mixture itself.
        dtype: Of its weight; None for the compute dtype.
    """
    bias = None
    if spec.correction_bias:
        shape = (1, spec.num_experts) if spec.is_correction_parameter else (spec.num_experts,)
        bias = CorrectionBias(scope, spec.correction_bias, *shape)
    rule = RoutingRule(**dataclasses.asdict(spec.routing))
    select = ExpertChoice(scope, spec.num_experts, rule, bias=bias)
    return Router(scope / spec.router, spec.hidden_size, spec.num_experts, select, bias=spec.router_bias, dtype=dtype)


class FusedExperts:
    """Gated feed-forward networks of one shape, through op `fused_moe` where it takes their weights, which are by the
    linear method of the scope.

    Where ranks share experts out, each has some of them: in the slots that its `placed` names.
    """

    __slots__ = (
        "_act",
        "_adapters",
        "_experts",
        "_gate_op",
        "_limit",
        "_name",
        "_num_experts",
        "_roles",
        "_run",
        "_scope",
        "choice",
        "down",
        "gate",
        "placed",
        "up",
    )

    def __init__(self, spec: SparseMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the experts, which are numbered in it.
        """
        gate, up, down = spec.names
        size, inner, bias = spec.expert_size, spec.intermediate_size, spec.expert_bias
        act, limit = spec.act, spec.limit
        self._adapters, self._name = scope.adapters, scope.prefix.removesuffix(".")
        scope = dataclasses.replace(scope, adapters=None)  # they are asked for all experts at once
        self._roles = spec.names
        self._num_experts, self.placed = spec.num_experts, place_experts(spec.num_experts, scope)
        own = range(spec.num_experts) if self.placed is None else self.placed.own
        each = [scope / str(expert) for expert in own]
        self.gate = [Linear(one / gate, size, inner, bias=bias, is_replicated=True) for one in each]
        self.up = [Linear(one / up, size, inner, bias=bias, is_replicated=True) for one in each]
        self.down = [Linear(one / down, inner, size, bias=bias, is_replicated=True) for one in each]
        self._scope, self._act, self._limit = scope, act, limit
        self._run: RunExperts
        self._experts: Experts | None = None
        gate_op: Op[..., Tensor] = ops.activation if act == "swigluoai" else GATED_ACTIVATIONS[act]
        self._gate_op = scope.op(gate_op)
        """Between gate, up and down where experts go one by one, or have adapters."""
        self.choice: ExpertsChoice | None = None
        """Set once weights are loaded."""
        scope.layers.append(self)
        if self._adapters is not None:
            self._register(self._adapters)
        scope.when_loaded(self._bind)

    def _register(self, adapters: AdapterSlots) -> None:
        """Tell adapters the layers of all experts, those of other ranks too."""
        names = self._roles
        roles = dict(zip(names, (self.gate, self.up, self.down), strict=True))
        own = {} if self.placed is None else {expert: slot for slot, expert in enumerate(self.placed.own)}
        sites: dict[str, list[str]] = {name: [] for name in names}
        linears = {}
        for name, layers in roles.items():
            for expert in range(self._num_experts):
                slot = expert if self.placed is None else own.get(expert)
                base = _of_other_rank if slot is None else layers[slot].base
                sites[name].append(f"{self._name}.{expert}.{name}")
                linears[sites[name][-1]] = LinearSite(shape=layers[0].shape, weights=None, base=base, expert=expert)
        gate, up, down = (tuple(each) for each in sites.values())
        adapters.routed_experts(self._name, ExpertSite(gate=gate, up=up, down=down), linears)

    def accept_stacked(self, scope: Scope, names: tuple[str, ...], *, inputs_first: bool) -> None:
        """Checkpoints may also bring gate and up [E, 2 M, I], or both [E, M, I], and down [E, I, M], under these names
        of `scope`.

        Args:
            inputs_first: Matrices are [E, I, 2 M] and [E, M, I] instead.
        """
        inner, size = self.gate[0].shape
        gate, up, down = self._roles

        def split(tensor: Tensor, roles: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
            for expert, matrix in enumerate(tensor.transpose(1, 2) if inputs_first else tensor):
                for role, rows in zip(roles, matrix.chunk(len(roles)), strict=True):
                    yield f"{self._name}.{expert}.{role}.weight", rows

        stacks = [(gate, up), (down,)] if len(names) == 2 else [(gate,), (up,), (down,)]
        for name, roles in zip(names, stacks, strict=True):
            shape = (size, inner) if roles == (down,) else (len(roles) * inner, size)
            scope.packed(
                name, (self._num_experts, *(shape[::-1] if inputs_first else shape)), partial(split, roles=roles)
            )

    def _bind(self) -> None:
        gate, up, down = (self._alike(layers) for layers in (self.gate, self.up, self.down))
        refusals = (layer.stack_refusal for layer in (*self.gate, *self.up, *self.down))
        refusal, disabled = next(filter(None, refusals), ""), self._scope.disabled_linear_kernels
        self.choice = choose_experts_method(gate, up, down, refusal=refusal, disabled=disabled)
        if self.placed is not None:
            self.choice = self.placed.agreed(self.choice, gate, up, down)
            self._share(self.placed)
        elif self.choice.method == FUSED:
            fused_moe = self._scope.op(ops.fused_moe)
            self._experts = Experts(gate=gate, up=up, down=down, activation=self._act, limit=self._limit)
            self._run = fused_moe(self._experts)
        else:
            self._run = self._one_by_one

    @staticmethod
    def _alike(layers: list[Linear]) -> tuple[LinearWeights, ...]:
        found = [layer.stack_weights() for layer in layers]
        return alike([one for one in found if one is not None])

    def _share(self, placed: PlacedExperts) -> None:
        """Compute with the experts of this rank, and have the others' results from them."""
        assert self.choice is not None
        if self.choice.method != FUSED:
            self._run = partial(placed.run, outputs=self._outputs_one_by_one, sum_=torch_moe_sum)
            return
        sum_ = self._scope.op(ops.moe_sum)
        gate, up, down = (self._alike(layers) for layers in (self.gate, self.up, self.down))
        own = Experts(gate=gate, up=up, down=down, activation=self._act, limit=self._limit)
        make = self._scope.op(ops.expert_outputs)
        run = make(own)
        self._experts = own

        def outputs(x: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
            return run(x, placed.slots[experts])

        self._run = partial(placed.run, outputs=outputs, sum_=sum_)
        placed.moved_by(self._move)

    def _move(self, moves: list[Move]) -> None:
        """Take experts of other ranks into the slots of this one."""
        assert self.placed is not None
        move_linears(self.placed.group, moves, (self.gate, self.up, self.down), self.placed.own)
        self._share(self.placed)

    def _outputs_one_by_one(self, x: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
        """Rows [P, I] -> [P, I] float32, each through the layers of its own expert."""
        out = torch.empty_like(x, dtype=torch.float32)
        for expert in torch.unique(experts).tolist():
            rows = torch.where(experts == expert)[0]
            taken, slot = x[rows], self._slot(expert)
            inner = self._activated(self.gate[slot](taken), self.up[slot](taken))
            out[rows] = self.down[slot](inner).float()
        return out

    def _slot(self, expert: int) -> int:
        return expert if self.placed is None else int(self.placed.slots[expert])

    @property
    def stack_weights(self) -> Experts | None:
        """The experts of this rank as ops take them; None where op `fused_moe` does not, or some may have adapters."""
        return self._experts if self._adapters is None else None

    def _one_by_one(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Experts with weights that the op does not take: each through its own layers."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            rows, slots = torch.where(topk_ids == expert)
            taken = x[rows]
            inner = self._activated(self.gate[expert](taken), self.up[expert](taken))
            out.index_add_(0, rows, self.down[expert](inner).float() * topk_weights[rows, slots, None])
        return out.to(x.dtype)

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._act == "swigluoai":
            return swigluoai_and_mul(gate, up, self._limit, partial(self._gate_op, name="sigmoid"))
        return self._gate_op(gate, up)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `RunExperts`. Tokens of adapters that change these experts take a way of their own."""
        if self.placed is not None:
            self.placed.begin()
        adapters, tokens = self._adapters, None if self._adapters is None else self._adapters.tokens
        placed = {} if adapters is None or tokens is None else adapters.of_experts(self._name)
        if not placed or tokens is None:
            return self._run(x, topk_ids, topk_weights)
        slots = tokens.slots.repeat_interleave(len(x) // len(tokens.slots))  # some networks give a row for each expert
        changed = torch.isin(slots, torch.tensor(list(placed), dtype=slots.dtype, device=slots.device))
        out = torch.empty_like(x)
        for rows, run in (
            (~changed, self._run),
            (changed, partial(self._adapted, slots=slots[changed], placed=placed)),
        ):
            if rows.any():
                out[rows] = run(x[rows], topk_ids[rows], topk_weights[rows])
        return out

    def _adapted(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, slots: Tensor, placed: dict[int, ExpertAdapter]
    ) -> Tensor:
        """Experts with adapters: op `lora_linear` with a row for each pair of token and expert, an expert in the place
        of a slot.

        Args:
            slots: [T], of each token.
            placed: Slot -> its adapter.
        """
        outputs = partial(self._adapted_outputs, slots=slots, placed=placed)
        if self.placed is not None:
            return self.placed.run(x, topk_ids, topk_weights, outputs=outputs, sum_=torch_moe_sum)
        tokens = torch.arange(len(x), device=x.device).repeat_interleave(topk_ids.shape[1])
        values = outputs(x[tokens], topk_ids.flatten(), tokens)
        return torch_moe_sum(values.view(*topk_ids.shape, -1), topk_ids, topk_weights, x.dtype)

    def _adapted_outputs(
        self, x: Tensor, experts: Tensor, tokens: Tensor, *, slots: Tensor, placed: dict[int, ExpertAdapter]
    ) -> Tensor:
        """Rows [P, I], the expert and the token of each -> [P, I] float32."""
        order = torch.argsort(experts, stable=True)  # expert by expert
        sorted_experts = experts[order].to(torch.int32)
        counts = torch.bincount(sorted_experts, minlength=self._num_experts).tolist()
        of_slot = {
            slot: (adapter, LoraTokens.of(torch.where(slots[tokens[order]] == slot, sorted_experts, -1).cpu().numpy(),
                                          x.device))
            for slot, adapter in placed.items()
        }  # fmt: skip

        def linear(taken: Tensor, layers: list[Linear], role: str) -> Tensor:
            parts = ((self._slot(expert), part) for expert, part in enumerate(taken.split(counts)) if len(part))
            out = torch.cat([layers[slot](part) for slot, part in parts] or [taken.new_empty(0, layers[0].shape[0])])
            for adapter, pairs in of_slot.values():
                weights = getattr(adapter, role)
                if self._adapters is not None and weights is not None and pairs is not None:
                    self._adapters.add(out, taken, weights, pairs)
            return out

        taken = x[order]
        inner = self._activated(linear(taken, self.gate, "gate"), linear(taken, self.up, "up"))
        out = torch.empty_like(x, dtype=torch.float32)
        out[order] = linear(inner, self.down, "down").float()
        return out


def place_experts(num_experts: int, scope: Scope) -> PlacedExperts | None:
    """Which experts the ranks have; None where each has all of them.

    Args:
        scope: Scope of the experts, which are numbered in it.
    """
    parallel = scope.expert_parallel
    if parallel is None:
        return None
    placed = PlacedExperts(num_experts, parallel, scope.device)
    parallel.absent.update(f"{scope.prefix}{each}" for each in range(num_experts) if each not in placed.own)
    return placed


def _of_other_rank() -> tuple[Tensor, Tensor | None]:
    raise ConfigError(
        "an adapter that scales whole weights (DoRA) needs those of all experts, and enable_expert_parallel leaves "
        "each rank some of them; serve it without",
        field="enable_expert_parallel",
    )


class SharedExpert:
    """A feed-forward network that every token uses, counted as much as a gate of one output says (Qwen2-MoE)."""

    __slots__ = ("_gate", "_weigh", "mlp")

    def __init__(self, scope: Scope, mlp: GatedMLP, gate: Linear) -> None:
        self.mlp = mlp
        self._gate = gate
        self._weigh = scope.op(ops.sigmoid_and_mul)

    def __call__(self, x: Tensor) -> Tensor:
        # Not by torch.sigmoid: its last bit follows where a number stands among all, so how many tokens there are.
        out = self.mlp(x)
        weighed: Tensor = self._weigh(self._gate(x), out)
        return weighed

    def fused_weights(self) -> dict[str, Any] | None:
        """The network and the gate as fields of `RoutedExperts`, or None when a stack cannot compute them."""
        network, gate = self.mlp.fused_weights(), self._gate.stack_weights()
        if network is None or gate is None or gate.bias is not None or gate.lora is not None:
            return None
        return {"shared": network, "shared_gate": gate.weight}


class SparseMoE:
    """x [T, I] -> [T, I]: what the router's experts make of each token, and the shared network's part."""

    __slots__ = ("experts", "router", "shared")

    def __init__(self, spec: SparseMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        self.router = make_router(spec, inner)
        self.experts = FusedExperts(spec, inner / "experts")
        stacked = spec.stacked
        if stacked is not None:
            at = inner if stacked.at is None else scope / stacked.at
            self.experts.accept_stacked(at, stacked.names, inputs_first=stacked.inputs_first)
            if stacked.router:
                router = self.router
                at.packed(stacked.router, router.shape, lambda tensor: [(router.name, tensor)])
        self.shared: Callable[[Tensor], Tensor] | None = None
        if isinstance(spec.shared, GatedMLPSpec):
            self.shared = network = GatedMLP(spec.shared, scope / spec.shared.name)
            if spec.shared_gate:
                gate = Linear(inner / spec.shared_gate, spec.hidden_size, 1, method=scope.plain_method)
                self.shared = SharedExpert(scope, network, gate)

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        assert isinstance(x, Tensor)  # see `consumers`
        topk_ids, topk_weights = self.router(x)
        out = self.experts(x, topk_ids, topk_weights)
        return out if self.shared is None else out + self.shared(x)

    @property
    def consumers(self) -> Sequence[Linear]:
        """None: the router and the experts take x as it is."""
        return ()

    def fused_weights(self) -> RoutedExperts | None:
        """The experts as data for op `decoder_stack`, or None when that op cannot compute them."""
        experts, choice, shared = self.experts.stack_weights, self.router.select, self._shared_weights()
        if experts is None or shared is None or not isinstance(choice, ExpertChoice):
            return None
        return RoutedExperts(
            router=self.router.weight,
            router_bias=self.router.bias,
            choice_bias=choice.bias,
            rule=choice.rule,
            experts=experts,
            **shared,
        )

    def _shared_weights(self) -> dict[str, Any] | None:
        """Fields of `RoutedExperts`, or None when a stack cannot compute what is shared."""
        if self.shared is None:
            return {}
        if isinstance(self.shared, SharedExpert):
            return self.shared.fused_weights()
        network = self.shared.fused_weights() if isinstance(self.shared, GatedMLP) else None
        return None if network is None else {"shared": network}
