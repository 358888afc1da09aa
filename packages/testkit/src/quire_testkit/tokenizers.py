"""A real byte-level BPE tokenizer for random checkpoints: trained on text made here, stretched to any vocabulary.

Knows the tokenizer.json format and how a merge list stays consistent. Knows nothing of models.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire_interfaces import ConfigError

__all__ = ["CHATML_TEMPLATE", "MAX_VOCAB_SIZE", "MIN_VOCAB_SIZE", "SPECIAL_TOKENS", "sample_text", "write_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TRAINED_MERGES = 512
_NUM_SYLLABLES = len(string.ascii_uppercase) * len(string.ascii_lowercase)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""All bytes and the special tokens."""
MAX_VOCAB_SIZE = MIN_VOCAB_SIZE + _NUM_SYLLABLES + _NUM_SYLLABLES**2
"""What bytes, special tokens and made-up words of two syllables fill for certain."""

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
    """Write tokenizer.json and tokenizer_config.json (with a ChatML template) with exactly `vocab_size` ids.

    The first merges are trained; further ones make up words, so that every id of a large embedding has a text of its
    own that is tokenized back to it. The special tokens are the last ids, `<|im_end|>` the very last.

    Raises:
        ConfigError: vocab_size is not from `MIN_VOCAB_SIZE` to `MAX_VOCAB_SIZE`.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size must be from {MIN_VOCAB_SIZE} (bytes and special tokens) to {MAX_VOCAB_SIZE} (made-up words "
            f"of two syllables), got {vocab_size}",
            field="vocab_size",
        )
    room = vocab_size - len(SPECIAL_TOKENS)
    spec = json.loads(_train(min(room, 256 + _TRAINED_MERGES), seed).to_str())
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for left, right in itertools.islice(_made_up_merges(seed), room - len(vocab)):
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    spec["added_tokens"] = [_special_token(room + place, text) for place, text in enumerate(SPECIAL_TOKENS)]
    # Written as text: the library takes seconds to build, and to write, a large vocabulary.
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _train(vocab_size: int, seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator((sample_text(2000, seed + part) for part in range(4)), trainer)
    return tokenizer


def _made_up_merges(seed: int) -> Iterator[tuple[str, str]]:
    """Syllables of a capital and a small letter ("Qu"), then pairs of them ("QuRe").

    The trained merges join small letters only, and no merge here joins a small letter to a capital but between two
    whole syllables: the text of each new token has one segmentation, so it is tokenized back to that token.
    """
    syllables = list(itertools.product(string.ascii_uppercase, string.ascii_lowercase))
    random.Random(seed).shuffle(syllables)
    yield from syllables
    words = ["".join(syllable) for syllable in syllables]
    yield from itertools.product(words, words)


def _special_token(token_id: int, text: str) -> dict[str, Any]:
    """An entry of `added_tokens` in tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": text, **flags}
