"""Items whose embeddings are in a tier: described once, and restored without preparing or encoding anything."""

from __future__ import annotations

import json

import numpy as np

from quire_interfaces import EncoderCacheConnector, FeatureArray, MediaItem, Modality
from quire_multimodal.store import MediaStore, StoredItem, write_features

__all__ = ["describe_item", "restore_item"]

_VERSION = 1


def describe_item(stored: StoredItem) -> bytes:
    """What a prompt needs to know of an item, as JSON: all but its arrays."""
    description = {
        "version": _VERSION,
        "modality": str(stored.item.modality),
        "num_embeds": stored.item.num_embeds,
        "text": stored.text,
        "embed_token_ids": stored.embed_token_ids,
        "facts": dict(stored.facts),
    }
    return json.dumps(description).encode()


def restore_item(connector: EncoderCacheConnector, key: str, store: MediaStore) -> StoredItem | None:
    """An item as its embeddings, which are copied into its file in the store.

    Args:
        connector: Where its description and its embeddings may be.
        key: Its name.
        store: Has a place for its file, and is not told of it.

    Returns:
        The item; None where its description or its embeddings are missing.
    """
    text = connector.load_item(key)
    if text is None:
        return None
    description = json.loads(text)
    if description["version"] != _VERSION:
        return None
    num_embeds = description["num_embeds"]
    embeds = connector.load_embeds(key, num_embeds)
    if embeds is None:
        return None
    path = store.path(key)
    _, num_bytes = write_features(path, {"embeds": np.frombuffer(embeds, np.uint8)})
    item = MediaItem(
        modality=Modality(description["modality"]),
        key=key,
        num_embeds=num_embeds,
        path=str(path),
        features=(FeatureArray("embeds", connector.dtype, (num_embeds, connector.width), 0),),
        is_encoded=True,
    )
    return StoredItem(item, description["text"], tuple(description["embed_token_ids"]), description["facts"], num_bytes)
