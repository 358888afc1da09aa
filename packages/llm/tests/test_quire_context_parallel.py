"""An engine whose KV cache is interleaved over ranks gives the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.config import QuireConfig
from quire.plan import MemoryPlan, make_plan
from quire_demo_model import adapter_paths, checkpoint_path
from quire_interfaces import ConfigError
from quire_models import ModelConfig
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "block_size": 4,
    "num_gpu_blocks_override": 49,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "num_threads": 1,
    "speculative_method": "ngram",
    "speculative_adaptive": False,
    "num_speculative_tokens": 3,
}
"""Small blocks, prompts in chunks, and memory for half of the requests that run."""
RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
PROMPTS = [
    "The capital of France is",
    "one two three one two three one two",
    "Once upon a time there was a small house at the end of a long road, and in it lived",
]


def answers(llm: LLM) -> tuple[list[Any], list[float]]:
    """Tokens and ends of requests of many kinds, and the log probabilities of the tokens."""
    found: list[Any] = []
    logprobs: list[float] = []

    def ask(prompts: list[str], params: SamplingParams, **more: Any) -> None:
        for output in llm.generate(prompts, params, **more):
            for each in output.outputs:
                found.append((each.token_ids, each.finish_reason))
                logprobs.extend(
                    at[token].logprob for token, at in zip(each.token_ids, each.logprobs or (), strict=False)
                )

    ask(PROMPTS * 4, SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True))
    ask(PROMPTS, SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, logprobs=0))  # their prefixes are cached
    digits = StructuredOutputsParams(regex="[a-z]{4} [0-9]{6}")
    ask(PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=24, structured_outputs=digits))
    adapter = LoRARequest("demo-json", 1, str(adapter_paths()["demo-json"]))
    ask(PROMPTS, SamplingParams(temperature=0, max_tokens=16, logprobs=0), lora_request=adapter)
    return found, logprobs


def test_tokens_are_those_of_one_rank() -> None:
    """Chunks, prefix hits, preemption, drafts, adapters and grammars included."""
    with LLM(**SETTINGS) as alone:
        expected, expected_logprobs = answers(alone)
    with LLM(**RANKS, **SETTINGS) as shared:
        found, logprobs = answers(shared)
        stats = shared.stats()
    assert found == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=2e-5)
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total > 0
    assert stats.num_accepted_tokens_total > 0


def plan_of(model: ModelConfig, **settings: Any) -> MemoryPlan:
    config = QuireConfig.of(max_model_len=64, kv_cache_memory_bytes=1 << 20, **settings)
    return make_plan(config, model, free_bytes=1 << 33)


def block_bytes(plan: MemoryPlan) -> int:
    return sum(plan.kv_plan.tensor_block_bytes)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_cache_holds_as_many_times_more_tokens(num_kv_heads: int, tmp_path: Path) -> None:
    """Two ranks have a head each where there are two, and share the tokens of one."""
    tiny_hf_checkpoint(tmp_path, "llama", num_key_value_heads=num_kv_heads)
    model = ModelConfig.from_path(tmp_path)
    heads, tokens = plan_of(model, tensor_parallel_size=2), plan_of(model, **RANKS)
    assert tokens.block_size == heads.block_size
    assert block_bytes(heads) == block_bytes(tokens) * (2 if num_kv_heads == 1 else 1)
    assert tokens.num_kv_tokens >= heads.num_kv_tokens * (2 if num_kv_heads == 1 else 1)


def test_ranks_share_the_latents(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "DeepseekV3ForCausalLM", CASES["DeepseekV3ForCausalLM"])
    model = ModelConfig.from_path(tmp_path)
    whole, shared = plan_of(model, tensor_parallel_size=2), plan_of(model, **RANKS)
    assert block_bytes(whole) == 2 * block_bytes(shared)
    assert shared.num_kv_tokens >= 2 * whole.num_kv_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size does not go with .*: it must be a multiple of that"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size does not go with .*: it must be a multiple of that"),
        ({"block_size": 1}, "block_size does not go with decode_context_parallel_size 2: it must divide"),
        ({"speculative_method": "eagle3", "speculative_eagle_topk": 2}, "eagle_topk does not go with .* set it to 1"),
    ],
)
def test_what_needs_whole_blocks_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(ModelConfig.from_path(checkpoint_path()), **{**RANKS, **settings})


@pytest.mark.parametrize("architecture", ["MambaForCausalLM", "MistralForCausalLM", "T5ForConditionalGeneration"])
def test_networks_without_attention_to_all_tokens_are_refused(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    with pytest.raises(ConfigError, match=f"{architecture} has no attention of a decoder to all tokens before"):
        plan_of(ModelConfig.from_path(tmp_path), **RANKS)
