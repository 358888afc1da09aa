"""T5 (Raffel et al. 2020), mT5, UMT5 and Flan-T5: positions come as biases of attention scores, by distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_attention import EncoderBatch, ForwardBatch
from quire_models.layers.encoder import CrossAttention, EncoderAttention, ProjectionNames
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.linear import Embedding, Linear, LMHead
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.t5.config import T5Config
from quire_ops import GATED_ACTIVATIONS, LoraTokens, ops

__all__ = ["T5ForConditionalGeneration", "bucket"]

NAMES = ProjectionNames("q", "k", "v", "o")


def bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of a distance in one direction, 0 or more: half of the buckets are for one distance each, the others
    grow with its logarithm (Raffel et al. 2020, sec. 2.1, and the code that came with it).

    Args:
        distance: int64.
    """
    num_exact = num_buckets // 2
    # In float32, as networks were trained: a distance at a border falls on the same side.
    share = torch.log(distance.float().clamp_min(1.0) / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (share * (num_buckets - num_exact)).to(torch.int64)
    return torch.where(distance < num_exact, distance, far.clamp_max(num_buckets - 1))


class DistanceBias:
    """The biases of one stack, or of one layer: heads by distance, as ops `encoder_attention` and
    `biased_paged_attention` take them."""

    def __init__(self, config: T5Config, scope: Scope, *, decoder: bool) -> None:
        self._parameter = scope.parameter("weight", config.num_buckets, config.num_heads)
        self._config, self._decoder = config, decoder
        self.by_distance: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        weight = self._parameter.take()  # [buckets, H]
        most, num = self._config.max_distance, self._config.num_buckets
        if self._decoder:
            buckets = bucket(torch.arange(most + 1), num, most)
        else:  # one half of the buckets for keys before the query, the other for those behind it
            distance = torch.arange(-most, most + 1)
            buckets = bucket(distance.abs(), num // 2, most) + (distance > 0) * (num // 2)
        self.by_distance = weight[buckets.to(weight.device)].T.contiguous()


class T5FeedForward:
    """x [N, hidden_size] -> [N, hidden_size]: with a gate or without."""

    def __init__(self, config: T5Config, scope: Scope) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate, self.plain = None, None
        if not config.mlp_gated:
            self.plain = MLP(scope, hidden, inner, act=config.hidden_act, bias=False, names=("wi", "wo"))
            return
        self.gate, self.up = Linear(scope / "wi_0", hidden, inner), Linear(scope / "wi_1", hidden, inner)
        self.down = Linear(scope / "wo", inner, hidden)
        self.act_and_mul = scope.op(GATED_ACTIVATIONS[config.hidden_act])

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate is None:
            assert self.plain is not None
            return self.plain(x)
        return self.down(self.act_and_mul(self.gate(x), self.up(x)))


class T5SelfAttention:
    """x [T, hidden_size] -> [T, hidden_size]: causal, over the paged cache. Scores are not scaled."""

    def __init__(self, config: T5Config, layer: int, scope: Scope) -> None:
        hidden, width = config.hidden_size, config.query_size
        self.projections = MergedLinear(scope, *(Linear(scope / name, hidden, width) for name in NAMES[:3]))
        self.out = Linear(scope / NAMES.out, width, hidden)
        self.attention = scope.attention(layer, scale=1.0)
        self.attend = scope.op(ops.biased_paged_attention)
        self.layer, self.num_heads = layer, config.num_heads

    def __call__(self, x: Tensor, batch: ForwardBatch, bias: Tensor) -> Tensor:
        query, key, value = (each.view(len(x), self.num_heads, -1) for each in self.projections(x))
        self.attention.write(key, value, batch)
        cache, metadata = batch.of_layer(self.layer)
        attended = self.attend(query, cache, metadata, scale=1.0, bias=bias, kv_scale=self.attention.kv_scale)
        return self.out(attended.flatten(1))


class T5EncoderLayer:
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, config: T5Config, scope: Scope, bias: DistanceBias) -> None:
        hidden, eps, self.bias = config.hidden_size, config.rms_norm_eps, bias
        scope = scope / "layer"
        self.attention_norm = RMSNorm(scope / "0" / "layer_norm", hidden, eps)
        inner = scope / "0" / "SelfAttention"
        self.attention = EncoderAttention(
            inner, hidden, config.num_heads, config.head_dim, bias=False, scale=1.0, names=NAMES
        )
        self.mlp_norm = RMSNorm(scope / "1" / "layer_norm", hidden, eps)
        self.mlp = T5FeedForward(config, scope / "1" / "DenseReluDense")

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, self.bias.by_distance)
        return x + self.mlp(self.mlp_norm(x))


