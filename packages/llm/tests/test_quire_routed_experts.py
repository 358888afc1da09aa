"""Outputs tell the experts that routers chose: those that Transformers' classes choose for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_quire_lora_experts import network

from quire import LLM, CompletionOutput, RequestOutput, SamplingParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "block_size": 8,
    "num_threads": 1,
    "dtype": "float32",
    "enable_return_routed_experts": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPT = [(7 * i) % 290 + 3 for i in range(37)]


def routed_by_transformers(model: Any, token_ids: list[int]) -> NDArray[Any]:
    """[tokens, layers, K], the experts of a token in ascending order, as the modules of experts are given them."""
    chosen: list[torch.Tensor] = []

    def note(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        numbers = (each for each in (*args, *options.values()) if isinstance(each, torch.Tensor))
        chosen.append(next(each for each in numbers if not each.is_floating_point()))

    modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([each.view(len(token_ids), -1) for each in chosen], dim=1).sort(dim=-1).values.numpy()


def check(model: Any, output: RequestOutput, completion: CompletionOutput | None = None) -> None:
    """Hold what an output tells to what Transformers chooses for all of its tokens but the last."""
    completion = completion or output.outputs[0]
    token_ids = [*output.prompt_token_ids, *completion.token_ids][:-1]
    assert completion.routed_experts is not None
    assert completion.routed_experts.dtype == np.uint8
    expected = routed_by_transformers(model, token_ids)
    assert completion.routed_experts.shape == expected.shape
    np.testing.assert_array_equal(np.sort(completion.routed_experts, axis=-1), expected)


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV2ForCausalLM",  # a dense layer before those with experts, groups of experts
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",  # windows in half of the layers
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Qwen3MoeForCausalLM",
    ],
)
def test_prompts_in_chunks_and_cached_prefixes_have_their_experts(architecture: str, tmp_path: Path) -> None:
    model = network(architecture, tmp_path)
    with LLM(str(tmp_path), max_num_batched_tokens=16, max_num_seqs=4, **SETTINGS) as llm:
        together = llm.generate([PROMPT, PROMPT[3:20], PROMPT[:1]], GREEDY)
        for output in together:
            check(model, output)
        again = llm.generate([[*PROMPT, *together[0].outputs[0].token_ids, 5, 6, 7]], GREEDY)[0]
        assert again.num_cached_tokens >= len(PROMPT) - 8
        check(model, again)


def test_experts_that_every_token_has_are_not_told(tmp_path: Path) -> None:
    model = network("InklingForCausalLM", tmp_path)
    with LLM(str(tmp_path), max_num_batched_tokens=16, **SETTINGS) as llm:
        check(model, llm.generate([PROMPT], GREEDY)[0])


def test_outputs_that_end_early_repeat_or_come_from_drafts(tmp_path: Path) -> None:
    model = network("MixtralForCausalLM", tmp_path)
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 3, "speculative_adaptive": False}
    repeated = [5, 6, 7, 8] * 6
    with LLM(str(tmp_path), **SETTINGS, **drafts) as llm:
        (same,) = llm.generate([[5] * 9], SamplingParams(temperature=0, max_tokens=30, logit_bias={5: 100.0}))
        check(model, same)
        assert llm.stats().num_accepted_tokens_total > 0
        (plain,) = llm.generate([repeated], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        check(model, plain)
        stop = plain.outputs[0].text[4:6]
        for params in (
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop]),
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop], logprobs=1),
            SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[plain.outputs[0].token_ids[5]]),
            SamplingParams(temperature=0, max_tokens=1),
            SamplingParams(temperature=1.0, seed=3, n=2, best_of=3, max_tokens=9, ignore_eos=True),
        ):
            (output,) = llm.generate([repeated], params)
            for completion in output.outputs:
                check(model, output, completion)


def test_preempted_requests_have_their_experts(tmp_path: Path) -> None:
    model = network("Qwen3MoeForCausalLM", tmp_path)
    settings = {**SETTINGS, "num_gpu_blocks_override": 17}
    with LLM(str(tmp_path), **settings, enable_prefix_caching=False) as llm:
        prompts = [[3 + i, *PROMPT[:20]] for i in range(4)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        assert llm.stats().num_preemptions_total > 0
        for output in outputs:
            check(model, output)


def test_ranks_that_share_out_experts_tell_the_experts_of_one(tmp_path: Path) -> None:
    model = network("DeepseekV3ForCausalLM", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=2)
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        with LLM(str(tmp_path), **SETTINGS, **ranks) as llm:
            (output,) = llm.generate([PROMPT], params)
            check(model, output)
            completion = output.outputs[0]
            logprobs = [{token: each.logprob for token, each in at.items()} for at in completion.logprobs or ()]
            found.append((completion.token_ids, logprobs, completion.routed_experts.tolist()))
    assert found[0] == found[1]


def test_nothing_is_told_unasked(tmp_path: Path) -> None:
    network("MixtralForCausalLM", tmp_path)
    with LLM(str(tmp_path), **{**SETTINGS, "enable_return_routed_experts": False}) as llm:
        (output,) = llm.generate([PROMPT], GREEDY)
    assert output.outputs[0].routed_experts is None


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("MixtralForCausalLM", {"pipeline_parallel_size": 2}, "each stage routes tokens in its own layers"),
        ("MixtralForCausalLM", {"kv_disk_path": "tier"}, "tiers keep keys and values without the experts"),
        ("LlamaForCausalLM", {}, "LlamaForCausalLM has no routed experts; leave it out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    network(architecture, tmp_path)
    config = QuireConfig.of(max_model_len=64, enable_return_routed_experts=True, **settings)
    with pytest.raises(ConfigError, match=message):
        make_plan(config, ModelConfig.from_path(tmp_path), free_bytes=1 << 30)
