"""A Fast Conformer's layers, and the network of one with a decoder.

Shape legend: F frames of an input, M mel bins, E tokens of all inputs, T tokens of one input, C width of the stream,
H heads, D head dimension, P distances between two tokens of the longest input, in both directions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.build import build_feed_forward
from quire_models.config import ModelConfig
from quire_models.families.fast_conformer import ConformerDecoderSpec, FastConformerSpec
from quire_models.layers.activations import activation
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Parameter, Scope

__all__ = ["ConformerDecoder", "FastConformer"]

_BATCH_NORM_EPS = 1e-5


class ConformerDecoder(EncoderDecoderLM):
    """The network, whose encoder reads frames of mel bins in place of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, ConformerDecoderSpec)
        self._conformer = FastConformer(spec.conformer, scope)
        self._projection = None if spec.projection is None else Linear.of(scope, spec.projection)

    def encoder_input(self, inputs: EncoderBatch) -> Tensor:
        """Frames [F, M] of each input -> [E, C]. Raises ValueError as `FastConformer.subsample`."""
        return self._conformer.subsample(inputs.features, inputs.lens, self.dtype)

    def layer_by_layer(self, x: Tensor, lens: list[int]) -> Tensor:
        """All layers of the encoder, and the projection to the decoder's width."""
        x = self._conformer(x, lens)
        return x if self._projection is None else self._projection(x)


