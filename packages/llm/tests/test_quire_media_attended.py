"""Prompts whose tokens attend to media by cross attention, through the whole engine: side by side, in little room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_greedy_tokens import greedy_tokens

from quire.assemble import build_parts
from quire.config import QuireConfig
from quire_engine import LLMEngine
from quire_interfaces import RenderedPrompt
from quire_models import ModelConfig, load_model
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.media_prompts import media_continuation, media_prompt
from quire_testkit.parity.oracle import write_checkpoint

ARCHITECTURE = "MllamaForConditionalGeneration"
NUM_TOKENS = 12
ITEMS: tuple[list[int], ...] = ([], [0], [1, 2], [0, 3], [2], [3, 1, 2], [0])
"""Items of each prompt; the second ones stand right before the third ones."""
SETTINGS: dict[str, dict[str, Any]] = {
    "all in one step": {},
    "in pieces, ahead of the device": {"max_num_batched_tokens": 16, "block_size": 4, "async_scheduling": True},
    "room for the items of two prompts": {"encoder_cache_size": 90, "block_size": 4},
    "few blocks": {"num_gpu_blocks_override": 34, "block_size": 4, "max_num_batched_tokens": 33},
    "drafts": {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RenderedPrompt], list[list[int]]]:
    """The checkpoint, the prompts, and the tokens of Transformers."""
    folder = tmp_path_factory.mktemp("attended")
    oracle = write_checkpoint(folder / "model", ARCHITECTURE, MEDIA_CASES[ARCHITECTURE])
    network = load_model(ModelConfig.from_path(folder / "model"), folder / "model", dtype="float32")
    made = [media_prompt(network, oracle, items, folder) for items in ITEMS]
    rendered = [RenderedPrompt(token_ids=prompt.token_ids, media=prompt.media) for prompt in made]
    return folder / "model", rendered, [media_continuation(oracle, prompt, NUM_TOKENS).token_ids for prompt in made]


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(
    prompts: tuple[Path, list[RenderedPrompt], list[list[int]]], name: str
) -> None:
    folder, rendered, expected = prompts
    assert len({tuple(tokens) for tokens in expected}) == len(set(map(tuple, ITEMS)))
    config = QuireConfig.of(model=str(folder), dtype="float32", max_model_len=128, **SETTINGS[name])
    engine = LLMEngine(build_parts(config), config.engine)
    try:
        for order in (1, -1):  # the second time, prefixes are in the cache
            found = greedy_tokens(engine, rendered[::order], NUM_TOKENS)[::order]
            pairs = zip(found, expected, strict=True)
            assert [tokens[: len(theirs)] for tokens, theirs in pairs] == expected
    finally:
        engine.close()
