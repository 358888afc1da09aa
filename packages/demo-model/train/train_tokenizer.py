"""Train the byte-level BPE vocabulary on a sample of the corpus and write the tokenizer's files.

Text is cut before merging so that a value has the same tokens wherever it stands: a space joins only a lower-case
word or punctuation that follows it, a capital starts a new piece, and each digit is a piece of its own. So a city in
a question and the same city in a JSON string are equal sequences, which is what copying needs.

Run: python packages/demo-model/train/train_tokenizer.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from random import Random

from chat import CHECKPOINT, load_template
from corpus.mix import conversation
from corpus.words import Source
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = [
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
PIECES = r"\p{N}| ?\p{Ll}+|\p{Lu}\p{Ll}*| ?[^\s\p{L}\p{N}]+|\s+|\p{L}+"


def sample(num_conversations: int, seed: int) -> Iterator[str]:
    """Rendered conversations from the training side of the corpus."""
    template = load_template()
    source = Source(Random(seed))
    for _ in range(num_conversations):
        c = conversation(source)
        text = template.render(messages=c.messages, tools=c.tools, enable_thinking=c.enable_thinking)
        for mark in CONTROL + MARKS:
            text = text.replace(mark, "\n")
        yield text


def build(vocab_size: int, num_conversations: int, seed: int) -> Tokenizer:
    """The trained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=CONTROL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sample(num_conversations, seed), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into the checkpoint folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab-size", type=int, default=1280)
    parser.add_argument("--conversations", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = build(args.vocab_size, args.conversations, args.seed)
    tokenizer.save(str(CHECKPOINT / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
    }
    (CHECKPOINT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens written to {CHECKPOINT.name}/tokenizer.json")


if __name__ == "__main__":
    main()
