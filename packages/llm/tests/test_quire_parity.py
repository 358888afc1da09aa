"""The whole engine against Hugging Face Transformers: same greedy tokens, same logits, in every situation a request can
meet; and the tokens of a seeded request do not depend on the situation at all.

The networks alone are compared in quire_models; here scheduler, KV cache, runner and sampler are real and joined.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_engine import EngineConfig, EngineCore, EngineInfo, EngineParts
from quire_interfaces import Request, SamplingParams, SchedulerOutput
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import ModelConfig, load_model
from quire_runner import ModelRunner, RunnerConfig, RunnerExecutor
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

NUM_OUTPUT, NUM_PROMPT, MAX_MODEL_LEN = 64, 45, 160
VARIATIONS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope": "linear"}),
    "llama-dynamic": ("llama", {"rope": "dynamic", "max_position_embeddings": 64}),
    "llama-llama3": ("llama", {"rope": "llama3"}),
    "llama-yarn": ("llama", {"rope": "yarn"}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope": "yarn"}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}
"""Name -> family and fields of its configuration. With 3 layers, max_window_layers=1 mixes full and sliding layers."""


@dataclass
class Situation:
    """One way for the two watched requests to be computed."""

    chunk: int = 0
    """Most prompt tokens per step, 0 for the whole prompt."""
    num_strangers: int = 0
    is_warm: bool = False
    """The prompts were served before: the prefix cache has them."""
    preempt_after: tuple[int, ...] = ()
    """Steps after which everything that runs is preempted and the prefix cache emptied."""
    depth: int = 0
    block_size: int = 8


SITUATIONS = {
    "whole": Situation(),
    "chunk-1": Situation(chunk=1, block_size=1),
    "chunk-7": Situation(chunk=7),
    "chunk-64": Situation(chunk=64, block_size=16),
    "strangers": Situation(num_strangers=16),
    "prefix-hit": Situation(is_warm=True),
    "preempted": Situation(preempt_after=(10, 30), num_strangers=3),
    "async": Situation(depth=1),
    "async-everything": Situation(depth=1, chunk=7, num_strangers=16, preempt_after=(15,), is_warm=True),
}


@dataclass
class Watched:
    """What one run showed of a request."""

    token_ids: list[int]
    num_cached_tokens: int
    num_preemptions: int
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Position -> logits [vocab_size] of the token after it."""


class RecordingRunner:
    """Passes steps on to a `ModelRunner` and files the logits it shows under the request they belong to."""

    def __init__(self) -> None:
        self.inner: ModelRunner | None = None
        self.logits: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self._holder: dict[int, str] = {}

    def tap(self, rows: list[int], positions: list[int], logits: torch.Tensor) -> None:
        for row, position, values in zip(rows, positions, logits.clone(), strict=True):
            self.logits[self._holder[row]][position] = values

    def execute(self, output: SchedulerOutput) -> Any:
        assert self.inner is not None
        self._holder.update({new.row: new.request_id for new in output.new_rows})
        return self.inner.execute(output)

    def close(self) -> None:
        assert self.inner is not None
        self.inner.close()


def run(folder: Path, network: Any, situation: Situation, prompt: list[int]) -> dict[str, Watched]:
    """Serve a greedy and a seeded request in a situation."""
    model = ModelConfig.from_path(folder)
    specs = model.kv_cache_specs(situation.block_size, dtype_bytes=4)
    plan = plan_kv_cache(specs, num_blocks=20 * MAX_MODEL_LEN * len(specs) // situation.block_size)
    recorder = RecordingRunner()
    recorder.inner = ModelRunner.for_model(
        network,
        plan,
        RunnerConfig(dtype="float32", max_num_seqs=32, max_model_len=MAX_MODEL_LEN),
        on_logits=recorder.tap,
    )
    cache = KVCacheManager(plan, KVCacheConfig(block_size=situation.block_size))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=32, max_model_len=MAX_MODEL_LEN, long_prefill_token_threshold=situation.chunk),
        cache,
    )
    info = EngineInfo(max_model_len=MAX_MODEL_LEN, vocab_size=model.vocab_size)
    parts = EngineParts(scheduler=scheduler, executor=RunnerExecutor(recorder, threaded=situation.depth > 0), info=info)
    core = EngineCore(parts, EngineConfig(async_scheduling=situation.depth > 0))
    if situation.is_warm:
        core.add_request(request("earlier", prompt, SamplingParams(temperature=0), seed=1, max_tokens=1))
        while core.has_requests():
            core.step()
    watched = [
        request("greedy", prompt, SamplingParams(temperature=0, ignore_eos=True), seed=1),
        request("seeded", prompt, SamplingParams(temperature=0.9, top_p=0.95, seed=11, ignore_eos=True), seed=11),
    ]
    strangers = [
        request(
            f"stranger-{number}",
            random.Random(number).choices(range(3, model.vocab_size), k=1 + number * 5),
            SamplingParams(temperature=1.0, top_k=number, ignore_eos=True),
            seed=number,
            max_tokens=5 + 4 * number,
        )
        for number in range(situation.num_strangers)
    ]
    for each in [*strangers[::2], *watched, *strangers[1::2]]:
        core.add_request(each)
    steps = 0
    while core.has_requests():
        core.step()
        steps += 1
        if steps in situation.preempt_after:
            core.settle()
            assert core.reset_prefix_cache(preempt_running=True)
        cache.check_integrity()
    core.close()
    assert cache.usage().num_free_blocks == cache.usage().num_total_blocks
    return {
        each.request_id: Watched(
            each.output_token_ids, each.num_cached_tokens, each.num_preemptions, recorder.logits[each.request_id]
        )
        for each in watched
    }


def request(
    name: str, prompt: list[int], params: SamplingParams, *, seed: int, max_tokens: int = NUM_OUTPUT
) -> Request:
    return Request(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=params, seed=seed, max_tokens=max_tokens
    )


@torch.inference_mode()
def oracle_logits(hf: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy continuation by transformers with its own cache, and the logits that chose each token [64, vocab_size]."""
    step = hf(input_ids=torch.tensor([prompt]), use_cache=True)
    tokens, logits = [], []
    for _ in range(NUM_OUTPUT):
        logits.append(step.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
        step = hf(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_situation_gives_the_oracles_tokens(variation: str, tmp_path: Path) -> None:
    family, fields = VARIATIONS[variation]
    hf = tiny_hf_checkpoint(tmp_path, family, **fields)
    prompt = random.Random(variation).choices(range(3, 320), k=NUM_PROMPT)
    expected, expected_logits = oracle_logits(hf, prompt)
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    scale = expected_logits.abs().max()
    seeded: dict[str, list[int]] = {}
    for name, situation in SITUATIONS.items():
        seen = run(tmp_path, network, situation, prompt)
        greedy = seen["greedy"]
        assert greedy.token_ids == expected, name
        for offset in range(NUM_OUTPUT):
            logits = greedy.logits[NUM_PROMPT - 1 + offset]
            error = (logits - expected_logits[offset]).abs().max() / scale
            assert error < 1e-4, f"{name}: token {offset} is off by {error:.2e}"
        assert (greedy.num_cached_tokens > 0) == situation.is_warm, name
        assert greedy.num_preemptions == len(situation.preempt_after), name
        seeded[name] = seen["seeded"].token_ids
    assert len(seeded["whole"]) == NUM_OUTPUT
    assert all(tokens == seeded["whole"] for tokens in seeded.values()), seeded
    assert seeded["whole"] != expected
