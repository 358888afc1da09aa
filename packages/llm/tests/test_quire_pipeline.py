"""Engines whose layers are cut into pipeline stages give what one process gives, whatever is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_prepared_prompts import PreparedPrompts
from llm_thread_ranks import ranks_in_threads

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.assemble import build_parts
from quire.config import QuireConfig
from quire_demo_model import adapter_paths
from quire_engine import LLMEngine
from quire_testkit.media_models import MediaModel
from quire_testkit.seeing_models import drawing

PROMPTS = ["The capital of France is", "one two three one two three one two", "Hello", "a b c d e f g a b c d"]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
PLAIN = SamplingParams(temperature=0, max_tokens=20, logprobs=3, ignore_eos=True)


def told(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: Any = PROMPTS, **more: Any) -> list[Any]:
    """Tokens, log probabilities and ends of some requests."""
    found: list[Any] = []
    for output in llm.generate(prompts, params, use_tqdm=False, **more):
        logprobs = [{token: one.logprob for token, one in (at or {}).items()} for at in output.prompt_logprobs or ()]
        found.append(logprobs)
        for each in output.outputs:
            logprobs = [{token: one.logprob for token, one in at.items()} for at in each.logprobs or ()]
            found.append((each.token_ids, logprobs, each.finish_reason))
    return found


def of_many_kinds(llm: LLM) -> list[Any]:
    """What requests of many kinds get, one kind after the other and all at once."""
    regex = StructuredOutputsParams(regex="[a-z]{4} [0-9]{6}")
    kinds = [
        PLAIN,
        SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, logprobs=2),
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, structured_outputs=regex),
        SamplingParams(temperature=0, max_tokens=24, structured_outputs=regex, logprobs=1),
        SamplingParams(temperature=0.9, seed=5, max_tokens=16, presence_penalty=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, min_tokens=4, stop=["zzz"]),
        SamplingParams(temperature=0, max_tokens=8, logit_bias={30: 4.0, 40: -100.0}),
    ]
    found = [told(llm, params) for params in kinds]
    found.append(told(llm, kinds, [PROMPTS[i % len(PROMPTS)] for i in range(len(kinds))]))
    adapter = LoRARequest("demo-json", 1, str(adapter_paths()["demo-json"]))
    found.append(told(llm, SamplingParams(temperature=0, max_tokens=16, logprobs=1), lora_request=adapter))
    return found


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    with LLM(**SETTINGS) as llm:
        return of_many_kinds(llm)


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (2, {}),
        (3, {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 8}),
        (2, {"max_num_batched_tokens": 3, "max_num_seqs": 3}),
        (2, {"block_size": 4, "num_gpu_blocks_override": 28, "max_model_len": 64}),  # too few blocks: preemption
        (2, {"enable_prefix_caching": False, "async_scheduling": False}),
        (4, {"speculative_method": "ngram", "speculative_adaptive": False, "num_speculative_tokens": 3}),
    ],
)
def test_stages_give_the_bits_of_one(stages: int, settings: dict[str, Any], alone: list[Any]) -> None:
    with ranks_in_threads() as ranks, LLM(pipeline_parallel_size=stages, **(SETTINGS | settings)) as llm:
        assert of_many_kinds(llm) == alone
        assert all(rank.num_steps > 50 for rank in ranks)


@pytest.mark.parametrize("settings", [{"convert": "embed", "max_num_batched_tokens": 8}, {"runner": "pooling"}])
def test_stages_pool_as_one(settings: dict[str, Any]) -> None:
    """The last stage pools; chunks of prompts, and prompts side by side."""

    def vectors(stages: int) -> list[torch.Tensor]:
        with ranks_in_threads(), LLM(pipeline_parallel_size=stages, **SETTINGS, **settings) as llm:
            return [output.outputs.data for output in llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)]

    assert all(map(torch.equal, vectors(2), vectors(1)))


def test_stages_take_embeddings_as_prompts() -> None:
    """They are put into the residual stream of the first stage."""
    rows = torch.from_numpy(np.random.default_rng(5).normal(0, 0.02, (2, 12, 256)).astype(np.float32))
    prompts = [{"prompt_embeds": rows[0]}, "The capital of France is", {"prompt_embeds": rows[1]}]

    def answers(stages: int) -> list[Any]:
        settings = {**SETTINGS, "enable_prompt_embeds": True, "max_num_batched_tokens": 8}
        with ranks_in_threads(), LLM(pipeline_parallel_size=stages, **settings) as llm:
            return told(llm, PLAIN, prompts)

    assert answers(2) == answers(1)


SEEING = ("PaliGemmaForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Prompts whose tokens see one another, and positions on several axes with features that are
added behind the first layer."""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Transformers' own processors
@pytest.mark.parametrize("architecture", SEEING)
def test_stages_see_as_one(tmp_path: Path, architecture: str) -> None:
    placeholder = MediaModel(tmp_path, architecture).family.placeholders["image"]
    prepared = PreparedPrompts(tmp_path)
    prompts = [
        prepared.prompt(f"{placeholder} so", {"image": [drawing(1)]}),
        prepared.prompt("so it is", {}),
        prepared.prompt(f"{placeholder} then", {"image": [drawing(2, (60, 30))]}),
    ]

    def answers(stages: int) -> list[Any]:
        config = QuireConfig.of(
            model=str(tmp_path), pipeline_parallel_size=stages, max_model_len=600, kv_cache_memory_bytes=1 << 24,
            dtype="float32", num_threads=1,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)
        with ranks_in_threads():
            engine = LLMEngine(build_parts(config), config.engine)
            try:
                names = [engine.add_request(prompt, params) for prompt in prompts]
                found: dict[str, Any] = {}
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        (one,) = output.outputs
                        assert one.error is None, one.error
                        found[output.request_id] = one.token_ids, one.logprobs
                return [found[name] for name in names]
            finally:
                engine.close()

    assert answers(2) == answers(1)
