"""What heads have in common that are a layer of the target's own checkpoint: embedding and LM head are the target's."""

from __future__ import annotations

from quire_interfaces import CheckpointError
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.draft_head import DraftHead
from quire_models.layers.network import Network

__all__ = ["FurtherTokenHead"]


class FurtherTokenHead(DraftHead):
    """See `DraftHead`."""

    _target: DecoderLM | None = None

    def join(self, target: Network) -> None:
        """See `DraftHead.join`."""
        if not isinstance(target, DecoderLM) or target.config.hidden_size != self.config.hidden_size:
            raise CheckpointError(f"{target.config.architecture} is not what this layer predicts further tokens for")
        self._target = target

    @property
    def target(self) -> DecoderLM:
        """What it was joined with."""
        assert self._target is not None, "join was not called"
        return self._target
