"""The logits processor `no_repeats`: no token twice in a prompt and its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["NoRepeats"]


class NoRepeats:
    """Implements `quire_interfaces.LogitsProcessor`; remembers nothing between calls."""

    def __call__(self, token_ids: Sequence[int], num_prompt_tokens: int, logits: torch.Tensor) -> torch.Tensor:
        """logits [vocab_size] float32 -> the same, with nothing for tokens that there were."""
        logits[list(token_ids)] = float("-inf")
        return logits
