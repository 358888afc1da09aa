"""Constraints where the tokenizer has more tokens than the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_interfaces import GrammarSpec
from quire_renderers import load_tokenizer
from quire_structured_output import Vocabulary, make_backend
from quire_testkit.tokenizers import write_tokenizer


@pytest.mark.parametrize("size", [270, 300, 400])
def test_a_constraint_is_made_of_the_networks_tokens(tmp_path: Path, size: int) -> None:
    write_tokenizer(tmp_path, vocab_size=400)
    tokenizer = load_tokenizer(tmp_path)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size=size, eos_token_ids=[5])
    texts = ["the one and only", "another of the others"]
    assert [max(tokenizer.encode(text, add_special_tokens=False)) >= 270 for text in texts] == [True, True]
    for text in texts:
        token_ids = vocabulary.encode(text)
        assert max(token_ids) < size
        assert b"".join(vocabulary.tokens[each] for each in token_ids) == text.encode()
    for spec in (GrammarSpec("choice", texts), GrammarSpec("regex", "(the one|another) [0-9]+")):
        grammar = make_backend("llguidance", vocabulary).compile(spec)
        matcher, written = grammar.new_matcher(), b""
        words = memoryview(bytearray(-(-size // 32) * 4)).cast("I")
        while not matcher.is_terminated and len(written) < 80:
            matcher.fill_bitmask(words)
            chosen = next(i for i in range(size) if words[i // 32] >> i % 32 & 1)
            assert matcher.accept(chosen)
            written += vocabulary.tokens[chosen] if chosen != 5 else b""
        assert spec.kind == "regex" or written.decode() in texts
