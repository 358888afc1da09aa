"""What heads have in common that draft from a target's hidden states.

Shape legend: T positions, H hidden size, N positions whose logits are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.network import Network

__all__ = ["DraftHead"]


class DraftHead(Network):
    """At position i it sees what the target made of token i beside the embedding of token i + 1, and says token i + 2;
    its own state stands for the features of tokens that are only guessed."""

    wants_hidden: bool = True
    """Its features are the target's hidden states behind the final norm."""

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target with so many layers whose input it reads instead."""
        return ()

    def join(self, target: Network) -> None:
        """Take from the target what the checkpoint does not bring.

        Raises:
            CheckpointError: the two do not belong together.
        """
        raise NotImplementedError

    def fuse(self, features: Tensor) -> Tensor:
        """Features [T, width] -> the states [T, H] that `advance` reads."""
        return features

    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """One pass.

        Args:
            batch: `input_ids` [T] are the tokens behind the positions; keys and values of the positions are written.
            states: [T, H]: fused features, or for guessed positions what this gave for the position before.

        Returns:
            [T, H] states.
        """
        raise NotImplementedError

    def target_ids(self, ids: Tensor) -> Tensor:
        """Tokens of the head's vocabulary -> the target's."""
        return ids

    def top(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """States [N, H] -> log probabilities [N, K] float32 of the `count` most likely tokens, best first, and the
        tokens [N, K] of the target's vocabulary; fewer where the head proposes fewer."""
        scores = torch.log_softmax(self.compute_logits(hidden), dim=-1)
        found = scores.topk(min(count, scores.shape[-1]))
        return found.values, self.target_ids(found.indices)
