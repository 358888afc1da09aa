"""What the small JSON files beside a tokenizer say: special tokens, chat templates, end-of-sequence ids.

Knows the file names and shapes of the Hugging Face checkpoint format; knows no tokenizer library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError
from quire_renderers.prompt_encodings import prompt_encoding_of

__all__ = ["AddedTokenSpec", "TokenizerFiles", "read_tokenizer_files"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTokenSpec:
    """One token that is matched in the text before the tokenizer's own rules see it."""

    content: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The facts of a checkpoint folder that are not in the tokenizer model itself."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as it stands, with the tokenizer_class of config.json where it names none."""
    named_tokens: dict[str, AddedTokenSpec] = field(default_factory=dict)
    """bos_token, eos_token, ... as far as they are named."""
    extra_special_tokens: tuple[AddedTokenSpec, ...] = ()
    added_tokens: dict[int, AddedTokenSpec] = field(default_factory=dict)
    """Added tokens with the ids that tokenizer_config.json (added_tokens.json for an old folder) gives them."""
    model_eos_token_ids: tuple[int, ...] = ()
    """eos_token_id of generation_config.json, else of config.json."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; a single unnamed template is "default"."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the JSON files of a checkpoint folder; each of them may be missing.

    Raises:
        CheckpointError: a file that is there is not what it should be.
    """
    settings = _read_object(folder / "tokenizer_config.json")
    if settings.get("tokenizer_class") is None:
        settings["tokenizer_class"] = _read_object(folder / "config.json").get("tokenizer_class")
    # special_tokens_map.json and added_tokens.json are of a time before added_tokens_decoder, and then have the word.
    is_old = "added_tokens_decoder" not in settings
    special_map = _read_object(folder / "special_tokens_map.json") if is_old else {}
    named: dict[str, AddedTokenSpec] = {}
    for name in _NAMED_TOKENS:
        spec = _token_spec(special_map.get(name, settings.get(name)))
        if spec is not None:
            named[name] = spec
    extra = _extra_special_tokens(settings, special_map)
    names = {spec.content for spec in named.values()}
    if is_old:
        added = _old_added_tokens(folder / "added_tokens.json", names | {spec.content for spec in extra})
    else:
        added = _added_tokens(folder / "tokenizer_config.json", settings["added_tokens_decoder"] or {}, names)
    return TokenizerFiles(
        folder=folder,
        settings=settings,
        named_tokens=named,
        extra_special_tokens=extra,
        added_tokens=added,
        model_eos_token_ids=_model_eos_token_ids(folder),
        chat_templates=_chat_templates(folder, settings),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _token_spec(value: Any, *, special: bool = True) -> AddedTokenSpec | None:
    """A token as the files write it: a string, or an object with flags."""
    if isinstance(value, str):
        return AddedTokenSpec(content=value, special=special) if value else None
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        special = bool(value.get("special", special))
        flags = {name: bool(value.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
        normalized = bool(value.get("normalized", not special))
        return AddedTokenSpec(content=value["content"], special=special, normalized=normalized, **flags)
    return None


def _extra_special_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> tuple[AddedTokenSpec, ...]:
    """Special tokens without a name; "additional" is the older word for them."""
    newer, older = "extra_special_tokens", "additional_special_tokens"
    values = _listed(settings.get(newer) or settings.get(older)) + _listed(special_map.get(newer))
    found = map(_token_spec, values or _listed(special_map.get(older)))
    return tuple({spec.content: spec for spec in found if spec is not None}.values())


def _listed(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return list(values.values())
    return values if isinstance(values, list) else []


def _added_tokens(source: Path, decoder: Any, named: set[str]) -> dict[int, AddedTokenSpec]:
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{source}: added_tokens_decoder must be an object of tokens by id, is {decoder!r}")
    added: dict[int, AddedTokenSpec] = {}
    for key, value in decoder.items():
        if isinstance(value, dict) and value.get("content") in named:  # as bos_token or the like; that makes it special
            value = {**value, "special": True}
        spec = _token_spec(value, special=False)
        if spec is None or not (key.isascii() and key.isdigit()):
            raise CheckpointError(f"{source}: added_tokens_decoder[{key!r}] is not a token: {value!r}")
        added[int(key)] = spec
    return added


def _old_added_tokens(source: Path, special: set[str]) -> dict[int, AddedTokenSpec]:
    added: dict[int, AddedTokenSpec] = {}
    for content, token_id in _read_object(source).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0 or not content:
            raise CheckpointError(f"{source}: {content!r} must be a token with its id, has {token_id!r}")
        is_special = content in special
        added[token_id] = AddedTokenSpec(content=content, special=is_special, normalized=not is_special)
    return added


def _model_eos_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        settings = _read_object(folder / name)
        value = settings.get("eos_token_id")
        if value is None and isinstance(settings.get("text_config"), dict):
            value = settings["text_config"].get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id must be an id or a list of ids, found {value!r}")
        return tuple(ids)
    return ()


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, dict):
        templates.update({str(name): text for name, text in value.items() if isinstance(text, str)})
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    encoding = None if templates else prompt_encoding_of(folder)
    if encoding is not None:
        templates["default"] = encoding
    return templates
