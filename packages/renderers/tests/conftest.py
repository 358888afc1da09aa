"""Small real tokenizers of every kind the package reads, trained here and written as checkpoint folders."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = "the quick brown fox jumps over a lazy dog; naïve café — 你好 世界! x = f(y) + 42, Grüße 🙂 ok\n\tdef".split(
    " "
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def corpus(num_lines: int = 300) -> list[str]:
    chooser = random.Random(7)
    return [" ".join(chooser.choice(WORDS) for _ in range(chooser.randrange(3, 20))) for _ in range(num_lines)]


def write_folder(folder: Path, tokenizer: Tokenizer | None, settings: dict[str, Any]) -> None:
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings})
    )


def _byte_level(vocab_size: int = 420) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def byte_level(folder: Path) -> None:
    """In the manner of Qwen: ChatML tokens, two added tokens that are not special."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CHATML])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    write_folder(folder, tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def byte_level_blanks(folder: Path) -> None:
    """Added tokens that take in blanks, overlap, and are matched after normalization."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_start|>", normalized=False),
            AddedToken("<|im_end|>", normalized=False, rstrip=True),
            AddedToken("<|im_end|><|im_end|>", normalized=False),
            AddedToken("<mask>", normalized=False, lstrip=True),
            AddedToken("<|endoftext|>", normalized=False, lstrip=True, rstrip=True),
        ]
    )
    tokenizer.add_tokens([AddedToken("fox jumps", normalized=True)])
    write_folder(folder, tokenizer, {"eos_token": "<|im_end|>"})


def _byte_fallback_bpe() -> models.BPE:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    ascii_only = ["".join(c for c in line if c.isascii()) for line in corpus()]
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    spec = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(spec["vocab"], key=spec["vocab"].get)
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in spec["merges"]]
    return models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")


def _llama2_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("[INST]", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


LLAMA2_SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_fallback_prepend(folder: Path) -> None:
    """In the manner of Llama 2: the normalizer puts the space in front."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _llama2_tokens(tokenizer)
    write_folder(folder, tokenizer, LLAMA2_SETTINGS)


def byte_fallback_metaspace(folder: Path) -> None:
    """In the manner of later Mistral files: a metaspace before the first word only."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _llama2_tokens(tokenizer)
    write_folder(folder, tokenizer, {**LLAMA2_SETTINGS, "add_bos_token": True, "add_eos_token": True})


def unigram(folder: Path) -> None:
    """A unigram model with the metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=specials, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    write_folder(folder, tokenizer, LLAMA2_SETTINGS)


def wordpiece(folder: Path) -> None:
    """A decoder that does not work by joining."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    write_folder(folder, tokenizer, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"})


def train_sentencepiece(kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def _sentencepiece(folder: Path, kind: str) -> None:
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(kind))
    write_folder(folder, None, {**LLAMA2_SETTINGS, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})


def sentencepiece_bpe(folder: Path) -> None:
    _sentencepiece(folder, "bpe")


def sentencepiece_unigram(folder: Path) -> None:
    _sentencepiece(folder, "unigram")


MAKERS: dict[str, Callable[[Path], None]] = {
    maker.__name__: maker
    for maker in (
        byte_level,
        byte_level_blanks,
        byte_fallback_prepend,
        byte_fallback_metaspace,
        unigram,
        wordpiece,
        sentencepiece_bpe,
        sentencepiece_unigram,
    )
}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of tokenizer, made on first use."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            MAKERS[kind](made[kind])
        return made[kind]

    return folder_of


@pytest.fixture(params=list(MAKERS), scope="session")
def any_folder(request: pytest.FixtureRequest, tokenizer_folder: Callable[[str], Path]) -> Path:
    """Each kind of tokenizer in turn."""
    return tokenizer_folder(request.param)
