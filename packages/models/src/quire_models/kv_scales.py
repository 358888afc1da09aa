"""Scales of fp8 KV caches, as checkpoints bring them.

Knows their names and forms; does not know caches. A checkpoint has one scale for all keys of a layer and one for all
values, or one per key-value head. Names in use, behind that of the attention: `k_scale` and `v_scale`
(compressed-tensors), `attn.k_scale` (vLLM), `k_proj.k_scale` (ModelOpt), `k_proj.output_scale` (Quark, older
compressed-tensors), and `kv_scale` for both (FP8 checkpoints of 2024).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from quire_interfaces import CheckpointError

__all__ = ["KVScales"]

_ROWS = {
    "k_scale": [0],
    "v_scale": [1],
    "kv_scale": [0, 1],
    "attn.k_scale": [0],
    "attn.v_scale": [1],
    "attn.kv_scale": [0, 1],
    "k_proj.k_scale": [0],
    "v_proj.v_scale": [1],
    "k_proj.output_scale": [0],
    "v_proj.output_scale": [1],
    "qkv_proj.k_scale": [0],
    "qkv_proj.v_scale": [1],
}
"""Name of a scale -> whose it is: 0 for keys, 1 for values."""

_UNUSED = {f"{part}{name}" for part in ("", "attn.") for name in ("q_scale", "prob_scale", "prob_output_scale")}
_UNUSED |= {"q_proj.q_scale", "q_proj.output_scale"}
"""Scales of an attention that is computed in fp8, which no backend does."""


class KVScales:
    """Takes the scales out of a checkpoint's tensors.

    Args:
        attentions: Name of each attention, with the dot behind it: "model.layers.0.self_attn.".
        num_kv_heads: Key-value heads of each.
    """

    def __init__(self, attentions: Collection[str], num_kv_heads: int) -> None:
        self._attentions = attentions
        self._num_kv_heads = num_kv_heads
        self.found: dict[str, Tensor] = {}
        """Name of an attention -> [2, num_kv_heads] float32, keys first; 1 where the checkpoint has only the other."""

    def take(self, name: str, tensor: Tensor) -> bool:
        """Keep the tensor if it is a scale; False when it is none.

        Raises:
            CheckpointError: a scale of a wrong shape, or one that is not a positive number.
        """
        parts = name.split(".")
        for depth in (1, 2):  # parts of the scale's own name
            attention, kind = ".".join([*parts[:-depth], ""]), ".".join(parts[-depth:])
            if attention in self._attentions and kind in _UNUSED:
                return True
            if attention in self._attentions and kind in _ROWS:
                scales = self.found.setdefault(attention, torch.ones(2, self._num_kv_heads))
                scales[_ROWS[kind]] = self._checked(name, tensor)
                return True
        return False

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.numel() not in (1, self._num_kv_heads):
            raise CheckpointError(
                f"{name} is {list(tensor.shape)}: a scale of the KV cache is one number, or one for each of the "
                f"{self._num_kv_heads} key-value heads; use a checkpoint made for this model"
            )
        scale = tensor.float().flatten()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise CheckpointError(
                f"{name} is {scale.tolist()}: scales of the KV cache are positive numbers; quantize the checkpoint "
                "anew, or remove its scales"
            )
        return scale
