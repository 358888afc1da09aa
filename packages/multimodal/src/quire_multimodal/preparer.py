"""The front of the package: sources in, prepared items out, each prepared once however often it is used.

Waits for the network and for preparing processes in threads; the event loop is never kept from its work. The store is
touched under one lock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire_interfaces import EncoderCacheConnector, FeatureArray, MediaItem, Modality, OverloadedError, PromptMedia
from quire_multimodal.config import MediaConfig
from quire_multimodal.embeds import EMBEDS_TOKEN_ID, read_embeds
from quire_multimodal.errors import MediaError
from quire_multimodal.fingerprint import fingerprint, prompt_arguments, read_config
from quire_multimodal.positions import PositionScheme, place_media
from quire_multimodal.restored_items import describe_item, restore_item
from quire_multimodal.sources import LoadedMedia, MediaSource, load
from quire_multimodal.spans import PromptFrame, added_sound, expand_placeholders, find_spans
from quire_multimodal.store import MediaStore, StoredItem, write_features
from quire_multimodal.workers import WorkerPool

__all__ = ["ItemQuery", "MediaPreparer", "MediaStats"]

_log = logging.getLogger(__name__)
_KEY = re.compile("[0-9a-f]{64}")
_NUM_LOADERS = 32
_MAX_WAITING = 1024
"""Media that may wait at the same time, of all requests."""


@dataclass(frozen=True, slots=True)
class MediaStats:
    """What was prepared since the start, of one modality."""

    num_queries: int = 0
    """Items that prompts asked for."""
    num_hits: int = 0
    """Those of them that were there, or being prepared, already, here or in the tier on disk."""
    num_items: int = 0
    """Items that a preparing process has prepared."""
    num_embeds: int = 0
    """Embeddings of those items."""
    num_seconds: float = 0.0
    """Time that preparing processes took for them, waiting included."""


class ItemQuery(NamedTuple):
    """An item that a prompt asks for."""

    key: str
    modality: Modality
    media: LoadedMedia | None
    """None where only its uuid is given."""
    arguments: dict[str, Any]
    """Of the processor."""
    facts: Mapping[str, Any]
    """Of embeddings."""


class MediaPreparer:
    """Prepares media for the prompts of one model. Thread-safe.

    Args:
        folder: Of the checkpoint; None prepares no media, but prompts that are embeddings.
        config: Bounds, sources, processes, memory.
        embed_token_ids: Tokens that take embeddings, by modality, where config.json does not say them.
        embeds_width: Width of the embeddings that the network takes, for those that callers have computed.
        is_prefix_lm: All tokens of a prompt with media see one another in this network.
        has_cross_attention: Tokens attend to media, for each of which one token stands.
        is_added: A sound is added to the tokens of prompt and output (`added_sound`).
        store_base: Folder in which the store makes its own; shared memory if not said.

    Raises:
        CheckpointError: the checkpoint has no processor that can be loaded.
    """

    def __init__(
        self,
        folder: Path | str | None,
        config: MediaConfig | None = None,
        *,
        embed_token_ids: Mapping[str, list[int]] | None = None,
        embeds_width: int | None = None,
        is_prefix_lm: bool = False,
        has_cross_attention: bool = False,
        is_added: bool = False,
        store_base: Path | None = None,
    ) -> None:
        self.config = config or MediaConfig()
        self._arguments = {
            name: each for name, each in (self.config.mm_processor_kwargs or {}).items() if name != "backend"
        }
        self._workers = None if folder is None else WorkerPool(folder, self.config, embed_token_ids)
        self._fingerprint, self._scheme, self._is_prefix_lm = "", None, is_prefix_lm
        self._has_cross_attention, self._is_added = has_cross_attention, is_added
        self._model_config: Mapping[str, Any] = {}
        self.frame: PromptFrame | None = None
        """What is written into prompts with media, special tokens included; None for nothing."""
        self.placeholders: Mapping[str, str] = {}
        """Token that a chat template writes for an item, by modality: what the model takes."""
        if folder is not None and self._workers is not None:
            self._fingerprint = fingerprint(folder, [self.config.image_backend, self.config.media_io_kwargs])
            self._model_config = read_config(Path(folder))
            self._scheme = PositionScheme.from_config(self._model_config)
            self.placeholders, self.frame = self._workers.placeholders, self._workers.frame
            for modality, reason in self._workers.unusable.items():
                _log.warning("%s cannot be served: %s", modality, reason)
        self.encoder_connector: EncoderCacheConnector | None = None
        """Has items that were prepared and encoded before, maybe by others; None where they are in the store alone."""
        self._store = MediaStore(int(self.config.mm_processor_cache_gb * (1 << 30)), store_base)
        self._loaders = ThreadPoolExecutor(_NUM_LOADERS, thread_name_prefix="media-load")
        self._lock = threading.Lock()
        self._preparing: dict[str, Future[None]] = {}
        self._num_waiting = 0
        self._embeds_width = embeds_width
        self._counts: dict[str, Counter[str]] = {str(modality): Counter() for modality in Modality}
        self._seconds = {str(modality): 0.0 for modality in Modality}

    async def prepare(
        self, sources: Sequence[MediaSource], arguments: Mapping[str, Any] | None = None
    ) -> list[StoredItem]:
        """The items of a prompt, kept in the store until `release`.

        Args:
            sources: In the order of the prompt.
            arguments: The request's `mm_processor_kwargs`, over the server's.

        Raises:
            MediaError: naming the part of the request whose medium cannot be used; none is kept then.
            OverloadedError: the shared memory is full of items in use, or too many media are waiting.
        """
        futures = self._submit(sources, arguments)
        try:
            await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        except asyncio.CancelledError:
            for future in futures:
                future.add_done_callback(self._release_result)
            raise
        return self._all_or_none(futures)

    def prepare_now(
        self, sources: Sequence[MediaSource], arguments: Mapping[str, Any] | None = None
    ) -> list[StoredItem]:
        """`prepare` for callers without an event loop; blocks."""
        futures = self._submit(sources, arguments)
        wait(futures)
        return self._all_or_none(futures)

    def _submit(self, sources: Sequence[MediaSource], arguments: Mapping[str, Any] | None) -> list[Future[StoredItem]]:
        self._check_limits(sources)
        with self._lock:
            if self._num_waiting and self._num_waiting + len(sources) > _MAX_WAITING:
                raise OverloadedError(f"{self._num_waiting} media of other requests are waiting; try again later")
            self._num_waiting += len(sources)
        present = {source.modality for source in sources}
        futures = []
        for source in sources:
            merged = {**(arguments or {}), **prompt_arguments(self._model_config, source.modality, present)}
            futures.append(self._loaders.submit(self._prepare_one, source, merged))
        for future in futures:
            future.add_done_callback(self._count_down)
        return futures

    def _count_down(self, _: Future[StoredItem]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _all_or_none(self, futures: Sequence[Future[StoredItem]]) -> list[StoredItem]:
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for future in futures:
                self._release_result(future)
            raise errors[0]
        return [future.result() for future in futures]

    def _release_result(self, future: Future[StoredItem]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.release([future.result()])

    def release(self, items: Iterable[StoredItem]) -> None:
        """The request that held these items has ended."""
        with self._lock:
            for stored in items:
                self._store.release(stored.item.key)

    def expand(
        self, text: str, items: Sequence[StoredItem], literal: Iterable[tuple[int, int]] = ()
    ) -> tuple[str, list[StoredItem]]:
        """`expand_placeholders` with the placeholders and the frame of this model."""
        return expand_placeholders(text, items, self.placeholders, literal, self.frame)

    def place(self, items: Sequence[StoredItem], token_ids: Sequence[int]) -> PromptMedia:
        """What a prompt carries of its media: their spans, and positions where the network wants them.

        Args:
            items: In the order of the prompt, as `expand` returns them.
            token_ids: Of the expanded text.

        Raises:
            MediaError: the tokens are not those of the items.
        """
        if self._is_added:
            return added_sound(items, token_ids)
        spans = find_spans(items, token_ids, 1 if self._has_cross_attention else None)
        media = place_media(items, spans, len(token_ids), self._scheme)
        if self._has_cross_attention:
            return media.as_cross_attended()
        return media.as_prefix(token_ids) if items and self._is_prefix_lm else media

    def _check_limits(self, sources: Sequence[MediaSource]) -> None:
        limits = self.config.limit_mm_per_prompt or {}
        seen: Counter[Modality] = Counter()
        for source in sources:
            modality = source.modality
            seen[modality] += 1
            is_prompt = modality == Modality.EMBEDS
            flag = "enable_prompt_embeds" if is_prompt else "enable_mm_embeds"
            if (source.is_embeds or is_prompt) and not getattr(self.config, flag):
                message = f"this server takes no embeddings of callers (--{flag.replace('_', '-')})"
                raise MediaError(message, code="unsupported_media").at(source.param)
            if modality not in self.placeholders and not is_prompt:
                takes = ", ".join(self.placeholders) or "text only"
                message = f"this model takes no {modality} (it takes: {takes})"
                raise MediaError(message, code="unsupported_media").at(source.param)
            if seen[modality] > limits.get(modality, len(sources)):
                message = f"a prompt may hold at most {limits[modality]} of {modality} (--limit-mm-per-prompt)"
                raise MediaError(message, code="too_many_media").at(source.param)

    def _prepare_one(self, source: MediaSource, arguments: Mapping[str, Any]) -> StoredItem:
        """One item, found or prepared; blocks."""
        try:
            merged = {**self._arguments, **arguments}
            media = None if source.url is None and source.value is None else load(source, self.config)
            facts = {} if source.uuid is not None else dict(source.facts)
            key = source.key or self._key(source, media, {**merged, "facts": facts})
            if _KEY.fullmatch(key) is None:  # it names a file
                raise MediaError("the hash of an item has 64 digits of base 16")
            query = ItemQuery(key, source.modality, media, merged, source.facts)
            with self._lock:
                self._counts[source.modality]["num_queries"] += 1
            return self._acquire(query)
        except MediaError as error:
            raise error.at(source.param) from None

    def _key(self, source: MediaSource, media: LoadedMedia | None, arguments: Mapping[str, Any]) -> str:
        """Names the content and all that prepares it."""
        if source.uuid is None and media is None:
            raise MediaError(f"the {source.modality} has neither a URL nor data nor a uuid")
        content = ["uuid", source.uuid] if source.uuid is not None or media is None else ["bytes", media.digest()]
        try:
            named = json.dumps([str(source.modality), self._fingerprint, arguments, content], sort_keys=True)
        except TypeError as error:
            raise MediaError(f"mm_processor_kwargs must be JSON: {error}") from None
        return hashlib.sha256(named.encode()).hexdigest()

    def _acquire(self, query: ItemQuery) -> StoredItem:
        """The item, which whoever comes first has prepared."""
        was_there = True
        while True:
            with self._lock:
                stored = self._store.acquire(query.key)
                if stored is not None:
                    self._counts[query.modality]["num_hits"] += was_there
                    return stored
                other = self._preparing.get(query.key)
                if other is None:
                    own = self._preparing[query.key] = Future()
            if other is not None:
                other.result()  # raises what the other one met
                continue
            was_there = False
            try:
                stored = self._prepare(query)
            except BaseException as error:
                with self._lock:
                    self._store.discard(query.key)
                    del self._preparing[query.key]
                own.set_exception(error)
                raise
            own.set_result(None)
            return stored

    def _prepare(self, query: ItemQuery) -> StoredItem:
        """Take the item out of the connector, or have a process prepare it, and take it into the store."""
        start = time.monotonic()
        restored = (
            None if self.encoder_connector is None else restore_item(self.encoder_connector, query.key, self._store)
        )
        stored = restored or self._prepare_anew(query)
        with self._lock:
            self._store.add(stored)
            del self._preparing[query.key]
            counts = self._counts[query.modality]
            if restored is not None:
                counts["num_hits"] += 1
            else:
                counts["num_items"] += 1
                counts["num_embeds"] += stored.item.num_embeds
                self._seconds[query.modality] += time.monotonic() - start
        return stored

    def _prepare_anew(self, query: ItemQuery) -> StoredItem:
        key, modality, media, arguments, facts = query
        if media is None:
            message = f"no {modality} of this uuid or hash is there: send it with its data"
            raise MediaError(message, code="media_not_cached")
        path, is_encoded = self._store.path(key), media.form == "embeds"
        if is_encoded:
            answer = {**self._take_embeds(modality, media.data, path), "facts": facts}
        else:
            job = {"modality": str(modality), "form": media.form, "arguments": arguments, "path": str(path)}
            assert self._workers is not None  # without it, there is no modality that passes `_check_limits`
            answer = self._workers.prepare({**job, **media.fields}, media.data)
        features = tuple(FeatureArray(name, kind, tuple(shape), at) for name, kind, shape, at in answer["features"])
        num_embeds = answer["num_embeds"]
        item = MediaItem(
            modality=modality, key=key, num_embeds=num_embeds, path=str(path), features=features, is_encoded=is_encoded
        )
        token_ids = tuple(answer["embed_token_ids"])
        stored = StoredItem(item, answer["text"], token_ids, answer["facts"], answer["num_bytes"])
        if self.encoder_connector is not None and not is_encoded:
            self.encoder_connector.save_item(key, describe_item(stored))
        return stored

    def _take_embeds(self, modality: Modality, data: bytes, path: Path) -> dict[str, Any]:
        """Write embeddings that the caller has computed into the store; no process has to prepare anything."""
        embeds = read_embeds(data, self._embeds_width)
        features, num_bytes = write_features(path, {"embeds": embeds})
        answer = {"num_embeds": len(embeds), "features": features, "num_bytes": num_bytes}
        if modality == Modality.EMBEDS:
            return {**answer, "text": "", "embed_token_ids": [EMBEDS_TOKEN_ID]}
        if self._workers is None or modality not in self._workers.embeds_texts:
            raise MediaError(f"this model takes no embeddings of {modality}", code="unsupported_media")
        before, token, after, token_id = self._workers.embeds_texts[modality]
        return {**answer, "text": f"{before}{token * len(embeds)}{after}", "embed_token_ids": [token_id]}

    def stats(self) -> dict[str, MediaStats]:
        """What was asked for and prepared since the start, by modality."""
        with self._lock:
            return {
                modality: MediaStats(**counts, num_seconds=self._seconds[modality])
                for modality, counts in self._counts.items()
            }

    @property
    def num_waiting(self) -> int:
        """Number of items that are being loaded and prepared, or wait for it."""
        return self._num_waiting

    @property
    def num_bytes(self) -> int:
        """Bytes of prepared media in the store."""
        return self._store.num_bytes

    def reset(self) -> None:
        """Forget every prepared item that no request holds."""
        with self._lock:
            self._store.clear()

    def remove_store(self) -> None:
        """Remove the store's files, and nothing else: takes no lock, so that a signal's handler may call it."""
        self._store.remove()

    def close(self) -> None:
        """End the processes and remove the store."""
        if self._workers is not None:
            self._workers.close()
        self._loaders.shutdown(cancel_futures=True)
        self._store.close()
