"""A small vocabulary for tests: single bytes, a few words, control tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_structured_output import Vocabulary, make_backend
from quire_testkit.conformance import grammar_backend as suite


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(tokens=suite.TOKENS, special_ids=suite.SPECIAL, eos_token_ids=suite.EOS, encode=suite._encode)


@pytest.fixture(scope="session")
def backend(vocabulary):
    return make_backend("auto", vocabulary)


@pytest.fixture
def encode(vocabulary) -> Callable[[str], list[int]]:
    return vocabulary.encode