class T5DecoderLayer:
    """The same, with attention to what the encoder read between the two."""

    def __init__(self, config: T5Config, layer: int, scope: Scope, bias: DistanceBias) -> None:
        hidden, eps, self.bias = config.hidden_size, config.rms_norm_eps, bias
        scope = scope / "layer"
        self.attention_norm = RMSNorm(scope / "0" / "layer_norm", hidden, eps)
        self.attention = T5SelfAttention(config, layer, scope / "0" / "SelfAttention")
        self.cross_norm = RMSNorm(scope / "1" / "layer_norm", hidden, eps)
        inner, index = scope / "1" / "EncDecAttention", config.num_layers + layer
        self.cross = CrossAttention(
            inner, index, hidden, config.num_heads, config.head_dim, bias=False, scale=1.0, names=NAMES
        )
        self.mlp_norm = RMSNorm(scope / "2" / "layer_norm", hidden, eps)
        self.mlp = T5FeedForward(config, scope / "2" / "DenseReluDense")

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, self.bias.by_distance)
        x = x + self.cross(self.cross_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class T5ForConditionalGeneration(EncoderDecoderLM):
    """The network."""

    ignored_tensors = frozenset(
        {
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        }
    )

    def __init__(self, config: T5Config, scope: Scope) -> None:
        super().__init__(config, scope)
        encoder, decoder = scope / "encoder", scope / "decoder"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tokens = Embedding(scope / "shared", config.vocab_size, hidden)
        biases = self._biases(config, encoder, config.num_encoder_layers, decoder=False)
        self.encoder_layers = [
            T5EncoderLayer(config, encoder / "block" / str(i), bias) for i, bias in enumerate(biases)
        ]
        self.encoder_norm = RMSNorm(encoder / "final_layer_norm", hidden, eps)
        biases = self._biases(config, decoder, config.num_layers, decoder=True)
        self.decoder_layers = [
            T5DecoderLayer(config, i, decoder / "block" / str(i), bias) for i, bias in enumerate(biases)
        ]
        self.decoder_norm = RMSNorm(decoder / "final_layer_norm", hidden, eps)
        # Files of T5 1.1 may bring a head of its own although their config.json says that it is the embedding.
        tied_to = self.tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(scope / "lm_head", config.vocab_size, hidden, tied_to=tied_to, may_differ=True)
        self._logits_scale = config.logits_scale

    @staticmethod
    def _biases(config: T5Config, scope: Scope, num_layers: int, *, decoder: bool) -> list[DistanceBias]:
        """Of each layer of a stack."""
        biases = [
            DistanceBias(
                config,
                scope / "block" / str(i) / "layer" / "0" / "SelfAttention" / "relative_attention_bias",
                decoder=decoder,
            )
            for i in range(num_layers if config.has_bias_in_every_layer else 1)
        ]
        return biases if config.has_bias_in_every_layer else biases * num_layers

    def embed(self, input_ids: Tensor, positions: Tensor, lora: LoraTokens | None, *, decoder: bool) -> Tensor:
        """See `EncoderDecoderLM.embed`."""
        return self.tokens(input_ids, lora)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states, scaled where the head is the embedding."""
        return hidden * self._logits_scale
