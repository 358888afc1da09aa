"""Tiny networks that read texts and images apart, CLIP and SigLIP, with their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

__all__ = ["DUAL_ENCODERS", "DualEncoder"]

DUAL_ENCODERS = ("CLIP", "Siglip")
"""What Transformers' classes begin with."""
_LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE_SIZE = 32
_START, _END = "<|im_start|>", "<|endoftext|>"


class DualEncoder:
    """A random network with its tokenizer, which writes an end behind texts, and its image processor, in a folder.

    Args:
        folder: Where it is written.
        name: One of `DUAL_ENCODERS`.
        text_length: Tokens that it reads of a text.
    """

    def __init__(self, folder: Path, name: str, text_length: int = 48) -> None:
        import transformers

        self.folder, self.text_length, self._is_clip = folder, text_length, name == "CLIP"
        write_tokenizer(folder, vocab_size=600)
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids: dict[str, int] = {token: own.token_to_id(token) or 0 for token in (_START, _END)}
        own.post_processor = processors.TemplateProcessing(single=f"{_START} $A {_END}", special_tokens=[*ids.items()])
        own.save(str(folder / "tokenizer.json"))
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"pad_token": _END, "model_max_length": text_length}
        file.write_text(json.dumps(settings))
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        text = {**_LAYERS, "vocab_size": 600, "max_position_embeddings": text_length}
        text |= {"eos_token_id": ids[_END], "bos_token_id": ids[_START], "pad_token_id": ids[_END]}
        vision = {**_LAYERS, "image_size": _IMAGE_SIZE, "patch_size": 8}
        fields: dict[str, Any] = {"text_config": text, "vision_config": vision}
        if self._is_clip:
            fields |= {"projection_dim": 40}
        else:
            text |= {"projection_size": 32}
        case = ParityCase(config=f"{name}Config", fields=fields, weight_scale=0.2)
        self.network = write_checkpoint(folder, f"{name}Model", case)
        square = {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE}
        if self._is_clip:
            self._images: Any = transformers.CLIPImageProcessorPil(
                size={"shortest_edge": _IMAGE_SIZE}, crop_size=square
            )
        else:
            self._images = transformers.SiglipImageProcessorPil(size=square)
        self._images.save_pretrained(folder)

    @torch.no_grad()
    def text_features(self, text: str) -> Tensor:
        """[dimensions]: as Transformers gives them, not normalized."""
        padding = {} if self._is_clip else {"padding": "max_length"}
        inputs = self.tokenizer(text, max_length=self.text_length, truncation=True, return_tensors="pt", **padding)
        return _vector(self.network.get_text_features(input_ids=inputs["input_ids"]))

    @torch.no_grad()
    def image_features(self, image: Any) -> Tensor:
        """[dimensions]: as Transformers gives them, not normalized."""
        pixels = self._images([image], return_tensors="pt")["pixel_values"]
        return _vector(self.network.get_image_features(pixel_values=pixels))


def _vector(features: Any) -> Tensor:
    vector: Tensor = getattr(features, "pooler_output", features)[0]
    return vector
