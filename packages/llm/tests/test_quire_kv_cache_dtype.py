"""KV caches narrower than the network, through `LLM`: what is stored depends on the tokens before alone, so a request
gets the same tokens however it is served; the plan, the report and the disk tier know the format.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, ConfigError, QuireConfig, SamplingParams, StructuredOutputsParams
from quire.plan import make_plan
from quire.quantize import quantize_checkpoint
from quire_models import ModelConfig
from quire_testkit.checkpoints import checkpoint_config, make_checkpoint

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
RANDOM = random.Random(7)
SHARED = [RANDOM.randrange(3, 250) for _ in range(48)]
PROMPTS = [SHARED[: 16 * (i % 4)] + [RANDOM.randrange(3, 250) for _ in range(1 + 7 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(temperature=[0.0, 0.8][i % 2], seed=i, max_tokens=12 + 4 * i, ignore_eos=True) for i in range(6)
]

SITUATIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of seven": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
    "preempted": {"num_gpu_blocks_override": 17, "enable_prefix_caching": False},
    "tiny blocks and drafts": {
        "block_size": 2,
        "speculative_method": "ngram",
        "speculative_adaptive": False,
        "prompt_lookup_min": 1,
    },
    "synchronous": {"async_scheduling": False},
}


@pytest.fixture(scope="module", params=["qwen3", "windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    fields = fields if request.param == "windows" else {}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32", **fields)


def start(folder: Path, dtype: str, **settings: Any) -> LLM:
    defaults = {"max_model_len": 128, "max_num_seqs": 6, "num_threads": 1}
    return LLM(folder, kv_cache_dtype=dtype, **(defaults | settings))


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_tokens_depend_on_nothing_else(folder: Path, dtype: str) -> None:
    with start(folder, dtype, enable_prefix_caching=False) as llm:
        alone = [tokens(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for situation, settings in SITUATIONS.items():
        with start(folder, dtype, **settings) as llm:
            assert tokens(llm, PROMPTS, PARAMS) == alone, situation
            again = llm.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False)
            assert [output.outputs[0].token_ids for output in again] == alone[::-1], f"{situation}, the second time"
            if settings.get("enable_prefix_caching", True):
                assert any(output.num_cached_tokens for output in again), "nothing came from the prefix cache"


def test_formats_are_not_the_same(folder: Path) -> None:
    """Logits of a network of random weights move with the cache's precision, the most with four bits."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True, prompt_logprobs=0)
    seen = {}
    for dtype in ("auto", *FORMATS):
        with start(folder, dtype, enable_prefix_caching=False) as llm:
            (output,) = llm.generate([PROMPTS[-1]], params, use_tqdm=False)
            seen[dtype] = [
                entries[token_id].logprob
                for token_id, entries in zip(PROMPTS[-1][1:], output.prompt_logprobs[1:], strict=True)
            ]
    errors = {dtype: max(abs(a - b) for a, b in zip(seen[dtype], seen["auto"], strict=True)) for dtype in FORMATS}
    assert 0 < errors["int8"] < errors["fp8_e4m3"] < errors["fp8_e5m2"]
    assert errors["int8"] < errors["int4"] < 1.0


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8", "int4"])
def test_prefixes_on_disk_are_those_of_the_format(folder: Path, dtype: str, tmp_path: Path) -> None:
    tier = {"kv_disk_path": str(tmp_path / "tier"), "kv_disk_size": "50M"}
    with start(folder, dtype, **tier) as llm:
        first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in first]
    with start(folder, dtype, **tier) as llm:
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert again[-1].num_cached_tokens > first[-1].num_cached_tokens >= 0
    for other in {"auto", *FORMATS} - {dtype}:
        with start(folder, other, **tier) as llm:
            (output,) = llm.generate([PROMPTS[-1]], PARAMS[-1:], use_tqdm=False)
            assert output.num_cached_tokens == 0, f"{other} took blocks of {dtype}"


def test_the_plan_counts_the_bytes_of_each_format() -> None:
    model = ModelConfig.from_dict(checkpoint_config("qwen3", "0.6b"))
    rows = {"auto": 256, "bfloat16": 256, "float32": 512, "fp8": 128, "fp8_e5m2": 128, "int8": 132, "int4": 68}
    rows |= {"int8_per_token_head": 132, "int4_per_token_head": 68}
    for dtype, row_bytes in rows.items():
        config = QuireConfig.of(kv_cache_dtype=dtype, max_model_len=1024, num_gpu_blocks_override=100)
        plan = make_plan(config, model, free_bytes=20 * 10**9)
        assert plan.ledger_bytes["KV cache"] == 100 * 16 * 28 * 2 * 8 * row_bytes, dtype
    assert plan.kv_cache_dtype == "int4"


