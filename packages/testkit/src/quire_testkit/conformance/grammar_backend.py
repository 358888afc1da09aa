"""What every `GrammarBackend` must do, as tests to inherit.

    class TestMyBackend(GrammarBackendSuite):
        def make_backend(self, tokens, special_ids, eos_token_ids, encode): return MyBackend(...)

The suite brings a small vocabulary of its own: single bytes, some longer tokens, control tokens, two end tokens and
ids that are no tokens. Python's `re` and `json` judge what is generated.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire_interfaces import GrammarBackend, GrammarMatcher, GrammarSpec, RequestError, StructuredOutputsParams

__all__ = ["GrammarBackendSuite", "allowed_tokens", "walk"]

EOS = (0, 3)
SPECIAL = frozenset({0, 1, 3})
WORDS = (
    b"the", b"yes", b"no", b'{"', b'"}', b'":', b"[", b"], [", b", ", b"true", b"null", b"12", b"345", b"ab", b"abc",
    b"bc", b"ba", b"  ", b"\n  ", "é".encode(), "日本".encode(), "日本".encode()[:4], b"value", b"name", b'"name"',
    b'{"name":',
)  # fmt: skip
TOKENS = (b"<|end|>", b"<|start|>", b"", b"<|eot|>", *(bytes([byte]) for byte in range(256)), *WORDS, b"", b"")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "value": {"enum": ["yes", "no", 12, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "value", "tags"],
    "additionalProperties": False,
}
REGEXES = (r"[0-9]{3}-[a-c]{2,4}", r"(ab|a)(c|bcd)?", r"(yes|no)( the){0,3}", r"日本é?[^a-z]", r"x+y{1,2}z*", r"\.\*\\")
_MAX_TOKENS = 4000


_BY_FIRST_BYTE: dict[int, list[int]] = {}
"""Tokens of text by their first byte, the longest first."""
for _id in sorted(range(len(TOKENS)), key=lambda token_id: -len(TOKENS[token_id])):
    if TOKENS[_id] and _id not in SPECIAL:
        _BY_FIRST_BYTE.setdefault(TOKENS[_id][0], []).append(_id)


def _encode(text: str) -> list[int]:
    """Longest token first, from the left."""
    data = text.encode()
    token_ids: list[int] = []
    place = 0
    while place < len(data):
        best = next(i for i in _BY_FIRST_BYTE[data[place]] if data.startswith(TOKENS[i], place))
        token_ids.append(best)
        place += len(TOKENS[best])
    return token_ids


def allowed_tokens(matcher: GrammarMatcher, vocab_size: int) -> list[int]:
    """The tokens of the matcher's mask, in order. The buffer is poisoned before."""
    num_words = -(-vocab_size // 32)
    words = memoryview(bytearray(b"\xaa" * (4 * num_words))).cast("I")
    matcher.fill_bitmask(words)
    return [i for i in range(32 * num_words) if words[i // 32] >> (i % 32) & 1]


def walk(matcher: GrammarMatcher, vocab_size: int, seed: int) -> list[int]:
    """Random tokens of the masks up to an end token, which is left out. Ends are taken gladly, lest walks are long."""
    rng = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < _MAX_TOKENS:
        allowed = allowed_tokens(matcher, vocab_size)
        assert allowed, f"nothing may follow {token_ids}"
        ends = [i for i in allowed if i in EOS]
        token_id = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        assert matcher.accept(token_id)
        if matcher.is_terminated:
            return token_ids
        token_ids.append(token_id)
    raise AssertionError(f"no end within {_MAX_TOKENS} tokens")


def _overlap(a: bytes, b: bytes) -> bool:
    return a.startswith(b) or b.startswith(a)


class GrammarBackendSuite:
    """Tests of the `GrammarBackend` contract. Implement `make_backend`; override nothing else."""

    def make_backend(
        self,
        tokens: tuple[bytes, ...],
        special_ids: frozenset[int],
        eos_token_ids: tuple[int, ...],
        encode: Callable[[str], list[int]],
    ) -> GrammarBackend:
        """A backend for this vocabulary."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_backend")

    @pytest.fixture
    def backend(self) -> GrammarBackend:
        return self.make_backend(TOKENS, SPECIAL, EOS, _encode)

    def _text(self, token_ids: list[int]) -> str:
        assert all(TOKENS[i] and i not in SPECIAL for i in token_ids), "control tokens and holes are no text"
        return b"".join(TOKENS[i] for i in token_ids).decode()

    def _starts(self, backend: GrammarBackend) -> list[GrammarMatcher]:
        specs = [GrammarSpec("regex", pattern) for pattern in REGEXES]
        specs.append(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True).spec())
        specs.append(StructuredOutputsParams(choice=("ab", "abc", "the yes")).spec())
        return [backend.compile(spec).new_matcher() for spec in specs]

    def test_says_what_it_is(self, backend: GrammarBackend) -> None:
        assert backend.name
        assert backend.vocab_size == len(TOKENS)
        assert backend.eos_token_ids == EOS
        assert {"json", "regex", "choice"} <= backend.kinds

    @pytest.mark.parametrize("pattern", REGEXES)
    def test_outputs_match_their_pattern(self, backend: GrammarBackend, pattern: str) -> None:
        grammar = backend.compile(GrammarSpec("regex", pattern))
        for seed in range(20):
            text = self._text(walk(grammar.new_matcher(), len(TOKENS), seed))
            assert re.fullmatch(pattern, text), text

    @pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " {0,2}"}])
    def test_outputs_follow_their_schema(self, backend: GrammarBackend, options: dict[str, Any]) -> None:
        grammar = backend.compile(StructuredOutputsParams(json=SCHEMA, **options).spec())
        for seed in range(20):
            value = json.loads(self._text(walk(grammar.new_matcher(), len(TOKENS), seed)))
            assert sorted(value) == ["name", "tags", "value"]
            assert isinstance(value["name"], str)
            assert len(value["name"]) <= 5
            assert value["value"] in ("yes", "no", 12, None)
            assert len(value["tags"]) <= 2
            assert all(isinstance(each, bool) for each in value["tags"])

    def test_outputs_are_choices(self, backend: GrammarBackend) -> None:
        choices = ("ab", "abc", "a.*", "日本", "the yes")
        grammar = backend.compile(StructuredOutputsParams(choice=choices).spec())
        found = {self._text(walk(grammar.new_matcher(), len(TOKENS), seed)) for seed in range(60)}
        assert found == set(choices), found

    def test_masks_and_accept_agree(self, backend: GrammarBackend) -> None:
        for number, matcher in enumerate(self._starts(backend)):
            rng = random.Random(number)
            for _ in range(6):
                allowed = allowed_tokens(matcher, len(TOKENS))
                for token_id in range(len(TOKENS)):
                    accepted = matcher.accept(token_id)
                    if accepted:
                        matcher.rollback(1)
                    # A mask may leave one way of writing a text and drop the others, but never a text.
                    others = [TOKENS[i] for i in allowed if i != token_id]
                    same_text = any(_overlap(TOKENS[token_id], other) for other in others)
                    assert accepted == (token_id in allowed) or (accepted and same_text), (number, token_id)
                matcher.accept(rng.choice(allowed))
                if matcher.is_terminated:
                    break

    def test_rollback_forgets(self, backend: GrammarBackend) -> None:
        for number, matcher in enumerate(self._starts(backend)):
            rng = random.Random(number)
            masks: list[list[int]] = []
            for _ in range(12):
                masks.append(allowed_tokens(matcher, len(TOKENS)))
                matcher.accept(rng.choice(masks[-1]))
                if matcher.is_terminated:
                    break
            while masks:
                back = min(len(masks), rng.randint(1, 3))
                matcher.rollback(back)
                del masks[len(masks) - back + 1 :]
                assert not matcher.is_terminated
                assert allowed_tokens(matcher, len(TOKENS)) == masks.pop()

    def test_every_end_token_ends(self, backend: GrammarBackend) -> None:
        grammar = backend.compile(GrammarSpec("regex", "ab?"))
        for end in EOS:
            matcher = grammar.new_matcher()
            assert not set(EOS) & set(allowed_tokens(matcher, len(TOKENS)))
            assert not matcher.accept(end)
            assert matcher.accept(_encode("a")[0])
            assert set(EOS) < set(allowed_tokens(matcher, len(TOKENS)))
            assert matcher.accept(end)
            assert matcher.is_terminated
            assert not matcher.accept(_encode("b")[0])
            assert not matcher.accept(end)
            matcher.rollback(1)
            assert matcher.accept(_encode("b")[0])
            assert allowed_tokens(matcher, len(TOKENS)) == sorted(EOS)

    def test_matchers_do_not_know_each_other(self, backend: GrammarBackend) -> None:
        grammar = backend.compile(GrammarSpec("regex", REGEXES[0]))
        alone = [walk(grammar.new_matcher(), len(TOKENS), seed) for seed in range(8)]
        matchers = [grammar.new_matcher() for _ in alone]
        for place in range(max(map(len, alone))):
            for matcher, token_ids in zip(matchers, alone, strict=True):
                if place < len(token_ids):
                    assert token_ids[place] in allowed_tokens(matcher, len(TOKENS))
                    assert matcher.accept(token_ids[place])

    def test_forced_tokens_are_the_only_text(self, backend: GrammarBackend) -> None:
        for number, start in enumerate(self._starts(backend)):
            forced = start.forced_token_ids()
            begin = self._text(forced)
            for token_id in forced:
                assert token_id in allowed_tokens(start, len(TOKENS))
                assert start.accept(token_id)
            start.rollback(len(forced))
            text = self._text(walk(start, len(TOKENS), number))
            assert text.startswith(begin)

    @pytest.mark.parametrize(
        "spec",
        [
            GrammarSpec("regex", "(a"),
            GrammarSpec("regex", "a{2"+",1}"),
            GrammarSpec("json", '{"type":"strin"}'),
            GrammarSpec("json", '{"$ref":"#/$defs/nothing"}'),
            GrammarSpec("json", '{"type":"array","items":{"type":"string"},"uniqueItems":true}'),
        ],
    )  # fmt: skip
    def test_what_cannot_be_is_refused_by_name(self, backend: GrammarBackend, spec: GrammarSpec) -> None:
        with pytest.raises(RequestError) as error:
            backend.compile(spec)
        assert error.value.param == f"structured_outputs.{spec.kind}"
        assert len(str(error.value)) < 1500

    def test_kinds_it_does_not_know_are_refused(self, backend: GrammarBackend) -> None:
        for kind in ("grammar", "structural_tag"):
            if kind not in backend.kinds:
                with pytest.raises(RequestError):
                    backend.compile(GrammarSpec(kind, 'start: "a"'))

    def test_compiles_in_several_threads(self, backend: GrammarBackend) -> None:
        specs = [GrammarSpec("regex", f"a{{{n}}}b") for n in range(1, 9)]
        with ThreadPoolExecutor(4) as pool:
            grammars = list(pool.map(backend.compile, specs))
        for n, grammar in enumerate(grammars, start=1):
            assert self._text(walk(grammar.new_matcher(), len(TOKENS), n)) == "a" * n + "b"
