"""Speculation with recurrent and hybrid networks: tokens do not change, in any cut, on blocks of a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire_demo_model import checkpoint_path
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

EXACT = {"Mamba2ForCausalLM", "Lfm2ForCausalLM"}
"""Those that promise the same bits in every cut, where the kernels are there; their log probabilities are compared."""
NETWORKS = sorted(EXACT | {f"{name}ForCausalLM" for name in ("Jamba", "Qwen3Next", "Rwkv", "MiniMax")})


@pytest.fixture(scope="module", params=NETWORKS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("network") / request.param
    write_checkpoint(made, request.param, CASES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        # Blocks of a few tokens: drafts run over the ends of several.
        patch.setattr("quire.plan.state_block_size", lambda make_specs, block_size: block_size)
        yield made


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(folder), tokenizer=str(checkpoint_path()), dtype="float32", num_threads=1,
        max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, block_size=2,
        **{"num_gpu_blocks_override": 400, **settings},
    )  # fmt: skip


def test_tokens_do_not_change(folder: Path) -> None:
    shared = [(7 * i) % 190 + 3 for i in range(60)]
    prompts = [shared[i:] + [5, 9 + i] * (1 + 3 * i) for i in range(5)]
    params = [
        SamplingParams(temperature=i % 2 * 0.7, seed=i, max_tokens=14, ignore_eos=True, logprobs=1) for i in range(5)
    ]

    def answers(llm: LLM, asked: list[SamplingParams]) -> list[Any]:
        outputs = [each.outputs[0] for each in llm.generate(prompts, asked, use_tqdm=False)]
        exact = folder.name in EXACT and llm.engine_info.batch_invariant
        return [(each.token_ids, each.logprobs if exact else None) for each in outputs]

    with make(folder, enable_prefix_caching=False) as llm:
        expected = answers(llm, params)
        # The same up to the middle, where a token that came is forbidden.
        leaving = [
            replace(each, logit_bias={it[0][6 + i]: -100.0})
            for i, (each, it) in enumerate(zip(params, expected, strict=True))
        ]
        expected_leaving = answers(llm, leaving)
    drafting: dict[str, Any] = {"speculative_adaptive": False, "num_speculative_tokens": 5}
    few_blocks = 12 if folder.name.startswith(("Mamba2", "Rwkv")) else 90
    tight: dict[str, Any] = {"num_gpu_blocks_override": few_blocks, "async_scheduling": True}
    with make(folder, speculative_method="ngram", prompt_lookup_min=1, **drafting, **tight) as llm:
        assert answers(llm, params) == expected
        stats = llm.stats()
    assert stats.num_draft_tokens_total > stats.num_accepted_tokens_total
    assert stats.num_preemptions_total > 0
    with make(folder, speculative_method="suffix", **drafting) as llm:
        assert answers(llm, params) == expected
        assert answers(llm, params) == expected, "drafts are what came before, prefixes are in the cache"
        assert llm.stats().num_accepted_tokens_total > 30
        assert answers(llm, leaving) == expected_leaving
        stats = llm.stats()
    assert stats.num_draft_tokens_total > stats.num_accepted_tokens_total + 5
