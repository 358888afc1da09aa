"""Write a random Whisper of a published size, with the tokenizer and the rules of another one.

    python apps/bench/benchmarks/speech_checkpoint.py FOLDER base --tokenizer path/to/whisper-tiny.en

The other one is a folder of Transformers or of CTranslate2; the random one gets a row for each token of it.
What it writes makes no sense, and takes as long as what a trained one writes: each window ends at the most tokens that
are asked for.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quire_models.hub import resolve_model

SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12), "medium": (1024, 24, 16)}
"""Width, layers of each stack, heads (Radford et al. 2022, table 1)."""


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--tokenizer", required=True, help="folder of a Whisper")
    args = parser.parse_args()
    source = resolve_model(args.tokenizer)
    width, layers, heads = SIZES[args.size]
    torch.manual_seed(0)
    like = json.loads((source / "config.json").read_text())
    kept = ("vocab_size", "num_mel_bins", "decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    config = WhisperConfig(
        **{name: like[name] for name in kept},
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config.alignment_heads = [[layers - 1, 0]]
    model.save_pretrained(args.folder)
    shutil.copyfile(source / "tokenizer.json", args.folder / "tokenizer.json")
    rules = json.loads((source / "generation_config.json").read_text())
    rules["alignment_heads"] = [[layers - 1, 0]]
    (args.folder / "generation_config.json").write_text(json.dumps(rules))


if __name__ == "__main__":
    main()
