"""A GGUF file's vocabulary -> tokenizer.json and tokenizer_config.json. Free of torch, and of libraries that tokenize.

Two kinds are read: byte-level BPE with its merges ("gpt2"), and sentencepiece's BPE with a score for each piece
("llama"), whose merges are the pairs of pieces that make up a third one, the best scores first.
"""

from __future__ import annotations

import logging
from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.end_tokens import CONTROL, end_token_ids, named_token_id, tokens_of
from quire_models.gguf.header import GgufHeader

__all__ = ["tokenizer_files"]

logger = logging.getLogger(__name__)

_UNKNOWN, _USER_DEFINED = 2, 4
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
    fields, tokens = header.fields, tokens_of(header)
    kind, pre = fields.text("tokenizer.ggml.model", default=None), fields.text("tokenizer.ggml.pre", default="default")
    if kind is None or kind in ("no_vocab", "none"):
        return {}
    readers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in readers or (kind == "gpt2" and pre not in (*_SPLITS, *_DIGITS, *_PLAIN)):
        logger.warning(
            "%s: its tokenizer (model %r, pre-tokenizer %r) is not one that is read from GGUF files; give the folder "
            "of the model's own tokenizer with --tokenizer",
            header.path, kind, pre,
        )  # fmt: skip
        return {}
    if not tokens:
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens must be a list of tokens; convert the model again")
    kinds = _list_for(header, "token_type", tokens, int) or [1] * len(tokens)
    ends = set(end_token_ids(header))
    added = [
        _added(i, token, special=kind_of != _USER_DEFINED or i in ends)
        for i, (token, kind_of) in enumerate(zip(tokens, kinds, strict=True))
        if i in ends or kind_of in (_UNKNOWN, CONTROL, _USER_DEFINED)
    ]
    parts = readers[kind](header, tokens)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    tokenizer["post_processor"] = _post_processor(header, tokens, parts)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _settings(header, tokens)}


def _list_for(header: GgufHeader, name: str, tokens: list[str], *kinds: type) -> list[Any] | None:
    """A list with one number for each token, None where the file has none."""
    found = header.fields.get(f"tokenizer.ggml.{name}")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(each) in kinds for each in found):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{name} must be a list of numbers; convert the model again"
        )
    if len(found) != len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{name} has {len(found)} entries for {len(tokens)} tokens; convert the "
            "model again"
        )
    return found


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": special}


def _byte_level(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    merges, pre = header.fields.get("tokenizer.ggml.merges"), header.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge for merge in merges):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.merges must be a list of pairs of texts; convert the model again"
        )
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
    scores = _list_for(header, "scores", tokens, int, float)
    if scores is None:
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
    if header.fields.flag("tokenizer.ggml.add_space_prefix", default=True):
        space.insert(0, {"type": "Prepend", "prepend": "▁"})
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = named_token_id(header, "unknown") or 0
    return {
        "normalizer": {"type": "Sequence", "normalizers": space},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            **_bpe(tokens, _merges(tokens, scores), ignore_merges=False),
            "unk_token": tokens[unknown],
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
    token_id = named_token_id(header, name)
    return None if token_id is None else tokens[token_id]


def _post_processor(header: GgufHeader, tokens: list[str], parts: dict[str, Any]) -> dict[str, Any] | None:
    """What stands before and behind a text: as the file says, else a bos for sentencepiece and llama3's kind."""
    fields = header.fields
    wants_bos = parts["model"]["byte_fallback"] or parts["model"]["ignore_merges"]
    around = {
        "bos": fields.flag("tokenizer.ggml.add_bos_token", default=wants_bos),
        "eos": fields.flag("tokenizer.ggml.add_eos_token", default=False),
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
            token: {"id": token, "ids": [named_token_id(header, name)], "tokens": [token]}
            for name, token in special.items()
        },
    }


def _settings(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, Any] = {key: _named(header, tokens, name) for name, key in names.items()}
    settings = {key: token for key, token in settings.items() if token is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    templates = _chat_templates(header)
    if set(templates) == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def _chat_templates(header: GgufHeader) -> dict[str, str]:
    """By name: `tokenizer.chat_template` is the default one, `tokenizer.chat_template.tool_use` that for tools."""
    fields, prefix = header.fields, "tokenizer.chat_template"
    fields.skip("tokenizer.chat_templates")  # the names, which the keys have too
    keys = {key: key[len(prefix) + 1 :] or "default" for key in header.metadata if key.startswith(f"{prefix}.")}
    found = {name: fields.text(key, default="") for key, name in {prefix: "default", **keys}.items()}
    return {name: text for name, text in found.items() if text}
