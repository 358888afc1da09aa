"""Processors of real families without weights, small: their own classes, a trained tokenizer, a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_testkit.tokenizers import write_tokenizer


def save_processor(family: str, folder: Path) -> None:
    """Write the tokenizer, the processor and a config.json of a family into a folder."""
    import transformers

    make, tokens, embed_tokens = FAMILIES[family]
    write_tokenizer(folder, vocab_size=600)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    make(transformers, tokenizer).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in embed_tokens.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **ids}))


def _llava(hf: Any, tokenizer: Any) -> Any:
    image = hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return hf.LlavaProcessor(image, tokenizer, patch_size=14, vision_feature_select_strategy="default",
                             num_additional_image_tokens=1)  # fmt: skip


FAMILIES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...], dict[str, str]]] = {
    "llava": (_llava, ("<image>",), {"image_token_index": "<image>"}),
}
"""Family -> its processor, the tokens that its tokenizer needs, and what its config.json says of them."""
