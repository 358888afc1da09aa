"""Encoding and decoding against the makers' own libraries."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast  # AutoTokenizer would import torch

from quire_interfaces import CheckpointError, Tokenizer
from quire_renderers import load_tokenizer

FAST_KINDS = [
    "byte_level",
    "byte_level_blanks",
    "byte_fallback_prepend",
    "byte_fallback_metaspace",
    "unigram",
    "wordpiece",
]
ODD = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "<mask>",
    "<think>",
    " ",
    "  ",
    "\n",
    "fox jumps",
    "e\u0301",
]
texts = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=8)), max_size=12).map("".join)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.fixture(scope="module", params=FAST_KINDS)
def both(request: pytest.FixtureRequest, tokenizer_folder: Callable[[str], Path]) -> tuple[Tokenizer, object]:
    folder = tokenizer_folder(request.param)
    return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))


@quick
@given(text=texts, add_special_tokens=st.booleans())
def test_encode_equals_transformers(both, text, add_special_tokens):
    ours, oracle = both
    expected = oracle.encode(text, add_special_tokens=add_special_tokens)
    assert ours.encode(text, add_special_tokens=add_special_tokens) == expected


@quick
@given(text=texts, skip=st.booleans())
def test_decode_of_encoded_text_equals_transformers(both, text, skip):
    ours, oracle = both
    token_ids = oracle.encode(text)
    assert ours.decode(token_ids, skip_special_tokens=skip) == oracle.decode(token_ids, skip_special_tokens=skip)


@quick
@given(data=st.data(), skip=st.booleans())
def test_decode_of_random_byte_level_ids_equals_transformers(tokenizer_folder, data, skip):
    folder = tokenizer_folder("byte_level")
    ours = load_tokenizer(folder)
    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    token_ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=40))
    assert ours.decode(token_ids, skip_special_tokens=skip) == oracle.decode(token_ids, skip_special_tokens=skip)


def test_vocab_size_and_named_ids_equal_transformers(both):
    ours, oracle = both
    assert ours.vocab_size == len(oracle)
    assert ours.bos_token_id == oracle.bos_token_id
    assert ours.eos_token_ids == (() if oracle.eos_token_id is None else (oracle.eos_token_id,))


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "sentencepiece_unigram"])
@quick
@given(
    text=st.one_of(st.text(max_size=30), st.lists(st.sampled_from(["the", " fox", "  ", "你好", "\n"])).map("".join))
)
def test_sentencepiece_equals_its_library(tokenizer_folder, kind, text):
    folder = tokenizer_folder(kind)
    ours = load_tokenizer(folder)
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    plain = text.replace("\x00", "").replace("<", "")
    token_ids = library.encode(plain)
    assert ours.encode(plain, add_special_tokens=False) == token_ids
    assert ours.encode(plain) == [library.bos_id(), *token_ids]
    if library.unk_id() not in token_ids:
        assert ours.decode(token_ids) == library.decode(token_ids)


def with_settings(folder: Path, target: Path, **settings: object) -> Path:
    shutil.copytree(folder, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return target


def test_sentencepiece_puts_the_dummy_prefix_behind_added_tokens_too_unless_legacy_is_false(tokenizer_folder, tmp_path):
    text = "<|im_start|>the fox<|im_end|> the dog"
    folder = tokenizer_folder("sentencepiece_bpe")
    for number, (more, expected) in enumerate(
        (
            ({}, "<|im_start|> the fox<|im_end|>  the dog"),
            ({"legacy": None}, "<|im_start|> the fox<|im_end|>  the dog"),
            ({"legacy": True}, "<|im_start|> the fox<|im_end|>  the dog"),
            ({"legacy": False}, text),
            ({"add_prefix_space": False}, text),
        )
    ):
        ours = load_tokenizer(with_settings(folder, tmp_path / str(number), **more))
        token_ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(token_ids, skip_special_tokens=False) == expected, more


def test_sentencepiece_reads_each_part_between_added_tokens_as_its_library_does(tokenizer_folder):
    folder = tokenizer_folder("sentencepiece_bpe")
    ours = load_tokenizer(folder)
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    mark = ours.encode("<|im_end|>", add_special_tokens=False)
    expected = [*library.encode("the fox"), *mark, *library.encode("dog"), *mark, *mark, *library.encode("a")]
    assert ours.encode("the fox<|im_end|>dog<|im_end|><|im_end|>a", add_special_tokens=False) == expected


@pytest.mark.parametrize("kind", ["T5Tokenizer", "XLMRobertaTokenizerFast", "AlbertTokenizer"])
def test_sentencepiece_classes_that_number_pieces_otherwise_are_not_read_plainly(tokenizer_folder, tmp_path, kind):
    """Their ids would be those of other words, and their end tokens missing."""
    tokenizer_class = getattr(transformers, kind.removesuffix("Fast"))
    folder = tmp_path / "model"
    folder.mkdir()
    content = (tokenizer_folder("sentencepiece_unigram") / "tokenizer.model").read_bytes()
    (folder / tokenizer_class.vocab_files_names["vocab_file"]).write_bytes(content)
    own = {"cls_token": "<s>", "sep_token": "</s>"} if kind == "AlbertTokenizer" else {}  # [CLS] is no piece here
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **own}))
    if importlib.util.find_spec("google") is None:  # it comes with protobuf, which transformers needs for these
        with pytest.raises(CheckpointError, match=f"{kind}.*protobuf"):
            load_tokenizer(folder)
        return
    ours, oracle = load_tokenizer(folder), tokenizer_class.from_pretrained(str(folder))
    for text in ("the quick brown fox", " naïve café", "a  b"):
        assert ours.encode(text) == oracle.encode(text)


def test_round_trip_of_each_tokenizer(any_folder):
    ours = load_tokenizer(any_folder)
    assert ours.decode(ours.encode("the quick brown fox")) == "the quick brown fox"


def test_token_bytes_joined_are_the_text(any_folder):
    ours = load_tokenizer(any_folder)
    if any_folder.name.startswith("wordpiece"):
        assert ours.token_bytes(ours.encode("fox", add_special_tokens=False)[0])
        return
    token_ids = ours.encode("the fox, 42", add_special_tokens=False)
    joined = b"".join(map(ours.token_bytes, token_ids)).decode()
    assert joined.removeprefix(" ") == "the fox, 42"
    assert [ours.token_bytes(i) for i in (-1, ours.vocab_size, 10**9)] == [b"", b"", b""]
    assert ours.token_text(ours.vocab_size) == ""


@pytest.mark.parametrize(
    ("kind", "begin"), [("byte_level", "Ġ"), ("byte_fallback_prepend", "▁"), ("sentencepiece_bpe", "▁")]
)
def test_tokens_are_spelled_as_in_the_vocabulary(tokenizer_folder, kind, begin):
    ours = load_tokenizer(tokenizer_folder(kind))
    spelled = [ours.id_to_token(token_id) for token_id in ours.encode("a fox\x01", add_special_tokens=False)]
    control = "ā" if kind == "byte_level" else "<0x01>"
    assert "".join(spelled).removeprefix("▁") == f"a{begin}fox{control}"


def test_offsets_say_where_tokens_stand_in_the_text(tokenizer_folder):
    ours = load_tokenizer(tokenizer_folder("byte_level"))
    text = "<|im_start|>the fox — 42"
    token_ids, offsets = ours.encode(text), ours.token_offsets(text)
    assert len(token_ids) == len(offsets)
    inside = [(token_id, span) for token_id, span in zip(token_ids, offsets, strict=True) if span != (0, 0)]
    assert inside[0][1] == (0, len("<|im_start|>"))
    for token_id, (begin, end) in inside:
        if "\ufffd" not in ours.token_text(token_id):
            assert text[begin:end] in (ours.token_text(token_id), ours.token_text(token_id).lstrip())


def test_invalid_utf8_is_shown_as_replacement_character(tokenizer_folder):
    for kind, byte_token in (("byte_level", "Ä"), ("byte_fallback_prepend", "<0xC4>")):
        ours = load_tokenizer(tokenizer_folder(kind))
        token_id = ours._backend.token_to_id(byte_token)
        assert ours.token_bytes(token_id) == b"\xc4"
        assert ours.token_text(token_id) == "\ufffd"


def test_ids_outside_the_vocabulary_have_no_text(any_folder):
    ours = load_tokenizer(any_folder)
    token_ids = ours.encode("the fox")
    assert ours.decode([-5, *token_ids, ours.vocab_size + 3, 2**40]) == ours.decode(token_ids)


def test_encode_from_many_threads(any_folder):
    ours = load_tokenizer(any_folder)
    samples = [f"the quick fox {i} <|im_end|> 你好 {'dog ' * i}" for i in range(20)]
    expected = [ours.encode(text) for text in samples]
    found: list[list[list[int]]] = []

    def work() -> None:
        found.append([ours.encode(text) for text in samples])

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6
