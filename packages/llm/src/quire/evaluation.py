"""How well a model predicts a text, and how many conversations it answers as they should be: for comparing forms of the
same weights.

Knows an `LLM`; does not know the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.llm import LLM
from quire_interfaces import ConfigError, RequestError, SamplingParams

__all__ = ["Perplexity", "Task", "answers_right", "perplexity", "read_tasks"]

_SPARE_TOKENS = 8
"""What an answer may be longer than the right one before it is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """What `perplexity` found."""

    perplexity: float
    """e to the mean negative log-likelihood of a token."""
    num_tokens: int
    """Tokens that were predicted."""
    num_windows: int


def perplexity(llm: LLM, token_ids: Sequence[int], *, window: int = 512) -> Perplexity:
    """Perplexity of a text, cut into windows that do not overlap; the first token of each is not predicted.

    Args:
        token_ids: The text.
        window: Tokens of a window; at most the model's longest sequence less one.

    Raises:
        RequestError: Fewer than two tokens, or a window that is too long or too short.
    """
    longest = llm.engine_info.max_model_len - 1
    if not 2 <= window <= longest:
        raise RequestError(f"window must be from 2 to {longest} tokens (max_model_len less one), got {window}")
    windows = [list(token_ids[begin : begin + window]) for begin in range(0, len(token_ids), window)]
    windows = [part for part in windows if len(part) > 1]
    if not windows:
        raise RequestError(f"the text has {len(token_ids)} tokens; at least two are needed to predict one")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(windows, params, use_tqdm=False)
    scored = [entries for output in outputs for entries in output.prompt_logprobs or () if entries]
    logprobs = [logprob.logprob for entries in scored for logprob in entries.values()]  # of the text's own tokens alone
    return Perplexity(
        perplexity=math.exp(-math.fsum(logprobs) / len(logprobs)), num_tokens=len(logprobs), num_windows=len(windows)
    )


class Task(NamedTuple):
    """A conversation and what its next message should be."""

    messages: list[dict[str, Any]]
    answer: str


def read_tasks(file: str | Path) -> list[Task]:
    """The conversations of a file, each up to its last message, which is the right answer.

    Args:
        file: UTF-8, an object on each line: {"messages": [..., {"role": "assistant", "content": "..."}]}.

    Raises:
        ConfigError: The file cannot be read, has no line, or one that is something else.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file} as UTF-8 text: {error}", field="tasks") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            *before, last = json.loads(line)["messages"]
            if last["role"] != "assistant" or not isinstance(last["content"], str) or not before:
                raise ValueError("its last message is no answer")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{file}, line {number} should be {{"messages": [...]}} that ends with an answer in text '
                f'({{"role": "assistant", "content": "..."}}), is {line[:60]} ({error})',
                field="tasks",
            ) from None
        tasks.append(Task(before, last["content"]))
    if not tasks:
        raise ConfigError(f"{file} has no conversations", field="tasks")
    return tasks


def answers_right(llm: LLM, tasks: Sequence[Task]) -> int:
    """How many of the conversations the model answers exactly as it should, with its most likely tokens; white space at
    either end aside."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(llm.tokenizer.encode(task.answer)) + _SPARE_TOKENS)
        for task in tasks
    ]
    outputs = llm.chat([task.messages for task in tasks], params, use_tqdm=False)
    return sum(
        output.outputs[0].text.strip() == task.answer.strip() for output, task in zip(outputs, tasks, strict=True)
    )
