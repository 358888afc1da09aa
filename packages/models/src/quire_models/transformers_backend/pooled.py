"""Decoders of Transformers whose class has a head of classes in place of its LM head: their hidden states, which a
pooler reads, and the tensors of the head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models.transformers_backend.model import TransformersLM
from quire_ops import LoraTokens

__all__ = ["TransformersBody"]


class TransformersBody(TransformersLM):
    """A network of Transformers without an LM head."""

    _is_tried = False
    """The network has run once, as it does when it is loaded."""

    @property
    def head_weights(self) -> Mapping[str, Tensor]:
        """See `Network.head_weights`.

        Raises:
            CheckpointError: Transformers' class has other tensors in its head than Quire knows.
        """
        pooler = self.config.network.pooler
        assert pooler is not None
        tensors = self._model.state_dict()
        if missing := [name for name in pooler.shapes() if name not in tensors]:
            raise CheckpointError(f"Transformers' {self.config.architecture} has no {', '.join(missing)} in its head")
        return {name: tensors[name].float() for name in pooler.shapes()}

    def _try(self) -> None:
        super()._try()
        self._is_tried = True

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """There are none: hidden states are pooled.

        Raises:
            ConfigError: Whenever it is called after loading.
        """
        if self._is_tried:
            raise ConfigError(
                f"{self.config.architecture} has no LM head: it reads texts and writes none", field="model"
            )
        return hidden
