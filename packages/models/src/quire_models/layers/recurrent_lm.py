"""A decoder-only network with recurrent layers: what it promises is looked up from the ops that its layers chose."""

from __future__ import annotations

from quire_models.layers.decoder_lm import DecoderLM
from quire_models.recurrent_config import RecurrentConfig
from quire_ops import op_table

__all__ = ["RecurrentLM"]

ELEMENTWISE = frozenset({"embedding", "rotary_embedding"})
"""Ops that copy numbers or act on each alone, with operations that round one way: alike in every backend."""


class RecurrentLM(DecoderLM):
    """See `DecoderLM`."""

    config: RecurrentConfig

    @property
    def batch_invariant(self) -> bool:
        """Logits depend on nothing but the tokens before them: not on other requests, chunks, or what was cached.
        Promised where every op of the network promises it for itself."""
        if self._scope.quantization is not None:
            return False
        backends = [*self._scope.chosen, self._scope.choose(self._scope.linear_method.op)[0]]
        if self.config.num_heads:
            name = self.attention_backend.name
            backends += [each for each in op_table().backends("paged_attention") if each.name == name]
        return all(backend.batch_invariant or backend.op in ELEMENTWISE for backend in backends)
