"""Features of towers that join the residual stream in front of later layers (Bai et al. 2025, "Qwen3-VL", DeepStack).

Shape legend: T tokens of the step, M of them stand for media, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quire_attention import MediaEmbeds

__all__ = ["DeepstackFeatures"]


@dataclass(slots=True)
class DeepstackFeatures:
    """The further features of a step's media, by the layer in front of which they are added."""

    token_index: Tensor | None = None
    """[M] int64: places of the tokens of media among the step's; None in a step without further features."""
    of_layer: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [M, H]; the number of layers stands for what follows the last one."""

    @classmethod
    def of(cls, media: MediaEmbeds | None, layers: tuple[int, ...], hidden_size: int) -> DeepstackFeatures:
        """The features that stand behind the first `hidden_size` numbers of each embedding.

        Args:
            media: Of the step.
            layers: The layers in front of which they are added, in the order of the embedding.
            hidden_size: Width of the residual stream.
        """
        if media is None or not layers:
            return cls()
        features = media.embeds.split(hidden_size, dim=-1)[1:]
        return cls(media.token_index, dict(zip(layers, features, strict=True)))

    def add(self, x: Tensor, layer: int) -> Tensor:
        """The residual stream [T, H] in front of a layer, with its features."""
        features = self.of_layer.get(layer)
        if features is None or self.token_index is None:
            return x
        return x.index_add(0, self.token_index, features.to(x.dtype))
