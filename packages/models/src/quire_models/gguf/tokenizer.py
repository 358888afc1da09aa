"""A GGUF file's vocabulary -> tokenizer.json and tokenizer_config.json. Free of torch, and of libraries that tokenize.

Two kinds are read: byte-level BPE with its merges ("gpt2"), and sentencepiece's BPE with a score for each piece
("llama"), whose merges are the pairs of pieces that make up a third one, the best scores first.
"""

from __future__ import annotations

import logging
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader

__all__ = ["tokenizer_files"]

logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens (tokenizer.ggml.token_type)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _CONTRACTIONS + "{1,3}" + _REST, _CONTRACTIONS + _REST
_SPLITS = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA3)
_SPLITS |= dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2)
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PLAIN = ("gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jina-v2-code", "exaone")


def tokenizer_files(header: GgufHeader) -> dict[str, Any]:
    """File name -> content; nothing when the file brings no vocabulary, or (a warning says so) one of another kind.

    Raises:
        CheckpointError: Lists that do not fit together.
    """
    meta = header.metadata
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if kind is None or kind in ("no_vocab", "none"):
        return {}
    readers = {"gpt2": _byte_level, "llama": _sentencepiece}
    pre = meta.get("tokenizer.ggml.pre", "default")
    if kind not in readers or (kind == "gpt2" and pre not in (*_SPLITS, *_DIGITS, *_PLAIN)):
        logger.warning(
            "%s: its tokenizer (model %r, pre-tokenizer %r) is not one that is read from GGUF files; give the folder "
            "of the model's own tokenizer with --tokenizer",
            header.path, kind, pre,
        )  # fmt: skip
        return {}
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens must be a list of tokens; convert the model again")
    kinds = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens; convert the "
            "model again"
        )
    added = [
        _added(i, token, special=kind_of != _USER_DEFINED)
        for i, (token, kind_of) in enumerate(zip(tokens, kinds, strict=True))
        if kind_of in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    parts = readers[kind](header, tokens)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    tokenizer["post_processor"] = _post_processor(header, tokens, parts)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _settings(header, tokens)}


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": special}


def _byte_level(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    meta = header.metadata
    merges, pre = meta.get("tokenizer.ggml.merges"), meta.get("tokenizer.ggml.pre", "default")
    if not isinstance(merges, list):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.merges must be a list; convert the model again")
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if pre in _SPLITS:
        first = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [first, level]
    elif pre in _DIGITS:
        steps = [{"type": "Digits", "individual_digits": True}, {**level, "use_regex": True}]
    else:
        steps = [{**level, "use_regex": True}]
    return {
        "normalizer": {"type": "NFC"} if _SPLITS.get(pre) == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**level, "use_regex": True},
        "model": _bpe(tokens, [merge.split(" ", 1) for merge in merges], ignore_merges=_SPLITS.get(pre) == _LLAMA3),
    }


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.scores must have one number for each of {len(tokens)} tokens; convert the "
            "model again"
        )
    space: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        space.insert(0, {"type": "Prepend", "prepend": "▁"})
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": space},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            **_bpe(tokens, _merges(tokens, scores), ignore_merges=False),
            "unk_token": tokens[unknown] if 0 <= unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(tokens: list[str], merges: list[list[str]], *, ignore_merges: bool) -> dict[str, Any]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, list[str]]] = []
    for token_id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[token_id], ids[left], ids[right], [left, right]))
    found.sort(key=lambda merge: merge[:3])
    return [merge for *_, merge in found]


def _named(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{name}_token_id is {token_id!r}, there are {len(tokens)} tokens; convert "
            "the model again"
        )
    return tokens[token_id]


def _post_processor(header: GgufHeader, tokens: list[str], parts: dict[str, Any]) -> dict[str, Any] | None:
    """What stands before and behind a text: as the file says, else a bos for sentencepiece and llama3's kind."""
    meta = header.metadata
    wants_bos = parts["model"]["byte_fallback"] or parts["model"]["ignore_merges"]
    around = {
        "bos": meta.get("tokenizer.ggml.add_bos_token", wants_bos),
        "eos": meta.get("tokenizer.ggml.add_eos_token", False),
    }
    named = {name: _named(header, tokens, name) for name, wanted in around.items() if wanted}
    special = {name: token for name, token in named.items() if token is not None}
    if not special:
        return None

    def template(text: str, type_id: int) -> list[dict[str, Any]]:
        def token(name: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": special[name], "type_id": type_id}}] if name in special else []

        return [*token("bos"), {"Sequence": {"id": text, "type_id": type_id}}, *token("eos")]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [meta[f"tokenizer.ggml.{name}_token_id"]], "tokens": [token]}
            for name, token in special.items()
        },
    }


def _settings(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, Any] = {key: _named(header, tokens, name) for name, key in names.items()}
    settings = {key: token for key, token in settings.items() if token is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = header.metadata.get("tokenizer.chat_template")
    return settings if not isinstance(template, str) else {**settings, "chat_template": template}
