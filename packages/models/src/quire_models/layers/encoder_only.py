"""A network that reads and does not write: hidden states of whole texts, many of them in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces import RequestError
from quire_models.build import within
from quire_models.config import ModelConfig
from quire_models.encoder_spec import DistanceBiasSpec, EncoderAttentionSpec, EncoderSpec
from quire_models.layers.decoder_lm import rotary_tables
from quire_models.layers.distance_bias import DistanceBias
from quire_models.layers.encoder import EncoderLayer
from quire_models.layers.fused_encoder import bind_encoder
from quire_models.layers.network import Network
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.layers.token_embedding import TokenEmbedding
from quire_models.spec import LayerSpec
from quire_ops import RunEncoder

__all__ = ["EncoderOnly"]

_UNSEEN = -1e9
"""Score that leaves nothing of a key's weight, and is finite where all keys of a block have it."""


class EncoderOnly(Network):
    """The encoder that `config.network` describes. There are no logits, and there is no KV cache."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, EncoderSpec)
        body = within(scope, spec.body)
        self.embedding = TokenEmbedding(spec.embedding, body)
        by_name = {layer.name: EncoderLayer(layer, scope / layer.name) for layer in _of_each_name(spec.layers)}
        self.layers = [by_name[layer.name] for layer in spec.layers]
        self._biases = _distance_biases(spec.distance_bias, scope)
        self._causal = _causal_bias(spec, scope.device) if spec.is_causal else None
        self.norm = None if spec.final_norm is None else make_norm(spec.final_norm, body)
        self._tables, self._rotations = rotary_tables(spec.layers, scope)
        self.run_layers: RunEncoder = self.layer_by_layer
        """Embeddings -> what is behind the last layer and its norm."""
        scope.when_loaded(self._bind)

    def _bind(self) -> None:
        biases = [self._position_bias(index) for index in range(len(self.layers))]
        size = self.config.hidden_size
        run = bind_encoder(self._scope, size, self.layers, self._rotations, biases, self.norm)
        self.run_layers = run or self.layer_by_layer

    @property
    def in_one_call(self) -> bool:
        """Whether a backend runs all layers in one call (op `encoder_stack`), not op by op."""
        return self.run_layers != self.layer_by_layer

    def layer_by_layer(
        self,
        x: Tensor,
        lens: Sequence[int],
        rotations: Sequence[tuple[Tensor, Tensor]],
        key_lens: list[int] | None = None,
    ) -> Tensor:
        """All layers and the norm behind them, op by op: `RunEncoder`; with `EncoderBatch.key_lens`."""
        for index, (layer, rotation) in enumerate(zip(self.layers, self._rotations, strict=True)):
            turn = None if rotation is None else rotations[rotation]
            x = layer(x, list(lens), turn, self._position_bias(index), key_lens)
        return x if self.norm is None else self.norm(x)

    def _position_bias(self, index: int) -> Tensor | None:
        """[H, distances] of a layer, as op `encoder_attention` takes them; None for none."""
        if self._causal is not None:
            return self._causal
        return self._biases[min(index, len(self._biases) - 1)].by_distance if self._biases else None

    def _token_table(self) -> Tensor:
        return self.embedding.table.part(None)

    @torch.inference_mode()
    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """[E] tokens of all inputs -> their hidden states behind the last layer, [E, hidden_size]."""
        rotations = [table(batch.positions, max(batch.lens)) for table in self._tables]
        self.use_adapters(batch.lora)
        x = self.embedding(batch.input_ids, batch.positions, batch.lora, token_type_ids=batch.token_type_ids)
        if batch.key_lens is not None:  # op `encoder_stack` does not have it
            return self.layer_by_layer(x, batch.lens, rotations, batch.key_lens)
        return self.run_layers(x, batch.lens, rotations)

    @torch.inference_mode()
    def read(
        self, inputs: Sequence[Sequence[int]], token_type_ids: Sequence[Sequence[int]] | None = None
    ) -> list[Tensor]:
        """Hidden states of some inputs, read side by side without padding.

        Args:
            inputs: Token ids of each, as its tokenizer gives them.
            token_type_ids: Of each input, the type of each token: 0, or 1 in the second text of a pair; None for 0.

        Returns:
            Of each input, its hidden states behind the last layer [tokens, hidden_size].

        Raises:
            RequestError: an input is empty or too long, a token id is not in the vocabulary, or token types are of
                other lengths than their inputs.
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
        if token_type_ids is not None and [len(types) for types in token_type_ids] != lens:
            raise RequestError("token_type_ids must have one type for each token", param="token_type_ids")
        batch = EncoderBatch(
            input_ids=torch.tensor([token for token_ids in inputs for token in token_ids], device=self.device),
            positions=torch.cat([torch.arange(length) for length in lens]).to(self.device),
            lens=lens,
            token_type_ids=None
            if token_type_ids is None
            else torch.tensor([kind for types in token_type_ids for kind in types], device=self.device),
        )
        return list(self.encode_batch(batch).split(lens))


def _causal_bias(spec: EncoderSpec, device: torch.device) -> Tensor:
    """[H, 3]: what is added to scores of keys before a query, of its own and of those behind it, which it does not
    see."""
    attention = spec.layers[0].mixers[0]
    assert isinstance(attention, EncoderAttentionSpec)
    return torch.tensor([0.0, 0.0, _UNSEEN], device=device).repeat(attention.num_heads, 1)


def _of_each_name(layers: Iterable[LayerSpec]) -> Iterable[LayerSpec]:
    """The layers, one that runs several times once."""
    return {layer.name: layer for layer in layers}.values()


def _distance_biases(spec: DistanceBiasSpec | None, scope: Scope) -> list[DistanceBias]:
    """The biases of each layer's scores, or of all layers' as the only one; none where scores have none."""
    if spec is None:
        return []
    return [DistanceBias(scope / name, spec.num_buckets, spec.num_heads, spec.max_distance) for name in spec.names]
