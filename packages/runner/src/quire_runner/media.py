"""`EncoderCache`: the embeddings that towers have made of images, videos and sounds, and their places in a step.

Holds what the scheduler says, no more and no less (`SchedulerOutput.encode`, `freed_media`). Knows items by their keys
and the files that hold their arrays; does not know what a tower computes.

Shape legend: T tokens of the step, M of them that stand for media, W the width of an embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire_attention.batch import CrossMedia, ForwardBatch, MediaEmbeds
from quire_interfaces.encoder_cache import EncoderCacheConnector
from quire_interfaces.media import MediaItem, PromptMedia
from quire_interfaces.step import RequestFailure, SchedulerOutput
from quire_ops import to_device
from quire_runner.device_timer import DeviceTimer
from quire_runner.inputs import HostPlan
from quire_runner.media_arrays import read_arrays
from quire_runner.protocols import EncodeMedia

__all__ = ["EncodedMedia", "EncoderCache", "MediaPlaces"]

_logger = logging.getLogger(__name__)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that nobody changes any more: not copied where it lies in host memory."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class EncodedMedia(NamedTuple):
    """What became of the items that a step was to encode."""

    items: list[MediaItem]
    """Those that towers have read."""
    failed: dict[str, str]
    """Key -> why an item could not be encoded."""
    timer: DeviceTimer
    """Time of the towers, by modality."""


class EncoderCache:
    """Embeddings by the keys of their items.

    Args:
        encode: Has towers read items (`RunnableNetwork.encode_media`).
        media: Row -> what stands among the tokens of its prompt; kept up to date by its owner.
        device: Where embeddings are kept.
        connector: Keeps what towers have made, beyond memory.
    """

    def __init__(
        self,
        encode: EncodeMedia,
        media: Mapping[int, PromptMedia],
        device: torch.device,
        connector: EncoderCacheConnector | None = None,
    ) -> None:
        self._encode_media = encode
        self._media = media
        self._device = device
        self._connector = connector
        self._embeds: dict[str, Tensor] = {}
        """Key -> [num_embeds, W]."""

    @property
    def num_embeds(self) -> int:
        """Embeddings that are kept."""
        return sum(map(len, self._embeds.values()))

    def close(self) -> None:
        """Have written what the connector was given."""
        if self._connector is not None:
            self._connector.close()

    def update(self, output: SchedulerOutput) -> EncodedMedia:
        """Forget and encode what a step says."""
        for key in output.freed_media:
            self._embeds.pop(key, None)  # a step that failed has perhaps not encoded it
        timer = DeviceTimer(self._device)
        encoded = EncodedMedia([], {}, timer)
        by_modality: dict[str, list[MediaItem]] = {}
        for item in output.encode:
            if not self._load(item):
                by_modality.setdefault("" if item.is_encoded else item.modality, []).append(item)
        for modality, items in by_modality.items():
            with timer.measure(modality) if modality else nullcontext():
                self._encode_apart(modality, items, encoded)
        return encoded

    def _encode_apart(self, modality: str, items: list[MediaItem], encoded: EncodedMedia) -> None:
        """Encode items, one after the other where they cannot be encoded together."""
        try:
            encoded.items.extend(self._encode(modality, items))
        except Exception:
            # One of them is the reason; by itself, each is its own.
            for item in items:
                try:
                    encoded.items.extend(self._encode(modality, [item]))
                except Exception as error:
                    _logger.exception("the %s %s could not be encoded", item.modality, item.key)
                    encoded.failed[item.key] = f"the {item.modality} could not be encoded: {error}"

    def _load(self, item: MediaItem) -> bool:
        """Take the embeddings of an item out of the connector. Returns whether they were there."""
        connector = self._connector
        if connector is None or item.is_encoded:
            return False
        payload = connector.load_embeds(item.key, item.num_embeds)
        if payload is None:
            return False
        embeds = torch.frombuffer(payload, dtype=getattr(torch, connector.dtype)).view(item.num_embeds, -1)
        self._embeds[item.key] = embeds.to(self._device)
        return True

    def _encode(self, modality: str, items: list[MediaItem]) -> list[MediaItem]:
        """Have a tower read items; those without a modality are embeddings already. Returns those that it has read."""
        arrays = [read_arrays(item) for item in items]
        embeds = self._encode_media(modality, arrays) if modality else [each.popitem()[1] for each in arrays]
        for item, each in zip(items, embeds, strict=True):
            if len(each) != item.num_embeds:
                raise RuntimeError(
                    f"the tower made {len(each)} embeddings of an item that has {item.num_embeds} places in the prompt"
                )
        self._embeds.update({item.key: each.to(self._device).clone() for item, each in zip(items, embeds, strict=True)})
        if not modality:
            return []
        if self._connector is not None:
            for item in items:
                self._connector.save_embeds(item.key, _bytes_of(self._embeds[item.key]))
        return items

    def rows_of(self, key: str, first: int, last: int) -> Tensor:
        """Embeddings [last - first, W] of a part of an item, which is there."""
        return self._embeds[key][first:last]

    def embeds_of(self, media: PromptMedia) -> Tensor:
        """Embeddings [num_embeds, W] of all items of a prompt, which are there."""
        return torch.cat([self._embeds[span.item.key] for span in media.spans])

    def missing(self, output: SchedulerOutput, failed: dict[str, str]) -> dict[int, RequestFailure]:
        """Rows of a step whose media are not there, and why."""
        missing: dict[int, RequestFailure] = {}
        entries = zip(output.rows, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
        for row, start, num_tokens in entries:
            for key in self._keys(self._media.get(row), start, start + num_tokens):
                if key not in self._embeds:
                    missing[row] = RequestFailure(failed.get(key, "an item of its prompt was not encoded"))
        return missing

    def _keys(self, media: PromptMedia | None, start: int, end: int) -> Iterable[str]:
        """Items whose embeddings tokens `start` to `end` read."""
        for span in () if media is None else media.spans:
            if span.is_read(start, end):
                yield span.item.key

    def add_to(self, batch: ForwardBatch, plan: HostPlan) -> None:
        """Put the media of a step's rows into its batch: embeddings in their places, positions of several axes, and
        which tokens see all of their prompt."""
        media = self._media
        entries = [(entry, media[row]) for entry, row in enumerate(plan.rows.tolist()) if row in media]
        tokens: list[int] = []
        prefix: list[int] = []
        embeds: list[Tensor] = []
        cross: list[CrossMedia] = []
        for entry, of_row in entries:
            start, end = int(plan.start[entry]), int(plan.ends[entry])
            offset = int(plan.query_start_loc[entry]) - start
            cross += self._cross_media(of_row, start, end, offset)
            prefix += range(offset + start, offset + min(end, of_row.prefix_len))
            for span in of_row.spans:
                first, last = span.embeds_between(start, end)
                if first < last:
                    embeds.append(self.rows_of(span.item.key, first, last))
                    tokens += [offset + token for token in span.tokens_between(start, end)]
        if tokens:
            index = to_device(np.array(tokens, dtype=np.int64), batch.positions.device)
            batch.media = MediaEmbeds(token_index=index, embeds=torch.cat(embeds))
        batch.cross_media = tuple(cross)
        if prefix:
            batch.prefix_index = to_device(np.array(prefix, dtype=np.int64), batch.positions.device)
        self._place(batch, plan, entries)

    def _cross_media(self, media: PromptMedia, start: int, end: int, offset: int) -> Iterable[CrossMedia]:
        """What tokens `start` to `end` of a row attend to by cross attention, which stand at `offset` + their place."""
        spans = [span for span in media.spans if span.cross_end and span.is_read(start, end)]
        edges = sorted({max(start, span.start) for span in spans} | {min(end, span.cross_end) for span in spans})
        for begin, behind in pairwise(edges):
            embeds = tuple(self._embeds[span.item.key] for span in spans if span.start <= begin < span.cross_end)
            if embeds:
                yield CrossMedia(begin=offset + begin, end=offset + behind, embeds=embeds)

    def _place(self, batch: ForwardBatch, plan: HostPlan, entries: list[tuple[int, PromptMedia]]) -> None:
        """Positions [A, T] on A axes where a prompt's own are in the step; behind prompts, all count on from them."""
        positions = batch.positions
        for entry, media in entries:
            if not media.positions:
                continue
            table = np.frombuffer(media.positions, dtype="<i4").reshape(media.num_position_axes, -1)
            num_prompt = table.shape[1]
            start, begin = int(plan.start[entry]), int(plan.query_start_loc[entry])
            end = begin + plan.query_lens[entry]
            behind = min(begin + max(0, num_prompt - start), end)
            if behind > begin:
                if positions.ndim == 1:
                    positions = positions.expand(len(table), -1).clone()
                of_step = table[:, start : start + behind - begin].astype(np.int64)
                positions[:, begin:behind] = to_device(of_step, positions.device)
            positions[..., behind:end] += media.position_delta
        batch.positions = positions


class MediaPlaces(EncoderCache):
    """Where media stand in the steps of a pipeline stage behind the first one, which has their embeddings: positions,
    and which tokens see one another."""

    def update(self, output: SchedulerOutput) -> EncodedMedia:
        """Nothing: the first stage encodes, and says what became of it."""
        return EncodedMedia([], {}, DeviceTimer(self._device))

    def missing(self, output: SchedulerOutput, failed: dict[str, str]) -> dict[int, RequestFailure]:
        """None: the first stage leaves such rows out."""
        return {}

    def rows_of(self, key: str, first: int, last: int) -> Tensor:
        """[last - first, 0]: embeddings without width."""
        return torch.empty(last - first, 0, device=self._device)
