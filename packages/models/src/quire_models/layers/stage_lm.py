"""One pipeline stage of a decoder-only network: some of its layers, with what stands before or behind them.

Shape legend: T tokens of the step, H hidden size, K layers before this stage whose input a drafter reads.
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
from quire_models.layers.deepstack import DeepstackFeatures
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.network import Network
from quire_models.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from quire_models.layers.scope import Scope
from quire_models.layers.token_embedding import TokenEmbedding
from quire_models.layers.whole_spans import with_whole_spans
from quire_models.layers.whole_stack import gather_layers
from quire_models.spec import EmbeddingSpec
from quire_models.stages import StageSpec
from quire_ops import DecodeRows, RunDecode

__all__ = ["StageLM", "StageNeighbours"]


class StageNeighbours(Protocol):
    """The stages before and behind this one, in a step."""

    def receive(self, like: Tensor) -> Tensor:
        """What the stage before has handed on: the residual stream of the step's tokens and beside it the inputs of K
        layers, [T, (1 + K) * H]; `like` has its shape and dtype."""

    def send(self, hidden: Tensor) -> None:
        """Hand the residual stream on to the next stage, with the inputs of layers so far beside it; it must not be
        changed afterwards."""


class StageLM(DecoderLM):
    """A stage: takes the residual stream from the stage before and gives its own to the next one."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        assert isinstance(config.network, StageSpec)
        self._stage: StageSpec = config.network
        self.neighbours: StageNeighbours | None = None
        """Set by who runs steps."""
        self.tapped_layers: tuple[int, ...] = ()
        """Layers of the whole network whose input a drafter of the last stage reads, in ascending order: handed on from
        stage to stage. Set before the first step."""
        super().__init__(config, scope)
        if scope.adapters is not None:
            scope.adapters.is_elsewhere = self._is_elsewhere

    @property
    def stage_group(self) -> Collectives:
        """The stages; rank r is stage r."""
        assert self._scope.pp_group is not None
        return self._scope.pp_group

    @property
    def received_width(self) -> int:
        """Width (1 + K) * H of what the stage before hands on."""
        return (1 + len(self._tapped_before)) * self.config.hidden_size

    @property
    def _tapped_before(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.tapped_layers if layer < self._stage.first_layer)

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
        goes_apart = self._scope.tp_group is not None if self._stack is None else self._has_own_steps
        if goes_apart and FusedDecoder.keeps_gates_wide(self._scope, self.config, layers, norm):
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
        """The residual stream behind the stage's layers [T, H], or behind the final norm. `taps`: on the last stage,
        layer of the whole network -> tensor [T, H] for the stream before it."""
        neighbours, stage, media = self.neighbours, self._stage, self.config.media
        if neighbours is None:
            raise ConfigError("a pipeline stage runs beside the others only", field="pipeline_parallel_size")
        self.use_adapters(batch.lora)
        # As in the whole network, one call runs no step with features or attention that it does not know.
        by_op = media is not None and batch.media is not None and len(media.deepstack_layers) > 0
        if self._sees_whole_spans and media is not None:
            given, batch = batch, with_whole_spans(batch, self.config.sliding_windows, media)
            by_op = by_op or batch is not given
        length = max(batch.num_positions, *batch.attention[0].kv_lens)
        rotations = [table(batch.positions, length) for table in self._tables]
        features, passed_on = DeepstackFeatures(), list[Tensor]()
        if stage.is_first:
            x = self.embed(batch.input_ids, batch.positions, batch.lora, batch.media)
            deepstack = media.deepstack_layers if media else ()
            features = DeepstackFeatures.of(batch.media, deepstack, self.config.hidden_size)
        else:
            shape = (len(batch.input_ids), self.received_width)
            received = neighbours.receive(torch.empty(shape, dtype=self.dtype, device=self.device))
            x, *passed_on = received.split(self.config.hidden_size, dim=-1)
            if passed_on:
                x = x.contiguous()
        own = self._own_taps(x, taps)
        hidden = self._through_layers(x, rotations, batch, own, None if by_op else self._stack, features)
        if not stage.is_last:
            neighbours.send(torch.cat((hidden, *passed_on, *own.values()), dim=-1) if passed_on or own else hidden)
            return hidden
        for layer, tap in zip(self._tapped_before, passed_on, strict=True):
            if layer in taps:
                taps[layer].copy_(tap)
        return hidden

    def _own_taps(self, x: Tensor, taps: dict[int, Tensor]) -> dict[int, Tensor]:
        """Number of a layer within the stage -> tensor for the residual stream before it, in ascending order: on the
        last stage those that are asked for, else those that the last stage may be asked for."""
        stage, num_layers = self._stage, len(self.layers)
        if stage.is_last:
            numbers = {layer - stage.first_layer: tap for layer, tap in taps.items()}
            return {number: tap for number, tap in numbers.items() if number >= 0}
        numbers = {layer - stage.first_layer: torch.empty_like(x) for layer in self.tapped_layers}
        return {number: tap for number, tap in numbers.items() if 0 <= number < num_layers}

    def _through_layers(
        self,
        x: Tensor,
        rotations: list[tuple[Tensor, Tensor]],
        batch: ForwardBatch,
        taps: dict[int, Tensor],
        stack: FusedDecoder | None,
        features: DeepstackFeatures,
    ) -> Tensor:
        if stack is not None and stack.serves(batch):
            return stack(x, rotations, batch, taps)
        unrotated, residual = (self._unrotated, self._unrotated), None
        for i, (layer, rotation) in enumerate(zip(self.layers, self._rotations, strict=True)):
            x = features.add(x, i)
            self._tap(taps, i, x, residual)
            cos, sin = unrotated if rotation is None else rotations[rotation]
            x, residual = layer(x, residual, cos, sin, batch)
        x = features.add(x, len(self.layers))
        self._tap(taps, len(self.layers), x, residual)
        if self._stage.is_last:
            hidden: Tensor = self._add_norm(x, residual)[0]
            return hidden
        return x if residual is None else x + residual

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """None: a stage's step begins or ends at another stage."""
        return None
