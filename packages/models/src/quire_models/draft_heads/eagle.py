"""EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a small decoder that goes on
from a target's hidden states.

At position i it sees the target's features of token i beside the embedding of token i + 1, and says token i + 2; its
own state stands for the features of the tokens it has only guessed. EAGLE-3 fuses features of several depths, keeps
the embedding apart from them within its first layer, and may propose a part of the vocabulary only. P-EAGLE is an
EAGLE-3 head, mostly of several layers, that says several tokens in one pass: in the place of a guessed token and its
features stand a token and features for the purpose (`mask_token_id`, `mask_hidden`).

Shape legend: T positions, H hidden size, F feature layers, N positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_interfaces import CheckpointError
from quire_models.build import build_feed_forward, build_layer, build_mixer
from quire_models.draft_heads.eagle_config import EagleConfig, EagleSpec, default_feature_layers
from quire_models.draft_heads.head import DraftHead
from quire_models.layers.decoder_lm import DecoderLM, rotary_tables
from quire_models.layers.linear import Embedding, Linear
from quire_models.layers.network import Network
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_ops import LoraTokens, ops

__all__ = ["EagleHead"]

_NAMES_OF_SPECULATORS = (("fusion_fc.", "fc."), ("transformer.", "layers.0."))
"""Of an EAGLE head in the format of the library `speculators` -> ours."""


class _Eagle3Layer:
    """EAGLE-3's layer: attention over embedding and state side by side; the state alone is the residual."""

    def __init__(self, spec: EagleSpec, scope: Scope) -> None:
        layer = spec.layers[0]
        assert layer.input_norm is not None
        assert layer.feed_forward is not None
        assert layer.feed_forward_norm is not None
        assert spec.hidden_norm is not None
        self.input_layernorm = make_norm(layer.input_norm, scope)
        self.hidden_norm = make_norm(spec.hidden_norm, scope)
        self.self_attn = build_mixer(layer.mixers[0], 0, scope)
        self.post_attention_layernorm = make_norm(layer.feed_forward_norm, scope)
        self.mlp = build_feed_forward(layer.feed_forward, scope)
        self._norm_before_residual = spec.norm_before_residual

    def __call__(self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.hidden_norm(state)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        state = normed if self._norm_before_residual else state
        state = state + self.self_attn(x, cos, sin, batch)
        return state + self.mlp(self.post_attention_layernorm(state))


class EagleHead(DraftHead):
    """A head of either kind. Embedding and LM head come from its checkpoint, or else from the target (`join`)."""

    ignored_tensors = frozenset({"t2d"})  # follows from d2t

    def __init__(self, config: EagleConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec, size = config.network, config.hidden_size
        assert isinstance(spec, EagleSpec)
        self._is_eagle3 = config.kind == "eagle3"
        self.wants_hidden = config.kind == "eagle"
        has_bias = scope.parameter("fc.bias", size, optional=True)
        assert spec.embedding.project_in is not None
        self.fc = Linear.of(scope, spec.embedding.project_in)
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
        self._embedding: Tensor | Embedding | None = None
        """The head's own table, or the target's where it has none."""
        self.norm = None if spec.final_norm is None else make_norm(spec.final_norm, scope)
        if self._is_eagle3:
            self.midlayer = _Eagle3Layer(spec, scope / "midlayer")
        first = int(self._is_eagle3)
        self.layers = [build_layer(layer, i, scope / layer.name) for i, layer in enumerate(spec.layers) if i >= first]
        self.rotary = rotary_tables(spec.layers, scope)[0][0]
        width = config.num_features * config.target_hidden_size
        self._masked_parameter = scope.parameter("mask_hidden", 1, width, optional=True)
        self._masked_state: Tensor | None = None

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of the target whose input it reads (EAGLE-3, DFlash)."""
        assert isinstance(self.config, EagleConfig)
        return () if self.wants_hidden else self.config.feature_layers or default_feature_layers(num_layers)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Names with and without "model.", of EAGLE-3's layer under either name, and those of `speculators`."""
        name = name.removeprefix("model.")
        for theirs, ours in _NAMES_OF_SPECULATORS:
            if name.startswith(theirs) and not self._is_eagle3:
                name = ours + name.removeprefix(theirs)
        if self._is_eagle3 and name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name == "mask_hidden":
            tensor = tensor.reshape(1, -1)
        return ((name, tensor),)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers, and check the map of the vocabulary."""
        super().finish_loading(after_each)
        taken = (
            self._fc_bias_parameter, self._embedding_parameter, self._head_parameter, self._to_target_parameter,
            self._masked_parameter,
        )  # fmt: skip
        self._fc_bias, self._embedding, self._head, offsets, masked = (
            None if parameter.tensor is None else parameter.take() for parameter in taken
        )
        config = self.config
        assert isinstance(config, EagleConfig)
        if self.is_parallel:
            if masked is None:
                raise CheckpointError(
                    "the EAGLE-3 head is to draft all tokens in one pass (ptd_token_id in its config.json), but its "
                    "checkpoint has no mask_hidden; turn parallel_drafting off to draft one after another"
                )
            self._masked_state = self._project(masked)[0]
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
            theirs_in_blocks = target.embedding.stored is not None and not target.embedding.rank_rows
            self._embedding = target.embedding if theirs_in_blocks else target.embedding.part(None)
        if self._head is None:
            if config.hidden_size != theirs.hidden_size or config.draft_vocab_size != theirs.vocab_size:
                raise CheckpointError("the EAGLE head has no lm_head.weight, and the model's does not fit it")
            self._head = target

    def fuse(self, features: Tensor) -> Tensor:
        """Features [T, F * H of the target] -> the states that the layer reads."""
        if not self._is_eagle3:
            return features
        return self._project(features)

    @property
    def is_parallel(self) -> bool:
        """Whether it says all tokens of a draft in one pass (P-EAGLE)."""
        assert isinstance(self.config, EagleConfig)
        return self._is_eagle3 and self.config.mask_token_id is not None

    @property
    def masked_state(self) -> Tensor:
        """[H] what stands for the state of a token that is only guessed (P-EAGLE)."""
        assert self._masked_state is not None, "the head drafts one token after another"
        return self._masked_state

    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """One pass.

        Args:
            batch: `input_ids` [T] are the tokens behind the positions; keys and values of the positions are written.
            states: [T, H]: fused features, or for guessed positions what this gave for the position before.

        Returns:
            [T, H] states.
        """
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        embedded = self.embed(batch.input_ids)
        if self._is_eagle3:
            return self._through_layers(self.midlayer(embedded, states, cos, sin, batch), cos, sin, batch)
        return self._through_layers(self._project(torch.cat((embedded, states), dim=-1)), cos, sin, batch)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, H]."""
        assert self._embedding is not None, "join was not called"
        if isinstance(self._embedding, Embedding):
            return self._embedding.rows_of(ids)
        return self._embed(ids, self._embedding)

    def _through_layers(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, batch)
        return x if residual is None else x + residual

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """States [N, H] -> logits [N, draft_vocab_size] float32; `target_ids` says whose."""
        hidden = hidden if self.norm is None else self.norm(hidden)
        if isinstance(self._head, DecoderLM):
            return self._head.compute_logits(hidden, lora)
        assert self._head is not None
        return self._lm_head_op(hidden, self._head)

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """States [N, H] -> the most likely token of the target's vocabulary [N] int64, and its logit."""
        hidden = hidden if self.norm is None else self.norm(hidden)
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
