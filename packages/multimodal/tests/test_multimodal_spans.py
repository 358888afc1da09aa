"""Placeholders of the template become what items need; what users wrote stays text; tokens find their items."""

from __future__ import annotations

import random

import pytest

from quire_interfaces import MediaItem, Modality
from quire_multimodal import MediaError, StoredItem, expand_placeholders, find_spans
from quire_multimodal.spans import ITEM_NUMBER

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}


def stored(modality: Modality, num_embeds: int, token_id: int, text: str = "") -> StoredItem:
    media = MediaItem(modality=modality, key="", num_embeds=num_embeds, path="", features=())
    return StoredItem(media, text, (token_id,), {}, 0)


def image(number: int, num_embeds: int = 2) -> StoredItem:
    return stored(Modality.IMAGE, num_embeds, 7, f"[{number}:" + "<image>" * num_embeds + "]")


def test_items_of_each_modality_in_turn() -> None:
    video = stored(Modality.VIDEO, 1, 8, "(<image>)")
    text, items = expand_placeholders("a <image> b <video> c <image>", [image(1), image(2), video], PLACEHOLDERS)
    assert text == "a [1:<image><image>] b (<image>) c [2:<image><image>]"
    assert items == [image(1), video, image(2)]


def test_what_a_user_wrote_is_no_placeholder() -> None:
    text = "user: <image> template: <image>"
    ranges = [(6, 13)]
    assert expand_placeholders(text, [image(1)], PLACEHOLDERS, ranges)[0] == (
        "user: <image> template: [1:<image><image>]"
    )
    assert expand_placeholders(text, [], PLACEHOLDERS, [(0, 31)]) == (text, [])
    assert expand_placeholders(text, [], PLACEHOLDERS, [(7, 8), (25, 26)]) == (text, [])
    with pytest.raises(MediaError, match="1 placeholders for image and the request 2 items"):
        expand_placeholders(text, [image(1), image(2)], PLACEHOLDERS, ranges)


@pytest.mark.parametrize("num_items", [0, 2])
def test_more_or_fewer_items_than_placeholders(num_items: int) -> None:
    with pytest.raises(MediaError, match="1 placeholders for image"):
        expand_placeholders("<image>", [image(1)] * num_items, PLACEHOLDERS)


def test_longer_placeholders_win() -> None:
    text, _ = expand_placeholders("<image><image>s", [image(1)], {"image": "<image>", "audio": "<image>s"}, [(7, 15)])
    assert text == "[1:<image><image>]<image>s"


def test_spans_of_random_prompts() -> None:
    """Items with marks around and between their embeddings, some sharing a token, with text between."""
    for seed in range(200):
        chooser = random.Random(seed)
        ids, items, wanted = [], [], []
        for _ in range(chooser.randrange(1, 6)):
            ids += [chooser.randrange(10, 20) for _ in range(chooser.randrange(4))]
            token_id, places = chooser.choice((7, 8)), []
            for _ in range(chooser.randrange(1, 4)):
                ids.append(5)
                length = chooser.randrange(1, 4)
                places += range(len(ids), len(ids) + length)
                ids += [token_id] * length + [6]
            items.append(stored(Modality.IMAGE, len(places), token_id))
            wanted.append(places)
        ids += [chooser.randrange(10, 20) for _ in range(chooser.randrange(4))]
        spans = find_spans(items, ids)
        assert [span.tokens_between(0, len(ids)) for span in spans] == wanted
        assert [span.start for span in spans] == [places[0] for places in wanted]
        assert [span.end for span in spans] == [places[-1] + 1 for places in wanted]
        assert [span.item for span in spans] == [each.item for each in items]


@pytest.mark.parametrize(("ids", "count"), [([7, 7], 2), ([7, 7, 7, 7], 4), ([], 0)])
def test_tokens_that_do_not_match_the_items(ids: list[int], count: int) -> None:
    with pytest.raises(MediaError, match=f"{count} tokens for media, which take 3 embeddings"):
        find_spans([stored(Modality.IMAGE, 3, 7)], ids)


def test_items_are_numbered_by_modality_in_the_order_of_the_prompt() -> None:
    image = stored(Modality.IMAGE, 1, 7, f"(i{ITEM_NUMBER})")
    video = stored(Modality.VIDEO, 1, 8, f"(v{ITEM_NUMBER})")
    text, _ = expand_placeholders("<image> <video> <image>", [image, image, video], PLACEHOLDERS)
    assert text == "(i0) (v0) (i1)"
