"""How `quire eval` measures a model on a text, and shows what quantization changes."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire.evaluation import answers_right, perplexity, read_tasks
from quire.llm import LLM
from quire_interfaces import ConfigError

__all__ = ["print_eval"]


def print_eval(
    config: QuireConfig,
    text_file: str,
    *,
    window: int,
    against: list[str],
    as_json: bool,
    tasks_file: str | None = None,
) -> int:
    """Print the perplexity of the text, and of each form of the weights in `against` beside it.

    Args:
        text_file: UTF-8.
        tasks_file: Conversations with right answers, see `quire.evaluation.read_tasks`: how many are answered so.
        against: Values of `quantization`; "none" for the weights as the checkpoint has them.
    """
    try:
        text = Path(text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text_file} as UTF-8 text: {error}", field="text") from None
    tasks = [] if tasks_file is None else read_tasks(tasks_file)
    figures: list[dict[str, Any]] = []
    for method in [config.model.quantization, *(None if name == "none" else name for name in against)]:
        settings = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization=method))
        start = time.perf_counter()
        with LLM(config=settings) as llm:
            result = perplexity(llm, llm.tokenizer.encode(text), window=window)
            weights = sum(size for name, size in llm.engine_info.memory_bytes.items() if name.startswith("weights"))
            form = llm.engine_info.choices["weights"]
            right = {"answers_right": answers_right(llm, tasks), "num_answers": len(tasks)} if tasks else {}
        figures.append(
            {"weights": form, "weight_bytes": weights, "seconds": time.perf_counter() - start}
            | dataclasses.asdict(result)
            | right
        )
    first = figures[0]["perplexity"]
    if as_json:
        print(json.dumps([{**line, "change": line["perplexity"] / first - 1} for line in figures], indent=2))
        return 0
    answers = f"{'right':>10}" if tasks else ""
    print(f"{'bytes':>14}{'perplexity':>14}{'change':>10}{answers}  weights")
    for line in figures:
        change = f"{line['perplexity'] / first - 1:+.3%}"
        answers = f"{line['answers_right']:>10}" if tasks else ""
        print(f"{line['weight_bytes']:>14}{line['perplexity']:>14.4f}{change:>10}{answers}  {line['weights']}")
    print(f"{figures[0]['num_tokens']} tokens predicted, in {figures[0]['num_windows']} windows of {window}")
    if tasks:
        print(f"right: of {len(tasks)} conversations those that are answered exactly as their last message says")
    return 0
