"""Speculation with recurrent and hybrid networks: tokens do not change, in any cut, on blocks of a few tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, CheckpointError, SamplingParams
from quire_demo_model import checkpoint_path
from quire_ops import StateReplay
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

EXACT = {"Mamba2ForCausalLM", "Lfm2ForCausalLM"}
"""Those that promise the same bits in every cut, where the kernels are there; their log probabilities are compared."""
OTHERS = ("Inkling", "Inkling2", "Jamba", "KimiLinear", "MiniMax", "OlmoHybrid", "Qwen3Next", "Qwen4Exp", "Rwkv")
NETWORKS = sorted(EXACT | {f"{name}ForCausalLM" for name in OTHERS})


@pytest.fixture(scope="module", params=NETWORKS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("network") / request.param
    write_checkpoint(made, request.param, CASES[request.param])
    return made


@pytest.fixture(autouse=True)
def few_tokens_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts run over the ends of several blocks."""
    monkeypatch.setattr("quire.plan.state_block_size", lambda make_specs, block_size: block_size)


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(folder), tokenizer=str(checkpoint_path()), dtype="float32", num_threads=1,
        max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, block_size=2,
        **{"num_gpu_blocks_override": 400, **settings},
    )  # fmt: skip


def test_tokens_do_not_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[torch.Tensor, int]] = []
    run = StateReplay.run

    def seen(replay: StateReplay, *args: Any) -> None:
        tensors = [inputs[place] for _, places, inputs, _ in replay._calls for place in places]
        kept.append((replay._tokens, sum(tensor.nbytes for tensor in tensors)))
        run(replay, *args)

    monkeypatch.setattr(StateReplay, "run", seen)
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
    of_others = {"InklingForCausalLM": 100, "Inkling2ForCausalLM": 100, "Qwen4ExpForCausalLM": 160}
    few_blocks = {"Mamba2ForCausalLM": 12, "RwkvForCausalLM": 12, **of_others}.get(folder.name, 90)
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
        planned = llm.engine_info.memory_bytes["drafts of recurrent layers"]
    assert stats.num_draft_tokens_total > stats.num_accepted_tokens_total + 5
    tokens = kept[-1][0]  # of one step: those of all groups of layers
    size = sum(num_bytes for each, num_bytes in kept if each is tokens)
    assert 0.9 < size / len(tokens) / (planned / 24) <= 1


def test_the_layer_for_further_tokens_drafts(tmp_path: Path) -> None:
    name = "Qwen3NextForCausalLM"
    write_checkpoint(tmp_path, name, CASES[name])
    prompts = [{"prompt_token_ids": list(range(3, 15 + 9 * i))} for i in range(3)]
    params = [SamplingParams(temperature=t, seed=2, max_tokens=12, ignore_eos=True) for t in (0.0, 0.7, 0.0)]
    drafting: dict[str, Any] = {
        "speculative_method": "mtp", "num_speculative_tokens": 3, "speculative_adaptive": False,
        "speculative_eagle_topk": 4,
    }  # fmt: skip

    def tokens(llm: LLM) -> list[Any]:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    with make(tmp_path) as llm:
        expected = tokens(llm)
    with pytest.raises(CheckpointError, match="mtp"):
        make(tmp_path, **drafting)

    stored = load_file(tmp_path / "model.safetensors")
    last = "model.layers.3."
    layer = {f"mtp.layers.0.{key.removeprefix(last)}": it for key, it in stored.items() if key.startswith(last)}
    size = stored["model.norm.weight"].shape[0]
    layer["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(1)) * 0.1
    layer |= {f"mtp.{norm}.weight": torch.zeros(size) for norm in ("norm", "pre_fc_norm_embedding")}
    layer["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(size)
    save_file(stored | {key: it.clone() for key, it in layer.items()}, tmp_path / "model.safetensors")
    with make(tmp_path, **drafting) as llm:
        assert tokens(llm) == expected
        assert llm.stats().num_draft_tokens_total > 30
        assert llm.engine_info.memory_bytes["weights: draft"] == sum(it.nbytes for it in layer.values())
        assert any("in chains" in note for note in llm.engine_info.extra["notes"])


@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", "Qwen3NextForCausalLM"])
def test_every_drafter_and_several_answers(name: str, tmp_path: Path) -> None:
    target, draft, heads = (tmp_path / part for part in ("target", "draft", "heads"))
    write_checkpoint(target, name, CASES[name])
    values = json.loads((target / "config.json").read_text())
    case = CASES["LlamaForCausalLM"]
    fields = {**case.fields, "vocab_size": values["vocab_size"]}
    write_checkpoint(draft, "LlamaForCausalLM", replace(case, fields=fields))
    heads.mkdir()
    size, vocab = values["hidden_size"], values["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.linear.weight": (size, size), "0.linear.bias": (size,), "1.weight": (vocab, size)}
    save_file(
        {f"{i}.{part}": torch.randn(shape, generator=generator) for i in range(3) for part, shape in shapes.items()},
        heads / "medusa_lm_head.safetensors",
    )
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    prompts = [[(7 * i + j) % 190 + 3 for i in range(13)] + [5, 9 + j] * 4 for j in range(3)]
    params = [
        SamplingParams(temperature=0.8, seed=j, n=3, max_tokens=10, ignore_eos=True, logprobs=1, top_p=0.95)
        for j in range(2)
    ]
    params.append(SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1))

    def answers(llm: LLM) -> list[Any]:
        outputs = [each for output in llm.generate(prompts, params, use_tqdm=False) for each in output.outputs]
        return [
            (each.token_ids, [(i, round(entry.logprob, 3)) for place in each.logprobs for i, entry in place.items()])
            for each in outputs
        ]

    with make(target) as llm:
        expected = answers(llm)
    assert len({tuple(tokens) for tokens, _ in expected}) == 7
    for method, model in {"suffix": None, "medusa": heads, "draft_model": draft}.items():
        drafting = {"speculative_method": method, "speculative_model": model and str(model)}
        with make(target, **drafting, num_speculative_tokens=3, speculative_adaptive=False) as llm:
            for _ in range(2):
                assert answers(llm) == expected, method
            assert llm.stats().num_draft_tokens_total > 20, method
            llm.engine.core.parts.check_integrity()
