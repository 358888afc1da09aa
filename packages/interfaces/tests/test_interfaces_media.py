"""Spans of media: which tokens take embeddings, and which embeddings a part of the prompt takes."""

from __future__ import annotations

import random

from quire_interfaces import MediaItem, MediaSpan, Modality, PromptMedia


def make_span(start: int, embeds: tuple[tuple[int, int], ...], length: int) -> MediaSpan:
    num_embeds = sum(end - begin for begin, end in embeds)
    item = MediaItem(modality=Modality.IMAGE, key="k", num_embeds=num_embeds, path="", features=())
    return MediaSpan(item=item, start=start, length=length, embeds=embeds)


def test_parts_of_a_span_take_its_embeddings_in_order() -> None:
    draw = random.Random(0)
    for _ in range(300):
        start, length = draw.randrange(20), draw.randrange(1, 30)
        takes = [draw.random() < 0.6 for _ in range(length)]
        embeds, place = [], 0
        while place < length:
            end = place
            while end < length and takes[end]:
                end += 1
            if end > place:
                embeds.append((place, end))
            place = end + 1
        span = make_span(start, tuple(embeds), length)
        tokens = [start + place for place in range(length) if takes[place]]
        assert span.tokens_between(0, 100) == tokens
        cuts = sorted(draw.sample(range(60), 3))
        for first, last in zip([0, *cuts], [*cuts, 100], strict=True):
            wanted = [token for token in tokens if first <= token < last]
            assert span.tokens_between(first, last) == wanted
            begin, end = span.embeds_between(first, last)
            assert tokens[begin:end] == wanted


def test_keys_of_a_prompt_name_the_tokens_they_stand_for() -> None:
    media = PromptMedia(spans=(make_span(3, ((1, 4),), 5), make_span(9, ((0, 2),), 2)))
    assert media.extra_keys == ((3, 8, "k"), (9, 11, "k"))
