"""Grammars of random schemas take their own outputs again, and refuse values that an independent validator refuses."""

from __future__ import annotations

import json
import random

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import StructuredOutputsParams
from quire_testkit.conformance.grammar_backend import EOS, TOKENS, _encode, walk
from quire_testkit.schemas import random_schema

LEAVES = (None, True, False, 0, -1, 1.5, 10**9, "", "a", "é", "2024-02-30", [], {}, [None], {"x": 1})


def places(value, path=()):
    """Paths of all parts of a JSON value, the whole first."""
    yield path
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


def mutated(value, rng):
    """The value with one part replaced, removed, or added to."""
    value = json.loads(json.dumps(value))
    *way, last = rng.choice([(), *places(value)]) or (None,)
    if last is None:
        return rng.choice(LEAVES)
    parent = value
    for key in way:
        parent = parent[key]
    kind, part = rng.randrange(4), parent[last]
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(part, dict):
        part[rng.choice(("x", "a", "name", ""))] = rng.choice(LEAVES)
    elif kind == 1 and isinstance(part, list):
        part.append(rng.choice((*part, *LEAVES)))
    else:
        parent[last] = rng.choice(LEAVES)
    return value


def accepts(grammar, text):
    matcher = grammar.new_matcher()
    return all(matcher.accept(token_id) for token_id in _encode(text)) and matcher.accept(EOS[0])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_outputs_are_taken_again_and_what_is_invalid_is_refused(backend, seed):
    schema, rng = random_schema(seed), random.Random(seed)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    grammar = backend.compile(StructuredOutputsParams(json=schema).spec())
    text = b"".join(TOKENS[i] for i in walk(grammar.new_matcher(), len(TOKENS), seed)).decode()
    assert accepts(grammar, text)
    value = json.loads(text)
    for _ in range(20):
        value_or_other = mutated(value, rng)
        if not validator.is_valid(value_or_other):
            assert not accepts(grammar, json.dumps(value_or_other)), (schema, value_or_other)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_no_beginning_of_an_output_is_the_whole_of_one_unless_it_is_valid(backend, seed):
    schema = random_schema(seed)
    validator = jsonschema.Draft202012Validator(schema)
    grammar = backend.compile(StructuredOutputsParams(json=schema).spec())
    token_ids = [each for each in walk(grammar.new_matcher(), len(TOKENS), seed) if each not in EOS]
    for end in random.Random(seed).sample(range(len(token_ids)), min(10, len(token_ids))):
        matcher, text = grammar.new_matcher(), b"".join(TOKENS[i] for i in token_ids[:end])
        assert all(matcher.accept(token_id) for token_id in token_ids[:end])
        if matcher.accept(EOS[0]):
            validator.validate(json.loads(text))
