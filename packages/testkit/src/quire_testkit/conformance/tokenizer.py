"""What every `Tokenizer` must do, as tests to inherit.

class TestMyTokenizer(TokenizerSuite):
    def make_tokenizer(self): return MyTokenizer(...)
"""

from __future__ import annotations

import threading

import pytest

from quire_interfaces import Tokenizer

__all__ = ["TokenizerSuite"]

SAMPLES = ("", "the quick brown fox", "42 + 7", "two\nlines", "a", "over and over " * 50)


class TokenizerSuite:
    """Tests of the `Tokenizer` contract. Implement `make_tokenizer`; override nothing else."""

    def make_tokenizer(self) -> Tokenizer:
        """A tokenizer that can spell English text and digits."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_tokenizer")

    @pytest.mark.parametrize("text", SAMPLES)
    def test_ids_are_inside_the_vocabulary(self, text: str) -> None:
        tokenizer = self.make_tokenizer()
        for add_special_tokens in (True, False):
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            assert isinstance(token_ids, list)
            assert all(type(token_id) is int and 0 <= token_id < tokenizer.vocab_size for token_id in token_ids)

    def test_named_ids_are_inside_the_vocabulary(self) -> None:
        tokenizer = self.make_tokenizer()
        named = [*tokenizer.eos_token_ids, *([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])]
        assert isinstance(tokenizer.eos_token_ids, tuple)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in named)

    def test_a_word_survives_the_round_trip(self) -> None:
        tokenizer = self.make_tokenizer()
        assert tokenizer.decode(tokenizer.encode("the fox")).strip() == "the fox"

    def test_special_tokens_surround_the_same_ids(self) -> None:
        tokenizer = self.make_tokenizer()
        bare = tokenizer.encode("the fox", add_special_tokens=False)
        full = tokenizer.encode("the fox")
        assert any(full[start : start + len(bare)] == bare for start in range(len(full) - len(bare) + 1))

    def test_encoding_is_the_same_each_time_and_gives_a_fresh_list(self) -> None:
        tokenizer = self.make_tokenizer()
        first = tokenizer.encode("the fox")
        expected = list(first)
        first.append(0)
        assert tokenizer.encode("the fox") == expected

    def test_ids_outside_the_vocabulary_have_no_text(self) -> None:
        tokenizer = self.make_tokenizer()
        for token_id in (-1, tokenizer.vocab_size, 2**40):
            assert tokenizer.token_text(token_id) == ""
            assert tokenizer.token_bytes(token_id) == b""
            assert tokenizer.decode([token_id]) == ""
            assert tokenizer.id_to_token(token_id) == ""

    def test_the_vocabulary_spells_each_token_of_a_text(self) -> None:
        tokenizer = self.make_tokenizer()
        token_ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
        spelled = "".join(map(tokenizer.id_to_token, token_ids))
        assert all(word in spelled for word in ("the", "quick", "brown", "fox"))

    def test_text_of_each_token_is_its_bytes_with_replacements(self) -> None:
        tokenizer = self.make_tokenizer()
        for token_id in range(min(tokenizer.vocab_size, 2000)):
            text = tokenizer.token_text(token_id)
            assert text == tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def test_threads_agree(self) -> None:
        tokenizer = self.make_tokenizer()
        expected = [tokenizer.encode(text) for text in SAMPLES]
        wrong: list[str] = []

        def work() -> None:
            for _ in range(5):
                wrong.extend(t for t, ids in zip(SAMPLES, expected, strict=True) if tokenizer.encode(t) != ids)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
