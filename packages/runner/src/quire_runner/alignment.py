"""`AlignmentPooler`: where a decoder looked in a sound while it read the tokens of a text (Radford et al. 2022, and
OpenAI's Whisper since 2023), as the output of a request whose prompt is that text.

Shape legend: T tokens of the step, N tokens of one row in it, L tokens of the whole prompt, H alignment heads of all
layers, F places of the encoder's output that are sound, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_interfaces import RequestError
from quire_interfaces.pooling import PoolingParams
from quire_models.layers.encoder import CrossAttention
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_ops import PagedLayout
from quire_ops.kv_format import decode_rows, rows_of

__all__ = ["MEDIAN_WIDTH", "AlignmentPooler"]

MEDIAN_WIDTH = 7
"""Neighbouring places of which a weight becomes the median."""


class _Seen(NamedTuple):
    """What a layer's heads asked for in the last step."""

    query: Tensor
    """[T, heads, D]."""
    kv_cache: Tensor
    layout: PagedLayout


class _ObservedCross:
    """A layer's cross attention, whose queries are kept while somebody wants them."""

    def __init__(self, cross: CrossAttention, heads: list[int], index: int, scale: float) -> None:
        self._cross, self._index = cross, index
        self.heads, self.scale = heads, scale
        self.observers: WeakSet[_AlignmentState] = WeakSet()
        self.seen: _Seen | None = None

    def write(self, encoded: Tensor, batch: ForwardBatch) -> None:
        """As `CrossAttention.write`."""
        self._cross.write(encoded, batch)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self.observers:
            kv_cache, layout = batch.of_layer(self._index)
            num_heads = kv_cache.shape[2]
            query = self._cross.query(x).view(len(x), num_heads, -1)[:, self.heads]
            self.seen = _Seen(query, kv_cache, layout)
        else:
            self.seen = None
        return self._cross(x, batch)

    def weights(self, place: int, count: int, num_places: int) -> Tensor:
        """Attention of some tokens of the last step, which are of one row, over the first places [heads, N, F]."""
        assert self.seen is not None
        query, kv_cache, layout = self.seen
        blocks = layout.block_table[place, : -(-num_places // layout.block_size)].long()
        rows = [part[blocks, 0][:, self.heads] for part in rows_of(kv_cache)]
        keys = decode_rows(rows, torch.float32, None)  # [blocks, heads, block_size, D]
        keys = keys.transpose(0, 1).flatten(1, 2)[:, :num_places]
        scores = query[place : place + count].float().transpose(0, 1) @ keys.transpose(1, 2)
        return torch.softmax(scores * self.scale, dim=-1)


class _AlignmentState:
    """What is kept of a row between the chunks of its prompt."""

    def __init__(self, layers: Sequence[_ObservedCross], num_before: int, num_places: int) -> None:
        self._layers = layers
        self.num_before, self.num_places = num_before, num_places
        self.attention: list[Tensor] = []
        """[H, N, F] of each chunk."""
        self.hidden: list[Tensor] = []
        self.token_ids: list[Tensor] = []

    def add(self, hidden: Tensor, token_ids: Tensor, place: int) -> None:
        """Take the next tokens of the prompt.

        Args:
            hidden: [N, hidden_size].
            token_ids: [N].
            place: Of the first of them in the step.
        """
        parts = [layer.weights(place, len(hidden), self.num_places) for layer in self._layers]
        self.attention.append(torch.cat(parts))
        self.hidden.append(hidden.clone())
        self.token_ids.append(token_ids.clone())


class AlignmentPooler:
    """Outputs of requests that ask for an alignment (`quire_engine.alignment`): of each token of the text and of the
    end behind it, how much the heads attend to each place as they write it, and how probable the token is.

    The weights are those of the paper's authors: softmax over the places that are sound, standardized over the tokens,
    smoothed by a median over neighbouring places, averaged over heads.

    Args:
        network: Observed from now on.
        heads: (layer, head) of those that follow what is said.

    Raises:
        ValueError: the network has no such head.
    """

    def __init__(self, network: EncoderDecoderLM, heads: Sequence[tuple[int, int]]) -> None:
        self._network = network
        self._layers: list[_ObservedCross] = []
        num_layers = len(network.decoder_layers)
        of_layers: dict[int, list[int]] = {}
        for layer, head in sorted(heads):
            of_layers.setdefault(layer, []).append(head)
        for number, of_layer in of_layers.items():
            spec: Any = network.config.network.layers[number] if number < num_layers else None
            if spec is None or max(of_layer) >= spec.cross.num_heads:
                raise ValueError(f"the network has no heads {of_layer} in a layer {number}")
            layer_of = network.decoder_layers[number]
            observed: Any = _ObservedCross(layer_of.cross, of_layer, num_layers + number, spec.cross.scale)
            layer_of.cross = observed
            self._layers.append(observed)
        network.is_observed = lambda: any(layer.observers for layer in self._layers)

    def begin(self, params: PoolingParams) -> _AlignmentState:
        """The state of a request.

        Raises:
            RequestError: it asks for something else.
        """
        asked = (params.extra_kwargs or {}).get("alignment")
        if params.task != "plugin" or not isinstance(asked, dict):
            raise RequestError("this engine aligns texts with sounds, and else pools nothing", param="task")
        state = _AlignmentState(self._layers, asked["num_before"], asked["num_places"])
        for layer in self._layers:
            layer.observers.add(state)
        return state

    @torch.inference_mode()
    def finish(self, states: Sequence[_AlignmentState]) -> list[Tensor]:
        """[tokens of the text + 1, F + 1] float32 for each: weights, and the probability of the token in the last
        column (0 for the end of text)."""
        return [self._aligned(state) for state in states]

    def _aligned(self, state: _AlignmentState) -> Tensor:
        first = state.num_before - 1  # the token before the text writes the text's first
        weights = torch.cat(state.attention, dim=1)
        deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
        weights = ((weights - mean) / (deviation + 1e-10))[:, first:-1]
        token_ids, hidden = torch.cat(state.token_ids), torch.cat(state.hidden)
        logits = self._network.compute_logits(hidden[first:-2])
        text_ids = token_ids[first + 1 : -1]
        end_of_text = int(token_ids[-1])  # tokens from here on are no text
        chances = torch.softmax(logits[:, :end_of_text].float(), dim=-1)
        probabilities = chances.gather(1, text_ids[:, None])
        matrix = _median(weights).mean(0)
        return torch.cat((matrix, torch.cat((probabilities, probabilities.new_zeros(1, 1)))), dim=1)


def _median(values: Tensor) -> Tensor:
    """Of each weight and its neighbours along the last axis, mirrored at the ends: the middle one in order."""
    half, size = MEDIAN_WIDTH // 2, values.shape[-1]
    if size <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    window = [padded[..., shift : shift + size] for shift in range(MEDIAN_WIDTH)]
    for end in range(MEDIAN_WIDTH - 1, half - 1, -1):  # the largest of those that are left goes to their end
        for place in range(end):
            low, high = window[place], window[place + 1]
            window[place], window[place + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return window[half]
