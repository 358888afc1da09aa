"""How networks make their layers: a scope knows the layer's full name and everything a layer needs from outside.

Knows names, parameters and the chosen ops; does not know files or how checkpoints are read (`weights.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire_attention import Attention, AttentionBackend
from quire_distributed import Collectives
from quire_interfaces import LinearMethod
from quire_lora import AdapterSlots
from quire_models.layers.expert_parallel import ExpertParallel
from quire_models.layers.stored_layouts import DimShard
from quire_models.layers.stored_linear import StoredLinear, StoredTensor
from quire_models.quantization_config import QuantizationConfig
from quire_models.shards import HeadShard, OutputShard
from quire_ops import Op, OpBackend, OpRequest, op_table, replayable

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["AdjacentParameters", "Packed", "Parameter", "Scope"]


@dataclass(slots=True)
class Parameter:
    """A tensor that the checkpoint has to bring."""

    name: str
    shape: tuple[int, ...]
    """Of the rank's part, where ranks share it out."""
    tensor: Tensor | None = None
    dtype: torch.dtype | None = None
    """What it is kept in; None for the network's compute dtype."""
    optional: bool = False
    """The checkpoint need not bring it."""
    on_host: bool = False
    """It stays on the CPU: the layer makes another form of it, and puts that on its device."""
    beside: AdjacentParameters | None = None
    """The parameters that it lies among; None where its memory is its own."""
    shard: DimShard | None = None
    """Which part of the checkpoint's tensor it is; None for all of it."""

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        if self.shard is None:
            return self.shape
        return (*self.shape[: self.shard.dim], self.shard.total, *self.shape[self.shard.dim + 1 :])

    def part_of(self, tensor: Tensor) -> Tensor:
        """The rank's part of the checkpoint's tensor, a view of it."""
        shard = self.shard
        return tensor if shard is None else tensor.narrow(shard.dim, shard.start, self.shape[shard.dim])

    def memory(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Where its tensor has to be written, in this dtype on this device; None where it may be anywhere."""
        return None if self.beside is None else self.beside.memory(self, dtype, device)

    def take(self) -> Tensor:
        """The loaded tensor; the parameter lets go of it, so that a layer may replace it by another form."""
        assert self.tensor is not None, f"{self.name} is not loaded"
        tensor, self.tensor = self.tensor, None
        return tensor


class AdjacentParameters:
    """Parameters that lie one behind the other in one piece of memory, along their first dimension."""

    __slots__ = ("_parameters", "_places", "_whole")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        """Args:
        parameters: Alike but for their first dimension. None of them is loaded yet.
        """
        self._parameters = parameters
        self._whole: Tensor | None = None
        self._places: tuple[Tensor, ...] = ()
        for parameter in parameters:
            parameter.beside = self

    def memory(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The part of one of them; there is memory for all as soon as one is asked for."""
        if self._whole is None:
            sizes = [each.shape[0] for each in self._parameters]
            self._whole = torch.empty((sum(sizes), *parameter.shape[1:]), dtype=dtype, device=device)
            self._places = self._whole.split(sizes)
        return self._places[next(i for i, each in enumerate(self._parameters) if each is parameter)]

    def take(self) -> Tensor:
        """All of them as one tensor, of which they let go. It is put together where their memory was not used."""
        parts, whole, places = [parameter.take() for parameter in self._parameters], self._whole, self._places
        self._whole, self._places = None, ()
        if whole is None or any(part is not place for part, place in zip(parts, places, strict=True)):
            return torch.cat(parts)
        return whole


class Packed(NamedTuple):
    """A tensor that a checkpoint may bring in the place of several parameters."""

    shape: tuple[int, ...]
    split: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
    """The tensor, as it is in its file -> name and tensor of each parameter; views where that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What layers get from outside, and where they stand in the network."""

    dtype: torch.dtype
    device: torch.device
    linear_method: LinearMethod
    head_method: LinearMethod
    """Linear method of the LM head, which takes hidden states as they are."""
    plain_method: LinearMethod
    """For layers that are never quantized."""
    attention_backend: AttentionBackend
    cache_dtype: str | None = None
    """What keys and values are kept in; None for the compute dtype."""
    quantization: QuantizationConfig | None = None
    """How the checkpoint stores linear layers, when it is quantized."""
    joins_products: bool = False
    """Linear layers that take the same input multiply in one product (`MergedLinear`)."""
    adapters: AdapterSlots | None = None
    """Where layers find adapters on top of them; None where there never are any."""
    disabled_linear_kernels: frozenset[str] = frozenset()
    """Ops that may not multiply with quantized weights, or run experts."""
    stored: list[StoredLinear] = field(default_factory=list)
    """The methods of all layers that are quantized in the checkpoint."""
    layers: list[object] = field(default_factory=list)
    """Every `Linear` that takes the linear method and every `FusedExperts`, in the order in which they were made;
    shared by all scopes of a network."""
    prefix: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    """Every parameter of the network, in the order in which layers were made; shared by all scopes of a network."""
    packs: dict[str, Packed] = field(default_factory=dict)
    """Name in the checkpoint -> what it stands for."""
    routers: list[Any] = field(default_factory=list)
    """Every `Router` of the network, in the order of its layers; shared by all scopes of a network."""
    chosen: list[OpBackend[..., Any]] = field(default_factory=list)
    """The backends of every op that a layer bound; shared by all scopes of a network."""
    finishers: list[Callable[[], None]] = field(default_factory=list)
    """Called once all parameters are loaded, in the order in which layers were made."""
    attentions: dict[str, Attention] = field(default_factory=dict)
    """Name of each layer's attention, with the dot behind it, in the order of the layers."""
    head_shards: dict[str, HeadShard] = field(default_factory=dict)
    """Name of an attention whose heads are shared out between ranks -> those of this rank."""
    tp_group: Collectives | None = None
    """The tensor-parallel ranks that share the network; None for one that has it alone."""
    pp_group: Collectives | None = None
    """The pipeline stages that the network is cut into; None for a whole one."""

    expert_parallel: ExpertParallel | None = None
    """How these ranks share out whole experts; None where each has all of them."""

    def __truediv__(self, name: str) -> Scope:
        """The scope of a part: scope / "mlp"."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def attention(
        self,
        layer: int,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> Attention:
        """The attention over a layer's paged cache. At most one for a scope.

        Args:
            layer: Index of its cache in the batch.
            scale: Factor of the scores.
            sliding_window: A token sees itself and the W - 1 before it; None for all before it.
            soft_cap: Scores become cap * tanh(score / cap); None for no cap.
            alibi_slopes: [Hq] float32: a score falls by so much for each token in between; None for none.
            chunk_tokens: Tokens attend to those of their chunk only; None for no chunks.
        """
        attention = Attention(
            self.attention_backend,
            layer,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            chunk_tokens=chunk_tokens,
        )
        self.attentions[self.prefix] = attention
        return attention

    def parameter(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        optional: bool = False,
        shard: DimShard | None = None,
    ) -> Parameter:
        """Declare a parameter that the checkpoint has to bring; `shape` is that of the rank's part."""
        parameter = Parameter(self.prefix + name, shape, dtype=dtype, optional=optional, shard=shard)
        self.parameters.append(parameter)
        return parameter

    def packed(
        self, name: str, shape: tuple[int, ...], split: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Declare a tensor that the checkpoint may bring in the place of several parameters.

        Args:
            shape: Its shape there.
            split: The tensor -> name and tensor of each parameter.
        """
        self.packs[self.prefix + name] = Packed(shape, split)

    def stored_linear(
        self, out_features: int, in_features: int, *, rounds: bool = True, shard: OutputShard | None = None
    ) -> StoredLinear | None:
        """The method of the layer of this scope where the checkpoint is quantized.

        Args:
            rounds: Inputs may be rounded, where the checkpoint is meant so.
            shard: The rank's outputs; None for all.
        """
        name = self.prefix.removesuffix(".")
        stored = None if self.quantization is None else self.quantization.of_layer(name)
        return None if stored is None else self._stored(stored, out_features, in_features, rounds=rounds, shard=shard)

    def _stored(
        self,
        stored: QuantizationConfig,
        out_features: int,
        in_features: int,
        *,
        rounds: bool,
        shard: OutputShard | None,
    ) -> StoredLinear:
        name = self.prefix.removesuffix(".")
        stored = stored if rounds else dataclasses.replace(stored, inputs=None)
        request = OpRequest(device=self.device.type, dtype=self.dtype)
        disabled = self.disabled_linear_kernels
        method = StoredLinear(stored, request, name, out_features, in_features, disabled, self.device, shard=shard)
        self.stored.append(method)
        return method

    def stored_head(
        self, vocab_size: int, size: int, *, tied: bool, shard: OutputShard | None = None
    ) -> StoredLinear | None:
        """The method of an LM head where the checkpoint is quantized. A tied head has a form of its own where the files
        hold one. `shard`: the rank's tokens; None for all."""
        name = self.prefix.removesuffix(".")
        stored = None if self.quantization is None else self.quantization.of_head(name, tied=tied)
        return None if stored is None else self._stored(stored, vocab_size, size, rounds=False, shard=shard)

    def stored_parameters(self, tensors: Mapping[str, StoredTensor], *, on_host: bool) -> dict[str, Parameter]:
        """Declare what a layer has in the checkpoint. Where that is quantized, it is read on the host."""
        declared = {
            name: self.parameter(name, *shape, dtype=dtype, optional=optional, shard=shard)
            for name, (shape, dtype, optional, shard) in tensors.items()
        }
        for parameter in declared.values():
            parameter.on_host = on_host
        return declared

    def when_loaded(self, finish: Callable[[], None]) -> None:
        """Call `finish` once all parameters are loaded."""
        self.finishers.append(finish)

    def op(self, op: Op[P, R], **sizes: int) -> Callable[P, R]:
        """The function that serves an op on this device in this dtype."""
        backend = self.choose(op, **sizes)
        self.chosen.append(backend)
        return replayable(op, backend.function)

    def choose(self, op: Op[P, R], **sizes: int) -> OpBackend[P, R]:
        """The backend that serves an op on this device in this dtype."""
        request = OpRequest(device=self.device.type, dtype=self.dtype, sizes=sizes, cache_dtype=self.cache_dtype)
        return op_table().choose(op, request)
