"""Chat templates for checkpoints that come with an encoder in Python instead of one, by the model_type of config.json.

The markers and texts in `encodings/` are those that the models were trained with: the formats of DeepSeek-V3.2
(`encoding_dsv32.py`) and DeepSeek-V4 (`encoding_dsv4.py`) as published beside their weights. `thinking` or
`enable_thinking` opens the thinking, `reasoning_effort` "max" tells V4 to think longest.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire_interfaces import CheckpointError

__all__ = ["PROMPT_ENCODINGS", "prompt_encoding_of", "read_prompt_encoding"]

PROMPT_ENCODINGS = {"deepseek_v32": ("dsml", "deepseek_v32"), "deepseek_v4": ("dsml", "deepseek_v4")}
"""model_type -> the files that its template is made of."""


def read_prompt_encoding(model_type: str) -> str:
    """The chat template of a model_type in `PROMPT_ENCODINGS`."""
    folder = Path(__file__).parent / "encodings"
    names = PROMPT_ENCODINGS[model_type]
    return "".join((folder / f"{name}.jinja").read_text(encoding="utf-8") for name in names)


def prompt_encoding_of(folder: Path) -> str | None:
    """The chat template for a checkpoint without one, None where its model_type has none of these.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return read_prompt_encoding(model_type) if model_type in PROMPT_ENCODINGS else None
