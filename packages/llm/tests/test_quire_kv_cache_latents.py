"""Latents kept in fp8: in every situation tokens are those of a network whose rows were rounded before they reached a
plain cache; and the plan counts the bytes of the published layout.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, ConfigError, QuireConfig, SamplingParams
from quire.plan import make_plan
from quire_models import ModelConfig, load_model
from quire_ops import ops
from quire_testkit.checkpoints import checkpoint_config
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.situations import SITUATIONS, serve
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 32


def rounded(rows: Tensor, rank: int) -> Tensor:
    """Rows [T, W] as a cache in fp8 gives them back: read by attention that sees one row, a number at a time."""
    size = rank + 4 * -(-rank // 128) + 2 * (rows.shape[1] - rank)
    cache = torch.zeros(1, len(rows), size, dtype=torch.uint8)
    ops.write_latent_cache(rows, cache, torch.arange(len(rows)), rank)
    query = torch.zeros(len(rows), 1, rows.shape[1])
    latents = ops.sparse_latent_attention(query, cache, torch.arange(len(rows))[:, None], scale=1.0, rank=rank)[:, 0]
    return torch.cat((latents, rows[:, rank:].bfloat16().float()), dim=-1)


def round_rows(network: Any) -> None:
    """Have every attention of a network round what it keeps."""

    def of_attention(mixer: Any) -> None:
        make_row, rank, indexer = mixer._row, mixer._spec.kv_lora_rank, getattr(mixer, "indexer", None)
        mixer._row = lambda *args: rounded(make_row(*args), rank)
        if indexer is not None:
            make_keys = indexer.keys
            indexer.keys = lambda *args: make_keys(*args).bfloat16().float()

    for layer in network.layers:
        of_attention(layer.mixer)
    network._stack = None  # all layers in one call would not ask them


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"])
def test_tokens_are_those_of_rounded_rows(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    config = ModelConfig.from_path(tmp_path)
    prompt = random.Random(architecture).choices(range(3, config.vocab_size), k=40)
    plain = load_model(config, tmp_path, dtype="float32")
    unrounded = serve(plain, SITUATIONS["whole prefill"], prompt, NUM_TOKENS)
    round_rows(plain)
    expected = serve(plain, SITUATIONS["whole prefill"], prompt, NUM_TOKENS)
    network = load_model(config, tmp_path, dtype="float32", kv_cache_dtype="fp8_ds_mla")
    for name, situation in SITUATIONS.items():
        seen = serve(network, situation, prompt, NUM_TOKENS)
        for request in ("greedy", "seeded"):
            assert seen[request].token_ids == expected[request].token_ids, f"{request}, {name}"
        assert (seen["greedy"].num_cached_tokens > 0) == situation.is_warm, name
        assert seen["greedy"].num_preemptions == len(situation.preempt_after), name
    last = len(prompt) - 1
    difference = (seen["greedy"].logits[last] - expected["greedy"].logits[last]).abs().max()
    assert difference < 0.05 * (unrounded["greedy"].logits[last] - expected["greedy"].logits[last]).abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    case = CASES["DeepseekV32ForCausalLM"]
    write_checkpoint(path, "DeepseekV32ForCausalLM", replace(case, fields={**case.fields, "vocab_size": 320}))
    write_tokenizer(path, vocab_size=320)
    return path


def start(folder: Path, dtype: str = "fp8", **settings: Any) -> LLM:
    """With room for little more than one prompt."""
    defaults = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 1, "num_threads": 1}
    return LLM(folder, kv_cache_dtype=dtype, **defaults | settings)


def generate(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_rows_come_back_from_memory_and_disk(folder: Path, tmp_path: Path) -> None:
    """Those of the same format alone; and drafts are verified over them."""
    prompts = [random.Random(seed).choices(range(3, 250), k=75) for seed in range(3)]
    tiers = {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": "50M"}
    with start(folder) as llm:
        expected = [generate(llm, prompt)[0] for prompt in prompts]
        assert llm.engine_info.kv_cache_dtype == "fp8_ds_mla"
        assert llm.engine_info.choices["KV cache"] == "fp8_ds_mla, a scale for each 128 numbers of a token's latent"
    with start(folder, num_gpu_blocks_override=8, **tiers) as llm:
        assert [generate(llm, prompt) for prompt in prompts] == [(tokens, 0) for tokens in expected]
        assert [generate(llm, prompt) for prompt in prompts] == [(tokens, 64) for tokens in expected]
    with start(folder, "fp8_ds_mla", **tiers) as llm:
        assert [generate(llm, prompt) for prompt in prompts] == [(tokens, 64) for tokens in expected]
    with start(folder, "auto", **tiers) as llm:
        assert generate(llm, prompts[0])[1] == 0
    with start(folder, speculative_method="ngram", speculative_adaptive=False, prompt_lookup_min=1) as llm:
        assert [generate(llm, prompt)[0] for prompt in prompts] == expected


def plan_of(dtype: str, **fields: Any) -> Any:
    case = CASES["DeepseekV3ForCausalLM"]
    values = {**case.fields, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **fields}
    config = QuireConfig.of(kv_cache_dtype=dtype, dtype="bfloat16", max_model_len=128, num_gpu_blocks_override=100)
    return make_plan(config, ModelConfig.from_dict(values), free_bytes=20 * 10**9)


def test_the_plan_counts_the_published_bytes() -> None:
    layers = CASES["DeepseekV3ForCausalLM"].fields["num_hidden_layers"]
    for dtype, row_bytes in (("auto", 1152), ("fp8", 656), ("fp8_ds_mla", 656)):
        plan = plan_of(dtype, kv_lora_rank=512, qk_rope_head_dim=64)
        assert plan.ledger_bytes["KV cache"] == 100 * 16 * layers * row_bytes, dtype
    assert plan.kv_cache_dtype == "fp8_ds_mla"


@pytest.mark.parametrize(
    ("dtype", "fields", "message"),
    [
        ("fp8_e4m3", {}, "latents are not kept in fp8_e4m3; .* can be float32, bfloat16, float16, fp8_ds_mla"),
        ("int8", {}, "latents are not kept in int8"),
        (
            "fp8",
            {"kv_lora_rank": 18},
            "needs a latent of a multiple of 4 numbers and an even number behind it.* 18 and 8",
        ),
    ],
)
def test_other_rows_of_latents_are_refused(dtype: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        plan_of(dtype, **fields)
    assert refusal.value.field == "kv_cache_dtype"


def test_keys_and_values_are_no_latents() -> None:
    config = QuireConfig.of(kv_cache_dtype="fp8_ds_mla", max_model_len=1024)
    with pytest.raises(ConfigError, match="fp8_ds_mla is for latents"):
        make_plan(config, ModelConfig.from_dict(checkpoint_config("qwen3", "0.6b")), free_bytes=20 * 10**9)
