"""What a network asks of its towers, whoever builds them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Towers"]


class Towers(Protocol):
    """Turns images, videos and sounds into embeddings for a language model."""

    @property
    def num_parameters(self) -> int:
        """Weights of all of them, connectors included."""

    def encode(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings of each item, [num_embeds, width], in the compute dtype.

        Args:
            modality: A value of `quire_interfaces.Modality`.
            items: Arrays of each item under the names of its processor's outputs.

        Raises:
            ConfigError: There is no tower for this modality.
        """
