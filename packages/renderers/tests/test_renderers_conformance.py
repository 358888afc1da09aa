"""The package's classes against the conformance suites of their Protocols."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire_interfaces import Tokenizer
from quire_renderers import ChatRenderer, IncrementalDetokenizer, load_tokenizer
from quire_testkit.conformance.detokenizer import DetokenizerSuite
from quire_testkit.conformance.renderer import RendererSuite
from quire_testkit.conformance.tokenizer import TokenizerSuite

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
    "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="class", autouse=True)
def tokenizer_of_class(request, any_folder):
    request.cls.tokenizer = load_tokenizer(any_folder)


class TestTokenizers(TokenizerSuite):
    def make_tokenizer(self) -> Tokenizer:
        return self.tokenizer


class TestDetokenizer(DetokenizerSuite):
    def make_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def make_detokenizer(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), include_stop_str_in_output: bool = False
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tokenizer, stop=stop, include_stop_str_in_output=include_stop_str_in_output)


class TestRenderer(RendererSuite):
    def make_renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, TEMPLATE)
