"""Grammars of texts inside JSON strings: they accept a text as JSON writes it if and only if they accept the text."""

from __future__ import annotations

import json

import pytest

from quire_interfaces import RequestError, StructuredOutputsParams

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
NESTED = r"""
start: "(" (start | WORD)* ")"  // calls "like" this
WORD: /[a-z"\\]+/ | "A".."C" | "x\ty"
%import common (WS_INLINE)
%ignore WS_INLINE
"""


def accepts(backend, content, text, encode) -> bool:
    tag = {"format": content}
    matcher = backend.compile(StructuredOutputsParams(structural_tag=tag).spec()).new_matcher()
    return all(matcher.accept(token_id) for token_id in encode(text)) and matcher.accept(0)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (
            {"type": "grammar", "grammar": PATCH},
            {
                '*** Begin Patch\n*** Add File: a "b" \\ c\n+x\t"y"\n+\n*** End Patch\n': True,
                "*** Begin Patch\n*** Delete File: a\n*** End Patch": True,
                "*** Begin Patch\n*** End Patch": False,
                "*** Begin Patch\n*** Add File: a\nx\n*** End Patch": False,
            },
        ),
        (
            {"type": "grammar", "grammar": NESTED},
            {'("\\a (b) C)': True, "(x\ty)": True, "(\t a)": True, "(D)": False, "(a": False, "()": True},
        ),
        (
            {"type": "grammar", "grammar": 'start: line LF "x"\nline: /a[^\\n]*/\n%import common.LF'},
            {"ab\nx": True, 'a"\nx': True, "a\n\nx": False, "b\nx": False},
        ),
        ({"type": "grammar", "grammar": 'start: "a\\nB"i'}, {"a\nb": True, "A\nB": True, "a b": False}),
        (
            {"type": "regex", "pattern": r"[^\n]*\n\"?\\\s[\"']\w{2,3}(?:é|/)"},
            {'a"b\\c\n"\\\t"xyé': True, "\n\\ 'abc/": True, "\n\n'abc/": False, "\n\\ 'a/": False},
        ),
        ({"type": "regex", "pattern": r"[\n\"]+[^\"a-y]"}, {'\n""z': True, '""\\': True, '"""': False, '"b': False}),
        ({"type": "regex", "pattern": r"[]\\]+\x41"}, {"]\\A": True, "[A": False}),
    ],
)
def test_a_text_in_a_json_string_follows_its_grammar(backend, encode, content, texts):
    for text, is_good in texts.items():
        assert accepts(backend, content, text, encode) is is_good, text
        written = json.dumps(text, ensure_ascii=False)
        assert accepts(backend, {"type": "json_string", "content": content}, written, encode) is is_good, written
    text = next(iter(texts))
    assert not accepts(backend, {"type": "json_string", "content": content}, text, encode)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"type": "json_schema"}, "format.content.type"),
        (5, "format.content.type"),
        ({"type": "grammar"}, "format.content.grammar"),
        ({"type": "regex", "pattern": 5}, "format.content.pattern"),
        ({"type": "grammar", "grammar": "start: %json {}"}, "%json"),
        ({"type": "grammar", "grammar": "start: missing"}, "missing"),
        ({"type": "regex", "pattern": "(a"}, "structural_tag"),
    ],
)
def test_what_is_wrong_is_named(backend, content, place):
    tag = {"format": {"type": "json_string", "content": content}}
    with pytest.raises(RequestError, match=place):
        backend.compile(StructuredOutputsParams(structural_tag=tag).spec())
