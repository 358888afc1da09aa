"""From placeholders in a prompt's text to the spans of its tokens that stand for media.

The text is put together first and tokenized once: tokenizing pieces apart is wrong for some tokenizers. What looks like
a placeholder in a text that a user wrote is not one; whoever renders the prompt says where such texts are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire_interfaces import MediaSpan, Modality, PromptMedia
from quire_multimodal.errors import MediaError
from quire_multimodal.store import StoredItem

__all__ = ["ITEM_NUMBER", "PromptFrame", "added_sound", "expand_placeholders", "find_spans"]

ITEM_NUMBER = "\0"
"""Stands in the text of an item for the number of the item among those of its modality in the prompt, from 0."""


class PromptFrame(NamedTuple):
    """What a processor writes into a prompt with media, beside the texts of its items (PaliGemma, Llama 3.2 Vision)."""

    begin: str = ""
    """Behind the items that the prompt begins with, or before all, unless it is in the prompt already."""
    behind_items: str = ""
    """Behind the last item."""
    end: str = ""
    """Behind the prompt."""


def expand_placeholders(
    text: str,
    items: Sequence[StoredItem],
    placeholders: Mapping[str, str],
    literal: Iterable[tuple[int, int]] = (),
    frame: PromptFrame | None = None,
) -> tuple[str, list[StoredItem]]:
    """Replace each placeholder by the text of its item; the i-th of a modality is that of its i-th item.

    Args:
        text: Rendered prompt.
        items: In any order that keeps those of a modality in the prompt's.
        placeholders: Token that stands for an item, by modality.
        literal: [from, to) of `text` that users wrote: what looks like a placeholder there is text.
        frame: Is written, too, where there are items; None for nothing.

    Returns:
        The expanded text, and the items in the order of their placeholders.

    Raises:
        MediaError: the text has more or fewer placeholders of a modality than there are items.
    """
    modalities = {token: Modality(name) for name, token in placeholders.items()}
    ranges = sorted(literal)
    places = [match for match in _pattern(modalities).finditer(text) if not _overlaps(ranges, *match.span())]
    queues = {modality: [item for item in items if item.item.modality == modality] for modality in Modality}
    for modality, queue in queues.items():
        num_places = sum(modalities[match.group()] == modality for match in places)
        if len(queue) != num_places:
            raise MediaError(
                f"the prompt has {num_places} placeholders for {modality} and the request {len(queue)} items: with "
                "this chat template, media cannot stand where they do"
            )
    numbers = dict.fromkeys(Modality, 0)
    ordered = [queues[modalities[match.group()]].pop(0) for match in places]
    pieces: list[str] = []
    if ordered and frame is not None:
        ordered[-1] = replace(ordered[-1], text=ordered[-1].text + frame.behind_items)
        if frame.begin and frame.begin not in text:
            first = _num_leading(places) - 1
            if first >= 0:
                ordered[first] = replace(ordered[first], text=ordered[first].text + frame.begin)
            else:
                pieces.append(frame.begin)
        text += frame.end
    last = 0
    for match, stored in zip(places, ordered, strict=True):
        number = numbers[stored.item.modality]
        pieces += (text[last : match.start()], stored.text.replace(ITEM_NUMBER, str(number)))
        numbers[stored.item.modality] += 1
        last = match.end()
    return "".join((*pieces, text[last:])), ordered


def _num_leading(places: Sequence[re.Match[str]]) -> int:
    """Placeholders that a text begins with, of those in it."""
    end = num = 0
    while num < len(places) and places[num].start() == end:
        end, num = places[num].end(), num + 1
    return num


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _overlaps(ranges: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether [start, end) shares a character with one of the ranges, which are ascending and apart."""
    index = bisect_left(ranges, (end, -1))
    return index > 0 and ranges[index - 1][1] > start


def find_spans(
    items: Sequence[StoredItem], token_ids: Sequence[int], num_tokens: int | None = None
) -> tuple[MediaSpan, ...]:
    """The spans of a tokenized prompt: tokens that take embeddings belong to the items in turn.

    A placeholder that a user wrote has been tokenized as letters and is none of these tokens.

    Args:
        items: In the order of the prompt.
        token_ids: Of the expanded text.
        num_tokens: Tokens that stand for an item; None for one for each of its embeddings.

    Raises:
        MediaError: the tokens take more or fewer embeddings than the items have.
    """
    spans, position = [], 0
    for stored in items:
        places: list[int] = []
        num_places = stored.item.num_embeds if num_tokens is None else num_tokens
        while len(places) < num_places and position < len(token_ids):
            if token_ids[position] in stored.embed_token_ids:
                places.append(position)
            position += 1
        if len(places) < num_places:
            raise _mismatch(items, token_ids)
        start = places[0]
        embeds = _runs([place - start for place in places])
        spans.append(MediaSpan(item=stored.item, start=start, length=places[-1] + 1 - start, embeds=embeds))
    ids = {token_id for stored in items for token_id in stored.embed_token_ids}
    if any(token_id in ids for token_id in token_ids[position:]):
        raise _mismatch(items, token_ids)
    return tuple(spans)


def added_sound(items: Sequence[StoredItem], token_ids: Sequence[int]) -> PromptMedia:
    """The sound of a prompt whose network adds its embeddings to those of all tokens from the first on, generated ones
    included (Voxtral Realtime).

    Args:
        items: One sound, or none.
        token_ids: A first token, and those that stand for the sound.

    Raises:
        MediaError: there are several sounds, or other tokens beside those that stand for one.
    """
    if not items:
        return PromptMedia(spans=())
    stored, length = items[0], items[0].item.num_embeds
    if len(items) > 1 or not set(token_ids[1:]) <= set(stored.embed_token_ids) or len(token_ids) >= length:
        raise MediaError(
            f"this model writes down one sound while it hears it, and takes no text beside: got {len(items)} sounds in "
            f"a prompt of {len(token_ids)} tokens; send it to /v1/audio/transcriptions",
            code="unsupported_media",
        )
    return PromptMedia(spans=(MediaSpan(item=stored.item, start=0, length=length, embeds=((0, length),)),))


def _mismatch(items: Sequence[StoredItem], token_ids: Sequence[int]) -> MediaError:
    ids = {token_id for stored in items for token_id in stored.embed_token_ids}
    num_embeds = sum(stored.item.num_embeds for stored in items)
    num_places = sum(token_id in ids for token_id in token_ids)
    return MediaError(f"the prompt has {num_places} tokens for media, which take {num_embeds} embeddings")


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges [from, to)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return tuple(runs)
