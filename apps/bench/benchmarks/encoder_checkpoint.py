"""A random encoder with a tokenizer, for `quire bench peers --task embed`, of the size of a published one.

    python encoder_checkpoint.py minilm-l6 FOLDER
    python encoder_checkpoint.py bge-base FOLDER

Needs transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from quire_testkit.tokenizers import write_tokenizer

SIZES = {"minilm-l6": (6, 384, 12, 1536), "bge-base": (12, 768, 12, 3072), "bge-large": (24, 1024, 16, 4096)}
"""Name -> layers, hidden size, heads, inner size of the feed-forward part."""


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    layers, hidden, heads, inner = SIZES[args.name]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    model.save_pretrained(args.folder)
    write_tokenizer(args.folder, vocab_size=1000)


if __name__ == "__main__":
    main()
