"""Defaults of requests from a checkpoint's generation_config.json: what of it is used, and what is said not to be.

Knows the file's fields as Transformers has them. End tokens and what decoders begin with are read with config.json
(`quire_models.config`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.config import ModelSettings
from quire_interfaces import CheckpointError, ConfigError, Fields, RequestError, SamplingParams

__all__ = ["GENERATION_FIELDS", "generation_defaults", "generation_note", "read_generation_defaults"]

GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of the file that are those of `SamplingParams`."""

_READ_ELSEWHERE = ("eos_token_id", "decoder_start_token_id", "forced_bos_token_id")
_HARMLESS = (
    "_*",
    "transformers_version",
    "bos_token_id",
    "pad_token_id",
    "do_sample",
    "use_cache",
    "cache_*",
    "max_cache_len",
    "output_*",
    "return_*",
    "is_assistant",
    "num_assistant_*",
    "assistant_*",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "speculation_type",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "prefill_chunk_size",
    "low_memory",
    "renormalize_logits",
    "remove_invalid_values",
    "trust_remote_code",
)
"""Fields that change how outputs are computed or returned, not which they are."""
_OF_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "top_h": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "max_length": 20,
}
"""Fields -> the value that they have without being written."""


def generation_defaults(settings: ModelSettings, folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` for what requests leave out.

    Args:
        settings: `generation_config` and `override_generation_config`.
        folder: The model's.

    Raises:
        CheckpointError: a generation_config.json cannot be used, or is not where the settings say.
        ConfigError: an override that is no sampling field, or has no value that a request may have.
    """
    source, defaults = settings.generation_config, {}
    if source != "vllm":
        where = folder if source == "auto" else Path(source)
        if source != "auto" and not (where / "generation_config.json").is_file():
            raise CheckpointError(f"there is no generation_config.json in {source!r}; name its folder, auto or vllm")
        defaults = read_generation_defaults(where)
    override = settings.override_generation_config or {}
    for name in override:
        if name not in GENERATION_FIELDS:
            raise ConfigError(
                f"override_generation_config takes {', '.join(GENERATION_FIELDS)}, and no {name!r}",
                field="override_generation_config",
            )
    defaults = {name: value for name, value in (defaults | override).items() if value is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}", field="override_generation_config") from None
    return defaults


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that a generation_config.json sets; empty when there is none.

    Raises:
        CheckpointError: the file is no JSON object, or a field is no value that a request may have.
    """
    return _read(folder / "generation_config.json")[0]


def generation_note(settings: ModelSettings, folder: Path) -> str:
    """What the file sets that requests get no default from; empty where it sets nothing else, or is not read.

    Raises:
        CheckpointError: as `read_generation_defaults`.
    """
    if settings.generation_config == "vllm":
        return ""
    where = folder if settings.generation_config == "auto" else Path(settings.generation_config)
    unread = _read(where / "generation_config.json")[1]
    listed = ", ".join(f"{name} ({json.dumps(value)[:60]})" for name, value in unread.items())
    return f"generation_config.json: requests get no default from {listed}; they may ask for it" if unread else ""


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is used of the file, as fields of `SamplingParams`; and what changes outputs and is not."""
    if not path.is_file():
        return {}, {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        fields = Fields(values, str(path))
        defaults = {name: value for name in GENERATION_FIELDS if (value := fields.get(name)) is not None}
        if banned := _banned(fields):
            defaults["bad_words_token_ids"] = banned
        if stop := _stop_strings(fields):
            defaults["stop"] = stop
        SamplingParams(**defaults)
    except (ValueError, RequestError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; correct it, or remove the file") from None
    neutral = (name for name, value in _NEUTRAL.items() if values.get(name) == value)
    fields.skip(*_READ_ELSEWHERE, *_HARMLESS, *neutral)
    unread = fields.unread()
    if "num_beams" not in unread:
        unread = {name: value for name, value in unread.items() if name not in _OF_BEAMS}
    return defaults, unread


def _banned(fields: Fields) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that no output has."""
    words = fields.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ValueError(f"bad_words_ids must be a list of lists of token ids, is {words!r}")
    members = [Fields({"bad_words_ids": word}, fields.source).token_ids("bad_words_ids") for word in words]
    return (*((token_id,) for token_id in fields.token_ids("suppress_tokens")), *members)


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop_strings")
    return (value,) if isinstance(value, str) and value else fields.texts("stop_strings") if value else ()
