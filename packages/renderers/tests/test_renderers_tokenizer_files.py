"""Which file is believed about added tokens (against Transformers, over random folders) and about begin and end."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quire_interfaces import CheckpointError
from quire_renderers import load_tokenizer

KINDS = ["byte_level", "byte_level_blanks", "byte_fallback_prepend", "byte_fallback_metaspace", "unigram", "wordpiece"]
CONTENTS = ["<X>", " y", "fox", "[INST]", "<|im_end|>", "<think>", "quick brown", "Ü", "é", "\n", "<mask>", "the"]
NAMES = ("bos_token", "eos_token", "pad_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def flags(chooser: random.Random) -> dict[str, bool]:
    """No special token is normalized: `tokenizers` does not find those again in what it leaves out of a text."""
    found = {name: chooser.random() < 0.35 for name in FLAGS}
    return found | {"normalized": found["normalized"] and not found["special"]}


class Folder:
    """Random files: some tokens in tokenizer.json, some in the files beside it, some in both with other flags."""

    def __init__(self, base: Path, chooser: random.Random) -> None:
        self.chooser = chooser
        self.tokenizer = json.loads((base / "tokenizer.json").read_text())
        self.settings = json.loads((base / "tokenizer_config.json").read_text())
        self.other: dict[str, Any] = {}
        vocab = self.tokenizer["model"]["vocab"]
        self.vocab = vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        self.tokens = {token["id"]: token for token in self.tokenizer["added_tokens"]}
        self._new_tokens()
        if chooser.random() < 0.65:
            self._config_of_today()
        else:
            self._old_files()

    def _new_tokens(self) -> None:
        known = {token["content"] for token in self.tokens.values()}
        fresh = max([*self.vocab.values(), *self.tokens]) + 1
        contents = [text for text in self.chooser.sample(CONTENTS, 4) if text not in known]
        for number, content in enumerate(contents):
            token_id = self.vocab.get(content, fresh)
            fresh += token_id == fresh
            self.tokens[token_id] = {"id": token_id, "content": content, **flags(self.chooser)}
            if number < 2:  # those with the first ids, so that tokenizer.json has no gap
                self.tokenizer["added_tokens"].append(self.tokens[token_id])
        self.tokenizer["added_tokens"].sort(key=lambda token: token["id"])

    def _config_of_today(self) -> None:
        chooser, decoder = self.chooser, {}
        for token_id, token in self.tokens.items():
            value = {name: token[name] for name in ("content", *FLAGS)}
            if chooser.random() < 0.5:
                value |= flags(chooser)
                value["normalized"] &= not token["special"]
            if chooser.random() < 0.8:
                decoder[str(token_id)] = value
        if decoder and chooser.random() < 0.3:  # as where a reserved token got a name in this file only
            value = decoder[chooser.choice(list(decoder))]
            value["content"] = "<renamed>"
            value["normalized"] = False
        self.settings["added_tokens_decoder"] = decoder
        if chooser.random() < 0.4:
            self.settings["extra_special_tokens"] = chooser.sample(CONTENTS, 2)
        if chooser.random() < 0.4:  # is not read beside added_tokens_decoder
            self.other["special_tokens_map.json"] = {"eos_token": "fox"}

    def _old_files(self) -> None:
        chooser = self.chooser
        if chooser.random() < 0.6:
            listed = {token["content"]: i for i, token in self.tokens.items() if chooser.random() < 0.7}
            self.other["added_tokens.json"] = listed
        if chooser.random() < 0.4:
            self.settings["additional_special_tokens"] = ["<|im_start|>", "quick brown"]
        if chooser.random() < 0.6:
            contents = chooser.sample(["<|im_start|>", "<s>", "</s>", "[CLS]"], 3)
            named: dict[str, Any] = {
                name: self._named(content)
                for name, content in zip(NAMES, contents, strict=True)
                if chooser.random() < 0.5
            }
            if chooser.random() < 0.5:
                key = chooser.choice(["additional_special_tokens", "extra_special_tokens"])
                named[key] = ["<s>", "over a"]
            self.other["special_tokens_map.json"] = named

    def _named(self, content: str) -> Any:
        shape = {name: self.chooser.random() < 0.3 for name in ("single_word", "lstrip", "rstrip")}
        return content if self.chooser.random() < 0.5 else {"content": content, "normalized": False, **shape}

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.settings, **self.other}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_added_tokens_of_random_folders_equal_transformers(tokenizer_folder, tmp_path, kind, seed):
    chooser = random.Random(f"{kind} {seed}")
    folder = Folder(tokenizer_folder(kind), chooser).write(tmp_path / "model")
    ours, oracle = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    pieces = [*CONTENTS, "<renamed>", " ", "  ", "a", "fox jumps", " hello", "<s>", "</s>", "<|im_start|>"]
    for _ in range(20):
        text = "".join(chooser.choices(pieces, k=chooser.randrange(1, 8)))
        token_ids = oracle.encode(text)
        assert ours.encode(text) == token_ids, text
        for skip in (False, True):
            assert ours.decode(token_ids, skip_special_tokens=skip) == oracle.decode(
                token_ids, skip_special_tokens=skip
            )


def test_flags_of_tokenizer_config_win_over_tokenizer_json(changed_folder):
    plain = dict.fromkeys(FLAGS, False)
    folder = changed_folder("byte_level", added=[{"id": 342, "content": "<X>", **plain}])
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("go <X>  on")) == "go <X>  on"
    decoder = {"342": {"content": "<X>", **plain, "lstrip": True, "rstrip": True, "special": True}}
    folder = changed_folder("byte_level", added=[{"id": 342, "content": "<X>", **plain}], added_tokens_decoder=decoder)
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("go <X>  on")) == "goon"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": ["<X>"]}, "added_tokens_decoder must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<X>"}}}, "'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"lstrip": True}}}, "'5'"),
        ("added_tokens.json", {"<X>": "342"}, "'<X>' must be a token with its id"),
        ("added_tokens.json", {"<X>": -1}, "'<X>' must be a token with its id"),
    ],
)
def test_files_that_are_wrong_are_refused_by_name(changed_folder, name, content, error):
    folder = changed_folder("byte_level")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=error) as raised:
        load_tokenizer(folder)
    assert name in str(raised.value)


BEGIN, END, HI = "<|im_start|>", "<|im_end|>", "the fox"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(*, bos: bool = False, eos: bool = False) -> dict[str, Any]:
    """A post-processor as `tokenizers` writes it; the ids are those of the fixture."""

    def token(text: str, wanted: bool) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": text, "type_id": 0}}] if wanted else []

    ids = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ((BEGIN, 338), (END, 339))}
    single = [*token(BEGIN, bos), {"Sequence": {"id": "A", "type_id": 0}}, *token(END, eos)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}


WRITE_ANEW = ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast"]
LEAVE_ALONE = ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "GPT2Tokenizer", "BertTokenizer", None]


def around(folder: Path) -> tuple[bool, bool]:
    ids = load_tokenizer(folder).encode(HI)
    assert ids[(ids[0] == 338) : len(ids) - (ids[-1] == 339)] == load_tokenizer(folder).encode(
        HI, add_special_tokens=False
    )
    return ids[0] == 338, ids[-1] == 339


@pytest.mark.parametrize("kind", WRITE_ANEW)
@pytest.mark.parametrize("processor", [BYTE_LEVEL, None, template(), template(bos=True), template(bos=True, eos=True)])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_flags_write_the_post_processor_of_these_classes_anew(changed_folder, kind, processor, bos, eos):
    """Transformers 4: whatever tokenizer.json has."""
    named = {"bos_token": BEGIN, "eos_token": END}
    flags_set = {"add_bos_token": bos, "add_eos_token": eos}
    folder = changed_folder("byte_level", post_processor=processor, tokenizer_class=kind, **named, **flags_set)
    assert around(folder) == (bos, eos)


@pytest.mark.parametrize("kind", LEAVE_ALONE)
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_flags_of_other_classes_change_nothing(changed_folder, kind, bos, eos):
    named = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": kind}
    processor = template(bos=bos, eos=eos)
    folder = changed_folder(
        "byte_level", post_processor=processor, add_bos_token=not bos, add_eos_token=not eos, **named
    )
    assert around(folder) == (bos, eos)


@pytest.mark.parametrize("kind", WRITE_ANEW)
@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (BYTE_LEVEL, (True, False)),  # knows nothing of such tokens: the class's default
        (None, (True, False)),
        (template(), (False, False)),  # says that there are none, as Transformers 5 saves it, which keeps no flags
        (template(bos=True, eos=True), (True, True)),
    ],
)
def test_without_flags_the_post_processor_has_the_word_if_it_says_anything(changed_folder, kind, processor, expected):
    named = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": kind}
    assert around(changed_folder("byte_level", post_processor=processor, **named)) == expected


def test_gpt_neox_puts_only_what_flags_say(changed_folder):
    named = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "GPTNeoXTokenizerFast"}
    processor = template(bos=True, eos=True)
    assert around(changed_folder("byte_level", post_processor=processor, **named)) == (False, False)
    folder = changed_folder("byte_level", post_processor=processor, **named, add_eos_token=True)
    assert around(folder) == (False, True)


def test_class_of_config_json_counts_where_tokenizer_config_names_none(changed_folder):
    folder = changed_folder("byte_level", post_processor=BYTE_LEVEL, bos_token=BEGIN, tokenizer_class=None)
    assert around(folder) == (False, False)
    (folder / "config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    assert around(folder) == (True, False)


def test_a_begin_token_that_is_null_is_not_put(changed_folder):
    folder = changed_folder("byte_level", post_processor=BYTE_LEVEL, bos_token=None, tokenizer_class="LlamaTokenizer")
    assert around(folder) == (False, False)


def test_a_flag_that_is_no_flag_is_refused(changed_folder):
    folder = changed_folder("byte_level", tokenizer_class="LlamaTokenizer", add_bos_token="yes")
    with pytest.raises(CheckpointError, match="add_bos_token must be true or false, is 'yes'"):
        load_tokenizer(folder)


@pytest.fixture
def changed_folder(tokenizer_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A tokenizer of a kind with other settings, another post-processor, or more added tokens."""

    def make(kind: str, *, added: list[dict[str, Any]] = [], post_processor: Any = ..., **settings: Any) -> Path:  # noqa: B006
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tokenizer_folder(kind), folder)
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["added_tokens"] += added
        if post_processor is not ...:
            tokenizer["post_processor"] = post_processor
        path.write_text(json.dumps(tokenizer))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return folder

    return make


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "Hello",
    "cafe",
    "café",
    "Cafe",
    "Café",
    "世",
    "##界",
    "世界",
]


