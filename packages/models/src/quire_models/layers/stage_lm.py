"""One pipeline stage of a decoder-only network: some of its layers, with what stands before or behind them.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_distributed import Collectives
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.network import Network
from quire_models.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from quire_models.layers.scope import Scope
from quire_models.layers.token_embedding import TokenEmbedding
from quire_models.layers.whole_stack import gather_layers
from quire_models.spec import EmbeddingSpec
from quire_models.stages import StageSpec
from quire_ops import DecodeRows, RunDecode

__all__ = ["StageLM", "StageNeighbours"]


class StageNeighbours(Protocol):
    """The stages before and behind this one, in a step."""

    def receive(self, like: Tensor) -> Tensor:
        """The residual stream [T, hidden_size] of the step's tokens behind the stage before; `like` has its shape and
        dtype."""

    def send(self, hidden: Tensor) -> None:
        """Hand the residual stream [T, hidden_size] on to the next stage; it must not be changed afterwards."""


class StageLM(DecoderLM):
    """A stage: takes the residual stream from the stage before and gives its own to the next one."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        assert isinstance(config.network, StageSpec)
        self._stage: StageSpec = config.network
        self.neighbours: StageNeighbours | None = None
        """Set by who runs steps."""
        super().__init__(config, scope)
        if scope.adapters is not None:
            scope.adapters.is_elsewhere = self._is_elsewhere

    @property
    def stage_group(self) -> Collectives:
        """The stages; rank r is stage r."""
        assert self._scope.pp_group is not None
        return self._scope.pp_group

    def make_embedding(self, spec: EmbeddingSpec, body: Scope) -> TokenEmbedding:
        """What stands before the first layer; on the last stage the table that is the head's, too; else nothing that a
        checkpoint has to bring."""
        if not self._stage.is_first:
            spec = dataclasses.replace(spec, project_in=None, num_token_types=0, positions=None, norm=None)
        if not self._stage.has_table:
            body = dataclasses.replace(body, parameters=[], finishers=[], adapters=None)
        return TokenEmbedding(spec, body)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers, and bind the op that runs all layers of the stage in one call,
        where that of the whole network would."""
        Network.finish_loading(self, after_each)
        own = [self._fused_layer(i) for i in range(len(self.layers))]
        norm_layer = self.norm if self._stage.is_last else None
        own_norm = None
        if isinstance(norm_layer, RMSNorm | OffsetRMSNorm | LayerNorm):
            own_norm = norm_layer.fused_weights()
        layers, norm = gather_layers(self.stage_group, own, own_norm)
        if norm is None:
            return
        stage = tuple(layer for layer in own if layer is not None), own_norm
        self._stack = FusedDecoder.bind(self._scope, self.config, layers, norm, stage)
        shared = self._scope.tp_group is not None and self._stack is None
        if shared and FusedDecoder.keeps_gates_wide(self._scope, self.config, layers, norm):
            self._widen()

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A tensor of the checkpoint as parameters of this stage."""
        own = super().checkpoint_tensors(name, tensor)
        return ((each, part) for each, part in own if not self._stage.is_elsewhere(each))

    def _is_elsewhere(self, module: str) -> bool:
        """Whether only another stage has a module of the checkpoint."""
        names = [name for name, _ in super().checkpoint_tensors(f"{module}.weight", torch.empty(0, 0))]
        return bool(names) and all(map(self._stage.is_elsewhere, names))

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        """The residual stream behind the stage's layers [T, hidden_size], or behind the final norm."""
        neighbours = self.neighbours
        if neighbours is None:
            raise ConfigError("a pipeline stage runs beside the others only", field="pipeline_parallel_size")
        self.use_adapters(batch.lora)
        length = max(batch.num_positions, *batch.attention[0].kv_lens)
        rotations = [table(batch.positions, length) for table in self._tables]
        if self._stage.is_first:
            x = self.embed(batch.input_ids, batch.positions, batch.lora, batch.media)
        else:
            shape = (len(batch.input_ids), self.config.hidden_size)
            x = neighbours.receive(torch.empty(shape, dtype=self.dtype, device=self.device))
        hidden = self._through_layers(x, rotations, batch, taps)
        if not self._stage.is_last:
            neighbours.send(hidden)
        return hidden

    def _through_layers(
        self, x: Tensor, rotations: list[tuple[Tensor, Tensor]], batch: ForwardBatch, taps: dict[int, Tensor]
    ) -> Tensor:
        if self._stack is not None and self._stack.serves(batch):
            return self._stack(x, rotations, batch, taps)
        unrotated, residual = (self._unrotated, self._unrotated), None
        for layer, rotation in zip(self.layers, self._rotations, strict=True):
            cos, sin = unrotated if rotation is None else rotations[rotation]
            x, residual = layer(x, residual, cos, sin, batch)
        if self._stage.is_last:
            hidden: Tensor = self._add_norm(x, residual)[0]
            return hidden
        return x if residual is None else x + residual

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """None: a stage's step begins or ends at another stage."""
        return None
