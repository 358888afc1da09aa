"""Adapters that move into the weights while everything else goes on: drafts, grammars, preemption, tiny chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams

ADAPTERS = (None, "demo-capitals", "demo-json")
QUESTIONS = ("Who are you?", "What is a LoRA adapter?", "What is 3 + 4?", "Say hello.")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 0.8, "seed": 5, "top_p": 0.9},
    "observed": {"logprobs": 2, "presence_penalty": 0.5},
    "constrained": {"structured_outputs": StructuredOutputsParams(regex=r"[A-Za-z\"{}: ,.]{5,60}")},
}
SITUATIONS: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "chunks and preemption, a step ahead": {
        "async_scheduling": True, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40, "block_size": 4,
    },
}  # fmt: skip


def run(llm: LLM, wanted: list[tuple[str | None, str, str]]) -> list[list[int]]:
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 48, **KINDS[kind]}) for _, _, kind in wanted]
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for _, question, _ in wanted],
        params, lora_request=[adapter for adapter, _, _ in wanted], use_tqdm=False,
    )  # fmt: skip
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_tokens_are_those_of_adapters_that_stay_on_top(situation: str) -> None:
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "dtype": "float32", **SITUATIONS[situation]}
    everything = [(adapter, question, kind) for adapter in ADAPTERS for question in QUESTIONS for kind in KINDS]
    with LLM(**settings) as llm:
        expected = dict(zip(everything, run(llm, everything), strict=True))
    chooser = random.Random(1)
    with LLM(lora_merge_after=2, **settings) as llm:
        for _ in range(6):
            adapter = chooser.choice(ADAPTERS[1:])
            alone = [each for each in everything if each[0] == adapter]
            for some in (chooser.choices(alone, k=10), chooser.sample(everything, 6)):
                assert run(llm, some) == [expected[each] for each in some]
        stats = llm.stats()
        assert stats.num_adapter_merges_total >= 3
        assert stats.num_drafts_total > 0 or situation != "drafts"
        assert stats.num_preemptions_total > 0 or situation == "drafts"
        llm.engine.core.parts.check_integrity()


def test_adapters_stay_on_top_of_quantized_weights_and_keep_their_promise() -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    with LLM(lora_merge_after=1, quantization="int8", max_model_len=64) as llm:
        assert "whatever --lora-merge-after says" in llm.engine.info.choices["adapters"]
        params = SamplingParams(temperature=0, max_tokens=40, deterministic=True)
        llm.chat(question, params, lora_request="demo-capitals", use_tqdm=False)
        assert llm.stats().num_adapter_merges_total == 0
