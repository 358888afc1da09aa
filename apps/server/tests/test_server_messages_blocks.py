"""What the blocks of Anthropic's Messages API mean as a conversation."""

from __future__ import annotations

import pytest

from quire_interfaces import RequestError
from quire_server.messages_request import MessagesRequest

MARK = {"cache_control": {"type": "ephemeral"}}


def conversation(*messages, **fields):
    body = {"max_tokens": 1, "messages": list(messages), **fields}
    return MessagesRequest.model_validate(body).chat_messages()


def user(*blocks):
    return {
        "role": "user",
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks],
    }


@pytest.mark.parametrize("as_result", [False, True])
@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"source": {"type": "text", "media_type": "text/plain", "data": "Grass is green."}, "title": "Colours"},
            "Colours\nGrass is green.\n\n",
        ),
        (
            {"source": {"type": "content", "content": "Sky."}, "context": "from a book", "title": None},
            "from a book\nSky.\n\n",
        ),
        (
            {"source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}},
            "ab\n\n",
        ),
        (
            {
                "type": "search_result",
                "title": "Sky",
                "source": "book.txt",
                "content": [{"type": "text", "text": "Blue."}],
            },
            "Sky\nbook.txt\nBlue.\n\n",
        ),
    ],
)
def test_documents_and_search_results_are_read(block, text, as_result):
    block = {"type": "document", "citations": {"enabled": True}, **block, **MARK}
    if as_result:
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block, {"type": "text", "text": "?"}], **MARK}
        assert conversation(user(block)) == [{"role": "tool", "tool_call_id": "t", "content": text + "?"}]
    else:
        assert conversation(user(block, "What colour?")) == [{"role": "user", "content": text + "What colour?"}]


def test_failed_tools_say_so():
    def result(**block):
        (message,) = conversation(user({"type": "tool_result", "tool_use_id": "t", **block}))
        return message["content"]

    assert result(is_error=True) == result(is_error=True, content=[]) == "The tool failed and said nothing."
    assert result(is_error=True, content="No such city") == "No such city"
    assert result() == result(content=None) == ""


def test_what_only_its_maker_can_read_is_taken_and_left_out():
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "hm", "signature": ""}]
    blocks += [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "quire"}}]
    blocks += [{"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"encrypted_content": "x"}]}]
    use = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    function = {"name": "now", "arguments": {}}
    assert conversation({"role": "assistant", "content": [*blocks, {"type": "text", "text": "I look."}, use]}) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
        }
    ]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
UNREAD = [
    (IMAGE, "image"),
    (PDF, "PDF document"),
    ({**PDF, "title": "Report"}, "PDF document 'Report'"),
    ({"type": "document", "source": {"type": "url", "url": "http://x/y.pdf"}}, "document"),
    ({"type": "document", "source": {"type": "file", "file_id": "file_1"}}, "document"),
    ({"type": "container_upload", "file_id": "file_2"}, "container_upload 'file_2'"),
    ({"type": "hologram", "shape": {}}, "hologram"),
]


@pytest.mark.parametrize(("block", "name"), UNREAD)
def test_what_no_text_model_reads_is_a_line_that_names_it(block, name):
    line = f"[{name} left out: this model reads text only]"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, block]}
    assert conversation(user(result))[0]["content"] == f"a\n{line}"
    assert conversation(user({**result, "content": [block]}), user("b"))[0]["content"] == line
    assert conversation(user("a", block, "b"))[0]["content"] == f"a\n{line}\nb"
    old = [user(block), {"role": "assistant", "content": [block, {"type": "text", "text": "c"}]}, user("d")]
    assert [each["content"] for each in conversation(*old)] == [line, f"{line}\nc", "d"]
    with pytest.raises(RequestError, match=rf"messages\[2\].content\[1\] is of type '{block['type']}'"):
        conversation(*old[:2], user("  ", block, block))


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "redacted_thinking", "tool_use"])
def test_users_say_none_of_it(kind):
    with pytest.raises(RequestError, match=kind):
        conversation(user({"type": kind}))
    assert conversation(user({"type": kind}, "a"))[0]["content"].startswith(f"[{kind} left out")


@pytest.mark.parametrize(
    "kind", ["code_execution_tool_result", "mcp_tool_result", "web_fetch_tool_result", "some_future_tool_result"]
)
def test_results_of_the_server_s_own_tools_are_passed_over(kind):
    blocks = [{"type": kind, "tool_use_id": "s", "content": {"type": "x"}}, {"type": "text", "text": "Found."}]
    assert conversation({"role": "assistant", "content": blocks}) == [{"role": "assistant", "content": "Found."}]


