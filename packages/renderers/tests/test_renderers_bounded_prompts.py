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

from quire_interfaces import ContextLengthError, RequestError
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
     "[SEP]", "x" * 30, "\u200d", "ﬁ", "a,b", '{"k":1,"v":"w"}', "!?", "line\nof", "中文字中文", "12 34 of", "it's=",
     "ᄀ", "ᄀᆨ", "\u0301", "½", "1,234.5", "(a)[b]", "a_b-c/d+e", "#a @b"]
)  # fmt: skip


def test_ends_of_random_texts_are_those_of_the_whole(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)

    separators = [" ", "", ",", " ", "\n", ";", ". ", " "]

    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    @given(st.lists(pieces, max_size=40), st.integers(0, 400), st.integers(1, 60), st.integers(0, 10**6))
    def check(around: list[str], num_words: int, max_tokens: int, seed: int) -> None:
        words = sample_text(num_words, seed).split(" ")
        random.Random(seed).shuffle(around)
        for place, piece in enumerate(around):
            words.insert((place * 7 + seed) % (len(words) + 1), piece)
        text = "".join(word + separators[(place + seed) % len(separators)] for place, word in enumerate(words))
        whole = tokenizer.encode_segment(text)
        assert (
            tokenizer.encode_segment(tokenizer.part_of_text.head(text, max_tokens))[:max_tokens] == whole[:max_tokens]
        )
        for limit in (max_tokens, len(whole)):
            assert not tokenizer.part_of_text.exceeds(text, limit) or len(whole) > limit
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


def kind_of(folder: Path) -> str:
    return next(kind for kind in KINDS if folder.name.startswith(kind))


LONG_TEXTS = {
    "json": json.dumps([{"number": number, "word": "of"} for number in range(9000)], separators=(",", ":")),
    "lines": "the\nof\nand\n" * 20_000,
    "numbers": " ".join(map(str, range(30_000))),
    "sentences": "The end. " * 20_000,
    "path": "usr/lib/" * 20_000,
    "chinese": "中文字" * 20_000,
    "marks": "?!" * 50_000,
}
READ_IN_PARTS = {
    "bert": set(LONG_TEXTS),
    "gpt2": {"json", "lines", "numbers", "sentences", "path"},
    "digits": {"json", "lines", "numbers", "sentences", "path"},
    "xlmr": {"lines", "numbers", "sentences"},
    "llama": set(),
}


@pytest.mark.parametrize("name", list(LONG_TEXTS))
def test_texts_of_all_kinds_are_not_read_to_their_end(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    part, text = tokenizer.part_of_text, LONG_TEXTS[name]
    read: list[int] = []
    encode = part._encode
    monkeypatch.setattr(part, "_encode", lambda text: read.append(len(text)) or encode(text))
    whole = encode(text)
    assert part.first(text, 128) == whole[:128]
    assert part.last(text, 128) == whole[-128:]
    assert (sum(read) < 10_000) == (name in READ_IN_PARTS[kind_of(folder)])


TOO_LONG = {
    "words": (sample_text(40_000), {"bert", "gpt2", "digits", "xlmr"}),
    "one word": ("the" * 200_000, {"gpt2", "digits", "xlmr", "llama"}),
    "chinese": ("字中文" * 60_000, {"bert", "gpt2", "digits", "xlmr"}),
}


@pytest.mark.parametrize("name", list(TOO_LONG))
def test_texts_that_are_far_too_long_are_refused_unread(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kinds = TOO_LONG[name]
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    read: list[int] = []
    encode = tokenizer.part_of_text._encode
    monkeypatch.setattr(tokenizer.part_of_text, "_encode", lambda text: read.append(len(text)) or encode(text))
    prompts = BoundedPrompts(ChatRenderer(tokenizer))
    for render in (
        lambda: prompts.render(text, longest=128),
        lambda: prompts.render_pair("a", text, longest=128),
        lambda: prompts.render_pair(text, "a", longest=128),
    ):
        if kind_of(folder) in kinds:
            with pytest.raises(ContextLengthError, match="this model's context is 128 tokens") as caught:
                render()
            assert caught.value.max_model_len == 128
            # Where nothing says where words are apart, some hundred characters once for each place of a border.
            assert sum(read) < (20_000 if kind_of(folder) == "llama" else 10_000)
            read.clear()
        else:
            assert len(render().token_ids) > 2
    assert prompts.render(text, max_tokens=128, longest=128).token_ids  # what is cut is not refused
    assert len(prompts.render("the of", longest=2).token_ids) > 2  # this is another's to refuse


def test_what_the_vocabulary_does_not_know_is_not_counted(tmp_path: Path) -> None:
    trained("xlmr").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, FastTokenizer)
    text = "\u0e01" * 100_000  # unknown characters are one token together
    assert len(tokenizer.encode_segment(text)) < 10
    assert not tokenizer.part_of_text.exceeds(text, 10)
    assert tokenizer.part_of_text.exceeds("the" * 100_000, 10)


ENDLESS = {
    "of words": lambda seed: "".join(random.Random(seed).choices(("the", "of", "and", "a", "qu", "ire"), k=25_000)),
    "of letters": lambda seed: "".join(random.Random(seed).choices("etaoinshrdlu", k=60_000)),
    "of one letter": lambda seed: "ea"[seed % 2] * 60_000,
}
"""Words without an end, of small letters, which no kind of tokenizer splits."""


@pytest.mark.parametrize("name", list(ENDLESS))
def test_endless_words_are_not_read_to_their_end(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    part, kind = tokenizer.part_of_text, kind_of(folder)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    read: list[int] = []
    encode = part._encode
    monkeypatch.setattr(part, "_encode", lambda text: read.append(len(text)) or encode(text))
    for seed, (before, behind) in enumerate(
        [("", ""), ("the end. ", " of it"), ("\u00e9t\u00e9 [SEP] ", "."), ("12", "\u0301 a")]
    ):
        text = before + ENDLESS[name](seed) + behind
        whole = oracle(text, add_special_tokens=False)["input_ids"]
        for number in (1, 300):
            read.clear()
            assert part.first(text, number) == whole[:number]
            assert encode(part.head(text, number))[:number] == whole[:number]
            if kind == "bert" or name != "of one letter":  # such a word may have its first border at its end
                assert sum(read) < len(text), number
            read.clear()
            assert part.last(text, number) == whole[-number:]
            if kind == "bert" or (kind in ("gpt2", "digits") and name != "of one letter"):
                assert sum(read) < len(text), number


@pytest.mark.parametrize("name", list(ENDLESS))
def test_tokens_right_before_a_cut_are_those_of_the_whole(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So little of a word is read first that the tokens wanted are next to the cut, where its end would change them."""
    for setting, value in (("CHARS_PER_TOKEN", 2), ("MIN_CHARS", 1)):
        monkeypatch.setattr(f"quire_renderers.part_of_text.{setting}", value)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FastTokenizer)
    text = ENDLESS[name](3)[:6000]
    whole = tokenizer.encode_segment(text)
    for number in range(1, 120):
        assert tokenizer.part_of_text.first(text, number) == whole[:number]
        assert tokenizer.part_of_text.last(text, number) == whole[-number:]


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
