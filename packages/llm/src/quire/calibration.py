"""Rounding a network's layers by what a text sends through them: one pass over the text, in which each layer is
rounded when its inputs arrive, so that the layers behind it see what the rounded ones make.

All tokens go through a layer at once: memory holds what they are there, the inputs' second moments of one layer, and
the results of one decoder layer, however many there are. Knows networks and texts; the arithmetic is in
`quire_quantization.calibrated`, files in `quire.quantize`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.quantize_schemes import Rounded, Scheme
from quire_attention import ForwardBatch
from quire_interfaces import CheckpointError, KVCacheGroup, KVCachePlan, LinearMethod
from quire_models import Network
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import DecoderLayer, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_ops import OpRequest, PagedLayout, kv_cache_shape
from quire_quantization import linear_method
from quire_quantization.calibrated import InverseFactor, awq_factors, gptq_round, inverse_factor, second_moments
from quire_runner.kv_cache import allocate_kv_caches, layer_states

__all__ = ["ALGORITHMS", "Calibrator"]

ALGORITHMS = ("rtn", "gptq", "awq")
"""How weights are rounded: to nearest, or by what their inputs are."""

_FOLDS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
"""In a layer of Llama's shape: what makes the inputs (element by element, or through attention), and who takes them."""
_FLOAT8_MAX = 448.0


