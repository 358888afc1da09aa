"""Values between tags: end tags that are missing, and values that hold tags of their own, in all formats with tags."""

from __future__ import annotations

import itertools
import json

import pytest

from quire_renderers import ChatFormat, fold_events, merge_events

TEXT = {"type": "string"}
PARAMETERS = {"type": "object", "properties": {"town": TEXT, "state": TEXT, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "route", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ENDS = list(itertools.product([True, False], repeat=3))
# What stands before a call, before its name, behind it, before a value, behind it, behind the call, and behind all.
STYLES = {
    "qwen3_coder": (
        "<tool_call>\n", "<function=", ">\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n", "</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n", "<function=", ">\n", "<parameter={}>", "</parameter>\n", "</function>\n",
        "</seed:tool_call>",
    ),
    "glm45": ("", "<tool_call>", "\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>", ""),
    "minimax_m2": (
        "<minimax:tool_call>\n", '<invoke name="', '">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "deepseek_v32": (
        "<｜DSML｜function_calls>\n", '<｜DSML｜invoke name="', '">\n', '<｜DSML｜parameter name="{}" string="true">',
        "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n", "</｜DSML｜function_calls>",
    ),
    "step3": (
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>", '<steptml:invoke name="', '">',
        '<steptml:parameter name="{}">', "</steptml:parameter>", "</steptml:invoke>",
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
}  # fmt: skip


def call(style, name, parameters, *, value_end=True, call_end=True, close=True):
    """A call as a model writes it, perhaps without some of its ends."""
    before, before_name, behind_name, parameter, end, ends, closes = STYLES[style]
    values = "".join(parameter.format(key) + value + (end if value_end else "\n") for key, value in parameters.items())
    head = before + before_name + name + behind_name
    return head + values + (ends if call_end else "") + (closes if close else "")


def parse(style, text, *, stopped=True, tools=TOOLS):
    """(calls, text, whether all are complete), the same whole and letter by letter."""
    form = ChatFormat(tool_parser=style, reasoning_parser="none")
    whole, cut = form.parser(tools), form.parser(tools)
    events = merge_events([*whole.feed(text), *whole.finish(stopped=stopped)])
    pieces = [event for char in text for event in cut.feed(char)]
    assert merge_events([*pieces, *cut.finish(stopped=stopped)]) == events
    message = fold_events(events)
    calls = [
        (each.name, {key: str(value).strip() for key, value in json.loads(each.arguments).items()})
        for each in message.calls
    ]
    return calls, message.text, message.calls_are_complete


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("answer", ["", "\nThe answer.", "\n\nTwo\nlines with <b>tags</b>."])
@pytest.mark.parametrize(
    "parameters", [{"town": "Austin"}, {"town": "Austin", "state": "TX"}, {"days": "3", "town": "A\nB"}]
)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_missing_ends_swallow_nothing(style, answer, parameters, ends):
    value_end, call_end, close = ends
    if not any(ends):
        answer = ""  # nothing would tell the value from it
    text = call(style, "route", parameters, value_end=value_end, call_end=call_end, close=close)
    if style == "glm45" and not value_end and not call_end:
        return  # its calls have one end only
    calls, said, complete = parse(style, text + answer)
    assert calls == [("route", parameters)]
    assert said == answer.strip()
    assert complete == any(ends)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("between", ["", "Now the other.\n"])
def test_the_next_call_is_one_whatever_the_first_lacks(style, ends, between):
    value_end, call_end, close = ends
    first = call(style, "route", {"town": "Austin"}, value_end=value_end, call_end=call_end, close=close)
    second = call(style, "route", {"state": "TX"}) + "\n" + call(style, "now", {})
    calls, said, complete = parse(style, f"{first}\n{between}{second}")
    if between and not call_end and (not close or style == "glm45"):
        return  # the words belong to the first value as much as to the answer
    assert calls == [("route", {"town": "Austin"}), ("route", {"state": "TX"}), ("now", {})]
    assert said == between.strip()
    assert complete


@pytest.mark.parametrize("style", STYLES)
def test_the_newline_before_a_tag_is_no_part_of_the_value_that_it_ends(style):
    text = call(style, "route", {"town": "A\nB\n", "state": "TX"}, value_end=False)
    message = fold_events([*(parser := ChatFormat(tool_parser=style).parser(TOOLS)).feed(text), *parser.finish()])
    assert json.loads(message.calls[0].arguments) == {"town": "A\nB\n", "state": "TX"}
    text = call(style, "route", {"town": "A\nB\n", "state": "TX"})
    message = fold_events([*(parser := ChatFormat(tool_parser=style).parser(TOOLS)).feed(text), *parser.finish()])
    town = "A\nB" if style == "seed_oss" else "A\nB\n"  # a newline belongs to its tags
    assert json.loads(message.calls[0].arguments) == {"town": town, "state": "TX"}


@pytest.mark.parametrize("style", STYLES)
def test_an_end_on_a_line_of_its_own_is_likelier_than_one_in_a_text(style):
    end = STYLES[style][4].strip()
    text = call(style, "route", {"town": f"a {end} b\n"}, value_end=False) + f"{end}\nThe answer."
    text = text.replace("".join(STYLES[style][5:]), "", 1)
    assert parse(style, text) == ([("route", {"town": f"a {end} b"})], "The answer.", True)


def test_keys_without_their_end():
    text = "<tool_call>route\n<arg_key>town\n<arg_value>Austin</arg_value><arg_key>state<arg_value>TX</tool_call>"
    assert parse("glm45", text) == ([("route", {"town": "Austin", "state": "TX"})], "", True)


@pytest.mark.parametrize("style", STYLES)
def test_names_without_their_end(style):
    for parameters in ({"town": "Austin"}, {}):
        text = call(style, "route", parameters)
        behind_name = STYLES[style][2]
        cut = text.replace("route" + behind_name, "route\n", 1)
        assert parse(style, cut + "\nDone.") == ([("route", parameters)], "Done.", True)


def values(style):
    """Texts that a parameter may well have."""
    before, before_name, _, parameter, end, ends, closes = (each.strip() for each in STYLES[style])
    nested = call(style, "now", {}), call(style, "route", {"town": "Rome", "state": "IT"}), call(style, "f", {"x": "1"})
    for tag in (
        end,
        ends,
        closes.split("\n")[-1],
        before,
        before_name,
        parameter.format("x"),
        parameter.format("x") + "1" + end,
    ):
        if tag:
            yield f"a {tag} b"
            yield f"{tag} b\nc"
            yield f"<r>\n  {tag}\n</r>"
            yield f'print("{tag}"); print("{tag}")'
    if closes:
        yield f"{end}{ends} is how it ends"
    yield f"Ends: {end}, {ends}, {closes}. Begins: {before}, {before_name} and so on"
    for each in nested:
        yield f"So:\n{each}\nis a call."
        yield f"So: {each} is a call."
        yield f"{each}\n{each}"
    yield '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nis how others do it'
    yield "<think>hm</think>"
    yield '<config>\n<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n</config>'
    yield "if (a < b && c > d) { return '</'; } // <a"


@pytest.mark.parametrize("style", STYLES)
def test_values_may_hold_tags(style):
    for value in values(style):
        text = call(style, "route", {"town": value, "state": "TX"})
        assert parse(style, text) == ([("route", {"town": value, "state": "TX"})], "", True), value
        assert parse(style, text + "\nDone.") == ([("route", {"town": value, "state": "TX"})], "Done.", True), value
        text = call(style, "route", {"state": "TX", "town": value})
        assert parse(style, text + "\n" + call(style, "now", {}), stopped=False) == (
            [("route", {"state": "TX", "town": value}), ("now", {})],
            "",
            True,
        ), value


@pytest.mark.parametrize("style", STYLES)
def test_a_value_that_was_cut_short_is_never_taken_for_whole(style):
    ends = tuple(tag for part in STYLES[style][5:] for tag in part.split())
    for value in values(style):
        text = call(style, "route", {"town": value})
        for size in range(text.index(value) + len(value) % 3, len(text.rstrip()), 3):  # others in other values
            if text[:size].rstrip().endswith(ends):
                continue  # for all one can know, it is whole
            calls, _, complete = parse(style, text[:size], stopped=False)
            if complete:
                assert calls[0] == ("route", {"town": value.strip()}), text[:size]


def test_what_is_certain_is_given_out_at_once():
    parser = ChatFormat(tool_parser="qwen3_coder", reasoning_parser="none").parser(TOOLS)

    def given(text):
        return "".join(getattr(event, "json", "") for event in parser.feed(text))

    assert given("<tool_call>\n<function=route>\n<parameter=town>\nif a <") == '{"town": "if a '
    assert given(" b: </par") == "< b: "
    assert given("agraph> x") == "</paragraph> x"
    assert given(" </parameter> y") == " "
    assert given(" and more\n") == ""
    assert given("</parameter>\n</function>") == ""
    assert given("\n") == '</parameter> y and more"}'


def test_unknown_parameters_are_text_and_unknown_tools_take_any():
    text = call("qwen3_coder", "{}", {"town": "<parameter=x>\n1"})
    assert parse("qwen3_coder", text.format("route"))[0] == [("route", {"town": "<parameter=x>\n1"})]
    assert parse("qwen3_coder", text.format("other"))[0] == [("other", {"town": "", "x": "1"})]


@pytest.mark.parametrize(
    "text", ["</parameter>" + " " * 50_000, "<parameter=" * 5_000, "</parameter>\n</function> x " * 3_000]
)
def test_values_take_time_in_proportion(text):
    parser = ChatFormat(tool_parser="qwen3_coder", reasoning_parser="none").parser(TOOLS)
    parser.feed("<tool_call>\n<function=route>\n<parameter=town>\n")
    for start in range(0, len(text), 4):
        parser.feed(text[start : start + 4])
    parser.finish()
