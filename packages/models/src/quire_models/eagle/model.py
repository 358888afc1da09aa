"""EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a small decoder that goes on
from a target's hidden states.

At position i it sees the target's features of token i beside the embedding of token i + 1, and says token i + 2; its
own state stands for the features of the tokens it has only guessed. EAGLE-3 fuses features of several depths, keeps
the embedding apart from them within its layer, and may propose a part of the vocabulary only.

Shape legend: T positions, H hidden size, F feature layers, N positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_interfaces import CheckpointError
from quire_models.eagle.config import EagleConfig, default_feature_layers
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.draft_head import DraftHead
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.network import Network
from quire_models.layers.norm import RMSNorm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_ops import LoraTokens, ops

__all__ = ["EagleHead"]


def _first_layer(config: EagleConfig, scope: Scope) -> SequentialBlock:
    """The first layer of EAGLE: no norm before its attention, whose input is normalised features and embeddings."""
    size, bias = config.hidden_size, config.mlp_bias
    return SequentialBlock(
        mixer=SelfAttention(config, 0, scope / "self_attn"),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", size, config.rms_norm_eps),
        feed_forward=GatedMLP(scope / "mlp", size, config.intermediate_size, act=config.hidden_act, bias=bias),
    )


class _Eagle3Layer:
    """EAGLE-3's layer: attention over embedding and state side by side; the state alone is the residual."""

    def __init__(self, config: EagleConfig, scope: Scope) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(scope / "input_layernorm", size, eps)
        self.hidden_norm = RMSNorm(scope / "hidden_norm", size, eps)
        self.self_attn = SelfAttention(config, 0, scope / "self_attn", in_features=2 * size)
        self.post_attention_layernorm = RMSNorm(scope / "post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(scope / "mlp", size, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias)

    def __call__(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)
        state = state + self.self_attn(x, cos, sin, batch)
        return state + self.mlp(self.post_attention_layernorm(state))


class EagleHead(DraftHead):
    """A head of either kind. Embedding and LM head come from its checkpoint, or else from the target (`join`)."""

    ignored_tensors = frozenset({"t2d"})  # follows from d2t

    def __init__(self, config: EagleConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        size = config.hidden_size
        self._is_eagle3 = config.kind == "eagle3"
        self._feature_layers = config.feature_layers
        self.wants_hidden = not self._is_eagle3
        fused = self.num_features * config.target_hidden_size
        has_bias = scope.parameter("fc.bias", size, optional=True)
        self.fc = Linear(scope / "fc", fused + (0 if self._is_eagle3 else size), size)
        self._fc_bias_parameter = has_bias
        self._fc_bias: Tensor | None = None
        self._embedding_parameter = scope.parameter(
            "embed_tokens.weight", config.vocab_size, config.target_hidden_size, optional=True
        )
        self._head_parameter = scope.parameter("lm_head.weight", config.draft_vocab_size, size, optional=True)
        self._to_target_parameter = scope.parameter("d2t", config.draft_vocab_size, dtype=torch.int64, optional=True)
        self._to_target: Tensor | None = None
        self._head: Tensor | DecoderLM | None = None
        self._lm_head_op = scope.op(ops.lm_head)
        self._argmax = scope.op(ops.lm_head_argmax)
        self._embed = scope.op(ops.embedding)
        self._embedding: Tensor | None = None
        if self._is_eagle3:
            self.midlayer = _Eagle3Layer(config, scope / "midlayer")
            self.norm = RMSNorm(scope / "norm", size, config.rms_norm_eps)
        else:
            body = scope / "layers"
            self.layers = [_first_layer(config, body / "0")]
            for i in range(1, config.num_layers):
                attention = SelfAttention(config, i, body / str(i) / "self_attn")
                self.layers.append(pre_norm_block(config, body / str(i), attention))
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype=scope.dtype, device=scope.device)

    @property
    def num_features(self) -> int:
        """Features of a position, each as wide as the target's hidden states."""
        if not self._is_eagle3:
            return 1
        return 3 if self._feature_layers is None else len(self._feature_layers)

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """See `DraftHead.feature_layers`."""
        return (self._feature_layers or default_feature_layers(num_layers)) if self._is_eagle3 else ()

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Names with and without "model.", and of EAGLE-3's layer under either name."""
        name = name.removeprefix("model.")
        if self._is_eagle3 and name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        return ((name, tensor),)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """See `Network.finish_loading`."""
        super().finish_loading(after_each)
        taken = (self._fc_bias_parameter, self._embedding_parameter, self._head_parameter, self._to_target_parameter)
        self._fc_bias, self._embedding, self._head, offsets = (
            None if parameter.tensor is None else parameter.take() for parameter in taken
        )
        config = self.config
        assert isinstance(config, EagleConfig)
        if offsets is not None:
            self._to_target = torch.arange(len(offsets), device=offsets.device) + offsets
            if bool((self._to_target < 0).any() | (self._to_target >= config.vocab_size).any()):
                raise CheckpointError(f"d2t of the EAGLE head names tokens outside of 0 to {config.vocab_size - 1}")
        elif config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"the EAGLE head proposes {config.draft_vocab_size} of {config.vocab_size} tokens, but its checkpoint "
                "has no d2t that says which"
            )

    def join(self, target: Network) -> None:
        """Take from the target what the checkpoint did not bring.

        Raises:
            CheckpointError: the two do not belong together.
        """
        config = self.config
        assert isinstance(config, EagleConfig)
        theirs = target.config
        if not isinstance(target, DecoderLM):
            raise CheckpointError(f"EAGLE heads do not work with {theirs.architecture}: it does not show hidden states")
        if (config.target_hidden_size, config.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise CheckpointError(
                f"the EAGLE head is for a target of hidden size {config.target_hidden_size} and {config.vocab_size} "
                f"tokens, the model has {theirs.hidden_size} and {theirs.vocab_size}"
            )
        if self._embedding is None:
            self._embedding = target.embedding.weight
        if self._head is None:
            if config.hidden_size != theirs.hidden_size or config.draft_vocab_size != theirs.vocab_size:
                raise CheckpointError("the EAGLE head has no lm_head.weight, and the model's does not fit it")
            self._head = target

    def fuse(self, features: Tensor) -> Tensor:
        """Features [T, F * H of the target] -> the states that the layer reads."""
        if not self._is_eagle3:
            return features
        return self._project(features)

    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """One pass.

        Args:
            batch: `input_ids` [T] are the tokens behind the positions; keys and values of the positions are written.
            states: [T, H]: fused features, or for guessed positions what this gave for the position before.

        Returns:
            [T, H] states.
        """
        assert self._embedding is not None, "join was not called"
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        embedded = self._embed(batch.input_ids, self._embedding)
        if self._is_eagle3:
            return self.midlayer(embedded, states, cos, sin, batch)
        x, residual = self._project(torch.cat((embedded, states), dim=-1)), None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, batch)
        return x if residual is None else x + residual

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """States [N, H] -> logits [N, draft_vocab_size] float32; `target_ids` says whose."""
        hidden = self.norm(hidden) if self._is_eagle3 else hidden
        if isinstance(self._head, DecoderLM):
            return self._head.compute_logits(hidden, lora)
        assert self._head is not None
        return self._lm_head_op(hidden, self._head)

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """States [N, H] -> the most likely token of the target's vocabulary [N] int64, and its logit."""
        hidden = self.norm(hidden) if self._is_eagle3 else hidden
        head = self._head
        assert head is not None
        ids, max_logits = head.argmax(hidden, lora) if isinstance(head, DecoderLM) else self._argmax(hidden, head)
        return self.target_ids(ids), max_logits

    def target_ids(self, ids: Tensor) -> Tensor:
        """Tokens of the head's vocabulary -> the target's."""
        return ids if self._to_target is None else self._to_target[ids]

    def _project(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        return out if self._fc_bias is None else out + self._fc_bias
