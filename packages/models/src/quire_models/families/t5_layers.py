"""Modules that only T5 and its successors have.

Shape legend: T tokens of the step, H heads.
"""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.families.t5 import T5Spec
from quire_models.layers.distance_bias import DistanceBias
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.gathered_heads import GatherHeads
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import SelfAttentionSpec
from quire_ops import ops

__all__ = ["T5ForConditionalGeneration"]


class T5SelfAttention:
    """x [T, hidden_size] -> [T, hidden_size]: causal, over the paged cache. Scores are not scaled."""

    def __init__(self, spec: SelfAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        *projections, self.out = (Linear.of(scope, each) for each in spec.projections())
        self.projections = MergedLinear(scope, *projections)
        self.attention = scope.attention(index, scale=spec.scale)
        self.gather = GatherHeads.of(spec.heads, spec.head_dim, scope)
        self.attend = scope.op(ops.biased_paged_attention)
        self.index, self.num_heads, self.scale = index, spec.num_heads, spec.scale
        self.bias: DistanceBias
        """Set by the network, since layers may share it."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = (each.view(len(x), self.num_heads, -1) for each in self.projections(x))
        self.attention.write(key, value, batch)
        cache, metadata = batch.of_layer(self.index)
        attended = self.attend(
            query,
            cache,
            metadata,
            scale=self.scale,
            bias=self.bias.by_distance,
            kv_scale=self.attention.kv_scale,
        )
        return self.out(self.gather(attended.flatten(1)))


class T5ForConditionalGeneration(EncoderDecoderLM):
    """The network, whose positions are biases of attention scores."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, T5Spec)
        self._encoder_biases = _biases(spec, scope, [layer.name for layer in spec.encoder_layers], decoder=False)
        biases = _biases(spec, scope, [layer.name for layer in spec.layers], decoder=True)
        for layer, bias in zip(self.decoder_layers, biases, strict=True):
            assert isinstance(layer.attention, T5SelfAttention)
            layer.attention.bias = bias

    def encoder_biases(self) -> list[Tensor | None]:
        """Biases of the encoder's attention scores by distance, for each layer."""
        return [bias.by_distance for bias in self._encoder_biases]


def _biases(spec: T5Spec, scope: Scope, layers: list[str], *, decoder: bool) -> list[DistanceBias]:
    """The biases of each layer of a stack; those of the first serve all where they are shared."""
    own = layers if spec.has_bias_in_every_layer else layers[:1]
    heads = getattr(spec.attention, "heads", None)
    biases = [
        DistanceBias(
            scope / f"{name}.layer.0.SelfAttention.relative_attention_bias",
            spec.num_buckets,
            spec.attention.num_heads if heads is None else heads.num_heads,
            spec.max_distance,
            is_causal=decoder,
            heads=heads,
        )
        for name in own
    ]
    return biases if spec.has_bias_in_every_layer else biases * len(layers)
