"""Joined pieces are what the decoders of the `tokenizers` library make of the same tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from quire_renderers.text_streams import PieceStream
from quire_renderers.token_pieces import pieces_from_decoder

BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())
LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
word = st.text("ab é▁你", min_size=1, max_size=4)


def decoded(decoder, tokens):
    """What our table makes of tokens, whole and one by one."""
    pieces = pieces_from_decoder(tokens, (), json.loads(decoder.__getstate__()))
    ids = range(len(tokens))
    stream = PieceStream(pieces, skip_special_tokens=False, at_start=True)
    streamed = "".join(map(stream.push, ids)) + stream.flush()
    assert streamed == pieces.decode(ids, skip_special_tokens=False)
    return streamed


@settings(deadline=None)
@given(tokens=st.lists(st.text(BYTE_CHARS, min_size=1, max_size=4), max_size=12))
def test_byte_level_tokens(tokens):
    assert decoded(decoders.ByteLevel(), tokens) == decoders.ByteLevel().decode(tokens)


@settings(deadline=None)
@given(tokens=st.lists(word, max_size=12), scheme=st.sampled_from(("always", "first", "never")))
def test_metaspace_tokens(tokens, scheme):
    decoder = decoders.Metaspace(prepend_scheme=scheme)
    assert decoded(decoder, tokens) == decoder.decode(tokens)


@settings(deadline=None)
@given(texts=st.lists(st.tuples(word, st.booleans()), max_size=12))
def test_byte_fallback_tokens_of_valid_text(texts):
    tokens = []
    for text, in_bytes in texts:
        tokens += [f"<0x{byte:02X}>" for byte in text.encode()] if in_bytes else [text]
    assert decoded(LLAMA2, tokens) == LLAMA2.decode(tokens)


@settings(deadline=None)
@given(data=st.binary(max_size=12))
def test_invalid_bytes_become_replacement_characters_by_the_rule_of_unicode(data):
    tokens = ["a", *(f"<0x{byte:02X}>" for byte in data), "b"]
    assert decoded(LLAMA2, tokens) == f"a{data.decode('utf-8', 'replace')}b"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
def test_decoders_that_do_not_join_have_no_pieces(decoder):
    assert pieces_from_decoder(["a"], (), json.loads(decoder.__getstate__())) is None


@settings(deadline=None)
@given(tokens=st.lists(word, min_size=1, max_size=8), data=st.data())
def test_special_tokens_are_left_out_when_asked(tokens, data):
    special = data.draw(st.frozensets(st.integers(0, len(tokens) - 1)))
    state = json.loads(decoders.Fuse().__getstate__())
    pieces = pieces_from_decoder(tokens, special, state)
    ids = data.draw(st.lists(st.integers(-2, len(tokens) + 2), max_size=10))
    inside = [token_id for token_id in ids if 0 <= token_id < len(tokens)]
    assert pieces.decode(ids, skip_special_tokens=False) == "".join(tokens[i] for i in inside)
    assert pieces.decode(ids, skip_special_tokens=True) == "".join(tokens[i] for i in inside if i not in special)
