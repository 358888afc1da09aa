"""What maps each token for itself, as data: networks with a gate and without, and experts. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from quire_models.spec import ANY_EXPERT, LinearSpec, Weight, inside

__all__ = ["GatedMLPSpec", "MLPSpec", "Routing", "SparseMoESpec", "StackedExperts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLPSpec:
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    name: str = "mlp"
    hidden_size: int
    intermediate_size: int
    act: str
    bias: bool = False
    out_bias: bool | None = None
    """Whether the last matrix has a bias; None for as the others."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def width(self) -> int:
        return 3 * self.intermediate_size

    def projections(self) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """Gate, up, down."""
        hidden, inner = self.hidden_size, self.intermediate_size
        gate, up = (
            LinearSpec(name=name, in_features=hidden, out_features=inner, bias=self.bias) for name in self.names[:2]
        )
        out_bias = self.bias if self.out_bias is None else self.out_bias
        return gate, up, LinearSpec(name=self.names[2], in_features=inner, out_features=hidden, bias=out_bias)

    def weights(self) -> Iterator[Weight]:
        for linear in self.projections():
            yield from inside(self.name, linear.weights("MLP"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """down(act(up(x)))."""

    name: str = "mlp"
    """Empty where its matrices stand in the layer itself."""
    hidden_size: int
    intermediate_size: int
    act: str
    """A name of `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""
    bias: bool = True
    names: tuple[str, str] = ("fc1", "fc2")
    built_by: ClassVar[str] = ""
    """"module:class" of a family whose network is its own; empty for the shared one."""

    @property
    def width(self) -> int:
        return 3 * self.intermediate_size

    def projections(self) -> tuple[LinearSpec, LinearSpec]:
        """Up, down."""
        hidden, inner, (up, down) = self.hidden_size, self.intermediate_size, self.names
        return (
            LinearSpec(name=up, in_features=hidden, out_features=inner, bias=self.bias),
            LinearSpec(name=down, in_features=inner, out_features=hidden, bias=self.bias),
        )

    def weights(self) -> Iterator[Weight]:
        for linear in self.projections():
            yield from inside(self.name, linear.weights("MLP"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens choose their experts; the fields of `quire_ops.RoutingRule`, which says what they mean."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen", "sqrtsoftplus"]
    renormalize: bool = False
    minimum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """How a checkpoint may bring the matrices of all experts in one tensor each, instead of one by one."""

    names: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    """Of gate and up [E, 2 M, I], or of each of both [E, M, I], and of down [E, I, M], relative to the layer's `at`."""
    at: str | None = None
    """Name within the layer that the others are relative to; None for that of the experts' network."""
    inputs_first: bool = False
    """Matrices are [E, I, 2 M] and [E, M, I]."""
    router: str = ""
    """Another name of the router's weight, relative to `at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMoESpec:
    """A mixture of experts: routed ones, and a shared network that every token uses."""

    name: str = "mlp"
    hidden_size: int
    num_experts: int
    intermediate_size: int
    """Width within an expert."""
    act: str
    """Of the experts: a gated activation, or "swigluoai" with its `limit`."""
    routing: Routing
    limit: float = 0.0
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Of an expert's matrices, the last one being that of its output."""
    expert_bias: bool = False
    stacked: StackedExperts | None = StackedExperts()
    router: str = "gate"
    router_bias: bool = False
    correction_bias: str = ""
    """Name of the bias [E] that decides which experts are chosen and not how much they count; empty for none."""
    is_correction_parameter: bool = False
    """It is a parameter of the network, [1, E], not a buffer (ERNIE)."""
    shared: GatedMLPSpec | MLPSpec | None = None
    """Its name is relative to the layer."""
    shared_gate: str = ""
    """Name of the layer that weighs what the shared network gives (Qwen2-MoE); empty for none."""

    num_local_experts: int | None = None
    """Experts that a rank keeps, in its plan; None for all of them."""

    built_by: ClassVar[str] = ""
    """"module:class" of a family whose mixture is its own; empty for the shared one."""

    @property
    def num_chosen(self) -> int:
        """Experts that the router chooses for each token."""
        return self.routing.top_k

    @property
    def expert_size(self) -> int:
        """Width of what experts take and give."""
        return self.hidden_size

    @property
    def width(self) -> int:
        """What is gathered for experts and twice what is within them, or what the shared network keeps."""
        size = self.expert_size
        routed = self.routing.top_k * (size + 2 * self.intermediate_size) + self.hidden_size
        return max(routed, self.shared.width if self.shared is not None else 0)

    def weights(self) -> Iterator[Weight]:
        yield from inside(self.name, self._weights("experts"))
        if self.shared is not None:
            yield from self.shared.weights()

    def _weights(self, part: str) -> Iterator[Weight]:
        num, size, inner = self.num_experts, self.expert_size, self.intermediate_size
        kept = num if self.num_local_experts is None else self.num_local_experts
        yield Weight(f"{self.router}.weight", (num, self.hidden_size), part)
        if self.router_bias:
            yield Weight(f"{self.router}.bias", (num,), part)
        if self.correction_bias:
            shape = (1, num) if self.is_correction_parameter else (num,)
            yield Weight(self.correction_bias, shape, part, is_wide=True, is_buffer=not self.is_correction_parameter)
        for name in self.names:
            shape = (size, inner) if name is self.names[-1] else (inner, size)
            matrix = f"experts.{ANY_EXPERT}.{name}"
            yield Weight(f"{matrix}.weight", shape, part, is_linear=True, num_experts=kept)
            if self.expert_bias:
                yield Weight(f"{matrix}.bias", shape[:1], part, num_experts=kept)
        if self.shared_gate:
            yield Weight(f"{self.shared_gate}.weight", (1, self.hidden_size), part)
