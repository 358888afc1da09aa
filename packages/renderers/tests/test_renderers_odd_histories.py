"""What a model or a client once got wrong does not make a conversation impossible."""

from __future__ import annotations

import pytest

from quire_interfaces import RequestError
from quire_renderers import ChatRenderer, load_tokenizer

STRICT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def byte_level(tokenizer_folder):
    return load_tokenizer(tokenizer_folder("byte_level"))


@pytest.fixture(scope="module")
def renderer(byte_level):
    return ChatRenderer(byte_level, STRICT)


def history(arguments, **more):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', "<f a=1>"),
        ("", "<f>"),
        ('{"a": ', '<f arguments={"a": >'),
        ("[1]", "<f arguments=[1]>"),
        ("null", "<f arguments=null>"),
        ('{"a": NaN}', '<f arguments={"a": NaN}>'),
        ('{"a": 1e999}', '<f arguments={"a": 1e999}>'),
        (r'{"a": "\ud83d\ude00 \ud83d", "\uDC00": 1}', "<f a=😀 \ufffd \ufffd=1>"),
    ],
)
def test_malformed_arguments_go_through_a_template_that_takes_objects_only(renderer, arguments, shown):
    assert shown in renderer.render_chat(history(arguments), add_generation_prompt=False).text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_content_go_through_a_template_that_wants_content(renderer, content):
    text = renderer.render_chat(history("{}", **content), add_generation_prompt=False).text
    assert "<|im_start|>assistant\n<f>" in text


def test_a_template_s_own_refusal_stays_one(byte_level):
    renderer = ChatRenderer(byte_level, "{{ raise_exception('no') }}")
    with pytest.raises(RequestError, match="no"):
        renderer.render_chat(history("not json"), add_generation_prompt=False)


def test_developer_is_system_unless_the_template_knows_it(byte_level):
    messages = [{"role": "developer", "content": "Be short."}]
    plain = ChatRenderer(byte_level, "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
    assert plain.render_chat(messages).text == "system:Be short."
    knows = ChatRenderer(byte_level, "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{# developer #}")
    assert knows.render_chat(messages).text == "developer:Be short."


def test_reasoning_is_what_templates_call_reasoning_content(byte_level):
    renderer = ChatRenderer(byte_level, "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}")
    message = {"role": "assistant", "content": "4", "reasoning": "2 + 2", "tool_calls": []}
    assert renderer.render_chat([message], add_generation_prompt=False).text == "[2 + 2]4"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
TEXT = {"type": "text", "text": "look"}


@pytest.mark.parametrize(("part", "name"), [(IMAGE, "image"), (SOUND, "audio"), ({"type": "file"}, "file")])
def test_what_a_text_model_cannot_read_is_named(renderer, part, name):
    line = f"[{name} left out: this model reads text only]"
    told = renderer.render_chat(
        [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": [part, TEXT]},
            {"role": "tool", "tool_call_id": "c", "content": [TEXT, part, TEXT]},
            {"role": "user", "content": [TEXT, part]},
        ]
    ).text
    for expected in (
        f"user\n{line}<",
        f"assistant\n{line}\nlook<",
        f"tool\nlook\n{line}\nlook<",
        f"user\nlook\n{line}<",
    ):
        assert f"<|im_start|>{expected}|im_end|>" in told
    assert line in renderer.render_chat([{"role": "user", "content": "a"}, {"role": "tool", "content": [part]}]).text
    with pytest.raises(RequestError, match=r"messages\[1\].content\[0\] is of type") as caught:
        renderer.render_chat([{"role": "user", "content": "a"}, {"role": "user", "content": [part]}])
    assert caught.value.code == "unsupported_content_type"
