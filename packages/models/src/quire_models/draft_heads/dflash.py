"""DFlash (Chen et al. 2026, arXiv:2602.06036): a small decoder that fills a block of further tokens in one pass.

The block is the last known token and mask tokens behind it, all of which see one another; each mask token's state says
the token of its own position. The target's features of the tokens before, fused and normalised, are not part of the
sequence: each layer makes keys and values of them (section 3), which stay in its cache.

Shape legend: T positions, H hidden size, F feature layers.
"""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.eagle_config import EagleConfig, EagleSpec
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope

__all__ = ["DFlashHead"]


class DFlashHead(EagleHead):
    """The drafter. Embedding and LM head come from its checkpoint, or else from the target (`join`)."""

    def __init__(self, config: EagleConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, EagleSpec)
        assert spec.hidden_norm is not None
        self.hidden_norm = make_norm(spec.hidden_norm, scope)

    def fuse(self, features: Tensor) -> Tensor:
        """Features [T, F * H of the target] -> what each layer makes keys and values of, [T, H]."""
        return self.hidden_norm(self._project(features))

    def store(self, batch: ForwardBatch, fused: Tensor) -> None:
        """Write the keys and values of positions whose features are known.

        Args:
            batch: The positions.
            fused: [T, H] what `fuse` gave for them.
        """
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        for layer in self.layers:
            assert isinstance(layer, SequentialBlock)
            assert isinstance(layer.mixer, SelfAttention)
            layer.mixer.store(fused, cos, sin, batch)

    def fill(self, batch: ForwardBatch) -> Tensor:
        """States [T, H] of blocks, `input_ids` [T] of which are the last known tokens and mask tokens."""
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        return self._through_layers(self.embed(batch.input_ids), cos, sin, batch)
