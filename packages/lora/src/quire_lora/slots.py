"""`AdapterSlots`: the adapters on the device, in numbered slots, and which tokens of the step use which.

Layers get it through their constructor and register there; the runner fills slots, and makes of the slots of a step's
tokens what its batch carries (`LoraTokens`). Does not know files, names of adapters or requests.

Shape legend: T tokens of the step, N hidden states, S slots, R largest rank, V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_lora.adapter import Adapter, ExpertAdapter, LinearAdapter, TableAdapter
from quire_ops import NO_SLOT, LoraTokens, LoraWeights, OpRequest, fill_on_device, op_table, ops

__all__ = ["AdapterSlots", "ExpertSite", "LinearSite"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearSite:
    """A linear layer that adapters may change."""

    shape: tuple[int, int]
    """[outputs, inputs]."""
    weights: LoraWeights | None
    """By slot; None for a routed expert's, whose adapters stay in the form in which they were read."""
    base: Callable[[], tuple[Tensor, Tensor | None]]
    """The layer's own weight [outputs, inputs] and bias [outputs], widened to float32, without any adapter that was
    put into them; once it is loaded. For any thread."""

    plain: Callable[[], Tensor | None] = lambda: None
    """The layer's weight [outputs, inputs] as it lies in memory, which may be written over, by the step's thread; None
    where it is kept in another form. Once it is loaded."""
    expert: int | None = None
    """Which of its layer's experts it belongs to; None outside of them."""
    outputs: slice | None = None
    """Outputs that this rank computes, where ranks share them out: those of `weights`, `base` and `plain`; None for
    all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSite:
    """The routed experts of a layer: the names of their linear layers, expert by expert."""

    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


class AdapterSlots:
    """What adapters are on the device, layer by layer. One thread fills slots and runs steps.

    Args:
        num_slots: S.
        max_rank: R.
        dtype: The network's.
        device: Where the network is.
        lora_dtype: What matrices of linear layers are kept in: "auto" for `dtype`, "int8" or "fp8_e4m3", which are
            widened in the product. Those of routed experts and of the vocabulary are kept in `dtype` all the same.
    """

    def __init__(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device, lora_dtype: str = "auto"
    ) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.dtype, self.device = dtype, device
        self.narrow_dtype = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}.get(lora_dtype)
        """dtype of narrow matrices; None where they are kept in the network's."""
        self.linears: dict[str, LinearSite] = {}
        """Name of the layer -> its site."""
        self.experts: dict[str, ExpertSite] = {}
        """Name of a layer's routed experts -> their layers, which are among `linears`."""
        self.embedding: tuple[str, tuple[int, int]] | None = None
        """Name and shape [V, H]; None where the network's embedding takes no adapters."""
        self.lm_head: tuple[str, tuple[int, int]] | None = None
        self.is_elsewhere: Callable[[str], bool] = lambda module: False
        """Whether only another pipeline stage has the module of this name in the checkpoint."""
        self.versions: list[str | None] = [None] * num_slots
        """What is in each slot."""
        self.tokens: LoraTokens | None = None
        """Tokens of the pass that runs: `Network.forward` takes them from its batch, linear layers read them."""
        self.weights_before: dict[str, Tensor] = {}
        """Name of a layer whose weight holds an adapter -> what it was."""
        self.weights_lock = threading.Lock()
        """Held by who reads layers' weights, and by who writes over them."""
        backend = op_table().choose(ops.lora_linear, OpRequest(device=device.type, dtype=dtype))
        self.add = backend.function
        self.capture_refusal: str | None = None
        """Why steps with adapters cannot be captured in graphs, whatever adapters they are; None where they can."""
        if not backend.device_lengths:
            self.capture_refusal = f"op lora_linear of backend {backend.name} finds tokens on the host"
        self._embeddings: dict[int, TableAdapter] = {}
        self._lm_heads: dict[int, TableAdapter] = {}
        self._routed: dict[str, dict[int, ExpertAdapter]] = {}
        self._fixed: dict[int, tuple[Tensor, LoraTokens]] = {}
        """Tokens of a graph -> where their slots are, by token and in order."""

    def linear(
        self,
        name: str,
        outputs: int,
        inputs: int,
        base: Callable[[], tuple[Tensor, Tensor | None]],
        plain: Callable[[], Tensor | None] = lambda: None,
        own: slice | None = None,
    ) -> LoraWeights:
        """Register a linear layer; `base` and `plain` as in `LinearSite`, with whatever is in the weights now.

        Args:
            own: Outputs that this rank computes, where ranks share them out; None for all.
        """
        num_own = outputs if own is None else own.stop - own.start
        narrow, wide = self.narrow_dtype, torch.float32
        weights = LoraWeights(
            a=self._zeros(self.num_slots, self.max_rank, inputs, dtype=narrow),
            b=self._zeros(self.num_slots, self.max_rank, num_own, dtype=narrow),
            a_scale=None if narrow is None else self._zeros(self.num_slots, self.max_rank, dtype=wide),
            b_scale=None if narrow is None else self._zeros(self.num_slots, num_own, dtype=wide),
            ranks=torch.zeros(self.num_slots, dtype=torch.int32),
            adjusted=(adjusted := torch.zeros(self.num_slots, dtype=torch.int32)),
            device_adjusted=adjusted if self.device.type == "cpu" else adjusted.to(self.device),
            scale=self._zeros(self.num_slots, num_own, dtype=wide),
            shift=self._zeros(self.num_slots, num_own, dtype=wide),
        )

        def read_base() -> tuple[Tensor, Tensor | None]:
            with self.weights_lock:
                weight, bias = base()
                before = self.weights_before.get(name)
                return weight if before is None else before.float(), bias

        shape = (outputs, inputs)
        self.linears[name] = LinearSite(shape=shape, weights=weights, base=read_base, plain=plain, outputs=own)
        return weights

    def routed_experts(self, name: str, site: ExpertSite, linears: Mapping[str, LinearSite]) -> None:
        """Register the routed experts of a layer, and their linear layers. They take no memory before an adapter for
        them is placed."""
        self.experts[name] = site
        self.linears |= linears
        self._routed[name] = {}

    def of_experts(self, name: str) -> dict[int, ExpertAdapter]:
        """Slot -> its adapter for the routed experts of a layer. Filled in place."""
        return self._routed[name]

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # Zero pages from the system: slots that are never filled take no memory.
        return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

    def place(self, slot: int, version: str, adapter: Adapter) -> None:
        """Fill a slot, unless this version is in it. No step that uses the slot may be running."""
        if self.versions[slot] == version:
            return
        self.versions[slot] = None
        for name, site in self.linears.items():
            if site.weights is not None:
                self.place_linear(name, slot, adapter.linears.get(name))
        for name, adapters in self._routed.items():
            adapters.pop(slot, None)
            if name in adapter.experts:
                adapters[slot] = _experts_on(adapter.experts[name], self.device)
        for tables, table in ((self._embeddings, adapter.embedding), (self._lm_heads, adapter.lm_head)):
            tables.pop(slot, None)
            if table is not None:
                tables[slot] = TableAdapter(
                    **{name: _on(getattr(table, name), self.device) for name in TableAdapter.__slots__}
                )
        self.versions[slot] = version

    def place_linear(self, name: str, slot: int, adapter: LinearAdapter | None) -> None:
        """Fill a slot of one layer; None empties it. No step that uses the slot may be running."""
        weights = self.linears[name].weights
        assert weights is not None
        _place(weights, slot, adapter)

    @property
    def has_plain_weights(self) -> bool:
        """Whether any layer's weight lies in memory as the network multiplies with it. Once it is loaded."""
        return any(site.plain() is not None for site in self.linears.values())

    def tokens_of(self, slots: NDArray[np.int32]) -> LoraTokens | None:
        """What the batch of a step carries: `slots` are those of its tokens [T], -1 for none; None where none has
        one."""
        return LoraTokens.of(slots, self.device)

    def captured_tokens_of(self, slots: NDArray[np.int32], size: int) -> LoraTokens | None:
        """Tokens of a step that is captured in a graph, or was, in memory that stays where it is.

        Args:
            slots: [T] of its tokens, -1 for none.
            size: Tokens of the graph, at least T; the others have no slot.

        Returns:
            None where the step cannot be captured: none can while an adapter for routed experts is in a slot.
        """
        if self.capture_refusal is not None or any(self._routed.values()):
            return None
        if size not in self._fixed:
            self._fixed[size] = self._make_fixed(size)
        table, tokens = self._fixed[size]
        values = np.full(table.shape, NO_SLOT, dtype=np.int32)
        values[0, : len(slots)] = np.where(slots < 0, NO_SLOT, slots)
        values[1] = np.argsort(values[0], kind="stable")
        fill_on_device(table, values)
        return tokens

    def _make_fixed(self, size: int) -> tuple[Tensor, LoraTokens]:
        # Both rows begin where 16 bytes do, whatever the size: kernels are compiled for that.
        table = torch.zeros((2, -(-size // 4) * 4), dtype=torch.int32, device=self.device)
        groups = torch.zeros((0, 3), dtype=torch.int32)
        return table, LoraTokens(slots=table[0, :size], order=table[1, :size], groups=groups, is_fixed=True)

    def logit_tokens_of(self, slots: NDArray[np.int32]) -> LoraTokens | None:
        """What `Network.compute_logits` takes: `slots` are those of its hidden states [N], -1 for none; None where no
        slot changes the LM head."""
        return LoraTokens.of(slots, self.device) if self._lm_heads else None

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
        if not self._embeddings and not self._lm_heads:
            return False
        return any(slot in self._embeddings or slot in self._lm_heads for slot in set(slots.tolist()))

    def embed(self, out: Tensor, ids: Tensor, tokens: LoraTokens) -> None:
        """Change what the embedding gives for `ids` [T], [T, H], where adapters of the tokens say so."""
        if not self._embeddings:
            return
        for slot, begin, end in tokens.groups.tolist():
            table = self._embeddings.get(slot)
            if table is None:
                continue
            which = tokens.order[begin:end].long()
            if table.weight is not None:
                out[which] = table.weight[ids[which]]
            if table.a is not None and table.b is not None:
                out[which] += table.a[ids[which]] @ table.b

    def logits(self, out: Tensor, hidden: Tensor, tokens: LoraTokens) -> None:
        """Change the LM head's logits [N, V] of `hidden` [N, H] where adapters of the hidden states say so."""
        for slot, begin, end in tokens.groups.tolist():
            head = self._lm_heads.get(slot)
            if head is None:
                continue
            which = tokens.order[begin:end].long()
            if head.weight is not None:
                out[which] = (hidden[which] @ head.weight.T).float()
            if head.a is not None and head.b is not None:
                out[which] += (hidden[which] @ head.a.T @ head.b).float()


def _place(weights: LoraWeights, slot: int, adapter: LinearAdapter | None) -> None:
    # Between two steps of the others: their next tokens wait for this. Numbers of numpy take a tenth of torch's time.
    ranks, adjustments = weights.ranks.numpy(), weights.adjusted.numpy()
    before, rank = int(ranks[slot]), 0 if adapter is None else adapter.rank
    if rank < before:
        weights.a[slot, rank:before] = 0
        weights.b[slot, rank:before] = 0
    adjusted = adapter is not None and (adapter.scale is not None or adapter.shift is not None)
    if adapter is not None and rank:
        weights.a[slot, :rank].copy_(adapter.a)
        weights.b[slot, :rank].copy_(adapter.b)
        if weights.a_scale is not None and weights.b_scale is not None:
            assert adapter.a_scale is not None
            assert adapter.b_scale is not None
            weights.a_scale[slot, :rank] = adapter.a_scale
            weights.b_scale[slot] = adapter.b_scale
    if adapter is not None and adjusted:
        weights.scale[slot] = 1.0 if adapter.scale is None else adapter.scale
        weights.shift[slot] = 0.0 if adapter.shift is None else adapter.shift
    if weights.device_adjusted is not None and adjustments[slot] != adjusted:
        weights.device_adjusted[slot] = adjusted
    ranks[slot], adjustments[slot] = rank, adjusted


def _experts_on(adapter: ExpertAdapter, device: torch.device) -> ExpertAdapter:
    def moved(part: LoraWeights | None) -> LoraWeights | None:
        if part is None:
            return None
        tensors = {name: getattr(part, name).to(device) for name in ("a", "b", "scale", "shift")}
        return dataclasses.replace(part, **tensors)

    if device.type == "cpu":
        return adapter
    return ExpertAdapter(gate=moved(adapter.gate), up=moved(adapter.up), down=moved(adapter.down))


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
