"""A request's tokens and log probabilities, to the bit, whatever it is served beside and however it is cut."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestError, SamplingParams
from quire_testkit.checkpoints import make_checkpoint

RANDOM = random.Random(5)
SHARED = [RANDOM.randrange(3, 250) for _ in range(50)]
PROMPTS = [
    SHARED[: RANDOM.choice([0, 16, 33, 50])] + [RANDOM.randrange(3, 250)] * RANDOM.choice([1, 3, 20]) for _ in range(12)
]
EXTRAS: dict[int, dict[str, Any]] = {
    1: {"xtc_probability": 0.6, "xtc_threshold": 0.02},
    2: {"mirostat_mode": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5, "dry_multiplier": 2.0},
    4: {"top_n_sigma": 1.5, "dynatemp_range": 0.5, "repetition_penalty": 1.2},
    5: {"mirostat_mode": 1, "mirostat_tau": 3.0, "dry_multiplier": 1.0, "dry_allowed_length": 1},
    9: {"dry_multiplier": 3.0, "dry_range": 20, "dry_sequence_breakers": ("e", 7)},
    10: {"mirostat_mode": 2, "mirostat_tau": 6.0, "dynatemp_range": 0.3},
}
PARAMS = [
    SamplingParams(
        temperature=[0.0, 0.7, 1.3][i % 3],
        top_p=[1.0, 0.8][i % 2],
        top_k=[-1, 20][i % 2],
        seed=i,
        max_tokens=10 + 3 * i,
        ignore_eos=True,
        logprobs=2,
        deterministic=True,
        **EXTRAS.get(i, {}),
    )
    for i in range(12)
]

SITUATIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of seven": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
    "a cache so small that requests are preempted": {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
    "other blocks": {"block_size": 4},
    "one thread": {"num_threads": 1},
    "drafts": {"speculative_method": "ngram", "speculative_adaptive": False, "prompt_lookup_min": 1},
}


@pytest.fixture(scope="module", params=["qwen3 plain", "qwen3 int8", "qwen3 int4", "mixtral plain", "mixtral int8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    like, method = request.param.split()
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like=like, dtype="bfloat16")
    return folder, method


def start(model: tuple[Path, str], **settings: Any) -> LLM:
    folder, method = model
    defaults = {"max_model_len": 160, "max_num_seqs": 12, "num_threads": 2}
    return LLM(folder, quantization=None if method == "plain" else method, **(defaults | settings))


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], Any]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone(model: tuple[Path, str]) -> list[tuple[list[int], Any]]:
    with start(model, enable_prefix_caching=False) as llm:
        if not llm.engine_info.batch_invariant:
            pytest.skip(f"this processor has no kernels that promise it: {llm.engine_info.choices['determinism']}")
        return [answers(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nothing_changes_a_bit(model: tuple[Path, str], alone: list[tuple[list[int], Any]], situation: str) -> None:
    with start(model, **SITUATIONS[situation]) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone
        assert answers(llm, PROMPTS[::-1], PARAMS[::-1]) == alone[::-1], "the second time, from the prefix cache"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_tokens_are_those_of_the_logits(model: tuple[Path, str], kv_cache_dtype: str) -> None:
    """Steps without log probabilities are one call that shows nobody its logits, and writes none for greedy rows alone;
    with log probabilities the sampler gets them."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    mixed = [dataclasses.replace(each, logprobs=None, min_p=0.01 * (i % 4 == 1)) for i, each in enumerate(PARAMS)]
    with start(model, kv_cache_dtype=kv_cache_dtype) as llm:
        for params in ([greedy] * len(PROMPTS), mixed):
            with_logits = answers(llm, PROMPTS, [dataclasses.replace(each, logprobs=1) for each in params])
            without = answers(llm, PROMPTS, params)
            assert [tokens for tokens, _ in without] == [tokens for tokens, _ in with_logits]


def test_a_wish_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"deterministic.*seed"):
        SamplingParams(deterministic=True)
    code = (
        "from quire import *\nfrom quire_testkit.checkpoints import make_checkpoint\n"
        f"llm = LLM(make_checkpoint({str(tmp_path / 'tiny')!r}), max_model_len=64, num_threads=1)\n"
        "try: llm.generate([[5]], SamplingParams(temperature=0, deterministic=True), use_tqdm=False)\n"
        "except RequestError as error: print(error.param, error)\n"
    )
    environment = {**os.environ, "QUIRE_CPU_KERNELS": "none"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("deterministic this engine cannot promise")
