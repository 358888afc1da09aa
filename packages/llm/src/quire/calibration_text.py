"""The text that a network is calibrated with: a file -> token ids of sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError, RequestError
from quire_renderers import ChatRenderer

__all__ = ["SEQUENCE_TOKENS", "read_calibration"]

SEQUENCE_TOKENS = 512
"""At most so many of a sequence; a plain text is cut into pieces of as many."""


def read_calibration(file: str | Path, renderer: ChatRenderer, *, max_tokens: int) -> list[list[int]]:
    """The sequences of a file, from its beginning.

    Args:
        file: UTF-8. With the ending .jsonl an object on each line, {"text": "..."} or {"messages": [...]}, a
            conversation for the model's chat template: one sequence each. Anything else is one text.
        max_tokens: Of all sequences.

    Raises:
        ConfigError: The file cannot be read, or a line is something else; or there is nothing in it.
    """
    file = Path(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file} as UTF-8 text: {error}", field="calibration") from None
    sequences: list[list[int]] = []
    if file.suffix != ".jsonl":
        token_ids = renderer.tokenizer.encode(text)[:max_tokens]
        sequences = [token_ids[i : i + SEQUENCE_TOKENS] for i in range(0, len(token_ids), SEQUENCE_TOKENS)]
    else:
        num_left = max_tokens
        for number, line in enumerate(text.splitlines(), 1):
            if num_left > 0 and line.strip():
                sequences.append(_sequence(f"{file}, line {number}", line, renderer)[: min(num_left, SEQUENCE_TOKENS)])
                num_left -= len(sequences[-1])
    sequences = [sequence for sequence in sequences if sequence]
    if not sequences:
        raise ConfigError(f"{file} has no text to calibrate with", field="calibration")
    return sequences


def _sequence(where: str, line: str, renderer: ChatRenderer) -> list[int]:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}", field="calibration") from None
    if isinstance(values, dict) and isinstance(values.get("text"), str):
        return renderer.tokenizer.encode(values["text"])
    if isinstance(values, dict) and isinstance(values.get("messages"), list):
        try:
            return list(renderer.render_chat(values["messages"], add_generation_prompt=False).token_ids)
        except RequestError as error:
            raise ConfigError(f"{where}: {error}", field="calibration") from None
    raise ConfigError(
        f'{where} should be {{"text": "..."}} or {{"messages": [...]}}, is {line[:60]}', field="calibration"
    )
