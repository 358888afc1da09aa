"""Linear layers and the embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_distributed import Collectives
from quire_interfaces import LinearMethod
from quire_models.layers.scope import Parameter, Scope
from quire_models.layers.stored_layouts import DimShard
from quire_models.layers.stored_linear import StoredLinear, StoredTensor
from quire_models.layers.stored_table import StoredTable
from quire_models.shards import OutputShard, split_outputs
from quire_models.spec import LinearSpec
from quire_ops import ActivationScheme, LinearWeights, LoraTokens, LoraWeights, QuantizedTokens, ops
from quire_ops.ops import op_named
from quire_quantization.joined import ROTATED
from quire_quantization.numbers import INPUT_SCALES, ask

__all__ = ["Embedding", "LMHead", "Linear", "same_scales", "stack_weights", "unadapted_weights"]


COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear:
    """x [N, in_features] -> [N, out_features], through the linear method of the scope.

    Where ranks share the network, each has some of the outputs, and gathers those of the others; a layer with a `shard`
    of its own gives these outputs alone, [N, shard.size].
    """

    __slots__ = (
        "_adapters",
        "_apply",
        "_bias",
        "_dtype",
        "_group",
        "_lora",
        "_method",
        "_sizes",
        "_stored",
        "_weights",
        "is_joined",
        "name",
        "shape",
        "shard",
    )

    name: str
    """Of the weight, in full."""
    shape: tuple[int, int]
    """[out_features, in_features] of all ranks."""
    shard: OutputShard | None
    """Outputs that this rank computes; None for all."""
    is_joined: bool
    """Another object takes its parameters, and gives it its weights (`MergedLinear`)."""

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        shard: OutputShard | None = None,
        is_replicated: bool = False,
    ) -> None:
        """Args:
        method: None for the scope's.
        shard: The rank's outputs, where what is behind takes no others; None to gather those of all ranks.
        is_replicated: Each rank computes all outputs.
        """
        self.name, self.shape, self.shard = f"{scope.prefix}weight", (out_features, in_features), shard
        self._group: Collectives | None = None
        self._sizes: tuple[int, ...] = ()
        if scope.tp_group is not None and shard is None and not is_replicated:
            sizes = split_outputs(out_features, scope.tp_group.size)
            if sizes is not None:
                self._group, self._sizes = scope.tp_group, sizes
                self.shard = OutputShard.of(sizes, scope.tp_group.rank)
        stored = None if method else scope.stored_linear(out_features, in_features, shard=self.shard)
        self._method = stored or method or scope.linear_method
        self._apply = self._method.apply
        if method is None:
            scope.layers.append(self)
        rows = None if self.shard is None else DimShard(0, self.shard.start, out_features)
        outputs = out_features if self.shard is None else self.shard.size
        tensors = {"weight": StoredTensor((outputs, in_features), None, shard=rows)}
        if stored is not None:
            tensors = dict(stored.tensors())
        if bias:
            tensors.pop("bias", None)
        self._stored = scope.stored_parameters(tensors, on_host=stored is not None)
        self._bias = scope.parameter("bias", outputs, shard=rows) if bias else None
        self._weights: dict[str, Tensor] = {}
        self._dtype = scope.dtype
        self._adapters = scope.adapters
        self._lora: LoraWeights | None = None
        if self._adapters is not None:
            name = scope.prefix.removesuffix(".")
            own = None if self.shard is None else slice(self.shard.start, self.shard.stop)
            self._lora = self._adapters.linear(name, out_features, in_features, self.base, self.plain, own)
        self.is_joined = False
        scope.when_loaded(self._finish)

    @classmethod
    def of(cls, scope: Scope, spec: LinearSpec) -> Linear:
        """The layer that a record describes, within this scope."""
        method = scope.plain_method if spec.is_plain else None
        name, shard = scope / spec.name, spec.shard
        return cls(name, spec.in_features, spec.out_features, bias=spec.bias, method=method, shard=shard)

    @property
    def num_outputs(self) -> int:
        """Outputs that this rank computes."""
        return self.shape[0] if self.shard is None else self.shard.size

    def set_method(self, method: LinearMethod) -> None:
        """Keep the weight by another method. Before it is loaded; not for layers of a quantized checkpoint."""
        assert not self._weights
        assert not isinstance(self._method, StoredLinear)
        self._method, self._apply = method, method.apply

    def base(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in float32, whatever form the linear method keeps them in; of the rank's outputs."""
        some = next(iter(self._weights.values()))
        without_bias = {name: tensor for name, tensor in self._weights.items() if name != "bias"}
        weight = self._apply(without_bias, torch.eye(self.shape[1], dtype=self._dtype, device=some.device)).float().T
        bias = self._weights.get("bias")
        return weight, None if bias is None else bias.float()

    def plain(self) -> Tensor | None:
        """The weight [num_outputs, in_features] as it lies in memory; None where the method keeps another form."""
        weight = self._weights.get("weight")
        is_plain = self._weights.keys() <= {"weight", "bias"} and weight is not None and weight.dtype == self._dtype
        return weight if is_plain else None

    @property
    def bias(self) -> Tensor | None:
        """Of the rank's outputs. Once the weight is loaded."""
        return self._weights.get("bias")

    @property
    def method(self) -> LinearMethod | StoredLinear:
        """How it keeps its weight."""
        return self._method

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Name behind the layer's -> what the checkpoint has to bring."""
        return self._stored if self._bias is None else {**self._stored, "bias": self._bias}

    def _finish(self) -> None:
        if not self.is_joined:
            self.keep(self.make_weights())

    def make_weights(self) -> dict[str, Tensor]:
        """What its method makes of the loaded parameters, which let go of it; of a quantized checkpoint's on the
        host."""
        bias = None if self._bias is None else self._bias.take()
        tensors = {name: parameter.take() for name, parameter in self._stored.items() if parameter.tensor is not None}
        if isinstance(self._method, StoredLinear):
            return self._method.read(tensors, bias)
        return self._method.make_weights(tensors["weight"], bias)

    def keep(self, weights: dict[str, Tensor]) -> None:
        """Have what the method made, or views of what it made for several layers."""
        self._weights = self.on_device(weights)

    def on_device(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the method made, where it multiplies."""
        return self._method.on_device(weights) if isinstance(self._method, StoredLinear) else weights

    def take_weight(self) -> Tensor:
        """[out_features, in_features] in the compute dtype, whatever form it was kept in. The layer lets go of it, and
        is of no use any more."""
        some = next(iter(self._weights.values()))
        weight = self._weights.get("weight")
        if self._weights.keys() != {"weight"} or weight is None or weight.dtype not in COMPUTE_DTYPES:
            weight = self._apply(self._weights, torch.eye(self.shape[1], dtype=self._dtype, device=some.device)).T
        self._weights = {}
        return weight

    def stack_weights(self) -> LinearWeights | None:
        """The weight as ops take it, or None when there is a `stack_refusal`."""
        if self.stack_refusal:
            return None
        return LinearWeights(**self._weights, lora=self._lora, rank_sizes=self._sizes)

    @property
    def stack_refusal(self) -> str:
        """Why ops that take several layers' weights cannot have this one's; empty when they can."""
        if "order" in self._weights:
            return "inputs are gathered in another order"
        if not self._weights.keys() <= set(LinearWeights._fields):
            return "the linear method keeps a form of its own"
        # Matrices that take the same inputs could have other scales.
        return "inputs have scales from the checkpoint" if self.has_input_scale else ""

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint has the scale that inputs are rounded with. Once the weight is loaded."""
        return isinstance(self._method, StoredLinear) and self._method.has_input_scale

    @property
    def op(self) -> str:
        """The op that multiplies, once the weight is loaded."""
        return self._method.op

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        """How the op quantizes inputs; None where they are needed as they are. Once the weight is loaded."""
        scale = self._weights.get("input_scale")
        if scale is None or not self._weights.keys().isdisjoint({"order", ROTATED}) or self._adapters is not None:
            return None
        weight, scales = self._weights["weight"], self._weights["scale"]
        return ActivationScheme(weight.dtype, scale, by_group=scales.ndim == 2 and scales.shape[1] > 1)

    @property
    def rounds_tokens_to_int8(self) -> bool:
        """Whether the op multiplies int8 with int8. Once the weight is loaded."""
        weight = self._weights.get("weight")
        return weight is not None and weight.dtype == torch.int8 and "input_scale" in self._weights

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        """x [N, in_features], or quantized by `activation_scheme` where that is not None -> [N, out_features]."""
        out: Tensor = self._apply(self._weights, x)
        self.adapt(out, x)
        return self.gather(out)

    def gather(self, out: Tensor) -> Tensor:
        """The outputs of all ranks [N, out_features] from the rank's own, adapters included; `out` itself where nothing
        is to be gathered."""
        return out if self._group is None else self._group.all_gather(out.contiguous(), dim=-1, sizes=self._sizes)

    def wide(self, x: Tensor | QuantizedTokens) -> Tensor:
        """The rank's outputs [N, num_outputs] float32, as they are summed, with the step's adapters."""
        weights = {name: tensor for name, tensor in self._weights.items() if name != "bias"}
        out: Tensor = self._method.logits(weights, x)
        bias = self._weights.get("bias")
        out = out if bias is None else out.add_(bias.float())
        self.adapt(out, x)
        return out

    @property
    def is_adapted(self) -> bool:
        """Whether the pass that runs has adapters that this layer may have."""
        return self._lora is not None and self._adapters is not None and self._adapters.tokens is not None

    def adapt(self, out: Tensor, x: Tensor | QuantizedTokens) -> None:
        """Add the step's adapters to the product out [N, out_features], whose rows may be apart."""
        if self._lora is not None and self._adapters is not None and self._adapters.tokens is not None:
            assert isinstance(x, Tensor)  # nothing is quantized ahead where there are adapters
            self._adapters.add(out, x, self._lora, self._adapters.tokens)


def stack_weights(**layers: Linear) -> dict[str, LinearWeights] | None:
    """Name -> weights for op `decoder_stack`, or None when a layer keeps them in a form which that op does not take."""
    weights = {name: layer.stack_weights() for name, layer in layers.items()}
    return {name: weight for name, weight in weights.items() if weight is not None} if all(weights.values()) else None


def unadapted_weights(**layers: Linear) -> dict[str, LinearWeights] | None:
    """As `stack_weights`, of layers that op `decoder_stack` computes without adapters: None where one may have some."""
    weights = stack_weights(**layers)
    return None if weights is None or any(each.lora is not None for each in weights.values()) else weights


def same_scales(layers: Sequence[Linear], input_scales: Sequence[Tensor]) -> bool:
    """Whether layers round inputs with one scale: of each [1], or nothing for all. Numbers are looked at only where
    there may be different ones."""
    if len(input_scales) < 2 or not any(layer.has_input_scale for layer in layers):
        return True
    return ask(INPUT_SCALES, (torch.cat(list(input_scales)) == input_scales[0]).all())


class Embedding:
    """ids [T] -> [T, size]."""

    __slots__ = ("_adapters", "_embedding", "_parameter", "stored", "weights")

    stored: StoredTable | None
    """The table where the checkpoint is quantized and has it so."""
    weights: LinearWeights
    """The rank's rows as ops take them. Once they are loaded."""
    rank_rows: tuple[int, ...] = ()
    """Rows of each rank, one behind the other, where ranks share them out; empty where each has all."""

    def __init__(self, scope: Scope, vocab_size: int, size: int, shard: OutputShard | None = None) -> None:
        """Args:
        shard: The rows of this rank; None for all.
        """
        self._embedding = scope.op(ops.embedding)
        rows = None if shard is None else DimShard(0, shard.start, shard.total)
        method = scope.stored_head(vocab_size, size, tied=True, shard=shard)
        self.stored = None if method is None else StoredTable(scope, method, size)
        if self.stored is None:
            self._parameter = scope.parameter("weight", shard.size if shard else vocab_size, size, shard=rows)
        self._adapters = scope.adapters
        if self._adapters is not None and self._adapters.embedding is None:
            self._adapters.embedding = (scope.prefix.removesuffix("."), (vocab_size, size))
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weights = LinearWeights(self._parameter.take()) if self.stored is None else self.stored.finish()

    def __call__(self, ids: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """`lora`: which tokens have adapters, which may change their embedding."""
        out = self.rows_of(ids)
        if self._adapters is not None and lora is not None:
            self._adapters.embed(out, ids, lora)
        return out

    def rows_of(self, ids: Tensor) -> Tensor:
        """[T, size] without adapters."""
        return self._embedding(ids, self.weights.weight) if self.stored is None else self.stored.rows_of(ids)

    def part(self, shard: OutputShard | None) -> Tensor:
        """The rows of a shard in the compute dtype; None for all."""
        weight = self.weights.weight if self.stored is None else self.stored.whole()
        return weight if shard is None else weight[shard.start : shard.stop]


class LMHead:
    """hidden [N, size] -> logits [N, vocab_size] float32, through the linear method of the scope. May share the
    embedding's weight: a method that keeps another form of it has a copy of its own.

    Where ranks share the network, each has the logits of some tokens, and gathers those of the others.
    """

    __slots__ = (
        "_adapters",
        "_argmax",
        "_bias",
        "_bias_parameter",
        "_embedding",
        "_group",
        "_method",
        "_shard",
        "_sizes",
        "_stored",
        "_weights",
    )

    def __init__(
        self,
        scope: Scope,
        vocab_size: int,
        size: int,
        *,
        tied_to: Embedding | None = None,
        bias: bool = False,
        may_differ: bool = False,
    ) -> None:
        """Args:
        tied_to: The embedding whose weight it shares.
        may_differ: The checkpoint may bring a weight all the same, which is then its own.
        """
        self._bias_parameter = scope.parameter("bias", vocab_size) if bias else None
        self._bias: Tensor | None = None
        group = scope.tp_group
        sizes = None if group is None else split_outputs(vocab_size, group.size)
        self._group, self._sizes = None if sizes is None else group, sizes or ()
        self._shard = shard = None if group is None or sizes is None else OutputShard.of(sizes, group.rank)
        stored = scope.stored_head(vocab_size, size, tied=tied_to is not None, shard=shard)
        self._method = stored or scope.head_method
        self._argmax = scope.op(ops.lm_head_argmax)
        scope.op(op_named(self._method.logits_op))  # for the record of chosen backends
        self._embedding = None if stored else tied_to
        self._stored: dict[str, Parameter] = {}
        if self._embedding is None:
            tensors = {"weight": self._weight(vocab_size, size)} if stored is None else dict(stored.tensors())
            tensors.pop("bias", None)
            self._stored = scope.stored_parameters(tensors, on_host=stored is not None)
        elif may_differ:
            weight = self._weight(vocab_size, size)._replace(optional=True)
            self._stored = scope.stored_parameters({"weight": weight}, on_host=False)
        self._weights: dict[str, Tensor] = {}
        self._adapters = scope.adapters
        if self._adapters is not None:
            self._adapters.lm_head = (scope.prefix.removesuffix("."), (vocab_size, size))
        scope.when_loaded(self._finish)

    def _weight(self, vocab_size: int, size: int) -> StoredTensor:
        if self._shard is None:
            return StoredTensor((vocab_size, size), None)
        return StoredTensor((self._shard.size, size), None, shard=DimShard(0, self._shard.start, vocab_size))

    @property
    def op(self) -> str:
        """The op that computes the logits."""
        return self._method.logits_op

    def _finish(self) -> None:
        tensors = {name: parameter.take() for name, parameter in self._stored.items() if parameter.tensor is not None}
        if isinstance(self._method, StoredLinear):
            self._weights = self._method.on_device(self._method.read(tensors, None))
        elif not tensors and (table := self._embedding and self._embedding.stored) and not table.is_plain:
            self._method, self._weights = table.method, table.weights
        else:
            shared = None if self._embedding is None else self._embedding.part(self._shard)
            weight = tensors.get("weight", shared)
            assert weight is not None
            self._weights = self._method.make_weights(weight, None)
        if self._bias_parameter is not None:
            self._bias = self._bias_parameter.take().float()

    def __call__(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """`lora`: which hidden states have adapters that may change the head."""
        logits: Tensor = self._method.logits(self._weights, hidden)
        if self._group is not None:
            logits = self._group.all_gather(logits.contiguous(), dim=-1, sizes=self._sizes)
        if self._adapters is not None and lora is not None:
            self._adapters.logits(logits, hidden, lora)
        return logits if self._bias is None else logits.add_(self._bias)

    def stack_weights(self) -> LinearWeights | None:
        """The weight as ops take it, or None when there is more to the head than a product with it."""
        is_product = self._bias is None and self._weights.keys() <= set(LinearWeights._fields)
        return LinearWeights(**self._weights, lora=None, rank_sizes=self._sizes) if is_product else None

    @property
    def plain_weight(self) -> Tensor | None:
        """[vocab_size, size], of the rank's own tokens; None when there is more to the head than a product with it as
        it was loaded."""
        return self._weights["weight"] if self._method.name == "plain" and self._bias is None else None

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """The largest logit's token [N] int64, the lowest id among equals, and that logit [N] float32."""
        weight = self.plain_weight
        if weight is not None and lora is None:
            ids, max_logits = self._argmax(hidden, weight)
            return (ids, max_logits) if self._group is None else self._largest(ids, max_logits, self._group)
        max_logits, ids = self(hidden, lora).max(dim=-1)
        return ids, max_logits

    def _largest(self, ids: Tensor, max_logits: Tensor, group: Collectives) -> tuple[Tensor, Tensor]:
        """Of each rank's largest logits [N] and their tokens among the rank's own [N], the largest: of the first rank
        among equals, which has the lower tokens."""
        assert self._shard is not None
        ones = (1,) * group.size
        all_logits = group.all_gather(max_logits[:, None].contiguous(), dim=-1, sizes=ones)
        all_ids = group.all_gather((ids + self._shard.start)[:, None].contiguous(), dim=-1, sizes=ones)
        best, rank = all_logits.max(dim=-1)
        return all_ids.gather(1, rank[:, None])[:, 0], best
