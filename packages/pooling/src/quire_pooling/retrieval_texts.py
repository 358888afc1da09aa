"""How queries and images are put to ColPali and ColQwen2: what their processors write around them. Free of torch.

Their files say it only where it was changed; what Transformers' processors begin with stands here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import read_json
from quire_pooling.spec import LateInteractionSpec, PoolerSpec

__all__ = ["with_retrieval_texts"]

_NUM_AUGMENTATION_TOKENS = 10
"""Padding tokens behind a query."""
_IMAGE_TOKEN = "<image>"
"""PaliGemma's."""
_DESCRIBE = "Describe the image."
_COLQWEN2_IMAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)


def with_retrieval_texts(pooler: PoolerSpec, folder: Path, config: Mapping[str, Any]) -> PoolerSpec:
    """A retriever's pooler with the texts of its processor.

    Args:
        folder: The checkpoint, whose processor_config.json and tokenizer_config.json are read where they are there.
        config: config.json.

    Raises:
        CheckpointError: A file cannot be read.
    """
    processor, tokenizer = (_fields(folder / f"{name}_config.json") for name in ("processor", "tokenizer"))
    is_colpali = config.get("model_type") == "colpali"
    bos = _token(tokenizer.get("bos_token"), "<bos>") if is_colpali else ""
    padding = _token(tokenizer.get("pad_token"), "<pad>" if is_colpali else "<|endoftext|>")
    prefix = processor.get("query_prefix") or ("Question: " if is_colpali else "Query: ")
    image = processor.get("visual_prompt_prefix") or (_DESCRIBE if is_colpali else _COLQWEN2_IMAGE)
    texts = LateInteractionSpec(
        query_suffix=f"{padding * _NUM_AUGMENTATION_TOKENS}\n",
        image_document=f"{_IMAGE_TOKEN}{bos}{image}\n" if is_colpali else image,
        image_prompt=image if is_colpali else _DESCRIBE if _DESCRIBE in image else "",
    )
    return dataclasses.replace(pooler, prompts={"query": f"{bos}{prefix}"}, late_interaction=texts)


def _fields(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token(value: Any, default: str) -> str:
    """A token as tokenizer_config.json has it: a text, or an object with its content."""
    return str(value.get("content", default) if isinstance(value, Mapping) else value or default)
