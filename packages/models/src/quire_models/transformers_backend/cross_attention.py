"""Cross attention of a decoder of Transformers to media (Grattafiori et al. 2024, "The Llama 3 Herd of Models", 7.2).

What towers give for an item are the keys and values of these layers already. Tokens before the first item attend to
nothing, and such layers leave them as they are, as in the original; Transformers' class lets them attend to all items.

Shape legend: T tokens of the step, N embeddings, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire_attention import CrossMedia, ForwardBatch

__all__ = ["MediaCrossAttention"]


class MediaCrossAttention:
    """What the layers with cross attention find the step's media with; called as their attention."""

    def __init__(self, decoder: Any, layers: tuple[int, ...]) -> None:
        """Args:
        decoder: Runs the layers.
        layers: Those with cross attention, in the order of their keys and values in an embedding.
        """
        self._hidden_size = decoder.config.hidden_size
        self._media: tuple[CrossMedia, ...] = ()
        for number, layer in enumerate(layers):
            module = decoder.layers[layer].cross_attn
            module.quire_attention, module.quire_layer = self, number

    def arguments(self, batch: ForwardBatch, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the decoder for a step; without media, it leaves these layers out."""
        self._media = batch.cross_media
        if not self._media:
            return {}
        device = batch.input_ids.device
        attends = torch.zeros(1, 1, len(batch.input_ids), 1, dtype=dtype, device=device)
        for part in self._media:
            attends[0, 0, part.begin : part.end] = 1
        states = torch.zeros(1, 1, self._hidden_size, dtype=dtype, device=device)  # their keys and values are not used
        return {"cross_attention_states": states, "full_text_row_masked_out_mask": attends}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **options: object
    ) -> Tensor:
        """Args:
            layer: Number of the layer among those with cross attention.
            query: [1, Hq, T, D].
            key: [1, Hkv, 1, D], of no meaning, like `value`.

        Returns:
            [1, T, Hq, D].
        """
        num_heads, head_dim = key.shape[1], key.shape[-1]
        size = 2 * num_heads * head_dim
        out = torch.zeros_like(query.transpose(1, 2))
        for part in self._media:
            rows = [embeds[:, layer * size : (layer + 1) * size] for embeds in part.embeds]
            pairs = (rows[0] if len(rows) == 1 else torch.cat(rows)).unflatten(1, (2, num_heads, head_dim))
            keys, values = pairs.permute(1, 2, 0, 3)[:, None].to(query.dtype)
            of_part = query[:, :, part.begin : part.end]
            attended = F.scaled_dot_product_attention(of_part, keys, values, scale=scale, enable_gqa=True)
            out[:, part.begin : part.end] = attended.transpose(1, 2)
        return out
