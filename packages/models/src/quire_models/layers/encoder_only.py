"""A network that reads and does not write: hidden states of whole texts, many of them in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces import RequestError
from quire_models.layers.network import Network

__all__ = ["EncoderOnly"]


class EncoderOnly(Network):
    """Families say what becomes of a batch (`encode_batch`). There are no logits, and there is no KV cache."""

    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """[E] tokens of all inputs -> their hidden states behind the last layer, [E, hidden_size]."""
        raise NotImplementedError

    @torch.inference_mode()
    def read(self, inputs: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states of some inputs, read side by side without padding.

        Args:
            inputs: Token ids of each, as its tokenizer gives them.

        Returns:
            Of each input, its hidden states behind the last layer [tokens, hidden_size].

        Raises:
            RequestError: an input is empty or too long, or a token id is not in the vocabulary.
        """
        longest, vocab_size = self.config.max_encoder_len, self.config.vocab_size
        for number, token_ids in enumerate(inputs):
            if not 0 < len(token_ids) <= longest:
                raise RequestError(f"input {number} has {len(token_ids)} tokens; give 1 to {longest}", param="inputs")
            if min(token_ids) < 0 or max(token_ids) >= vocab_size:
                raise RequestError(
                    f"input {number} has a token id outside of the vocabulary, 0 to {vocab_size - 1}", param="inputs"
                )
        if not inputs:
            return []
        lens = [len(token_ids) for token_ids in inputs]
        batch = EncoderBatch(
            input_ids=torch.tensor([token for token_ids in inputs for token in token_ids], device=self.device),
            positions=torch.cat([torch.arange(length) for length in lens]).to(self.device),
            lens=lens,
        )
        return list(self.encode_batch(batch).split(lens))
