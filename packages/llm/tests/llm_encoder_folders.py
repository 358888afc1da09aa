"""Tiny sentence-transformers folders, with what Transformers makes of their texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import sample_text

__all__ = ["SentenceModel", "write_wordpiece"]


def write_wordpiece(folder: Path, vocab_size: int = 200) -> None:
    """A WordPiece tokenizer in the manner of BERT's, lower case, with token types of pairs."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([sample_text(2000)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]",
                "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]",
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class SentenceModel:
    """A random encoder in a folder with a tokenizer and a mean pooling, beside Transformers' own.

    Args:
        folder: Written to.
        architecture: A case of `ENCODER_CASES`.
    """

    def __init__(self, folder: Path, architecture: str = "BertModel") -> None:
        self.folder = folder
        self.network: Any = write_checkpoint(folder, architecture, ENCODER_CASES[architecture]).eval()
        write_wordpiece(folder)
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def mean_embeddings(self, texts: Sequence[str], **tokenizing: Any) -> torch.Tensor:
        """[N, hidden_size]: hidden states of each text by itself, averaged and divided by their length."""
        vectors = []
        for text in texts:
            with torch.inference_mode():
                hidden = self.network(**self.tokenizer(text, return_tensors="pt", **tokenizing)).last_hidden_state[0]
            vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
        return torch.stack(vectors)
