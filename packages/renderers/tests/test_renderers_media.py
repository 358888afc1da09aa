"""Media in conversations: where their placeholders go, and that nobody else can write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire_interfaces import PromptMedia, RequestError
from quire_renderers import ChatRenderer, load_tokenizer

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>{% endfor %}"
LISTS = (
    HEAD + "{% for p in m.content %}{% if p.type == 'image' %}<think>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}" + TAIL
)
BOTH = LISTS.replace("{% for p in", "{% if m.content is string %}{{ m.content }}{% else %}{% for p in").replace(
    "{% endfor %}" + TAIL, "{% endfor %}{% endif %}" + TAIL
)
TEXTS = HEAD + "{{ m.content }}" + TAIL
TRIMMED = HEAD + "{{ m.content | trim }}" + TAIL
TOKEN = "<think>"
"""An added token of the tokenizer that is not special; the placeholder of images here."""


class Items:
    """Two tokens for each image; what `quire_interfaces.PreparedMedia` asks for."""

    def __init__(self, placeholders: dict[str, str]) -> None:
        self.placeholders = placeholders
        self.has_special_tokens = False
        self.text, self.token_ids = "", list[int]()

    def expand(self, text: str) -> str:
        self.text = text
        return text.replace(TOKEN, TOKEN * 2)

    def place(self, token_ids: Sequence[int]) -> PromptMedia:
        self.token_ids = list(token_ids)
        return PromptMedia(spans=())


@pytest.fixture(scope="module")
def byte_level(tokenizer_folder: Any) -> Any:
    return load_tokenizer(tokenizer_folder("byte_level"))


@pytest.fixture
def make(byte_level: Any) -> Any:
    def renderer(template: str) -> ChatRenderer:
        return ChatRenderer(byte_level, template, placeholders={"image": TOKEN})

    return renderer


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


@pytest.mark.parametrize("template", [LISTS, BOTH])
def test_a_template_that_reads_lists_writes_the_placeholder(make: Any, template: str) -> None:
    items = Items({"image": TOKEN})
    prompt = make(template).render_chat(user("see ", IMAGE, " and ", IMAGE), media=items)
    assert items.text == f"<|im_start|>user\nsee {TOKEN} and {TOKEN}<|im_end|>"
    assert items.token_ids == prompt.token_ids
    assert prompt.media is not None
    assert prompt.text == items.text.replace(TOKEN, TOKEN * 2)


@pytest.mark.parametrize("template", [TEXTS, TRIMMED])
def test_one_that_reads_texts_gets_it_in_the_text(make: Any, template: str) -> None:
    items = Items({"image": TOKEN})
    make(template).render_chat(user("see", IMAGE, "and", IMAGE), media=items)
    assert items.text == f"<|im_start|>user\nsee\n{TOKEN}\nand\n{TOKEN}<|im_end|>"


def test_one_that_reads_lists_alone_loses_no_text(make: Any) -> None:
    prompt = make(LISTS).render_chat([{"role": "user", "content": "words"}])
    assert prompt.text == "<|im_start|>user\nwords<|im_end|>"
    system = make(LISTS).render_chat([{"role": "system", "content": "rules"}, {"role": "user", "content": "words"}])
    assert "rules" in system.text
    assert "words" in system.text


@pytest.mark.parametrize("template", [LISTS, BOTH, TEXTS])
def test_a_placeholder_in_a_text_is_text(make: Any, byte_level: Any, template: str) -> None:
    items = Items({"image": TOKEN})
    prompt = make(template).render_chat(user(f"a {TOKEN} b", IMAGE), media=items)
    (token_id,) = byte_level.encode(TOKEN, add_special_tokens=False)
    assert prompt.token_ids.count(token_id) == 2
    assert prompt.text.count(TOKEN) == 3


def test_a_modality_that_the_template_does_not_write_stands_in_its_text(byte_level: Any) -> None:
    placeholders = {"image": TOKEN, "video": "</think>"}
    items = Items(placeholders)
    renderer = ChatRenderer(byte_level, LISTS, placeholders=placeholders)
    renderer.render_chat(user("wood", {"type": "video_url", "video_url": {"url": "data:,"}}, IMAGE), media=items)
    assert items.text == f"<|im_start|>user\nwood</think>{TOKEN}<|im_end|>"


def test_what_a_model_does_not_take_is_a_line_or_refused(make: Any) -> None:
    items = Items({"image": TOKEN})
    file = {"type": "file", "file": {}}
    later = [*user("wood", file), {"role": "assistant", "content": "b"}, *user("c")]
    make(TEXTS).render_chat(later, media=items)
    assert "[file left out: this model reads text, image only]" in items.text
    with pytest.raises(RequestError, match="takes text and image only") as error:
        make(TEXTS).render_chat(user(file), media=items)
    assert error.value.param == "messages[0].content[0]"
    with pytest.raises(RequestError):
        make(TEXTS).render_chat(user("wood", file, IMAGE), media=items)


def test_messages_of_one_role_in_a_row_keep_their_media(make: Any) -> None:
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}{% endfor %}"
    )
    items = Items({"image": TOKEN})
    make(strict + LISTS).render_chat([*user("wood", IMAGE), {"role": "user", "content": "stone"}], media=items)
    assert items.text == f"<|im_start|>user\nwood{TOKEN}\n\nstone<|im_end|>"


def test_media_that_bring_special_tokens_get_no_others(tokenizer_folder: Any) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("byte_fallback_metaspace"))
    renderer = ChatRenderer(tokenizer, TEXTS, placeholders={"image": TOKEN})
    items, rendered = Items({"image": TOKEN}), []
    for items.has_special_tokens in (False, True):
        rendered.append(renderer.render_prompt("wood", media=items).token_ids)
    bare = tokenizer.encode("wood", add_special_tokens=False)
    assert rendered[1] == bare
    assert rendered[0] == tokenizer.encode("wood") != bare
