"""Folders with xAI's own file of a tokenizer: ids are those of an independent merge by ranks, prompts Grok 2's."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import pairwise

import pytest

from quire_interfaces import CheckpointError
from quire_renderers import ChatRenderer, load_tokenizer

SPECIAL = ["<|pad|>", "<|separator|>", "<|eos|>", "<|reserved_3|>", "<|control1|>"]
GROWN = [
    b"he", b"ll", b"hell", b"hello", b" h", b" hello", b"in", b"ing", b" w", b"or", b"ld", b" wor", b" world", b"'s",
    b"\n\n", b"  ", b"   ", b"\xc3\xa9", b"caf", b"12", b"aa", b"aaa", b"==", b"===", b"\xe4\xb8", b"He", b"Hello",
    b"Sh",
]  # fmt: skip
TOKENS = [bytes([byte]) for byte in reversed(range(256))] + GROWN
CONTENT = {
    "regular_tokens": [{"bytes": list(token), "token": 3 + rank} for rank, token in enumerate(TOKENS)],
    "special_tokens": [
        {"bytes": list(token.encode()), "token": token_id}
        for token, token_id in zip(SPECIAL, (0, 1, 2, 3 + len(TOKENS), 5 + len(TOKENS)), strict=True)
    ],
    "word_split": "V1",
    "vocab_size": 320,
}
IDS = {token: 3 + rank for rank, token in enumerate(TOKENS)}
TEXTS = [
    "hello world",
    "Hello  world's   café\n\n\n  aaaaa 1234 ===!!\r\n\t x", "x'Show we'LL 'S 'ſ ''s 'x 5th ١٢ ½", "  ", "\n \n  ",
    " \t\n x", "中文 naïve\u00a0hell\u3000.", "\U0001f600\U0001f600 =====\n", "e\u0301 a\u200db", "'re'ved'mm", "",
]  # fmt: skip


def write(folder, content=CONTENT):
    (folder / "tokenizer.tok.json").write_text(json.dumps(content))
    return folder


def words(text):
    """The words of a text, found by the kinds of its letters."""

    def kind(letter):
        if letter in "\r\n ":
            return letter
        if letter.isspace() and letter not in "\x1c\x1d\x1e\x1f":
            return "\t"
        return {"L": "a", "N": "0"}.get(unicodedata.category(letter)[0], ".")

    kinds, place = "".join(map(kind, text)), 0
    pattern = re.compile(r"[^\r\na0]?a+|0| ?\.+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    short = re.compile("'s|'t|'re|'ve|'m|'ll|'d", re.IGNORECASE)
    while place < len(text):
        found = short.match(text, place) or pattern.match(kinds, place)
        yield text[place : found.end()]
        place = found.end()


def merged(word):
    """The ids of a word: of neighbours, those that make the token of the lowest rank are joined first."""
    parts = [word] if word in IDS else [word[i : i + 1] for i in range(len(word))]
    while pairs := [(IDS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in IDS]:
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [IDS[part] for part in parts]


def test_ids_are_those_of_merging_by_ranks(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path))
    for text in TEXTS:
        ids = [token_id for word in words(text) for token_id in merged(word.encode())]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("hello<|control1|>") == [IDS[b"hello"], 5 + len(TOKENS)]
    assert tokenizer.decode([0, IDS[b"hello"], 1, 2]) == "hello"
    assert tokenizer.vocab_size == 6 + len(TOKENS)


def test_answers_end_with_the_turn_or_the_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert set(load_tokenizer(write(tmp_path)).eos_token_ids) == {1, 2}


def test_another_pattern_may_be_given(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, {**CONTENT, "pat_str": r"\S+|\s+", "word_split": "V9"}))
    assert tokenizer.encode("aa12") == [IDS[b"aa"], IDS[b"12"]]
    assert load_tokenizer(write(tmp_path)).encode("aa12") == [IDS[b"aa"], IDS[b"1"], IDS[b"2"]]


def test_a_conversation_without_a_template(tmp_path):
    renderer = ChatRenderer(load_tokenizer(write(tmp_path)))
    messages = [
        {"role": "system", "content": " be kind\n"},
        {"role": "user", "content": [{"type": "text", "text": " hi <|eos|> "}]},
        {"role": "assistant", "content": "hello "},
        {"role": "user", "content": "bye"},
    ]
    ids = renderer.render_chat(messages).token_ids
    assert renderer.tokenizer.decode(ids, skip_special_tokens=False) == (
        "System: be kind<|separator|>\n\nHuman: hi <|eos|><|separator|>\n\nAssistant: hello <|separator|>\n\n"
        "Human: bye<|separator|>\n\nAssistant:"
    )
    assert (ids.count(1), ids.count(2)) == (4, 0)  # what a user writes is text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(tmp_path).files.chat_templates == {"default": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regular_tokens": CONTENT["regular_tokens"][1:]}, "each byte be one"),
        ({"regular_tokens": [{"token": 7}]}, "regular_tokens must have bytes and a token"),
        ({"regular_tokens": [*CONTENT["regular_tokens"], {"bytes": [1], "token": 999}]}, "different tokens"),
        ({"special_tokens": None}, "special_tokens must have bytes and a token"),
        ({"special_tokens": CONTENT["special_tokens"][:2]}, r"must hold <\|eos\|>"),
        ({"special_tokens": [*CONTENT["special_tokens"], {"bytes": [255], "token": 999}]}, "no text in UTF-8"),
        ({"special_tokens": [*CONTENT["special_tokens"], {"bytes": [60, 60], "token": 9}]}, "the id 9 is that of"),
        ({"special_tokens": [*CONTENT["special_tokens"], {"bytes": [*b"he"], "token": 999}]}, "'he' is a control"),
        ({"word_split": "V2"}, "word_split must be V1 .* is 'V2'"),
        ({"pat_str": "(["}, "pattern is no regular expression"),
    ],
)
def test_files_that_are_wrong_are_refused(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(write(tmp_path, {**CONTENT, **change}))
