"""A tekken.json, Mistral's own file of a tokenizer, as a tokenizer of the library `tokenizers`.

The file has the bytes of each token in the order in which pairs are merged, a pattern that cuts texts into words, and
the control tokens, which come first.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from quire_interfaces import CheckpointError
from quire_renderers.rank_bpe import rank_backend

__all__ = ["TEKKEN_BOS", "TEKKEN_EOS", "read_tekken", "tekken_backend"]

TEKKEN_BOS, TEKKEN_EOS = "<s>", "</s>"
_FIRST_CONTROL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Of files that do not list theirs."""


def read_tekken(path: Path) -> dict[str, Any]:
    """The content of a tekken.json.

    Raises:
        CheckpointError: it cannot be read, or misses a part.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    config = content.get("config") if isinstance(content, dict) else None
    numbers = ("default_vocab_size", "default_num_special_tokens")
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("pattern"), str)
        or any(type(config.get(name)) is not int for name in numbers)
        or not isinstance(content.get("vocab"), list)
    ):
        raise CheckpointError(f"{path} must have a vocab, and a config with pattern, {' and '.join(numbers)}")
    if any(config[name] < 0 for name in numbers):
        raise CheckpointError(f"{path}: {' and '.join(numbers)} must be at least 0")
    return dict(content)


def tekken_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tekken.json. `<s>` comes before a text.

    Raises:
        CheckpointError: the file is not understood.
    """
    content = read_tekken(path)
    config = content["config"]
    num_control = config["default_num_special_tokens"]
    ranked = _ranked_tokens(content["vocab"][: config["default_vocab_size"] - num_control], path)
    control = _control_tokens(content.get("special_tokens"), num_control, path)
    vocab = dict(zip(control, range(num_control), strict=True))
    ids = {token: num_control + rank for rank, token in enumerate(ranked)}
    backend = rank_backend(path, ids, vocab, config["pattern"])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{TEKKEN_BOS} $A", pair=f"{TEKKEN_BOS} $A $B", special_tokens=[(TEKKEN_BOS, vocab[TEKKEN_BOS])]
    )
    return backend


def _ranked_tokens(vocab: list[Any], path: Path) -> list[bytes]:
    try:
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in vocab]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: a token of the vocab has no token_bytes in base 64: {error}") from error
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: the tokens must be different from each other, and each byte be one")
    return tokens


def _control_tokens(listed: Any, num_control: int, path: Path) -> list[str]:
    """Texts of the control tokens by id; those that the file does not name are fillers."""
    names = [f"<SPECIAL_{token_id}>" for token_id in range(num_control)]
    if listed is None:
        listed = [{"rank": rank, "token_str": name} for rank, name in enumerate(_FIRST_CONTROL_TOKENS[:num_control])]
    try:
        for entry in listed:
            if entry["rank"] < 0:
                raise IndexError(f"the rank {entry['rank']}")
            names[entry["rank"]] = str(entry["token_str"])
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: special_tokens must have a rank and a token_str each: {error}") from error
    if TEKKEN_BOS not in names or TEKKEN_EOS not in names or len(set(names)) != len(names):
        raise CheckpointError(f"{path}: special_tokens must hold {TEKKEN_BOS} and {TEKKEN_EOS}, each token once")
    return names
