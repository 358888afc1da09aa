"""What every `Detokenizer` must do, as tests to inherit.

class TestMyDetokenizer(DetokenizerSuite):
    def make_tokenizer(self): return ...
    def make_detokenizer(self, tokenizer, **options): return MyDetokenizer(tokenizer, **options)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire_interfaces import Detokenizer, Tokenizer

__all__ = ["DetokenizerSuite"]

TEXT = "the quick brown fox jumps over the lazy dog"


class DetokenizerSuite:
    """Tests of the `Detokenizer` contract. Implement the two factories; override nothing else."""

    def make_tokenizer(self) -> Tokenizer:
        """A tokenizer that can spell English text."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_tokenizer")

    def make_detokenizer(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), include_stop_str_in_output: bool = False
    ) -> Detokenizer:
        """A detokenizer for an output without a prompt, special tokens left out."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_detokenizer")

    @pytest.mark.parametrize("seed", range(20))
    def test_all_text_together_is_the_decoded_output(self, seed: int) -> None:
        tokenizer, chooser = self.make_tokenizer(), random.Random(seed)
        token_ids = [chooser.randrange(tokenizer.vocab_size) for _ in range(50)]
        detokenizer = self.make_detokenizer(tokenizer)
        said, cut = "", 0
        while cut < len(token_ids):
            size = chooser.randrange(1, 5)
            said += detokenizer.add(token_ids[cut : cut + size]).text
            cut += size
        assert said + detokenizer.finish().text == tokenizer.decode(token_ids)

    def test_one_offset_per_token_and_never_backwards(self) -> None:
        tokenizer = self.make_tokenizer()
        detokenizer = self.make_detokenizer(tokenizer)
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
        offsets = [offset for token_id in token_ids for offset in detokenizer.add([token_id]).text_offsets]
        assert len(offsets) == len(token_ids)
        assert offsets == sorted(offsets)
        assert offsets[0] == 0
        assert offsets[-1] < len(TEXT)

    def test_nothing_in_nothing_out(self) -> None:
        detokenizer = self.make_detokenizer(self.make_tokenizer())
        delta = detokenizer.add([])
        assert (delta.text, delta.stop_string, delta.text_offsets) == ("", None, [])
        assert detokenizer.finish().text == ""

    @pytest.mark.parametrize("stop", ["brown", "k br", "ox j", "the", "dog", "quick brown fox jumps"])
    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize("size", [1, 3, 1000])
    def test_stop_string_ends_the_output(self, stop: str, include: bool, size: int) -> None:
        tokenizer = self.make_tokenizer()
        detokenizer = self.make_detokenizer(tokenizer, stop=[stop], include_stop_str_in_output=include)
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
        said, num_tokens = "", 0
        for cut in range(0, len(token_ids), size):
            delta = detokenizer.add(token_ids[cut : cut + size])
            said += delta.text
            if delta.stop_string is not None:
                assert delta.stop_string == stop
                assert stop in tokenizer.decode(token_ids[: num_tokens + delta.num_stop_tokens])
                assert stop not in tokenizer.decode(token_ids[: num_tokens + delta.num_stop_tokens - 1])
                break
            num_tokens += len(token_ids[cut : cut + size])
        else:
            pytest.fail("the stop string was not noticed")
        assert said == TEXT.split(stop)[0] + (stop if include else "")
        assert detokenizer.add(token_ids).text == ""
        assert detokenizer.finish().text == ""

    def test_a_stop_string_never_shows_in_part(self) -> None:
        tokenizer = self.make_tokenizer()
        detokenizer = self.make_detokenizer(tokenizer, stop=["fox jumps"])
        said = ""
        for token_id in tokenizer.encode(TEXT, add_special_tokens=False):
            said += detokenizer.add([token_id]).text
            assert "the quick brown ".startswith(said)
        assert said == "the quick brown "

    def test_what_turned_out_to_be_no_stop_string_is_given_out(self) -> None:
        tokenizer = self.make_tokenizer()
        detokenizer = self.make_detokenizer(tokenizer, stop=["dogs"])
        said = "".join(detokenizer.add([i]).text for i in tokenizer.encode(TEXT, add_special_tokens=False))
        assert said == TEXT.removesuffix("dog")
        assert said + detokenizer.finish().text == TEXT
