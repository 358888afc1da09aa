"""Chat templates for checkpoints that come with an encoder in Python instead of one.

By the model_type of config.json, by the version that a tekken.json gives for the library mistral-common, or by xAI's
own file of a tokenizer (Grok 2).
The markers and texts in `encodings/` are those that the models were trained with: the formats of DeepSeek-V3.2
(`encoding_dsv32.py`) and DeepSeek-V4 (`encoding_dsv4.py`) as published beside their weights. `thinking` or
`enable_thinking` opens the thinking, `reasoning_effort` "max" tells V4 to think longest. Mistral's prompts are those of
mistral-common, versions 3, 7, 11 and 13.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire_interfaces import CheckpointError

__all__ = ["GROK_FILE", "PROMPT_ENCODINGS", "prompt_encoding_of", "read_prompt_encoding"]

PROMPT_ENCODINGS = {"deepseek_v32": ("dsml", "deepseek_v32"), "deepseek_v4": ("dsml", "deepseek_v4")}
"""model_type -> the files that its template is made of."""
GROK_FILE = "tokenizer.tok.json"
"""xAI's own file of a tokenizer."""
_TEKKEN_VERSIONS = {"v3": 3, "v7": 7, "v11": 11, "v13": 13}


def read_prompt_encoding(model_type: str) -> str:
    """The chat template of a model_type in `PROMPT_ENCODINGS`."""
    folder = Path(__file__).parent / "encodings"
    names = PROMPT_ENCODINGS[model_type]
    return "".join((folder / f"{name}.jinja").read_text(encoding="utf-8") for name in names)


def prompt_encoding_of(folder: Path) -> str | None:
    """The chat template for a checkpoint without one, None where there is none for it.

    Raises:
        CheckpointError: config.json or tekken.json cannot be read.
    """
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        from quire_renderers.tekken_tokenizer import read_tekken  # most starts do without

        version = _TEKKEN_VERSIONS.get(str(read_tekken(folder / "tekken.json")["config"].get("version")))
        template = (Path(__file__).parent / "encodings" / "mistral_tekken.jinja").read_text(encoding="utf-8")
        return None if version is None else f"{{%- set version = {version} -%}}\n{template}"
    if (folder / GROK_FILE).is_file() and not (folder / "tokenizer.json").is_file():
        return (Path(__file__).parent / "encodings" / "grok.jinja").read_text(encoding="utf-8")
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return read_prompt_encoding(model_type) if model_type in PROMPT_ENCODINGS else None
