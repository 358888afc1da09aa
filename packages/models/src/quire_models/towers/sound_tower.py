"""An encoder of sounds with its connector, made of a `SoundTowerSpec`.

Shape legend: N windows, M mel bins, F frames of a window, S tokens of a window, E tokens of all windows that are sound,
C width of the tower, W width of an embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_interfaces import Modality
from quire_models.layers.activations import activation
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.towers.connector import Connector
from quire_models.towers.layers import build_layers
from quire_models.towers.patches import piece_tokens
from quire_models.towers.tower_spec import ConvolutionSpec, SoundTowerSpec

__all__ = ["SoundTower"]


class SoundTower:
    """Spectrograms of some items -> their embeddings, [embeddings of the item, W] each."""

    def __init__(self, spec: SoundTowerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the whole network: a description has full names.
        """
        self._spec = spec
        self._convolutions = [Convolution(each, scope) for each in spec.convolutions]
        self._act = activation(scope, spec.act)
        table = scope.parameter(spec.positions, spec.num_positions, spec.convolutions[-1].out_channels)
        self._positions: Tensor
        scope.when_loaded(lambda: setattr(self, "_positions", table.take()))
        self._layers = build_layers(spec, scope)
        self._final_norm = make_norm(spec.final_norm, scope)
        self._connector = Connector(spec.connector, scope)
        self._piece_tokens = piece_tokens(scope.device)

    def encode(self, modality: Modality, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Args:
        items: Arrays of each item, under the names of the processor's outputs; spectrograms in the compute dtype.

        Raises:
            ValueError: A window has another number of frames than the tower's.
        """
        name, *mask_names = self._spec.inputs[modality]
        embeds = []
        for item in items:
            windows = item[name].reshape(-1, *item[name].shape[-2:])
            masks = [item[each].reshape(len(windows), -1) for each in mask_names if each in item]
            lens = self._token_lens(windows, masks[0] if masks else None)
            step = max(1, self._piece_tokens // self._spec.num_positions)
            pieces = range(0, len(windows), step)
            parts = [self._encode_windows(windows[each : each + step], lens[each : each + step]) for each in pieces]
            embeds.append(torch.cat(parts))
        return embeds

    def _token_lens(self, windows: Tensor, mask: Tensor | None) -> list[int]:
        """Tokens of each window that are sound."""
        num_frames, stride = windows.shape[-1], self._spec.convolutions[-1].stride
        if num_frames != stride * self._spec.num_positions:
            raise ValueError(
                f"a sound has {num_frames} frames, and the tower takes {stride * self._spec.num_positions}"
            )
        if mask is None:
            return [self._spec.num_positions] * len(windows)
        return [(int(count) - 1) // stride + 1 for count in mask.sum(-1).tolist()]

    def _encode_windows(self, windows: Tensor, lens: list[int]) -> Tensor:
        """[N, M, F] -> [embeddings of all windows, W]."""
        x = windows
        for convolution in self._convolutions:
            x = self._act(convolution(x))
        x = x.transpose(1, 2) + self._positions  # [N, S, C]
        x = torch.cat([window[:length] for window, length in zip(x, lens, strict=True)])  # [E, C]
        for layer in self._layers:
            x = layer(x, lens)
        if self._spec.pools_pairs:
            parts = [part[: len(part) // 2 * 2] for part in x.split(lens)]
            x = torch.cat(parts).unflatten(0, (-1, 2)).mean(1)
        return self._connector(self._final_norm(x))


class Convolution:
    """x [N, channels, frames] -> [N, output channels, frames / stride]."""

    def __init__(self, spec: ConvolutionSpec, scope: Scope) -> None:
        inner = scope / spec.name
        self._parameters = (
            inner.parameter("weight", spec.out_channels, spec.in_channels, 3),
            inner.parameter("bias", spec.out_channels),
        )
        self._stride = spec.stride
        self._weight: Tensor
        self._bias: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weight, self._bias = (parameter.take() for parameter in self._parameters)

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self._weight, self._bias, stride=self._stride, padding=1)
