"""Custom logits processors: `extra_args={"logits_processors": ["name"]}`, and those that run for every request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire_interfaces import LogitsProcessor, RequestError, SamplingParams
from quire_sampling.option import EditOption, EditStage, RequestContext, RowLogits

__all__ = ["OPTIONS", "describe_processors"]

Processors = tuple[tuple[str, LogitsProcessor], ...]
"""Names and processors in the order in which they run."""


def describe_processors(context: RequestContext) -> str:
    """The names that a request may choose, for error messages."""
    return f"registered: {', '.join(sorted(context.processors)) or 'none'}"


def _compile_processors(params: SamplingParams, context: RequestContext) -> Processors | None:
    names: Any = (params.extra_args or {}).get("logits_processors", ())
    param = "extra_args.logits_processors"
    if not isinstance(names, (list, tuple)):
        raise RequestError(f"{param} must be a list of names, got {names!r}", param=param)
    for name in names:
        if not isinstance(name, str) or name not in context.processors:
            raise RequestError(f"there is no logits processor {name!r}; {describe_processors(context)}", param=param)
    return tuple((name, context.processors[name]) for name in (*context.always, *names)) or None


def _apply_processors(processors: Processors, row: RowLogits) -> str | None:
    """Run the processors in order, in place."""
    logits = row.logits
    token_ids = row.history[: int(row.position) + 1].tolist()
    num_prompt_tokens = int(row.num_prompt_tokens)
    for name, processor in processors:
        try:
            result = processor(token_ids, num_prompt_tokens, logits)
        except Exception as error:
            return f"logits processor {name!r} raised {type(error).__name__}: {error}"
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            return f"logits processor {name!r} must return a tensor of shape {list(logits.shape)}, got {got}"
        if result.dtype != torch.float32 or result.device != logits.device:
            return (
                f"logits processor {name!r} must return float32 on {logits.device}, "
                f"got {result.dtype} on {result.device}"
            )
        logits.copy_(result)
    return None


OPTIONS = (
    EditOption(name="logits_processors", stage=EditStage.PROCESS, compile=_compile_processors, apply=_apply_processors),
)