def test_tools_that_were_found_are_named():
    found = [{"type": "tool_reference", "tool_name": name} for name in ("get_weather", "now")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    assert conversation(user(result))[0]["content"] == "get_weather\nnow\n"


def test_a_summary_takes_the_place_of_what_was_before_it():
    before = [user("a"), {"role": "assistant", "content": "b"}, user(IMAGE)]
    summary = {"type": "compaction", "content": "They spoke of a and b."}
    told = conversation(
        *before,
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, summary, {"type": "text", "text": "d"}]},
        user("e"),
        system="S",
    )
    assert [(each["role"], each["content"]) for each in told] == [
        ("system", "S"), ("user", "What was said before, in short:\n\nThey spoke of a and b."), ("assistant", "d"),
        ("user", "e"),
    ]  # fmt: skip
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}, {"type": "text", "text": "d"}]}
    assert [each["content"] for each in conversation(*before[:2], failed, user("e"))] == ["a", "b\n\nd", "e"]


def test_consecutive_messages_of_one_role_are_one_turn():
    use = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    told = conversation(
        {"role": "user", "content": "a"},
        user("b", "c"),
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [use]},
        {"role": "assistant", "content": [{**use, "id": "u"}, {"type": "thinking", "thinking": "hm"}]},
        user({"type": "tool_result", "tool_use_id": "t", "content": "1"}),
        user({"type": "tool_result", "tool_use_id": "u", "content": "2"}, "e"),
        {"role": "user", "content": "f"},
    )
    assert [(each["role"], each["content"]) for each in told] == [
        ("user", "a\n\nbc"), ("assistant", "d"), ("tool", "1"), ("tool", "2"), ("user", "e\n\nf"),
    ]  # fmt: skip
    assert [call["id"] for call in told[1]["tool_calls"]] == ["t", "u"]
    assert told[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize("as_text", [False, True])
def test_what_changes_with_each_request_is_left_out_of_the_system_prompt(as_text):
    """Claude Code begins it with a line that no two requests share; nothing behind it could be found in the cache."""
    line = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=5ab3f;"
    about = "x-anthropic-billing-header is a word that may be spoken of."
    texts = [line, "You help.", about]
    system = "\n".join(texts) if as_text else [{"type": "text", "text": text, **MARK} for text in texts]
    (first, _) = conversation({"role": "user", "content": line}, system=system)
    assert first == {"role": "system", "content": ("\n" if as_text else "\n\n").join(texts[1:])}
    assert [
        each["role"]
        for each in conversation({"role": "user", "content": line}, system=[{"type": "text", "text": line}])
    ] == ["user"]


def test_it_is_left_out_of_later_system_messages_too():
    line = "x-anthropic-billing-header: cc_version=2.1.0; cch=5ab3f;"
    blocks = [{"type": "text", "text": text} for text in (line, "Part one. ", "Part two.")]
    told = conversation(
        {"role": "user", "content": "a"},
        {"role": "system", "content": line},
        {"role": "system", "content": blocks[:1]},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": blocks},
        {"role": "system", "content": f"{line}\nBe brief."},
    )
    assert [(each["role"], each["content"]) for each in told] == [
        ("user", "a"), ("assistant", "b"), ("system", "Part one. Part two."), ("system", "Be brief."),
    ]  # fmt: skip


def test_the_texts_of_a_tool_s_result_stand_on_lines_of_their_own():
    texts = [{"type": "text", "text": text} for text in ("first", "second\n", "third")]
    (message,) = conversation(user({"type": "tool_result", "tool_use_id": "t", "content": texts}))
    assert message["content"] == "first\nsecond\nthird"


def test_effort_and_thinking_are_told_to_templates():
    def kwargs(**fields):
        return MessagesRequest.model_validate({"max_tokens": 1, "messages": [{}], **fields}).template_kwargs()

    assert kwargs() is None
    assert kwargs(output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    on = {"enable_thinking": True, "thinking": True}
    for kind in ("enabled", "adaptive", "between_tools"):
        assert kwargs(thinking={"type": kind}) == on
    off = {"enable_thinking": False, "thinking": False}
    assert kwargs(thinking={"type": "disabled"}, output_config={"effort": "high"}) == off
    assert kwargs(thinking={"type": "adaptive"}, output_config={"effort": "high"}) == {**on, "reasoning_effort": "high"}
    assert kwargs(thinking={"type": "disabled"}, chat_template_kwargs={"x": 1}) == {
        "enable_thinking": False, "thinking": False, "x": 1,
    }  # fmt: skip
