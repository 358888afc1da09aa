"""Recurrent networks with experts: the same tokens and log probabilities to the bit, alone and in any batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire_ops import op_table, ops
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

FAMILIES = ["GraniteMoeHybridForCausalLM", "JambaForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.skipif(
    not any(each.name == "cpu" and each.unavailable is None for each in op_table().backends(ops.mamba2_scan)),
    reason="needs the kernels",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_are_weighed_alike_alone_and_in_a_batch(architecture: str, dtype: str, tmp_path: Path) -> None:
    folder, case = tmp_path / "model", CASES[architecture]
    write_checkpoint(folder, architecture, replace(case, fields={**case.fields, "vocab_size": 320}))
    write_tokenizer(folder, vocab_size=320)
    rng = random.Random(architecture)
    prompts = [rng.choices(range(3, 320), k=length) for length in (1, 9, 40, 150, 33, 5, 64, 100)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, logprobs=2, deterministic=True)

    def answers(batches: list[list[int]], **options: object) -> dict[int, object]:
        settings = {"max_model_len": 256, "kv_cache_memory_bytes": 40_000_000, "max_num_seqs": 8} | options
        with LLM(model=str(folder), dtype=dtype, **settings) as llm:
            assert llm.engine_info.batch_invariant
            found: dict[int, object] = {}
            for batch in batches:
                outputs = llm.generate([prompts[i] for i in batch], params, use_tqdm=False)
                found |= {
                    i: (out.outputs[0].token_ids, out.outputs[0].logprobs)
                    for i, out in zip(batch, outputs, strict=True)
                }
            return found

    everyone = list(range(len(prompts)))
    alone = answers([[i] for i in everyone], enable_prefix_caching=False)
    assert answers([everyone, everyone]) == alone
    assert answers([everyone], max_num_batched_tokens=24, long_prefill_token_threshold=7) == alone
