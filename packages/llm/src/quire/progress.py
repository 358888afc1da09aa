"""Progress over the requests of a call, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from quire_engine import PooledRequestOutput, RequestOutput

__all__ = ["ProgressChoice", "progress"]

ProgressChoice = bool | Callable[..., Any]
"""Whether to show a bar; or what makes one, called as `tqdm` is."""


@contextlib.contextmanager
def progress(
    total: int, choice: ProgressChoice, verb: str = "generating"
) -> Iterator[Callable[[RequestOutput | PooledRequestOutput], None]]:
    """A progress bar over requests, with the rate of tokens: of generated ones, or of those read where prompts are
    pooled; nothing when switched off."""
    if callable(choice):
        with contextlib.closing(choice(total=total, desc=verb, dynamic_ncols=True)) as bar:
            yield lambda output: bar.update(1)
    elif choice:
        with _bar(total, verb) as advance:
            yield advance
    else:
        yield lambda output: None


@contextlib.contextmanager
def _bar(total: int, verb: str) -> Iterator[Callable[[RequestOutput | PooledRequestOutput], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    tokens = 0
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=total, rate="")

        def advance(output: RequestOutput | PooledRequestOutput) -> None:
            nonlocal tokens
            if isinstance(output, PooledRequestOutput):
                tokens += output.num_prompt_tokens
            else:
                tokens += output.num_generation_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
            bar.update(task, advance=1, rate=rate)

        yield advance
