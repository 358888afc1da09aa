"""A quoted pattern matches the JSON spelling of exactly the texts that the pattern itself matches."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import StructuredOutputsParams
from quire_structured_output.finite_patterns import finite_language
from quire_testkit.conformance.grammar_backend import EOS, _encode

CHARACTERS = 'ab0_ "\\\n\t/é-]^'
ATOMS = (
    "a",
    "b",
    "0",
    "_",
    " ",
    '"',
    r"\\",
    r"\n",
    r"\t",
    "/",
    "é",
    r"\-",
    ".",
    r"\w",
    r"\d",
    r"\s",
    "[ab]",
    '["0]',
    "[^a]",
)

literal = st.sampled_from(ATOMS)
pattern = st.recursive(
    literal,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(("?", "*", "+", "{1,2}"))).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=4,
)
text = st.text(CHARACTERS, max_size=4)


def spelled(content: str) -> str:
    """As JSON writes the text."""
    return json.dumps(content, ensure_ascii=False)


@settings(deadline=None, max_examples=60)
@given(pattern=pattern, contents=st.lists(text, min_size=8, max_size=8))
def test_texts_are_matched_in_their_json_spelling(backend, pattern, contents):
    tag = {"format": {"type": "json_string", "content": {"type": "regex", "pattern": pattern}}}
    grammar = backend.compile(StructuredOutputsParams(structural_tag=json.dumps(tag)).spec())
    for content in contents:
        matcher = grammar.new_matcher()
        is_taken = all(matcher.accept(token_id) for token_id in _encode(spelled(content))) and matcher.accept(EOS[0])
        assert is_taken == (re.fullmatch(pattern, content) is not None), content


@settings(deadline=None)
@given(words=st.lists(st.text("abc.*\\", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
def test_a_choice_of_words_is_a_finite_language(words):
    assert finite_language(f"^(?:{'|'.join(map(re.escape, words))})$", 64) is not None
    assert set(finite_language(f"^(?:{'|'.join(map(re.escape, words))})$", 64)) == set(words)


@pytest.mark.parametrize("endless", ["a*", "^a+$", "^(?:ab)*$"])
def test_repetitions_without_bound_are_no_finite_language(endless):
    assert finite_language(endless, 64) is None
