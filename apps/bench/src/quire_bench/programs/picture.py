"""Messages with an image, as programs of engines that see get them: with the standard library alone."""

from __future__ import annotations

import random
from typing import Any

QUESTION = "What is in this picture?"
FIRST_PROMPT = {"width": 112, "height": 112, "seed": 12345}


def pixels(prompt: dict[str, Any]) -> bytes:
    """RGB, row by row; the same for the same seed."""
    return random.Random(prompt["seed"]).randbytes(3 * prompt["width"] * prompt["height"])


def message(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation with the image as Pillow has it, in the words of vLLM's and Quire's `LLM.chat`."""
    import PIL.Image

    image = PIL.Image.frombytes("RGB", (prompt["width"], prompt["height"]), pixels(prompt))
    return [
        {"role": "user", "content": [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]}
    ]
