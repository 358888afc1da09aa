"""Both backends keep the contract of `GrammarBackend`."""

from __future__ import annotations

from quire_structured_output import Vocabulary, make_backend
from quire_testkit.conformance.grammar_backend import GrammarBackendSuite


class TestLLGuidance(GrammarBackendSuite):
    def make_backend(self, tokens, special_ids, eos_token_ids, encode):
        return make_backend(
            "llguidance",
            Vocabulary(tokens=tokens, special_ids=special_ids, eos_token_ids=eos_token_ids, encode=encode),
        )


class TestOutlines(GrammarBackendSuite):
    def make_backend(self, tokens, special_ids, eos_token_ids, encode):
        return make_backend(
            "outlines",
            Vocabulary(tokens=tokens, special_ids=special_ids, eos_token_ids=eos_token_ids, encode=encode),
        )
