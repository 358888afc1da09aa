"""Conversations that a template would refuse are put into the order of roles that it takes; others stay as they are."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from quire_interfaces import RequestError
from quire_renderers import ChatRenderer, RendererConfig, load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}{% endfor %}" + CHATML
)
SYSTEM_DROPPED = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(turn=0) %}"
    "{% for m in rest if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ (head ~ '\n\n' if head and loop.last else '') ~ m.content }}"
    "[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs!') }}{% endif %}{{ call.function.name }}"
    "#{{ call.id }}"
    "{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}{{ raise_exception('Only user') }}"
    "{% endif %}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endfor %}" + CHATML
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder("byte_level"))


def say(*turns):
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": names[turn[0]], "content": turn[1:]} for turn in turns]


def calls(*names, content=""):
    each = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": each}


def result(name, text):
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": text}


def turns(tokenizer, template, messages, **more):
    """(role, text) of each turn of a ChatML template, the head of the answer left out."""
    rendered = ChatRenderer(tokenizer, template).render_chat(messages, **more)
    assert rendered.token_ids == tokenizer.encode(rendered.text, add_special_tokens=False)
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", rendered.text, re.DOTALL)


LATER = [
    (["sa", "sb", "uc"], [("system", "a\n\nb"), ("user", "c")]),
    (["sa", "db", "uc"], [("system", "a\n\nb"), ("user", "c")]),
    (["da", "db", "uc"], [("system", "a\n\nb"), ("user", "c")]),
    (["ua", "sb"], [("user", "a"), ("user", "b")]),
    (["sa", "ub", "ac", "sd", "ue"],
     [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"), ("user", "e")]),
    (["sa", "ub", "uc"], [("system", "a"), ("user", "b"), ("user", "c")]),
]  # fmt: skip


@pytest.mark.parametrize("template", [SYSTEM_FIRST, SYSTEM_DROPPED])
@pytest.mark.parametrize(("given", "expected"), LATER)
def test_the_system_message_stands_first_and_later_ones_where_they_were(tokenizer, template, given, expected):
    assert turns(tokenizer, template, say(*given)) == expected


@pytest.mark.parametrize(("given", "_"), LATER)
def test_a_template_that_takes_them_gets_them_as_they_are(tokenizer, given, _):
    names = {"s": "system", "d": "system", "u": "user", "a": "assistant"}
    assert turns(tokenizer, CHATML, say(*given)) == [(names[each[0]], each[1:]) for each in given]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["ua", "ub"], [("user", "a\n\nb")]),
        (["sa", "ub"], [("user", "a\n\nb")]),
        (["sa"], [("user", "a")]),
        (["ua", "ab", "ac", "ud"], [("user", "a"), ("model", "b\n\nc"), ("user", "d")]),
        (["ab", "uc"], [("user", ""), ("model", "b"), ("user", "c")]),
        (["sa", "ab", "uc"], [("user", "a"), ("model", "b"), ("user", "c")]),
        (["ua", "ab", "sc"], [("user", "a"), ("model", "b"), ("user", "c")]),
    ],
)
def test_roles_alternate_where_the_template_wants_it(tokenizer, given, expected):
    assert turns(tokenizer, GEMMA, say(*given)) == expected


def test_tools_are_text_where_the_template_knows_none(tokenizer):
    messages = [*say("ua"), calls("f", "g", content="I look."), result("f", "1"), result("g", "2"), *say("ub", "ac")]
    told = turns(tokenizer, GEMMA, messages)
    both = '{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"a": 1}}'
    assert told == [("user", "a"), ("model", f"I look.\n\n{both}"), ("user", "1\n\n2\n\nb"), ("model", "c")]


def test_a_user_who_speaks_after_a_tool_and_ids_of_another_form(tokenizer):
    messages = [*say("sS", "ua"), calls("f"), result("f", "1"), *say("ub", "uc")]
    text = ChatRenderer(tokenizer, MISTRAL).render_chat(messages).text
    assert re.fullmatch(
        r"\[INST\]a\[/INST\]\[TOOL_CALLS\]f#(\w{9})\[TOOL_RESULTS\]1\[/TOOL_RESULTS\]</s>\[INST\]S\n\nb\n\nc\[/INST\]",
        text,
    )
    short = [{**calls("f"), "tool_calls": [{**calls("f")["tool_calls"][0], "id": "a1b2c3d4e"}]}]
    kept = ChatRenderer(tokenizer, MISTRAL).render_chat(
        [*say("ua"), *short, {**result("f", "1"), "tool_call_id": "a1b2c3d4e"}]
    )
    assert "f#a1b2c3d4e" in kept.text


def test_calls_side_by_side_follow_each_other_where_the_template_takes_one(tokenizer):
    messages = [*say("ua"), calls("f", "g"), result("g", "2"), result("f", "1"), *say("ub")]
    assert turns(tokenizer, ONE_CALL, messages) == [
        ("user", "a"), ("assistant", "<f>"), ("tool", "1"), ("assistant", "<g>"), ("tool", "2"), ("user", "b"),
    ]  # fmt: skip
    assert len(turns(tokenizer, CHATML, messages)) == 5


def test_arguments_are_text_where_the_template_joins_them_to_text(tokenizer):
    messages = [*say("ua"), calls("f"), result("f", "1")]
    assert turns(tokenizer, TEXT_ARGUMENTS, messages)[1] == ("assistant", 'f{"a": 1}')


def random_conversation(chooser):
    """Messages of all roles in any order; the results of calls follow them, as every API wants it."""
    messages, words = [], (f"word{number}" for number in itertools.count())
    for place in range(chooser.randrange(1, 8)):
        kind = chooser.choice(["system", "developer", "user", "user", "assistant", "calls"])
        if kind != "calls":
            messages.append({"role": kind, "content": next(words)})
            continue
        names = [f"f{place}", f"g{place}"][: chooser.randrange(1, 3)]
        messages.append(calls(*names))
        messages += [result(name, next(words)) for name in names]
    return messages


@pytest.mark.parametrize("template", [CHATML, SYSTEM_FIRST, SYSTEM_DROPPED, GEMMA, MISTRAL, ONE_CALL, TEXT_ARGUMENTS])
def test_no_order_of_roles_is_refused_and_no_text_is_lost(tokenizer, template):
    renderer = ChatRenderer(tokenizer, template)
    for seed in range(150):
        messages = random_conversation(random.Random(seed))
        told = re.findall(r"word\d+", renderer.render_chat(messages).text)
        # One writes the system message into the last turn of the user, if that is the last of all.
        left_out = ("system", "developer") if template == MISTRAL else ()
        expected = [each["content"] for each in messages if each["content"] and each["role"] not in left_out]
        assert set(told) >= set(expected), messages
        if template not in (ONE_CALL, MISTRAL):  # results stand behind their calls
            assert told == expected


def test_the_tokens_of_an_earlier_turn_are_found_again(tokenizer):
    renderer = ChatRenderer(tokenizer, SYSTEM_FIRST)
    first = say("sa", "ub", "s<total_tokens>9 left</total_tokens>")
    before = renderer.render_chat(first, add_generation_prompt=False)
    longer = renderer.render_chat([*first, *say("ac", "ud", "s<total_tokens>8 left</total_tokens>")])
    assert longer.token_ids[: len(before.token_ids)] == before.token_ids
    assert longer.num_reused_tokens >= len(before.token_ids)


def test_what_a_template_takes_is_asked_once(tokenizer, monkeypatch):
    renderer = ChatRenderer(tokenizer, SYSTEM_FIRST)
    renderer.check_templates()
    runs = []
    sandbox = renderer._templates._sandbox
    monkeypatch.setattr(sandbox, "run", lambda *args, run=sandbox.run: runs.append(1) or run(*args))
    for _ in range(3):
        renderer.render_chat(say("sa", "sb", "uc", "sd"))
    assert len(runs) == 3


def test_a_template_that_refuses_everything_says_why(tokenizer):
    renderer = ChatRenderer(tokenizer, "{{ raise_exception('no') }}")
    with pytest.raises(RequestError, match="refuses these messages: no"):
        renderer.render_chat(say("sa", "sb", "uc"))


def test_an_endless_template_is_stopped_once_while_it_is_asked(tokenizer, monkeypatch):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = f"{{% if messages | length > 1 %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}"
    renderer = ChatRenderer(tokenizer, endless, RendererConfig(template_timeout_s=0.05))
    runs = []
    sandbox = renderer._templates._sandbox
    monkeypatch.setattr(sandbox, "run", lambda *args, run=sandbox.run: runs.append(1) or run(*args))
    renderer.check_templates()
    assert len(runs) == 3  # the first two probes, of contents and of roles, are one message each
    assert renderer.render_chat(say("sa")).text == "a"


def test_an_answer_is_continued_in_its_place(tokenizer):
    rendered = ChatRenderer(tokenizer, GEMMA).render_chat(
        say("sa", "ub", "ac", "ad"), add_generation_prompt=False, continue_final_message=True
    )
    assert rendered.text.endswith("<|im_start|>model\nc\n\nd")
