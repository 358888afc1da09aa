"""Every pair of features, generated from their declaration: only weights and the form of the cache change answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llm_demo_heads import write_medusa_heads, write_with_mtp_layer

from quire import LLM, BeamSearchParams, RequestOutput
from quire_demo_model import adapter_paths
from quire_testkit.features import CHANGES_TOKENS, ENGINE, covering, features_page, requests_of_pairs

PAGE = Path(__file__).parents[3] / "docs" / "features.md"
PLAIN: dict[str, Any] = {
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 40,
    "num_gpu_blocks_override": 600,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "block_size": 8,
    "speculative_adaptive": False,
}
REQUESTS = requests_of_pairs(max_tokens=10)
TEXTS = ["What is 17 + 25?", "Spell the word basket.", "Who are you?", "Reverse the word lamp."]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of drafters that the demo model has no companion for: where it is read from with one."""
    folder = tmp_path_factory.mktemp("heads")
    adapters = tuple(f"{name}={path}" for name, path in adapter_paths().items())
    return {
        "MTP drafts": {"model": str(write_with_mtp_layer(folder / "mtp")), "lora_modules": adapters},
        "Medusa drafts": {"speculative_model": str(write_medusa_heads(folder / "medusa"))},
    }


def settings(row: dict[str, str | None]) -> dict[str, Any]:
    chosen = [ENGINE[kind][name] for kind, name in row.items() if name is not None]
    return {**PLAIN, **{key: value for each in chosen for key, value in each.items()}}


@dataclass(frozen=True)
class Answer:
    """Finish reason, tokens and text of the answers to a request, and the tokens whose log probabilities are told."""

    exact: list[Any]
    logprobs: list[float]


def answers(llm: LLM) -> dict[tuple[str, str], Answer]:
    """Of each pair, all in one batch."""
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    found = llm.beam_search(prompts(llm)[:2], beams, lora_request=[None, "demo-capitals"])
    names = [("beam search", "beam search"), ("beam search", "LoRA adapter")]
    return answers_of(llm, list(REQUESTS)) | {pair: _seen(output) for pair, output in zip(names, found, strict=True)}


def answers_of(llm: LLM, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Answer]:
    """Of some pairs, in a batch of their own."""
    prompt = dict(zip(REQUESTS, prompts(llm), strict=True))
    params, adapters = zip(*(REQUESTS[pair] for pair in pairs), strict=True)
    outputs = llm.generate([prompt[pair] for pair in pairs], params, use_tqdm=False, lora_request=adapters)
    return {pair: _seen(output) for pair, output in zip(pairs, outputs, strict=True)}


def prompts(llm: LLM) -> list[list[int]]:
    """Of each pair."""
    return [
        llm.renderer.render_chat([{"role": "user", "content": TEXTS[number % len(TEXTS)]}]).token_ids
        for number in range(len(REQUESTS))
    ]


def _seen(output: RequestOutput) -> Answer:
    observed = [output.prompt_logprobs, *(one.logprobs for one in output.outputs)]
    entries = [entry for each in observed for place in each or [] for entry in (place or {}).values()]
    exact = [(one.token_ids, one.text, one.finish_reason) for one in output.outputs]
    return Answer([*exact, *(entry.token_id for entry in entries)], [entry.logprob for entry in entries])


@cache
def expected(*changes: str | None, **model: Any) -> dict[tuple[str, str], Answer]:
    """Answers of an engine that has nothing but the weights and the KV cache of that form, adapters on top."""
    chosen = settings(dict(zip(CHANGES_TOKENS, changes, strict=True)))
    with LLM(**{**chosen, "lora_merge_after": 0}, **model) as llm:
        return answers(llm)


@pytest.mark.parametrize("row", covering(), ids=lambda row: ", ".join(str(name) for name in row.values()))
def test_features_go_together(row: dict[str, str | None], heads: dict[str, dict[str, Any]]) -> None:
    more, merges = heads.get(row["drafts"] or "", {}), row["weights"] == "adapters in the weights"
    with LLM(**settings(row), **more) as llm:
        got = [answers(llm)]
        if merges:  # one matrix in each step
            alone = [pair for pair, (_, adapter) in REQUESTS.items() if adapter is not None]
            got += [answers_of(llm, alone) for _ in range(6)]
        got.append(answers(llm))
        stats = llm.stats()
        llm.engine.core.parts.check_integrity()
    model = {name: value for name, value in more.items() if name != "speculative_model"}
    wanted = expected(*(row.get(kind) for kind in CHANGES_TOKENS), **model)
    for pair, answer in itertools.chain(*(round_.items() for round_ in got)):
        assert answer.exact == wanted[pair].exact, pair
        assert answer.logprobs == pytest.approx(wanted[pair].logprobs, abs=5e-5), pair
    assert (stats.num_preemptions_total > 0) == (row["memory"] == "preemption")
    assert (stats.prefix_cache_hit_tokens_total > 0) == (row["prefix caching"] is not None)
    assert (stats.num_draft_tokens_total > 0) == (row["drafts"] is not None)
    assert (stats.num_adapter_merges_total > 0) == merges


def test_page_is_fresh() -> None:
    """Written by `python -c "from quire_testkit.demo_heads import write_medusa_heads, write_with_mtp_layer
    from quire_testkit.features import *; print(features_page(), end='')"`."""
    assert PAGE.read_text() == features_page()
