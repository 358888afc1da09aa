"""Which tokens of a GGUF file's vocabulary end an answer. Free of torch.

Files name one end token, and often it is the one that ends a document, not a turn. Readers of the format know the
others by their texts (llama.cpp's end-of-generation tokens); so does this module.
"""

from __future__ import annotations

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader

__all__ = ["CONTROL", "end_token_ids", "named_token_id", "tokens_of"]

CONTROL = 3
"""Kind of a token (tokenizer.ggml.token_type) that is no part of a text."""

_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
"""Texts that end an answer whatever kind of token the file calls them."""
_CONTROL_ENDS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "▁<EOT>")
"""Texts that may be words, tags of HTML for example: they end an answer where they are control tokens."""


def tokens_of(header: GgufHeader) -> list[str]:
    """The vocabulary's texts by id; empty when the file brings none.

    Raises:
        CheckpointError: It is no list of texts.
    """
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        return []
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens must be a list of texts; convert the model again")
    return tokens


def named_token_id(header: GgufHeader, name: str) -> int | None:
    """The id under `tokenizer.ggml.{name}_token_id`, None where there is none.

    Raises:
        CheckpointError: It is no id of the vocabulary.
    """
    token_id, num_tokens = header.fields.get(f"tokenizer.ggml.{name}_token_id"), len(tokens_of(header))
    if token_id is None:
        return None
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
    if not is_id or (num_tokens and token_id >= num_tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{name}_token_id is {token_id!r}, there are {num_tokens} tokens; convert "
            "the model again"
        )
    return int(token_id)


def end_token_ids(header: GgufHeader) -> list[int]:
    """The ids that the file names, then those known by their texts.

    Raises:
        CheckpointError: A named id is none of the vocabulary.
    """
    named = [named_token_id(header, name) for name in _NAMED]
    tokens, kinds = tokens_of(header), header.fields.get("tokenizer.ggml.token_type")
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)

    def is_control(token_id: int) -> bool:
        return isinstance(kinds, list) and token_id < len(kinds) and kinds[token_id] == CONTROL

    found = {text: ids[text] for text in _TURN_ENDS if text in ids}
    found |= {text: ids[text] for text in _CONTROL_ENDS if text in ids and is_control(ids[text])}
    if ("<|return|>" in found or "<|flush|>" in found) and ("<|call|>" in found or "<|calls|>" in found):
        found.pop("<|end|>", None)  # of Harmony and Solar: there it ends a message of several
    if "<|tool_response>" in found:
        found.pop("</s>", None)  # of Gemma 4: a tag of HTML
    return list(dict.fromkeys(token_id for token_id in (*named, *found.values()) if token_id is not None))
