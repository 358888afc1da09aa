"""Prompts within a length: what is left of long texts and pairs is what cutting their tokens leaves, and costs no more
than its own length.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire_interfaces import RequestError
from quire_renderers import BoundedPrompts, ChatRenderer, load_tokenizer
from quire_renderers.bounded_prompts import truncated_pair_lens
from quire_renderers.fast_tokenizer import FastTokenizer
from quire_testkit.tokenizers import sample_text

GPT2 = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
RIGHT_TO_LEFT_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def trained(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer in the manner of BERT, GPT-2, XLM-R, Llama, or one whose words are not apart."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    corpus = [sample_text(3000), "été naïve Σας 12345 ΑΣ ß 中文 字"]
    size: dict[str, Any] = {"vocab_size": 400, "special_tokens": special, "show_progress": False}
    trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **size)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if kind == "bert":
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**size)
    elif kind == "xlmr":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        trainer = trainers.UnigramTrainer(unk_token="[UNK]", **size)
    elif kind == "llama":
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(max_token_length=12, **size)
    else:
        pattern = GPT2 if kind == "gpt2" else RIGHT_TO_LEFT_DIGITS
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


KINDS = ("bert", "gpt2", "digits", "xlmr", "llama")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    trained(request.param).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_input_names": names}))
    return folder


pieces = st.sampled_from(
    [" ", "  ", "\n", "a", "the", " of", "Word", "123", "45678901234567", "'s", ".", "é", "e\u0301", "ΑΣ", "中文",
     "[SEP]", "x" * 30, "\u200d", "ﬁ"]
)  # fmt: skip


def test_ends_of_random_texts_are_those_of_the_whole(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(st.lists(pieces, max_size=40), st.integers(0, 400), st.integers(1, 60), st.integers(0, 10**6))
    def check(around: list[str], num_words: int, max_tokens: int, seed: int) -> None:
        words = sample_text(num_words, seed).split(" ")
        random.Random(seed).shuffle(around)
        for place, piece in enumerate(around):
            words.insert((place * 7 + seed) % (len(words) + 1), piece)
        text = " ".join(words)
        whole = tokenizer.encode_segment(text)
        assert tokenizer.part_of_text.first(text, max_tokens) == whole[:max_tokens]
        assert tokenizer.part_of_text.last(text, max_tokens) == whole[max(0, len(whole) - max_tokens) :]

    check()


def test_long_texts_are_not_read_to_their_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    text = sample_text(40_000)
    read: list[int] = []
    encode = tokenizer.part_of_text._encode

    def counting(part: str) -> list[int]:
        read.append(len(part))
        return encode(part)

    monkeypatch.setattr(tokenizer.part_of_text, "_encode", counting)
    for find in (tokenizer.part_of_text.first, tokenizer.part_of_text.last):
        read.clear()
        assert len(find(text, 128)) == 128
        if folder.name.startswith("llama"):  # nothing says where its words are apart
            assert sum(read) == len(text)
        else:
            assert sum(read) < 10_000


def test_truncation_is_that_of_transformers(folder: Path) -> None:
    renderer = BoundedPrompts(ChatRenderer(load_tokenizer(folder)))
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [sample_text(number, number) for number in (1, 9, 30, 200)]
    for side in ("left", "right"):
        oracle.truncation_side = side
        for length in (6, 7, 23, 24, 1000):
            for text in texts:
                rendered = renderer.render(text, max_tokens=length, truncation_side=side)  # type: ignore[arg-type]
                assert rendered.token_ids == oracle(text, truncation=True, max_length=length)["input_ids"]
                for other in texts:
                    pair = renderer.render_pair(
                        text,
                        other,
                        max_tokens=length,
                        truncation_side=side,  # type: ignore[arg-type]
                    )
                    expected = oracle(text, other, truncation=True, max_length=length)
                    assert pair.token_ids == expected["input_ids"]
                    types = [int(place >= pair.second_segment_start) for place in range(len(pair.token_ids))]
                    assert types == expected["token_type_ids"]
    assert (
        renderer.render("the of", add_special_tokens=False).token_ids
        == oracle("the of", add_special_tokens=False)["input_ids"]
    )
    assert renderer.render([5, 6, 7], max_tokens=2, truncation_side="left").token_ids == [6, 7]
    with pytest.raises(RequestError, match="give at least 3"):
        renderer.render("a", max_tokens=2)
    with pytest.raises(RequestError, match="token id"):
        renderer.render([10**6])


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_the_longer_text_of_a_pair_is_cut_first(first: int, second: int, room: int) -> None:
    kept = truncated_pair_lens(first, second, room)
    assert sum(kept) == min(first + second, room)
    assert kept[0] <= first
    assert kept[1] <= second
    assert abs(kept[0] - kept[1]) <= 1 or kept == (first, second) or min(kept) == min(first, second)


def test_no_template_no_pairs(tmp_path: Path) -> None:
    plain = trained("gpt2")
    plain.post_processor = processors.ByteLevel()
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="has no template for pairs"):
        BoundedPrompts(ChatRenderer(load_tokenizer(tmp_path))).render_pair("a", "b")


@pytest.mark.parametrize(
    ("settings", "has_types"),
    [
        ({"tokenizer_class": "BertTokenizerFast"}, True),
        ({"tokenizer_class": "DebertaV2Tokenizer"}, True),
        ({}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, False),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
    ],
)
def test_pairs_have_token_types_where_networks_get_them(
    tmp_path: Path, settings: dict[str, Any], has_types: bool
) -> None:
    trained("bert").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_tokenizer(tmp_path).pair_template
    assert template is not None
    assert (template.second_segment_start is not None) == has_types
    if settings.get("tokenizer_class", "").startswith(("Tokenizers", "PreTrained")):
        names = transformers.AutoTokenizer.from_pretrained(tmp_path)("a", "b")
        assert ("token_type_ids" in names) == has_types


def test_pairs_through_a_chat_template(tmp_path: Path) -> None:
    trained("gpt2").save(str(tmp_path / "tokenizer.json"))
    role = "{% if m.role == 'query' %}Q {% elif m.role == 'document' %}D {% endif %}"
    own = "{% for m in messages %}" + role + "{{ m.content }}\n{% endfor %}"
    tokenizer = load_tokenizer(tmp_path)
    assert not ChatRenderer(tokenizer).has_pair_template
    renderer = ChatRenderer(tokenizer, own)
    assert renderer.has_pair_template
    assert renderer.render_pair_template("a", "b") == "Q a\nD b\n"
    assert renderer.render_pair_template("a", "b", "{{ messages[1].role }} {{ messages[1].content }}") == "document b"
    template = "{{ instruction }}: {{ messages[0].content }}"
    assert renderer.render_pair_template("a", "b", template, {"instruction": "Judge"}) == "Judge: a"
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages is reserved"):
        renderer.render_pair_template("a", "b", template, {"messages": []})
    with pytest.raises(RequestError, match="refuses"):
        renderer.render_pair_template("a", "b", "{{ raise_exception('refuses') }}")
    assert renderer.render_pair_template("a", "b", instruction="find") == "find\nQ a\nD b\n"
    end = "{{ messages[-1].content }} 5\nanswer:{{ messages[0].content }}"
    assert renderer.pair_template_end(end, instruction="yes") == tokenizer.encode(
        " 5\nanswer:yes", add_special_tokens=False
    )
    assert renderer.pair_template_end("{{ messages[-1].content }}") == []
