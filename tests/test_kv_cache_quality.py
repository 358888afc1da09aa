"""What narrow KV caches and quantized weights cost the demo model on held-out answers (docs/quantization.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

TRAIN = Path(__file__).parents[1] / "packages" / "demo-model" / "train"
BOUNDS = {"fp8_e4m3": 1.003, "fp8_e5m2": 1.003, "int8": 1.0005, "int4": 1.005}
"""Format -> most that the perplexity may grow, as a factor."""
WEIGHT_BOUNDS = {("int8", "auto"): 1.0005, ("w8a8", "int8"): 1.0005, ("int4", "auto"): 1.004, ("fp8", "auto"): 1.0005}
"""Formats of weights and cache -> the same. With the second, attention multiplies in int8 where there is VNNI."""


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, str]]:
    """(conversation up to its last answer, the answer); none was trained on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TRAIN)
        from chat import Chat
        from evaluate import TASKS, items

        chat = Chat()
        return [(item.prompt, item.expected) for task in TASKS for item in items(task, 4, chat, seed=5)]


def perplexity(held_out: list[tuple[str, str]], **settings: Any) -> float:
    """Of the answers' tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(max_num_seqs=16, num_threads=1, enable_prefix_caching=False, **settings) as llm:
        num_asked = [len(llm.tokenizer.encode(prompt)) for prompt, _ in held_out]
        wholes = llm.generate([prompt + answer for prompt, answer in held_out], params, use_tqdm=False)
    logprobs = [
        next(iter(entries.values())).logprob  # the prompt's own token comes first
        for asked, whole in zip(num_asked, wholes, strict=True)
        for entries in whole.prompt_logprobs[asked:]
        if entries
    ]
    assert len(logprobs) > 1000
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def exact(held_out: list[tuple[str, str]]) -> float:
    return perplexity(held_out)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_perplexity_grows_no_more_than_documented(held_out: list[tuple[str, str]], exact: float, dtype: str) -> None:
    assert exact < 1.05, "the demo model knows these answers"
    found = perplexity(held_out, kv_cache_dtype=dtype)
    assert found <= exact * BOUNDS[dtype], f"{found:.5f} after {exact:.5f}"
    assert found != exact


@pytest.mark.parametrize(("form", "cache"), WEIGHT_BOUNDS)
def test_quantized_weights_cost_no_more_than_documented(
    held_out: list[tuple[str, str]], exact: float, form: str, cache: str
) -> None:
    found = perplexity(held_out, quantization=form, kv_cache_dtype=cache)
    assert found <= exact * WEIGHT_BOUNDS[form, cache], f"{found:.5f} after {exact:.5f}"
    assert found != exact
