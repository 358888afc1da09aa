"""The checkpoint's chat template and tokenizer, as training and evaluation use them.

Knows how a conversation becomes token ids and which of them are targets. Knows nothing about the corpus' content.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[1] / "src" / "quire_demo_model" / "checkpoint"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def load_template(checkpoint: Path = CHECKPOINT) -> jinja2.Template:
    """The chat template in a sandbox, with the two extra names it may use."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string((checkpoint / "chat_template.jinja").read_text())


class Chat:
    """Renders and tokenizes conversations.

    Args:
        checkpoint: the folder with ``chat_template.jinja`` and ``tokenizer.json``.
    """

    def __init__(self, checkpoint: Path = CHECKPOINT) -> None:
        self.template = load_template(checkpoint)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.end_id: int = self.tokenizer.token_to_id("<|im_end|>")
        self.pad_id: int = self.tokenizer.token_to_id("<|endoftext|>")
        self._lead: list[int] = self.tokenizer.encode("<|im_start|>assistant\n").ids

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The text of a conversation; ``kwargs`` go to the template (``tools``, ``enable_thinking``, ...)."""
        return self.template.render(messages=messages, **kwargs)

    def encode(self, text: str) -> list[int]:
        """The token ids of rendered text."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def targets(self, ids: list[int], learn_from: int = 0) -> list[bool]:
        """For each token, whether it belongs to an assistant's answer (its end mark included).

        Args:
            ids: a whole conversation.
            learn_from: answers before this one are not targets.
        """
        mask = [False] * len(ids)
        start, width, inside, answer = self._lead[0], len(self._lead), False, -1
        i = 0
        while i < len(ids):
            if ids[i] == start and ids[i : i + width] == self._lead:
                i += width
                inside, answer = True, answer + 1
                continue
            if inside:
                mask[i] = answer >= learn_from
                inside = ids[i] != self.end_id
            i += 1
        return mask