def bert_folder(folder: Path, kind: str, *, lowercase: bool, **settings: Any) -> Path:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(WORDS[:5])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **names, **settings}))
    return folder


@pytest.mark.parametrize("kind", ["BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": False, "tokenize_chinese_chars": False},
    ],
)
def test_bert_kinds_take_their_normalizer_from_the_settings_as_in_transformers(tmp_path, kind, lowercase, settings):
    folder = bert_folder(tmp_path / "model", kind, lowercase=lowercase, **settings)
    ours, oracle = load_tokenizer(folder), getattr(transformers, kind).from_pretrained(str(folder))
    for text in ("Hello Café 世界", "hello cafe", "HELLO"):
        assert ours.encode(text) == oracle.encode(text), text


@pytest.mark.parametrize(
    "kind", ["GPT2Tokenizer", "RobertaTokenizerFast", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize("of_file", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
def test_space_before_a_text_is_taken_from_the_settings_by_some_classes(changed_folder, kind, of_file, settings):
    level = {**BYTE_LEVEL, "add_prefix_space": of_file}
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    more = dict.fromkeys(("cls_token", "sep_token", "mask_token"), "<|im_start|>")
    folder = changed_folder("byte_level", tokenizer_class=kind, **tokens, **more, **settings)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": level}))
    ours = load_tokenizer(folder)
    oracle = getattr(transformers, kind.removesuffix("Fast") if "Pre" not in kind else kind).from_pretrained(
        str(folder)
    )
    for text in ("the fox", " the fox"):
        expected = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected


def test_dropout_of_training_is_not_in_use(changed_folder):
    folder = changed_folder("byte_level")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    expected = load_tokenizer(folder).encode("the quick brown fox jumps")
    tokenizer["model"]["dropout"] = 0.9
    path.write_text(json.dumps(tokenizer))
    ours = load_tokenizer(folder)
    assert all(ours.encode("the quick brown fox jumps") == expected for _ in range(20))


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_metaspace_of_every_kind_equals_transformers(changed_folder, scheme, split, seed):
    folder = changed_folder("byte_fallback_metaspace")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    chooser = random.Random(seed)
    for number, text in enumerate(("<a>", " b", "c ", "é")):
        tokenizer["added_tokens"].append({"id": 358 + number, "content": text, **flags(chooser), "normalized": False})
    path.write_text(json.dumps(tokenizer))
    ours, oracle = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    for _ in range(60):
        text = "".join(chooser.choices(["<a>", " b", "c ", "é", "the", " ", "  ", "世", "\x00", "🙂", "</s>"], k=6))
        token_ids = oracle.encode(text)
        assert ours.encode(text) == token_ids, text
        whole = [token_id for token_id in token_ids if token_id > 2]
        assert ours.decode(whole, skip_special_tokens=False) == oracle.decode(whole), text