def test_the_report_and_the_memory(folder: Path) -> None:
    reports = {
        "auto": "float32",
        "bfloat16": "bfloat16",
        "fp8": "fp8_e4m3, all scales 1.0: the checkpoint has none",
        "int8": "int8, a scale for each token and head",
    }
    for dtype, report in reports.items():
        with start(folder, dtype) as llm:
            info = llm.engine_info
            assert info.choices["KV cache"] == report
            assert info.kv_cache_dtype == report.split(",")[0]


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale")])
def test_scales_of_the_checkpoint(folder: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    """With scales so large that little is left of the values, other tokens come, and int8 does not mind."""
    scaled = tmp_path / "scaled"
    shutil.copytree(folder, scaled)
    extra = {f"model.layers.0.self_attn.{name}": torch.tensor(1000.0) for name in names}
    save_file(load_file(folder / "model.safetensors") | extra, scaled / "model.safetensors", {"format": "pt"})
    found = {}
    for which in (folder, scaled):
        for dtype in ("fp8", "int8"):
            with start(which, dtype) as llm:
                found[which, dtype] = tokens(llm, PROMPTS, PARAMS)
                report = llm.engine_info.choices["KV cache"]
            if (which, dtype) == (scaled, "fp8"):
                assert report == "fp8_e4m3, the checkpoint's scales for 1 of 2 layers, 1.0 for the others"
    assert found[folder, "int8"] == found[scaled, "int8"]
    assert found[folder, "fp8"] != found[scaled, "fp8"]


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("weights", [False, True])
def test_the_checkpoint_says_what_the_cache_is_kept_in(folder: Path, tmp_path: Path, weights: bool) -> None:
    """`kv_cache_scheme` alone, or beside a scheme of weights; auto takes it, a choice comes before it."""
    made = tmp_path / "made"
    if weights:
        quantize_checkpoint(folder, made, "int8")
    else:
        shutil.copytree(folder, made)
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("k_scale", "v_scale")]
    scales = {name: torch.tensor(0.013) for name in names}
    save_file(load_file(made / "model.safetensors") | scales, made / "model.safetensors", {"format": "pt"})
    values = json.loads((made / "config.json").read_text())
    stored = values.get("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {}})

    def says(scheme: dict[str, Any]) -> None:
        text = json.dumps({**values, "quantization_config": {**stored, "kv_cache_scheme": scheme}})
        (made / "config.json").write_text(text)

    def served(dtype: str) -> tuple[str, list[list[int]]]:
        with start(made, dtype) as llm:
            return llm.engine_info.choices["KV cache"], tokens(llm, PROMPTS, PARAMS)

    says(SCHEME)
    report, found = served("auto")
    assert report == "fp8_e4m3, the checkpoint's scales for 2 of 2 layers, 1.0 for the others"
    assert (report, found) == served("fp8")
    plain, other = served("float32")
    assert plain == "float32"
    assert other != found
    says({**SCHEME, "type": "int"})  # no such cache with scales of the checkpoint: more exact instead
    assert served("auto") == (plain, other)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_beside_narrow_weights_and_constraints(folder: Path, dtype: str) -> None:
    grammar = StructuredOutputsParams(regex="(a|b|c){9}")
    params = [
        *PARAMS[:3],
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, structured_outputs=grammar),
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.4, logprobs=2, ignore_eos=True),
    ]
    settings = {
        "quantization": "int8",
        "speculative_method": "ngram",
        "speculative_adaptive": False,
        "long_prefill_token_threshold": 7,
    }
    with start(folder, dtype, quantization="int8", enable_prefix_caching=False) as llm:
        alone = [tokens(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, params, strict=False)]
    with start(folder, dtype, **settings) as llm:
        outputs = llm.generate(PROMPTS[:5], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        assert re.fullmatch("[abc]{9}", outputs[3].outputs[0].text)


def test_wrong_formats_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*int3") as caught:
        QuireConfig.of(kv_cache_dtype="int3")
    assert caught.value.field == "kv_cache_dtype"
