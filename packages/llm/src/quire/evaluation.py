"""How well a model predicts a text: perplexity, for comparing forms of the same weights.

Knows an `LLM`; does not know files or the command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.llm import LLM
from quire_interfaces import RequestError, SamplingParams

__all__ = ["Perplexity", "perplexity"]


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
    logprobs = [entries[0].logprob for output in outputs for entries in output.prompt_logprobs or () if entries]
    return Perplexity(
        perplexity=math.exp(-math.fsum(logprobs) / len(logprobs)), num_tokens=len(logprobs), num_windows=len(windows)
    )
