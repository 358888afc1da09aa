"""`SoundPooler`: what is said in sounds, in the place of vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_interfaces import RequestError
from quire_interfaces.pooling import PoolingParams
from quire_runner.protocols import HearsSounds

__all__ = ["SoundPooler"]


class SoundPooler:
    """Tokens of sounds. Implements `PoolsTexts`.

    Args:
        network: Knows which tokens its hidden states are.
    """

    def __init__(self, network: HearsSounds) -> None:
        self._network = network

    def pool(
        self, hidden: Tensor, lens: Sequence[int], params: Sequence[PoolingParams], token_ids: Tensor
    ) -> list[Tensor]:
        """[tokens, 4] of each sound, as `HearsSounds.hear` gives them.

        Args:
            hidden: Hidden states [E, hidden_size] of the frames of all sounds.
            lens: Number of frames of each.
            params: Nothing is chosen.
            token_ids: [E], which stand for frames.
        """
        return self._network.hear(hidden, lens)

    def finish_vectors(self, vectors: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """Raises RequestError: there are no towers."""
        raise RequestError("this model hears sounds and sees no images", param="prompt", code="unsupported_media")