class FastConformer:
    """Frames -> hidden states of an encoder."""

    def __init__(self, spec: FastConformerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the whole network.
        """
        self._spec = spec
        outer = scope / spec.name
        inner = outer / "subsampling"
        self._layers = [_ConformerLayer(spec, outer / f"layers.{number}") for number in range(spec.num_layers)]
        self._convolutions: list[tuple[Tensor, Tensor]]
        self._linear: tuple[Tensor, Tensor]
        convolutions = [
            ((inner / f"layers.{number}").parameter("weight", *shape),
             (inner / f"layers.{number}").parameter("bias", shape[0]))
            for number, shape in spec.convolution_shapes
        ]  # fmt: skip
        linear = inner / "linear"
        weight = linear.parameter("weight", spec.hidden_size, spec.subsampled_size)
        bias = linear.parameter("bias", spec.hidden_size)

        def finish() -> None:
            self._convolutions = [(each.take(), of.take()) for each, of in convolutions]
            self._linear = (weight.take(), bias.take())

        scope.when_loaded(finish)

    def subsample(self, features: list[Tensor] | tuple[Tensor, ...], lens: list[int], dtype: torch.dtype) -> Tensor:
        """Frames [F, M] of each input -> [E, C].

        Args:
            lens: Tokens of each input.
            dtype: Compute dtype.

        Raises:
            ValueError: an input has no frames of this network, or other tokens than it has frames for.
        """
        spec = self._spec
        for each in features:
            if each.ndim != 2 or each.shape[1] != spec.num_mel_bins:
                raise ValueError(f"the encoder reads frames of {spec.num_mel_bins} mel bins, got {list(each.shape)}")
        parts = [self._subsample_one(each.to(dtype)) for each in features]
        if [len(part) for part in parts] != list(lens):
            raise ValueError(f"sounds of {[len(part) for part in parts]} tokens came as {list(lens)} tokens")
        x = F.linear(torch.cat(parts), *self._linear)
        return x * spec.hidden_size**0.5 if spec.scales_input else x

    def _subsample_one(self, frames: Tensor) -> Tensor:
        """[F, M] -> [T, channels * bins that are left]."""
        (weight, bias), *others = self._convolutions
        half, channels = self._spec.width // 2, self._spec.channels
        x = F.conv2d(frames[None, None], weight, bias, stride=2, padding=half).relu_()
        for (weight, bias), (pointwise, pointwise_bias) in zip(others[::2], others[1::2], strict=True):
            x = F.conv2d(x, weight, bias, stride=2, padding=half, groups=channels)
            x = F.conv2d(x, pointwise, pointwise_bias).relu_()
        return x[0].transpose(0, 1).flatten(1)

    def __call__(self, x: Tensor, lens: list[int]) -> Tensor:
        """[E, C] -> [E, C]."""
        distances = _encoded_distances(max(lens), x)
        for layer in self._layers:
            x = layer(x, lens, distances)
        return x


def _encoded_distances(longest: int, like: Tensor) -> Tensor:
    """Sines and cosines by turns of the distances longest - 1 to 1 - longest, [P, C] (Dai et al. 2019, sec. 3.3)."""
    size = like.shape[1]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32, device=like.device) / size)
    distances = torch.arange(longest - 1, -longest, -1, dtype=torch.float32, device=like.device)
    angles = distances[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(like.dtype)


class _ConformerLayer:
    """Half a feed-forward network, attention by distances, a convolution, and the other half, each added to the stream;
    then a norm (Gulati et al. 2020, "Conformer", sec. 2)."""

    def __init__(self, spec: FastConformerSpec, scope: Scope) -> None:
        self._norms = [make_norm(norm, scope) for norm in spec.norms()]
        self._first = build_feed_forward(spec.feed_forward("feed_forward1"), scope)
        self._attention = _DistanceAttention(spec, scope / "self_attn")
        self._convolution = _LayerConvolution(spec, scope / "conv")
        self._second = build_feed_forward(spec.feed_forward("feed_forward2"), scope)

    def __call__(self, x: Tensor, lens: list[int], distances: Tensor) -> Tensor:
        first_norm, attention_norm, convolution_norm, second_norm, last_norm = self._norms
        x = x + 0.5 * self._first(first_norm(x))
        x = x + self._attention(attention_norm(x), lens, distances)
        x = x + self._convolution(convolution_norm(x), lens)
        x = x + 0.5 * self._second(second_norm(x))
        return last_norm(x)


class _DistanceAttention:
    """Every token attends to all of its input, by contents and by distances: what a query looks for, and what all
    queries look for, in both (Dai et al. 2019, sec. 3.3)."""

    def __init__(self, spec: FastConformerSpec, scope: Scope) -> None:
        attention, shapes = spec.attention, spec.layer_shapes()
        self._projections = [Linear.of(scope, each) for each in attention.projections()]
        self._head_dim, self._scale = attention.head_dim, attention.scale
        names = ("relative_k_proj.weight", "bias_u", "bias_v")
        parameters = [scope.parameter(name, *shapes[f"self_attn.{name}"]) for name in names]
        self._weights: list[Tensor]
        scope.when_loaded(lambda: setattr(self, "_weights", [each.take() for each in parameters]))

    def __call__(self, x: Tensor, lens: list[int], distances: Tensor) -> Tensor:
        """x [E, C], distances [P, C] -> [E, C]."""
        of_distances, content_bias, distance_bias = self._weights
        query, key, value = (each(x).view(len(x), -1, self._head_dim) for each in self._projections[:3])
        places = F.linear(distances, of_distances).view(len(distances), -1, self._head_dim).permute(1, 2, 0)
        longest = (len(distances) + 1) // 2
        attended = []
        for q, k, v in zip(query.split(lens), key.split(lens), value.split(lens), strict=True):
            count = len(q)
            own = places[:, :, longest - count : longest + count - 1]
            scores = _by_token((q + distance_bias).transpose(0, 1) @ own) * self._scale
            looking, keys, values = (each.transpose(0, 1)[None] for each in (q + content_bias, k, v))
            found = F.scaled_dot_product_attention(looking, keys, values, attn_mask=scores[None], scale=self._scale)
            attended.append(found[0].transpose(0, 1).flatten(1))
        return self._projections[3](torch.cat(attended))


def _by_token(scores: Tensor) -> Tensor:
    """Scores of T queries by distance, T - 1 to 1 - T, [H, T, 2T - 1] -> by key, [H, T, T], a view: key j of query i is
    i - j away."""
    heads, count, num_distances = scores.shape
    strides = (count * num_distances, num_distances - 1, 1)
    return scores.contiguous().as_strided((heads, count, count), strides, count - 1)


class _LayerConvolution:
    """[E, C] -> [E, C]: gated linear units, a convolution of each channel over the frames of its input, batch norm,
    activation, and a linear layer. The norm's statistics are those of the training: it is part of the convolution."""

    def __init__(self, spec: FastConformerSpec, scope: Scope) -> None:
        self._act = activation(scope, spec.act)
        self._half, self._dtype = spec.layer_width // 2, scope.dtype
        self._parameters: dict[str, Parameter] = {}
        for full, shape in spec.layer_shapes().items():
            if full.startswith("conv."):
                name = full.removeprefix("conv.")
                dtype = None if name.startswith("pointwise") else torch.float32  # of what is put together
                self._parameters[name] = scope.parameter(name, *shape, dtype=dtype)
        self._first: tuple[Tensor, Tensor | None]
        self._depthwise: tuple[Tensor, Tensor]
        self._last: tuple[Tensor, Tensor | None]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        taken = {name: parameter.take() for name, parameter in self._parameters.items()}
        self._parameters.clear()
        scale = taken["norm.weight"] / torch.sqrt(taken["norm.running_var"] + _BATCH_NORM_EPS)
        bias = taken.get("depthwise_conv.bias", torch.zeros_like(scale))
        shift = taken["norm.bias"] + (bias - taken["norm.running_mean"]) * scale
        weight = taken["depthwise_conv.weight"] * scale[:, None, None]
        self._depthwise = (weight.to(self._dtype), shift.to(self._dtype))
        self._first = (taken["pointwise_conv1.weight"][..., 0], taken.get("pointwise_conv1.bias"))
        self._last = (taken["pointwise_conv2.weight"][..., 0], taken.get("pointwise_conv2.bias"))

    def __call__(self, x: Tensor, lens: list[int]) -> Tensor:
        weight, bias = self._depthwise
        gated = F.glu(F.linear(x, *self._first), dim=-1)
        parts = [
            F.conv1d(each.t()[None], weight, bias, padding=self._half, groups=len(weight))[0].t()
            for each in gated.split(lens)
        ]
        return F.linear(self._act(torch.cat(parts)), *self._last)
