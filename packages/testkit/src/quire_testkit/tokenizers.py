"""A real byte-level BPE tokenizer for random checkpoints: trained on text made here, stretched to any vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

from quire_interfaces import ConfigError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["CHATML_TEMPLATE", "sample_text", "write_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TRAINED_MERGES = 512

CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_WORDS = tuple(
    """the a of to and in is that it was for on are with as at be this have from or one had by word but not what all
    were we when your can said there use an each which she do how their if will up other about out many then them
    these so some her would make like him into time has look two more write go see number no way could people my
    than first water been call who oil its now find long down day did get come made may part page quire gathers
    blocks tokens cache paper sheets folded together bound reader engine model serves request answer""".split()
)


def sample_text(num_words: int, seed: int = 0) -> str:
    """Pseudo-English sentences with numbers and punctuation; the same for the same seed."""
    chooser, words = random.Random(seed), []
    for position in range(num_words):
        word = chooser.choice(_WORDS) if chooser.random() < 0.95 else str(chooser.randrange(10_000))
        if position % 13 == 12:
            word += chooser.choice((".", ",", "?", ":\n"))
        words.append(word)
    return " ".join(words)


def write_tokenizer(folder: Path, *, vocab_size: int, seed: int = 0) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja with exactly `vocab_size` ids.

    The first merges are trained; further ones join existing tokens, so that every id of a large embedding has a text.

    Raises:
        ConfigError: vocab_size cannot hold the bytes and the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ConfigError(f"vocab_size must be at least {least} (bytes and special tokens), got {vocab_size}")
    room = vocab_size - len(SPECIAL_TOKENS)
    trained = _train(min(room, 256 + _TRAINED_MERGES), seed)
    spec = json.loads(trained.to_str())
    vocab, merges = spec["model"]["vocab"], [tuple(pair) for pair in spec["model"]["merges"]]
    _stretch(vocab, merges, room, seed)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # <|im_end|> is last: checkpoints name vocab_size - 1 as their end of sequence.
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _train(vocab_size: int, seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator((sample_text(2000, seed + part) for part in range(4)), trainer)
    return tokenizer


def _stretch(vocab: dict[str, int], merges: list[tuple[str, str]], size: int, seed: int) -> None:
    """Add merges of two known tokens until the vocabulary has `size` entries (a token list stays a valid BPE)."""
    chooser, known = random.Random(seed), sorted(vocab, key=vocab.__getitem__)
    while len(vocab) < size:
        left, right = chooser.choice(known), chooser.choice(known)
        if len(left) + len(right) > 12 or right.startswith("Ġ") or left + right in vocab:
            continue
        vocab[left + right] = len(vocab)
        merges.append((left, right))
        known.append(left + right)
