"""Wrong requests, hostile templates and broken folders: a typed error that names what is wrong."""

from __future__ import annotations

import json
import time

import pytest

from quire_interfaces import CheckpointError, ConfigError, ContextLengthError, RequestError
from quire_renderers import ChatRenderer, RendererConfig, load_tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder("byte_level"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(
        tokenizer, "{{ messages[0].content }}", RendererConfig(max_prompt_chars=20_000, template_timeout_s=0.3)
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([USER, "hi"], "messages[1]"),
        ([USER, None], "messages[1]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "hi"}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [4]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "hi", "odd": object()}], "messages[0].odd"),
    ],
)
def test_bad_messages(renderer, messages, param):
    with pytest.raises(RequestError) as caught:
        renderer.render_chat(messages)
    assert caught.value.param == param


def test_images_are_refused_in_words(renderer):
    with pytest.raises(RequestError, match="this model takes text only"):
        renderer.render_chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_deep_nesting_is_refused(renderer):
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="levels deep"):
        renderer.render_chat([{**USER, "extra": deep}])


@pytest.mark.parametrize("tools", ["x", {"a": 1}, ["x"], [None]])
def test_bad_tools(renderer, tools):
    with pytest.raises(RequestError, match="tools"):
        renderer.render_chat([USER], tools=tools)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "_x", "a b", ""]
)
def test_reserved_template_kwargs(renderer, name):
    with pytest.raises(RequestError) as caught:
        renderer.render_chat([USER], chat_template_kwargs={name: 1})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_template_kwargs_of_wrong_kind(renderer):
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        renderer.render_chat([USER], chat_template_kwargs=[1])
    with pytest.raises(RequestError, match="must be JSON"):
        renderer.render_chat([USER], chat_template_kwargs={"f": print})


def test_continue_final_message_contradictions(renderer):
    with pytest.raises(RequestError, match="cannot both be true"):
        renderer.render_chat([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="to continue"):
        renderer.render_chat([{"role": "assistant"}], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(RequestError, match="cannot be continued"):
        renderer.render_chat(
            [USER], continue_final_message=True, add_generation_prompt=False, chat_template="{{ 'fixed' }}"
        )


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[5].content + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ unknown.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
        "{{ self.__init__ }}{{ (self|attr('__init__')).x }}",
        "{% include 'x' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).join(['b'] * 9999) }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% for i in range(9999) %}{{ 'aaaaaaaaaa' }}{% endfor %}",
        "{{ lipsum(n=9999) }}",
        "(" * 3 + "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    ],
)
def test_bad_and_hostile_templates(renderer, template):
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        renderer.render_chat([USER], chat_template=template)
    assert caught.value.param in ("messages", "chat_template")
    assert time.process_time() - start < 10


def test_a_template_says_why_it_refuses(renderer):
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        renderer.render_chat([USER], chat_template="{{ raise_exception('roles must alternate') }}")
    assert caught.value.code == "chat_template_refused"


def test_a_huge_template_is_refused(renderer):
    with pytest.raises(RequestError, match="at most"):
        renderer.render_chat([USER], chat_template="x" * 300_000)


def test_no_template(tokenizer):
    renderer = ChatRenderer(tokenizer)
    assert not renderer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        renderer.render_chat([USER])


@pytest.mark.parametrize(
    "prompt", [[], [-1], [10**9], [1.0], [True], ["1"], [None], [[1]], b"abc", 7, None, {"a": 1}, [1, 2, 2**70]]
)
def test_bad_prompts(renderer, prompt):
    with pytest.raises(RequestError, match="prompt") as caught:
        renderer.render_prompt(prompt)
    assert caught.value.param.startswith("prompt")


def test_prompt_ids_go_up_to_the_models_vocabulary(tokenizer):
    renderer = ChatRenderer(tokenizer, vocab_size=tokenizer.vocab_size + 10)
    assert renderer.render_prompt([tokenizer.vocab_size + 9]).token_ids == [tokenizer.vocab_size + 9]
    with pytest.raises(RequestError, match=r"prompt\[1\]"):
        renderer.render_prompt([0, tokenizer.vocab_size + 10])


def test_text_limits(renderer):
    with pytest.raises(ContextLengthError, match="20000"):
        renderer.render_prompt("a" * 20_001)
    with pytest.raises(RequestError, match="20000"):
        renderer.render_chat([{"role": "user", "content": "a" * 20_001}])


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "sentencepiece_bpe"])
def test_half_a_surrogate_pair_is_refused(tokenizer_folder, kind):
    renderer = ChatRenderer(load_tokenizer(tokenizer_folder(kind)), "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="surrogate"):
        renderer.render_prompt("a\ud800b")
    with pytest.raises(RequestError, match="surrogate"):
        renderer.render_chat([{"role": "user", "content": "\udfff"}])


def test_bad_settings():
    for wrong in ({"segment_cache_bytes": -1}, {"max_prompt_chars": 0}, {"template_timeout_s": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RendererConfig(**wrong)


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.model", "no model"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "\x00"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
    ],
)
def test_broken_files(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name.split(".")[0]):
        load_tokenizer(tmp_path)


def test_eos_ids_come_from_generation_config_then_config(tmp_path, tokenizer_folder):
    source = tokenizer_folder("byte_level")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    own = load_tokenizer(tmp_path).eos_token_ids
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_tokenizer(tmp_path).eos_token_ids == (5, *own)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, own[0]]}))
    assert load_tokenizer(tmp_path).eos_token_ids == (7, 8, *own)


def test_contents_that_are_too_long_are_refused_before_the_template_sees_them(renderer):
    halves = [{"role": "user", "content": "x" * 10_000}, {"role": "user", "content": "y" * 10_001}]
    with pytest.raises(ContextLengthError, match="messages has 20001 characters, the limit is 20000") as caught:
        renderer.render_chat(halves, chat_template="{{ raise_exception('rendered') }}")
    assert caught.value.param == "messages"
    assert renderer.render_chat(halves[:1]).text == "x" * 10_000


@pytest.mark.parametrize(("num", "is_parsed"), [(19_990, True), (20_001, False)])
def test_arguments_of_very_many_parts_stay_text(tokenizer, num, is_parsed):
    arguments = '{"a": [' + "1," * num + "1]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[1].tool_calls[0].function.arguments is mapping }}"
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    assert ChatRenderer(tokenizer, template).render_chat(messages).text == str(is_parsed)
