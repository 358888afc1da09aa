"""The part that is named as the large one holds more than half of what is around it, and nothing in it holds more."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import GrammarSpec
from quire_structured_output.blame import largest_part

names = st.sampled_from(("a", "b", "properties", "enum"))
values = st.recursive(
    st.one_of(st.text("xyz", max_size=30), st.integers(-99, 99), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=values, big=st.lists(st.sampled_from(("a", "b", 0)), min_size=1, max_size=4))
def test_the_path_leads_to_what_was_made_large(value, big):
    whole = "q" * 5000
    for key in reversed(big):
        whole = {key: whole, "other": value} if isinstance(key, str) else [whole, value]
    way = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in big)
    part = largest_part(GrammarSpec("json", json.dumps(whole)))
    assert part == f"${way} (5002 characters)"


@settings(deadline=None)
@given(texts=st.lists(st.text("ab", min_size=1, max_size=9), min_size=2, max_size=9))
def test_a_choice_names_a_text_only_where_it_is_most_of_it(texts):
    part = largest_part(GrammarSpec("choice", json.dumps(texts)))
    total, longest = sum(map(len, texts)), max(map(len, texts))
    assert part.startswith("the text" if longest > total / 2 else f"the list of {len(texts)} texts, {total}")


@settings(deadline=None)
@given(count=st.integers(100, 10**6), rest=st.text("abc", max_size=30))
def test_a_pattern_names_its_largest_repetition(count, rest):
    part = largest_part(GrammarSpec("regex", f"{rest}x{{3}}[ab]{{1,{count}}}{rest}"))
    assert part.startswith(f"the repetition {{1,{count}}} after ")


@settings(deadline=None)
@given(lines=st.lists(st.text("ab: ", min_size=1, max_size=50), min_size=1, max_size=8))
def test_a_grammar_names_its_longest_line(lines):
    part = largest_part(GrammarSpec("grammar", "\n".join(lines)))
    number, of, size = map(int, re.match(r"line (\d+) of (\d+), .* \((\d+) characters\)$", part).groups())
    assert of == len(lines)
    assert size == len(lines[number - 1]) == max(map(len, lines))


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_what_is_nested_too_deeply_is_named_as_that(kind):
    assert "nested too deeply" in largest_part(GrammarSpec(kind, "[" * 100_000))