class Calibrator:
    """Rounds the layers of a network. Made before its weights are loaded; `run` once after."""

    def __init__(self, network: Network, layers: Iterable[Linear], scheme: Scheme | None, algorithm: str) -> None:
        """Args:
        layers: Those of the network that are to be rounded.
        scheme: How; None where weights stay as they are, and the text is for `kv_scales` alone.
        algorithm: One of `ALGORITHMS`.

        Raises:
            CheckpointError: The network's layers are not known well enough for the algorithm.
        """
        if algorithm == "awq" and not (isinstance(network, DecoderLM) and all(map(_has_llamas_shape, network.layers))):
            raise CheckpointError(
                f"awq has to know what comes before each layer, and does not for {network.config.architecture}; use "
                "gptq"
            )
        plain = linear_method("plain", OpRequest(device=network.device.type, dtype=network.dtype))
        self._network, self._scheme, self._algorithm = network, scheme, algorithm
        self._layers = {layer.name.removesuffix(".weight"): _Layer(layer, self, plain) for layer in layers}
        self._places = dict.fromkeys(self.place(name) for name in self._layers)
        self._place: str | None = None
        self._running = False
        self._done: Callable[[str], None]
        self._rounded: dict[str, Rounded] = {}
        self._input_scales: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._last: tuple[Tensor, InverseFactor] | None = None
        self._parameters = {parameter.name for parameter in network.parameters}
        self.folds: dict[str, Tensor] = {}
        """Names of norms' weights and of biases -> what awq divides them by."""
        self.kv_scales: dict[str, Tensor] = {}
        """Name of an attention, with the dot behind it -> [2, Hkv] float32: the largest magnitude of its keys and of
        its values by head, in multiples of fp8 e4m3's largest number. Complete after `run`."""

    def run(self, sequences: Sequence[Sequence[int]], done: Callable[[str], None]) -> None:
        """Send the text through the network.

        Args:
            sequences: Token ids.
            done: Called with each place, the beginning of its layers' names ("model.layers.3."), once its layers are
                rounded: they can be taken until it returns.
        """
        self._done, self._running = done, True
        with torch.inference_mode(), self._recorded_caches():
            self._network.forward(_batch(self._network, sequences))
        self._leave()

    @contextmanager
    def _recorded_caches(self) -> Iterator[None]:
        """Look at what each attention reads from its cache. They attend once each, in the order of their names."""
        backend: Any = self._network.attention_backend
        names = iter(self._network.attention_names)
        attend = backend.paged_attention

        def recorded(query: Tensor, kv_cache: Tensor, metadata: PagedLayout, **options: Any) -> Tensor:
            blocks, offsets = metadata.slot_mapping // metadata.block_size, metadata.slot_mapping % metadata.block_size
            largest = kv_cache[blocks, :, :, offsets].abs().amax(dim=(0, 3)).float()
            self.kv_scales[next(names)] = (largest / _FLOAT8_MAX).clamp_min_(1e-12)
            out: Tensor = attend(query, kv_cache, metadata, **options)
            return out

        backend.paged_attention = recorded
        try:
            yield
        finally:
            backend.paged_attention = attend

    @staticmethod
    def place(layer: str) -> str:
        """What the names of all parts of a layer's decoder layer begin with; empty for what is in none."""
        match = re.match(r".*?\.\d+\.", layer)
        return match.group() if match else ""

    def take(self, layer: str) -> tuple[Rounded, Tensor | None]:
        """What was made of a layer, and the scale of its inputs where the scheme has one. A layer that saw no input (an
        expert that no token was sent to) is rounded to nearest, its inputs as those of its like."""
        rounded = self._rounded.get(layer)
        assert self._scheme is not None
        if rounded is None:
            rounded = self._scheme.round(self._layers[layer].stored)
        if not self._scheme.static_inputs:
            return rounded, None
        last = layer.rpartition(".")[2]
        alike = [scale for name, scale in self._input_scales.items() if name.rpartition(".")[2] == last]
        return rounded, self._input_scales.get(layer, max(alike, default=torch.ones(1), key=float))

    def weight(self, layer: str, stored: Tensor, x: Tensor) -> Tensor:
        """The weight [O, I] that a layer multiplies its inputs x [T, I] with, rounded now. Before `run`, and where a
        layer is called again, as it is stored."""
        place = self.place(layer)
        if (
            self._scheme is None
            or not self._running
            or layer in self._rounded
            or (place != self._place and place not in self._places)
        ):
            return stored
        if place != self._place:
            self._leave()
            self._place = place
        if self._scheme.static_inputs:
            largest = x.abs().amax().float() if x.numel() else torch.tensor(0.0)
            self._input_scales[layer] = (largest / _FLOAT8_MAX).clamp_min_(1e-12).view(1)
        factors = None
        if self._algorithm == "awq":
            factors = self._scale(layer, x)
        if self._algorithm == "gptq" and len(x):
            plain = self._scheme.round(stored)
            assert self._scheme.limits is not None
            low, high = self._scheme.limits
            elements = gptq_round(stored, plain.scale, self._factor(x), low=low, high=high)
            rounded = Rounded(elements, plain.scale)
        elif factors is not None:
            rounded = self._scheme.round((stored.float() * factors).to(stored.dtype))
        else:
            rounded = self._scheme.round(stored)
        self._rounded[layer] = rounded
        weight = rounded.dequantized()
        return (weight if factors is None else weight.div_(factors)).to(x.dtype)

    def _leave(self) -> None:
        """Hand over the layers of the decoder layer that the text has left."""
        if self._place is None:
            return
        del self._places[self._place]
        self._done(self._place)
        for statistics in (self._rounded, self._input_scales, self._factors):
            statistics.clear()
        self._last, self._place = None, None

    def _factor(self, x: Tensor) -> InverseFactor:
        """Of inputs that several layers may take one after the other."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, inverse_factor(second_moments(x)))
        return self._last[1]

    def _scale(self, layer: str, x: Tensor) -> Tensor | None:
        """Factors of the inputs of a layer, folded into what makes them; None where that is not known."""
        if layer in self._factors:
            return self._factors[layer]
        place, scheme = self.place(layer), self._scheme
        assert scheme is not None
        for source, targets in _FOLDS:
            names = [f"{place}{target}" for target in targets]
            if layer not in names or any(name not in self._layers for name in names) or not len(x):
                continue
            weights = [self._layers[name].stored for name in names]
            share = self._shared_by_heads if source == "self_attn.v_proj" else lambda values: values
            factors = awq_factors(x, weights, lambda weight: scheme.round(weight).dequantized(), share)
            if self._fold(f"{place}{source}", factors):
                self._factors |= dict.fromkeys(names, factors)
                return factors
        return None

    def _shared_by_heads(self, values: Tensor) -> Tensor:
        """Means over the query heads that read the same values: [Hq * D] -> like it."""
        config = self._network.config
        heads = values.view(config.num_kv_heads, -1, config.head_dim)
        return heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()

    def _fold(self, source: str, factors: Tensor) -> bool:
        """Divide what a norm or a layer gives by the factors. False for a layer that is not rounded."""
        layer = self._layers.get(source)
        if layer is None:
            if f"{source}.weight" in self._parameters:
                self.folds[f"{source}.weight"] = factors
            return f"{source}.weight" in self.folds
        rounded = self._rounded.get(source)
        if rounded is None:
            return False
        if len(rounded.scale) != len(factors):  # one for each query head: those of a key-value head are the same
            heads = factors.view(self._network.config.num_kv_heads, -1, self._network.config.head_dim)
            factors = heads[:, 0].flatten()
        self._rounded[source] = rounded._replace(scale=rounded.scale.float() / factors[:, None])
        if layer.bias is not None:
            self.folds[f"{source}.bias"] = factors
        return True


def _has_llamas_shape(layer: DecoderLayer) -> bool:
    """Whether a layer has RMS norms before attention and a gated feed-forward network or experts, and none behind."""
    if not isinstance(layer, SequentialBlock) or layer.attention_out_norm or layer.feed_forward_out_norm:
        return False
    norms = (layer.before_mixer.norm, layer.before_feed_forward.norm)
    parts = isinstance(layer.mixer, SelfAttention) and isinstance(layer.feed_forward, GatedMLP | SparseMoE)
    return parts and all(isinstance(norm, RMSNorm) for norm in norms)


class _Layer:
    """The linear method of one layer."""

    name, op, logits_op = "calibrated", "linear", "lm_head"

    def __init__(self, layer: Linear, calibrator: Calibrator, plain: LinearMethod) -> None:
        self._layer, self._calibrator, self._plain = layer.name.removesuffix(".weight"), calibrator, plain
        self.stored: Tensor
        self.bias: Tensor | None = None
        layer.set_method(self)

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Keeps `weight` itself."""
        self.stored, self.bias = weight, bias
        return {"stored": weight}  # ops for several layers look for "weight"

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]."""
        weight = self._calibrator.weight(self._layer, weights["stored"], x)
        out: Tensor = self._plain.apply(self._plain.make_weights(weight, self.bias), x)
        return out

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """Not for the LM head."""
        raise NotImplementedError(f"{self._layer}: the LM head is not calibrated")


def _batch(network: Network, sequences: Sequence[Sequence[int]]) -> ForwardBatch:
    """All sequences from their first token. Every layer has the same cache: it is done with it before the next one
    begins."""
    block_size = max(128, -(-max(map(len, sequences)) // 128) * 128)
    specs = network.config.kv_cache_specs(block_size, network.cache_dtype)
    kinds = list(dict.fromkeys(specs.values()))
    names = {spec: next(name for name, one in specs.items() if one == spec) for spec in kinds}
    caches, states = {}, {}
    for spec, name in names.items():
        plan = KVCachePlan(
            groups=(KVCacheGroup(spec=spec, layer_names=(name,)),),
            num_blocks=1 + len(sequences),
            tensor_block_bytes=(spec.block_bytes,),
        )
        layer_caches = allocate_kv_caches(plan, device=network.device, cache_shape=kv_cache_shape)
        caches[spec], states[spec] = layer_caches[name], layer_states(plan, layer_caches).get(name, ())
    lens = [len(sequence) for sequence in sequences]
    starts = torch.tensor([0, *lens]).cumsum(0)
    positions = torch.cat([torch.arange(size) for size in lens])
    blocks = torch.arange(1, 1 + len(lens))
    metadata = [
        PagedLayout(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=blocks[:, None].int(),
            slot_mapping=torch.repeat_interleave(blocks * block_size, torch.tensor(lens)) + positions,
            block_size=block_size,
            query_lens=lens,
            kv_lens=lens,
        )
        for _ in kinds
    ]
    return ForwardBatch(
        input_ids=torch.tensor([token for sequence in sequences for token in sequence]),
        positions=positions,
        attention=tuple(metadata),
        group_of_layer=tuple(kinds.index(spec) for spec in specs.values()),
        kv_caches=tuple(caches[spec] for spec in specs.values()),
        states=tuple(states[spec] for spec in specs.values()) if any(states.values()) else (),
    )
