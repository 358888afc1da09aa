"""What a vocabulary says of a tokenizer, and what of it reaches the process of trials."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import ConfigError
from quire_structured_output import Vocabulary
from quire_structured_output.vocabulary import read_vocabulary, write_vocabulary

token = st.binary(min_size=1, max_size=6)


def vocabulary(tokens, special=(), eos=(0,)):
    return Vocabulary(tokens=tuple(tokens), special_ids=frozenset(special), eos_token_ids=eos, encode=list)


@settings(deadline=None)
@given(tokens=st.lists(st.one_of(token, st.just(b"")), min_size=1, max_size=40), data=st.data())
def test_the_other_end_of_a_socket_has_the_same_tokens(tokens, data):
    ids = st.integers(0, len(tokens) - 1)
    special = data.draw(st.frozensets(ids))
    eos = tuple(data.draw(st.lists(ids, min_size=1, max_size=3, unique=True)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=write_vocabulary, args=(ours, vocabulary(tokens, special, eos)))
        writer.start()
        copy = read_vocabulary(theirs)
        writer.join()
    assert (copy.tokens, copy.special_ids, copy.eos_token_ids) == (tuple(tokens), special, eos)


@settings(deadline=None)
@given(text=st.text(max_size=12))
def test_the_copy_encodes_texts_byte_by_byte(text):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = vocabulary([b"end", *(bytes([byte]) for byte in range(256))])
        writer = threading.Thread(target=write_vocabulary, args=(ours, sender))
        writer.start()
        copy = read_vocabulary(theirs)
        writer.join()
    assert b"".join(copy.tokens[token_id] for token_id in copy.encode(text)) == text.encode()


@pytest.mark.parametrize("eos", [(), (2,), (-1,), (0, 2)])
def test_end_tokens_outside_the_vocabulary_are_refused(eos):
    with pytest.raises(ConfigError, match="end tokens with ids below 2"):
        vocabulary([b"a", b"b"], eos=eos)


CONTROL = {0: "<end>", 1: "<call>"}


class NamedTokens:
    """A tokenizer of single characters that recognizes the names of two control tokens in texts."""

    vocab_size, eos_token_ids = 130, (0,)

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        token_ids = []
        while text:
            control = next((i for i, name in CONTROL.items() if text.startswith(name)), None)
            token_ids.append(2 + ord(text[0]) if control is None else control)
            text = text[1:] if control is None else text[len(CONTROL[control]) :]
        return token_ids

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(self.token_bytes(i).decode() for i in token_ids if i > 1 or not skip_special_tokens)

    def token_bytes(self, token_id):
        return (CONTROL[token_id] if token_id in CONTROL else chr(token_id - 2)).encode()


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(("<end>", "<call>", "<", "end", ">", "a", " ", "<<")), max_size=8).map("".join))
def test_names_of_control_tokens_in_a_text_are_text(text):
    vocabulary = Vocabulary.from_tokenizer(NamedTokens())
    assert vocabulary.special_ids == {0, 1}
    token_ids = vocabulary.encode(text)
    assert vocabulary.special_ids.isdisjoint(token_ids)
    assert b"".join(vocabulary.tokens[token_id] for token_id in token_ids) == text.encode()
