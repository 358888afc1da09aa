"""Tiny networks that give a vector for each token of a document that is an image, with their processors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

__all__ = ["RETRIEVAL_NETWORKS", "RetrievalModel"]

RETRIEVAL_NETWORKS: dict[str, str] = {
    "ColPali": "PaliGemmaForConditionalGeneration",
    "ColQwen2": "Qwen2VLForConditionalGeneration",
    "ColQwen2.5": "Qwen2_5_VLForConditionalGeneration",
}
"""Name -> architecture of the network with towers in it."""

_PIXELS = {"shortest_edge": 64, "longest_edge": 4096}
_SQUARE = {"height": 32, "width": 32}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


class RetrievalModel:
    """A random ColPali or ColQwen2 with its processor, in a folder.

    Args:
        folder: Where it is written.
        name: One of `RETRIEVAL_NETWORKS`.
        embedding_dim: Numbers of a token's vector.
    """

    def __init__(self, folder: Path, name: str, embedding_dim: int = 24) -> None:
        import transformers

        self.folder, is_colpali = folder, name == "ColPali"
        write_tokenizer(folder, vocab_size=600)
        tokens = {"image_token": "<image>"} if is_colpali else _QWEN_TOKENS
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, extra_special_tokens=tokens, bos_token="<|im_start|>", pad_token="<|endoftext|>"
        )
        images: Any
        if is_colpali:
            images = transformers.SiglipImageProcessorPil(size=_SQUARE, image_seq_length=16)
        else:
            images = transformers.Qwen2VLImageProcessorPil(size=_PIXELS, patch_size=4)
        stem = "ColPali" if is_colpali else "ColQwen2"
        self.processor: Any = getattr(transformers, f"{stem}Processor")(image_processor=images, tokenizer=tokenizer)
        case = MEDIA_CASES[RETRIEVAL_NETWORKS[name]]
        ids = {"image_token_id": tokens["image_token"]}
        if not is_colpali:
            ids |= {f"{part}_id": token for part, token in tokens.items()}
        text = {**case.fields["text_config"], "vocab_size": len(tokenizer), "eos_token_id": None}
        text["max_position_embeddings"] = 2048
        network = {
            **{field: value for field, value in case.fields.items() if field != "image_token_index"},
            "model_type": getattr(transformers, case.config).model_type,
            "text_config": text,
            **{field: tokenizer.convert_tokens_to_ids(token) for field, token in ids.items()},
        }
        fields: Mapping[str, Any] = {"vlm_config": network, "embedding_dim": embedding_dim}
        wrapped = ParityCase(config=f"{stem}Config", fields=fields, weight_scale=case.weight_scale, keep=case.keep)
        self.network = write_checkpoint(folder, f"{stem}ForRetrieval", dataclasses.replace(wrapped, seed=case.seed))
        self.processor.save_pretrained(folder)

    def expected(self, *, text: str | None = None, image: Any = None) -> Tensor:
        """Vectors of a query or of an image by Transformers, [tokens, embedding_dim]. Tokens of an image have the
        positions with which ColQwen2 was trained, which its class asked for before it lost them (5.x counts them like
        texts')."""
        given = {"images": [image]} if text is None else {"text": [text]}
        inputs = self.processor(**given, return_tensors="pt")
        inputs.pop("labels", None)
        if image is not None and hasattr(self.network.vlm, "get_rope_index"):
            types = (inputs["input_ids"] == self.network.config.vlm_config.image_token_id).int()
            inputs["position_ids"], _ = self.network.vlm.get_rope_index(
                inputs["input_ids"], mm_token_type_ids=types, image_grid_thw=inputs["image_grid_thw"]
            )
        with torch.no_grad():
            embeddings: Tensor = self.network(**inputs).embeddings[0]
        return embeddings
